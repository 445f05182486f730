"""vLLM's requests that load and unload adapters, between a real controller's API and its objects.

`tests/e2e/test_serve.py` has what they do in a whole stack.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gateway.conftest import World, key_route, serving, soon
from weft.wire.v1 import scheduler_pb2, supervisor_pb2
from weft_gateway.openai import load_adapters
from weft_operator.local import admission, api, objects, persistence

API = "serving.weft.dev/v1alpha1"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
POOL: Any = {
    "apiVersion": API,
    "kind": "ServingPool",
    "metadata": {"name": "base", "namespace": "team"},
    "spec": {"model": {"name": "tiny", "uri": "file:base"}, "allowedNamespaces": ["acme"]},
}
KEPT: Any = {
    "apiVersion": API,
    "kind": "LoRAAdapter",
    "metadata": {"name": "kept", "namespace": "team"},
    "spec": {"poolRef": {"name": "base"}, "modelName": "kept", "source": {"uri": "s3://bucket/kept"}},
}


class Loading:
    """A gateway that may change the objects of a store.

    `settles`: a condition that each new adapter gets at once, beside `digest`.
    """

    def __init__(self, world: World, store: objects.ObjectStore) -> None:
        self.world, self.store = world, store
        self.settles: dict[str, str] = {}
        self.digest = ""
        self.made: asyncio.Queue[Any] = asyncio.Queue()
        store.listen(self._on_event)

    async def post(self, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        async with self.world.http() as http:
            answer = await http.post(path, json=body, headers={"authorization": f"Bearer {key}"} if key else {})
        return answer.status_code, answer.json()["error"] if answer.is_error else answer.text

    def names(self) -> list[str]:
        return [obj["metadata"]["name"] for obj in self.store.objects("LoRAAdapter")]

    def _on_event(self, event: objects.WatchEvent) -> None:
        if event.type == "ADDED":
            self.made.put_nowait(event.object)
        if event.type == "ADDED" and self.settles:
            asyncio.get_running_loop().call_soon(self._settle, event.object)

    def _settle(self, obj: Any) -> None:
        meta = obj["metadata"]
        status = {"observedGeneration": meta["generation"], "conditions": [self.settles]}
        if self.digest:
            status |= {"digest": self.digest}
        self.store.set_status(objects.ref_of(obj), meta["uid"], meta["resourceVersion"], status)


@pytest.fixture
async def loading(parts: World, tmp_path: Path) -> AsyncIterator[Loading]:
    store = objects.ObjectStore(lambda: 0.0)
    folder = tmp_path / ("deep" * 30)  # beyond the kernel's limit for socket paths
    folder.mkdir()
    admit = admission.ObjectAdmission(store)
    for obj in (POOL, KEPT):
        store.apply(admit(obj, store.find))
    keeper = persistence.Durable(store, folder / "objects.json")
    served = api.LocalApi(store, keeper, admit=admit, logs={}, describe=lambda: {})
    tasks = [asyncio.create_task(keeper.run()), asyncio.create_task(api.serve(served, folder / "weft.sock"))]
    (roots := tmp_path / "roots").mkdir()
    settings = parts.settings(tmp_path, objects=folder / "weft.sock", adapter_roots=[roots])
    async with serving(parts, settings):
        yield Loading(parts, store)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ({"lora_name": "kept"}, 400, "adapter_already_loaded", "'kept' has already been loaded"),
        ({"lora_name": ""}, 400, "invalid_parameter", "lora_name"),
        ({"lora_name": "a b", "lora_path": "s3://bucket/x"}, 400, "adapter_refused", "only letters, digits"),
        ({"lora_name": "tiny", "lora_path": "s3://bucket/x"}, 400, "adapter_refused", "NameConflict"),
        ({"base_model_name": "other"}, 400, "invalid_parameter", "there are: tiny"),
        ({"is_3d_lora_weight": True}, 400, "invalid_parameter", "is_3d_lora_weight"),
        ({"pinned": False}, 400, "unsupported_parameter", "pinned"),
        ({"request_id": "mine"}, 400, "unsupported_parameter", "request_id"),
        (
            {"lora_name": "kept", "lora_path": "s3://bucket/kept", "load_inplace": True},
            400,
            "source_unchanged",
            "has this source",
        ),
        ({"lora_path": "oci://ghcr.io/acme/x:1"}, 400, "invalid_parameter", "takes a folder, hf://"),
        ({"lora_path": "file:x"}, 400, "invalid_parameter", "takes a folder, hf://"),
        ({"lora_path": "/nul\0"}, 400, "invalid_parameter", "cannot be read"),
        ({"lora_path": "~nobody-here/x"}, 404, "path_not_allowed", "is not below"),
        ({"lora_path": "~root/x"}, 404, "path_not_allowed", "is not below"),
        ({"lora_path": "CIRCLE"}, 404, "path_not_allowed", "is not below"),
        ({"lora_path": "/etc"}, 404, "path_not_allowed", "is not below"),
        ({"lora_path": "ROOT/../beside"}, 404, "path_not_allowed", "is not below"),
        ({"lora_path": "ROOT/link"}, 404, "path_not_allowed", "is not below"),
        ({"lora_path": "ROOT/linked-file"}, 404, "path_not_allowed", "is not below"),
        ({"lora_path": "ROOT/linked-tokenizer"}, 404, "path_not_allowed", "is not below"),
        ({"lora_path": "ROOT/nothing"}, 404, "not_found", "has no adapter_config.json and no adapter_model"),
        ({"lora_path": "ROOT/pipe"}, 404, "not_found", "has no adapter_model.safetensors"),
        ({"lora_path": "ROOT/pickled"}, 404, "not_found", "adapter_model.bin is a pickle"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_by_name(
    body: dict[str, Any], status: int, code: str, says: str, loading: Loading, tmp_path: Path
) -> None:
    root, beside = tmp_path / "roots", tmp_path / "beside"
    for folder in (beside, root / "linked-file", root / "linked-tokenizer", root / "pipe", root / "pickled"):
        folder.mkdir()
        (folder / "adapter_config.json").touch()
    (beside / "adapter_model.safetensors").touch()
    (root / "pickled" / "adapter_model.bin").touch()
    (root / "link").symlink_to(beside)
    (root / "linked-file" / "adapter_model.safetensors").symlink_to(beside / "adapter_model.safetensors")
    (root / "linked-tokenizer" / "adapter_model.safetensors").touch()
    (root / "linked-tokenizer" / "tokenizer_config.json").symlink_to(beside / "adapter_config.json")
    os.mkfifo(root / "pipe" / "adapter_model.safetensors")
    asked = {"lora_name": "new", "lora_path": "/nowhere", **body}
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    asked["lora_path"] = asked["lora_path"].replace("ROOT", str(root)).replace("CIRCLE", str(tmp_path / "circle"))
    found, error = await loading.post(LOAD, asked)
    assert (found, error["code"]) == (status, code)
    assert says in error["message"]
    assert error["type"] == ("InvalidUserInput" if code == "adapter_already_loaded" else "invalid_request_error")
    assert loading.names() == ["kept"]


@pytest.mark.parametrize(
    ("settles", "status", "code", "says"),
    [
        ({"type": "Fetched", "status": "False", "reason": "MissingFile"}, 400, "adapter_refused", "MissingFile"),
        ({}, 503, "adapter_not_ready", "is not served within"),
    ],
)
async def test_an_adapter_that_does_not_come_does_not_stay(
    settles: dict[str, str], status: int, code: str, says: str, loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_adapters, "LOAD_SECONDS", 60.0 if settles else 0.05)
    loading.settles = {**settles, "message": "m"} if settles else {}
    found, error = await loading.post(LOAD, {"lora_name": "new", "lora_path": "hf://acme/lora@v1"})
    assert (found, error["code"]) == (status, code)
    assert says in error["message"]
    assert loading.names() == ["kept"]


@pytest.mark.parametrize(
    ("name", "path", "place", "source"),
    [
        ("new", "hf://acme/lora@v1", "team/new", {"uri": "hf:acme/lora", "revision": "v1"}),
        ("kept.2", "acme/lora", "team/kept-2-", {"uri": "hf:acme/lora"}),
        ("acme/new", "s3://bucket/x", "acme/new", {"uri": "s3://bucket/x"}),
        ("rival/new", "s3://bucket/x", "team/rival-new-", {"uri": "s3://bucket/x"}),
    ],
)
async def test_an_adapter_is_its_namespaces_where_the_pool_allows_it(
    name: str, path: str, place: str, source: dict[str, str], loading: Loading
) -> None:
    loading.settles = {"type": "Fetched", "status": "False", "reason": "MissingFile", "message": "m"}
    await loading.post(LOAD, {"lora_name": name, "lora_path": path})
    made = loading.made.get_nowait()
    assert f"{made['metadata']['namespace']}/{made['metadata']['name']}".startswith(place)
    assert (made["spec"]["modelName"], made["spec"]["baseModel"], made["spec"]["source"]) == (name, "tiny", source)


async def test_an_adapter_is_loaded_with_its_route_and_known_as_loaded_for_as_long_as_that_is_there(
    loading: Loading,
) -> None:
    world, digest = loading.world, "sha256:" + "c" * 64
    loading.settles, loading.digest = {"type": "Ready", "status": "True", "reason": "Published", "message": "m"}, digest

    async def load(name: str, *others: scheduler_pb2.Route) -> scheduler_pb2.Route:
        of = {"lora_name": name, "lora_path": f"s3://bucket/{name}", "load_inplace": False, "is_3d_lora_weight": False}
        asked = asyncio.create_task(loading.post(LOAD, of))
        uid = (await soon(loading.made.get()))["metadata"]["uid"]
        routes = world.routes(world.scheduler.routes.version + 1)
        route = routes.routes.add(model_name=name, namespace="team", pool="team/base", digest=digest, uid=uid)
        routes.routes.extend(others)
        world.scheduler.send_routes(routes)
        assert (await soon(asked))[0] == 200
        return route

    await load("two", await load("one"))
    async with world.http() as http:
        found = [(await http.get(f"/v1/models/{name}")).json()["root"] for name in ("one", "two", "acme/upper")]
    assert found == ["s3://bucket/one", "s3://bucket/two", "sha256:" + "a" * 64]
    await load("three")
    assert list(world.gateway.loaded) == ["three"], "the routes of the others are gone"


async def test_an_adapter_that_is_deleted_meanwhile_is_not_loaded(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, store, read = asyncio.get_running_loop(), loading.store, loading.store.get

    def read_and_delete(ref: Any) -> Any:
        loop.call_soon(store.delete, ref)
        return read(ref)

    monkeypatch.setattr(store, "get", read_and_delete)
    status, error = await loading.post(LOAD, {"lora_name": "new", "lora_path": "s3://bucket/x"})
    assert (status, error["message"]) == (400, "The adapter is refused: it was deleted meanwhile")


async def test_what_becomes_of_another_object_is_none_of_a_loads(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tenant's labels may say anything, as the word for a watch that ends."""
    loop, store, read, digest = asyncio.get_running_loop(), loading.store, loading.store.get, "sha256:" + "c" * 64
    others: Any = {**KEPT, "metadata": {"name": "others", "namespace": "team", "labels": {"level": "ERROR"}}}
    others["spec"] = {**KEPT["spec"], "modelName": "others"}
    store.apply(admission.ObjectAdmission(store)(others, store.find))
    await soon(loading.made.get())

    def read_and_change(ref: Any) -> Any:
        found = read(ref)
        if ref.name not in ("kept", "others"):
            loop.call_soon(store.delete, objects.ref_of(others))
            loading.settles = {"type": "Ready", "status": "True", "reason": "Published", "message": "m"}
            loading.digest = digest
            loop.call_soon(loading._settle, found)
        return found

    monkeypatch.setattr(store, "get", read_and_change)
    asked = asyncio.create_task(loading.post(LOAD, {"lora_name": "new", "lora_path": "s3://bucket/x"}))
    uid = (await soon(loading.made.get()))["metadata"]["uid"]
    routes = loading.world.routes(loading.world.scheduler.routes.version + 1)
    routes.routes.add(model_name="new", namespace="team", pool="team/base", digest=digest, uid=uid)
    loading.world.scheduler.send_routes(routes)
    assert (await soon(asked))[0] == 200


async def test_an_unknown_adapter_is_not_unloaded(loading: Loading) -> None:
    status, error = await loading.post(UNLOAD, {"lora_name": "acme/upper"})
    assert (status, error["message"]) == (404, "The lora adapter 'acme/upper' cannot be found.")


async def test_a_platform_key_alone_loads_and_only_where_there_are_objects(parts: World, tmp_path: Path) -> None:
    keys = key_route("tenant", "acme"), key_route("platform", scope=supervisor_pb2.KEY_SCOPE_PLATFORM)
    parts.scheduler.routes = parts.routes(keys=keys)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        for path in (LOAD, UNLOAD):
            async with world.http() as http:
                answers = [
                    await http.post(path, json={"lora_name": "x"}, headers={"authorization": f"Bearer {one}"})
                    for one in ("tenant", "platform")
                ]
            errors = [answer.json()["error"] for answer in answers]
            assert [answer.status_code for answer in answers] == [403, 501]
            assert [error["code"] for error in errors] == ["missing_scope", "not_configured"]
            assert all("`weft push`" in error["message"] for error in errors)
