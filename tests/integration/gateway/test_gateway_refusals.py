"""What cannot be served gets a named error in OpenAI's shape, and nothing else notices."""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, TypeAlias

import orjson
import pytest

from harness.blobs import check_blobs
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import hex_of
from weft.wire.v1 import scheduler_pb2

from .conftest import ANSWER, World, key_route, serving, soon, until

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
JSON_TYPE = "application/json"
JSON = {"content-type": JSON_TYPE}
SHAPE = {"message", "type", "param", "code"}

# By code: what is changed in a good request; the parameter is the last one, or is said before.
Changes: TypeAlias = dict[str, list[dict[str, Any] | tuple[str, dict[str, Any]]]]
IMAGE = [{"type": "image_url", "image_url": {"url": ""}}]
BAD_CHATS: Changes = {
    "unsupported_parameter": [{"store": True}, {"best_of": 2}],
    "missing_parameter": [("messages[0].content", {"messages": [{"role": "user"}]}), {"model": None}],
    "model_not_found": [{"model": "acme/absent"}],
    "context_length_exceeded": [{"max_tokens": 512}, {"max_completion_tokens": 512}],
    "invalid_parameter": [
        *({"n": value} for value in (0, 129, True)),
        *({"temperature": value} for value in ("1", True, 1e39)),
        {"top_p": 0},
        {"frequency_penalty": 2.1},
        {"presence_penalty": "1"},
        *({"logit_bias": biases} for biases in ({"1": 100.5}, {"1": True}, [[1, 2]], {str(i): 1 for i in range(301)})),
        {"logit_bias": {"280": 1}},  # beyond the vocabulary
        {"logprobs": 1},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"max_tokens": 1.5},
        {"max_completion_tokens": 0},
        *({"stop": stop} for stop in (["a"] * 65, "", [1])),
        {"seed": 2**64 - 1 + 10},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},  # without a stream
        *({"messages": messages} for messages in ([], "hello")),
        ("messages[0].role", {"messages": [{"role": "<critic>", "content": ""}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": IMAGE}]}),
        {"model": 5},
    ],
}
BAD_TEXTS: Changes = {
    "unsupported_parameter": [{"top_logprobs": 1}, {"messages": [1]}],
    "missing_parameter": [{"prompt": None}],
    "context_length_exceeded": [
        {"prompt": [5] * 512},
        ("prompt[1]", {"prompt": [[5], [5] * 512]}),
        {"prompt": [[5], [5] * 500], "max_tokens": 13},  # the second has no room
    ],
    "invalid_parameter": [
        {"prompt": [5, 100_000]},
        ("prompt[1]", {"prompt": [[5], [100_000]]}),
        ("prompt[1]", {"prompt": ["a", ""], "add_special_tokens": False}),
        {"logprobs": True},
    ],
}


def refused(response: Any, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """The error of a response, after checking its whole shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == SHAPE
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert response.headers["x-request-id"]
    assert response.headers["x-should-retry"] == ("true" if status in (429, 503) else "false")
    return error


async def test_every_bad_request_is_refused_by_name_and_nothing_reaches_the_scheduler(world: World) -> None:
    async with world.http() as http:
        for path, good, bad in (("/v1/chat/completions", CHAT, BAD_CHATS), ("/v1/completions", TEXT, BAD_TEXTS)):
            for code, change in ((code, change) for code, changes in bad.items() for change in changes):
                param, changed = change if isinstance(change, tuple) else ([*change][-1], change)
                response = await http.post(path, content=json.dumps({**good, **changed}), headers=JSON)
                error = refused(response, 404 if code == "model_not_found" else 400, code, param)
                assert param in error["message"] or code == "context_length_exceeded", changed
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
    await world.settled()
    assert len(world.scheduler.outcomes) == 1, "only the good one reached the scheduler"


async def test_a_body_that_is_no_json_object_is_refused(world: World) -> None:
    wrong = [b"", b"{", b"[]", b'"text"', b'{"model": NaN}', b'\xff\xfe{"model": 1}', b'{"model": "\\ud800"}']
    wrong += [b"[" * 5000]
    async with world.http() as http:
        for body in wrong:
            refused(await http.post("/v1/chat/completions", content=body, headers=JSON), 400, "invalid_json")


async def test_unknown_paths_and_methods_have_the_same_shape(world: World) -> None:
    async with world.http() as http:
        refused(await http.get("/v2/nothing"), 404, "not_found")
        refused(await http.post("/v1/images/generations", json={}), 404, "not_found")
        wrong = await http.get("/v1/completions")
        refused(wrong, 405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"
        refused(await http.get("/v1/models/acme/absent"), 404, "model_not_found", "model")
        for path in ("/%00", "/%0d%0ax:%20y", "/%zz", "/..%2f..%2fetc/passwd", "/" + "x" * 60_000):
            refused(await http.get(path), 404, "not_found")


async def test_a_body_beyond_its_bound_is_refused_declared_or_not(parts: World, tmp_path: Path) -> None:
    async with serving(parts, parts.settings(tmp_path, max_body_bytes=2048)) as world, world.http() as http:
        body = orjson.dumps(TEXT | {"prompt": "x" * 4096})

        async def chunks() -> Any:
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        refused(await http.post("/v1/completions", content=body, headers=JSON), 413, "request_too_large")
        refused(await http.post("/v1/completions", content=chunks(), headers=JSON), 413, "request_too_large")


async def test_with_no_runner_in_time_it_is_a_503_before_the_first_byte(parts: World, tmp_path: Path) -> None:
    parts.scheduler.autopilot = False
    parts.scheduler.routes.pools[0].ready_runners = 0
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        posted = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": True}))
        await world.scheduler.next("submit")
        world.skip_hold()
        refused(await soon(posted), 503, "no_runner_available")
        cancel = await world.scheduler.next("cancel")
        await world.settled()
        assert world.outcome().request_id == cancel.request_id


async def test_without_a_scheduler_there_is_no_route_and_a_503_with_the_reason(parts: World, tmp_path: Path) -> None:
    settings = parts.settings(tmp_path, scheduler="127.0.0.1:1", hold_seconds=0.1)
    async with serving(parts, settings, ready=False) as world, world.http() as http:
        refused(await http.post("/v1/completions", json=TEXT), 503, "no_scheduler")
        refused(await http.get("/v1/models"), 503, "no_scheduler")
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"mirostat": 2}, {"code": "unsupported_parameter", "param": "mirostat", "model": "tiny"}),
        ({"max_tokens": 512}, {"code": "context_length_exceeded", "param": "max_tokens", "model": "tiny"}),
        ({"x" * 5000: 1}, {"code": "unsupported_parameter", "param": "x" * 64, "model": "tiny"}),
        ({"model": "nobodys"}, {"code": "model_not_found", "param": "model", "model": "nobodys"}),
    ],
    ids=["unknown", "beyond the context", "a long name", "no such model"],
)
async def test_the_log_of_a_refusal_names_what_was_wrong(
    world: World, caplog: pytest.LogCaptureFixture, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    caplog.set_level("INFO", "weft_gateway.shell.early_refusals")
    async with world.http() as http:
        response = await http.post("/v1/completions", json=TEXT | body)
    (logged,) = [vars(record)["kv"] for record in caplog.records if record.message == "refused"]
    assert logged.pop("duration_ms") >= 0
    status = 404 if "model" in body else 400
    assert response.status_code == status
    assert logged == {"request_id": logged["request_id"], "status": status, **fields}


# ---------------------------------------------------------------- keys


def with_keys(world: World, *, known: bool = True) -> scheduler_pb2.Routes:
    routes = world.routes(version=2)
    routes.keys_known = known
    routes.keys.extend(key_route(f"key-of-{name}", name, key_id=f"wk_{name}") for name in ("acme", "rival", "team"))
    return routes


async def test_a_key_opens_its_own_namespace_and_nothing_else_shows(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = with_keys(parts)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        acme = world.client(api_key="key-of-acme")
        assert [model.id async for model in acme.models.list()] == ["acme/upper"]
        answer = await acme.completions.create(model="acme/upper", prompt="hello")
        assert answer.choices[0].text == ANSWER
        await world.settled()
        assert (world.outcome().namespace, world.outcome().key_id) == ("acme", "wk_acme")
        key = {"authorization": "Bearer key-of-acme"}
        absent = await http.post("/v1/completions", json=TEXT | {"model": "acme/absent"}, headers=key)
        others = await http.post("/v1/completions", json=TEXT | {"model": "rival/secret"}, headers=key)
        assert refused(absent, 404, "model_not_found", "model")["message"].replace("acme/absent", "") == refused(
            others, 404, "model_not_found", "model"
        )["message"].replace("rival/secret", "")
        refused(await http.get("/v1/models/rival/secret", headers=key), 404, "model_not_found", "model")
        for spelling in ("Rival/secret", " rival/secret", "rival//secret", "rival%2fsecret", "acme/../rival/secret"):
            spelled = await http.post("/v1/completions", json=TEXT | {"model": spelling}, headers=key)
            refused(spelled, 404, "model_not_found", "model")
        assert (await http.get("/status", headers=key)).json()["models"][0]["id"] == "acme/upper"
        assert (await http.get("/status")).json()["models"] == []


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic key-of-acme", "key-of-acme"])
async def test_without_a_known_key_everything_is_a_401(parts: World, tmp_path: Path, header: str | None) -> None:
    parts.scheduler.routes = with_keys(parts)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        headers = {"authorization": header} if header else {}
        for response in (
            await http.get("/v1/models", headers=headers),
            await http.get("/v1/models/acme/upper", headers=headers),
            await http.post("/v1/completions", json=TEXT, headers=headers),
        ):
            refused(response, 401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"


# ---------------------------------------------------------------- what comes late


async def test_the_first_requests_wait_for_the_route_table(parts: World, tmp_path: Path) -> None:
    routes, parts.scheduler.routes = parts.scheduler.routes, scheduler_pb2.Routes()
    async with serving(parts, parts.settings(tmp_path), ready=False) as world, world.http() as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        listed = asyncio.create_task(http.get("/v1/models"))
        await until(lambda: world.gateway.machine.admission.arriving == 2 and world.gateway.manager.scheduler.up)
        unready = await http.get("/readyz")
        assert (unready.status_code, unready.text) == (503, "no route table from the scheduler yet\n")
        world.scheduler.send_routes(routes)
        assert (await soon(asked)).json()["choices"][0]["text"] == ANSWER
        assert (await soon(listed)).json()["data"][0]["id"] == "tiny"
        assert (await http.get("/readyz")).status_code == 200
        await world.settled()


async def test_a_request_that_is_held_when_the_process_stops_is_refused_at_once(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = scheduler_pb2.Routes()
    async with serving(parts, parts.settings(tmp_path), ready=False) as world, world.http() as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await until(lambda: world.gateway.machine.admission.arriving)
        await soon(world.gateway.manager.drain(600.0))
        refused(await soon(asked), 503, "shutting_down")


async def test_a_pool_whose_tokenizer_cannot_be_had_disturbs_no_other(parts: World, tmp_path: Path) -> None:
    routes = parts.routes()
    routes.pools.add(name="team/broken", base_digest="sha256:" + "0" * 64, base_model_name="broken")
    routes.routes.add(model_name="broken", namespace="team", pool="team/broken")
    parts.scheduler.routes = routes
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        admission = world.gateway.machine.admission
        posted = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"model": "broken"}))
        digest = routes.pools[-1].base_digest
        await until(lambda: admission.arriving == 1 and admission._tokenizer(digest).problem)
        world.skip_hold()
        error = refused(await soon(posted), 503, "model_not_ready")
        assert "team/broken" in error["message"]
        assert "not hold" in error["message"], "the depot's reason"
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200


async def test_a_tokenizer_that_comes_later_is_taken_and_weights_are_never_asked_for(
    parts: World, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    folder = parts.depot.blobs.path(parts.base_digest).parent
    manifest = parts.depot.blobs.path(parts.base_digest)
    shutil.copy(manifest, hidden)
    manifest.unlink()
    async with serving(parts, parts.settings(tmp_path), ready=False) as world, world.http() as http:
        await until(lambda: "not hold" in (world.gateway.machine.admission.not_ready_reason() or ""))
        posted = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await until(lambda: world.gateway.machine.admission.arriving == 1)
        shutil.copy(hidden, manifest)
        assert (await soon(posted)).status_code == 200
        assert world.gateway.machine.admission.not_ready_reason() is None
    weights = next(e for e in parts.depot.blobs.manifest(parts.base_digest).files if e.name == "model.safetensors")
    assert folder.is_dir()
    assert weights.digest not in parts.depot.asked


@pytest.mark.parametrize("cut", [False, True])
async def test_a_cached_tokenizer_that_is_damaged_is_fetched_again_before_it_is_used(
    parts: World, tmp_path: Path, cut: bool
) -> None:
    """A damaged manifest does not say which files are its own: they may be fetched again, too."""
    async with serving(parts, parts.settings(tmp_path)) as world:
        assert world.gateway.registry.get_sample_value("weft_gateway_corrupt_artifacts_total") == 0
    blobs = BlobStore(tmp_path / "data" / "blobs")
    manifest = blobs.path(parts.base_digest)
    files = [path for path in sorted(manifest.parent.iterdir()) if path != manifest]
    assert len(files) == 3, "the tokenizer, its configuration, the chat template"
    for damaged in (files, [manifest]):
        for path in damaged:
            data, at = path.read_bytes(), path.stat().st_size // 2
            path.write_bytes(data[:at] if cut else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        parts.depot.asked.clear()
        async with serving(parts, parts.settings(tmp_path)) as world:
            completion = await world.client().completions.create(model="tiny", prompt="hello")
            assert completion.choices[0].text == ANSWER
            assert world.gateway.registry.get_sample_value("weft_gateway_corrupt_artifacts_total") == len(damaged)
        assert {path.name for path in damaged} <= {hex_of(digest) for digest in parts.depot.asked}
        assert {path.name for path in manifest.parent.iterdir()} == {path.name for path in (*files, manifest)}
        check_blobs(blobs)


# ---------------------------------------------------------------- bodies that do not come


async def half_a_body(world: World, kind: str = JSON_TYPE) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: 100\r\n\r\n"
    writer.write(head.encode() + b'{"model":')
    return reader, writer


async def test_a_client_that_disconnects_within_its_body_is_no_error_of_ours(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await half_a_body(world)
    await until(lambda: world.gateway.machine.admission.arriving == 1)
    writer.close()
    registry, labels = world.gateway.registry, {"model": "-", "status": "499"}
    await until(lambda: registry.get_sample_value("weft_gateway_requests_total", labels) == 1)
    await world.settled()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_body_that_never_ends_is_given_up_in_bounded_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_gateway.openai.http_requests.BODY_SECONDS", 0.05)
    reader, writer = await half_a_body(world)
    dribbling = asyncio.create_task(dribble(writer))
    head = await soon(reader.readuntil(b"\r\n\r\n"))
    assert b" 408 " in head
    assert b"connection: close" in head
    await soon(dribbling)
    await until(lambda: not world.server.server_state.connections)
    await world.settled()


async def test_the_rest_of_a_refused_body_is_read_for_a_bounded_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_gateway.shell.bounded_http.REST_SECONDS", 0.05)
    reader, writer = await half_a_body(world, "text/plain")
    dribbling = asyncio.create_task(dribble(writer))
    assert b" 415 " in await soon(reader.readline())
    await soon(dribbling)
    await until(lambda: not world.server.server_state.connections)


async def test_a_refused_body_that_comes_in_time_keeps_its_connection(world: World) -> None:
    reader, writer = await half_a_body(world, "text/plain")
    assert b"415" in await soon(reader.readline())
    writer.write(b"x" * 91 + b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 200 " in await soon(reader.readuntil(b"HTTP/1.1 200 OK\r\n"))
    writer.close()


@pytest.mark.parametrize(("keys", "status"), [(False, b"415"), (True, b"401")])
async def test_a_connection_that_ends_with_its_answer_ends_behind_the_body(
    parts: World, tmp_path: Path, keys: bool, status: bytes
) -> None:
    parts.scheduler.routes = with_keys(parts)
    async with serving(parts, parts.settings(tmp_path, auth=keys)) as world:
        reader, writer = await half_a_body(world, "text/plain\r\nconnection: close")
        assert status in await soon(reader.readline())
        async with world.http() as http:
            assert (await http.get("/healthz")).status_code == 200, "the loop has gone on"
            assert len(world.server.server_state.connections) == 2
        writer.write(b"x" * 91)
        assert b'"error"' in await soon(reader.read())
        await until(lambda: not world.server.server_state.connections)


async def dribble(writer: asyncio.StreamWriter) -> None:
    """A byte at a time for as long as the connection is there."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.005)
