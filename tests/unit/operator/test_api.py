"""The local API over its real unix socket."""

import asyncio
import http.client
import json
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from harness.bad_manifests import adapter
from harness.waiting import PATIENCE_S
from weft.files import connect_socket
from weft_operator.local import Durable, LocalApi, LogFile, ObjectStore, admit, open_store, serve

ADAPTER = adapter("upper", "acme", poolRef={"name": "base"}, source={"uri": "file:upper"})


class Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("weft", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = connect_socket(self._path, PATIENCE_S)


class Served:
    """A running API and a client of it that works in threads."""

    def __init__(self, path: Path, store: ObjectStore, log: LogFile) -> None:
        self.path, self.store, self.log = path, store, log

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return await asyncio.to_thread(self._call, method, path, body)

    def _call(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        connection = Connection(self.path)
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, content)
        response = connection.getresponse()
        raw = response.read()
        connection.close()
        return response.status, json.loads(raw) if "json" in response.headers["content-type"] else raw.decode()

    async def lines(self, path: str, count: int, ready: threading.Event) -> list[str]:
        return await asyncio.to_thread(self._lines, path, count, ready)

    def _lines(self, path: str, count: int, ready: threading.Event) -> list[str]:
        connection = Connection(self.path)
        connection.request("GET", path)
        response = connection.getresponse()
        ready.set()
        found = [response.readline().decode() for _ in range(count)]
        connection.close()
        return found


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    folder = tmp_path / ("deep" * 30)  # deeper than the kernel's limit for socket paths
    folder.mkdir()
    store = open_store(folder / "objects.json", lambda: 1_700_000_000.0)
    keeper = Durable(store, folder / "objects.json")
    log = LogFile(folder / "gateway.log")
    served = LocalApi(store, keeper, admit=admit, logs={"gateway": log}, describe=lambda: {"pid": 1})
    path = folder / "weft.sock"
    assert len(str(path)) > 108, "as long as a socket's path may be"
    tasks = [asyncio.create_task(keeper.run()), asyncio.create_task(serve(served, path))]
    await asyncio.sleep(0)  # both have begun: the socket listens before anything else is awaited
    assert path.exists()
    yield Served(path, store, log)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    log.close()


async def test_an_object_is_created_changed_and_left_alone(api: Served) -> None:
    status, answer = await api.call("POST", "/v1/apply", ADAPTER)
    assert (status, answer["result"]) == (200, "created")
    assert answer["object"]["spec"]["pinned"] is False
    assert (await api.call("POST", "/v1/apply", ADAPTER))[1]["result"] == "unchanged"
    changed = ADAPTER | {"spec": {**ADAPTER["spec"], "pinned": True}}  # type: ignore[dict-item]
    assert (await api.call("POST", "/v1/apply", changed))[1]["result"] == "configured"
    assert api.path.with_name("objects.json").exists()


async def test_the_socket_is_for_its_owner_alone(api: Served) -> None:
    assert stat.S_IMODE(api.path.stat().st_mode) == 0o600


async def test_lists_objects_and_deletes(api: Served) -> None:
    await api.call("POST", "/v1/apply", ADAPTER)
    _, found = await api.call("GET", "/v1/loraadapters?namespace=acme")
    assert [item["metadata"]["name"] for item in found["items"]] == ["upper"]
    assert found["resourceVersion"] == str(api.store.version)
    assert (await api.call("GET", "/v1/loraadapters?namespace=globex"))[1]["items"] == []
    assert (await api.call("GET", "/v1/loraadapters/acme/upper"))[0] == 200
    assert (await api.call("DELETE", "/v1/loraadapters/acme/upper"))[0] == 200
    assert (await api.call("GET", "/v1/loraadapters/acme/upper"))[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "reason"),
    [
        ("GET", "/v1/loraadapters/acme/none", None, 404, "NotFound"),
        ("GET", "/v1/pods", None, 404, "NotFound"),
        ("GET", "/v1/logs/none", None, 404, "NotFound"),
        ("DELETE", "/v1/servingpools/acme/none", None, 404, "NotFound"),
        ("POST", "/v1/apply", b"{", 400, "BadRequest"),
        ("POST", "/v1/apply", b"[]", 400, "BadRequest"),
        ("POST", "/v1/apply", b"[" * 100_000, 400, "BadRequest"),
        ("POST", "/v1/apply", b'{"spec":' * 50_000, 400, "BadRequest"),
        ("POST", "/v1/apply", b'{"kind": "\\ud800"}', 400, "BadRequest"),
        ("POST", "/v1/apply", b'{"kind": NaN}', 400, "BadRequest"),
        ("POST", "/v1/apply", b'{"kind": ' + b"9" * 6_000 + b"}", 400, "BadRequest"),
        ("GET", "/v1/logs/gateway?tail=%C2%B2", None, 400, "BadRequest"),
        ("GET", f"/v1/logs/gateway?tail={'9' * 6_000}", None, 400, "BadRequest"),
        ("GET", "/v1/loraadapters/acme/a%2Fb%3Fc", None, 404, "NotFound"),
        ("GET", "/v1/logs/a%2Fb", None, 404, "NotFound"),
        ("POST", "/v1/apply", b" " * ((1 << 20) + 1), 400, "BadRequest"),
        ("POST", "/v1/apply", {"kind": "Pod"}, 422, "Invalid"),
        ("POST", "/v1/apply", {"kind": "List", "items": [1]}, 400, "BadRequest"),
        ("POST", "/v1/delete", ADAPTER, 400, "BadRequest"),
        ("GET", "/v1/watch?resourceVersion=zero", None, 400, "BadRequest"),
        ("GET", "/v1/watch?resourceVersion=0", None, 410, "Expired"),
    ],
)
async def test_refusals_have_a_reason(api: Served, method: str, path: str, body: Any, code: int, reason: str) -> None:
    status, answer = await api.call(method, path, body)
    assert status == code
    assert (answer["kind"], answer["code"], answer["reason"]) == ("Status", code, reason)
    assert answer["message"]


async def test_a_refused_object_names_every_wrong_field_and_changes_nothing(api: Served) -> None:
    before = api.store.version
    _, answer = await api.call("POST", "/v1/apply", ADAPTER | {"spec": {"poolref": {}, "maxRank": 0}})
    fields = [cause["field"] for cause in answer["details"]["causes"]]
    assert {"spec.poolref", "spec.maxRank", "spec.source", "spec.poolRef"} <= set(fields)
    assert api.store.version == before


async def test_a_watch_streams_changes_as_they_happen(api: Served) -> None:
    ready = threading.Event()
    watching = asyncio.create_task(api.lines(f"/v1/watch?resourceVersion={api.store.version}", 2, ready))
    await asyncio.to_thread(ready.wait)
    await api.call("POST", "/v1/apply", ADAPTER)
    await api.call("DELETE", "/v1/loraadapters/acme/upper")
    assert [event["type"] for event in [json.loads(line) for line in await watching]] == ["ADDED", "DELETED"]


async def test_a_log_is_read_from_its_end_and_followed(api: Served) -> None:
    api.log.write(b"one\ntwo\nthree\n")
    assert (await api.call("GET", "/v1/logs/gateway?tail=2"))[1] == "two\nthree\n"
    assert (await api.call("GET", "/v1/logs/gateway"))[1] == "one\ntwo\nthree\n"
    ready = threading.Event()
    following = asyncio.create_task(api.lines("/v1/logs/gateway?tail=1&follow=1", 2, ready))
    await asyncio.to_thread(ready.wait)
    api.log.write(b"four\n")
    assert await following == ["three\n", "four\n"]


async def test_the_stack_describes_itself(api: Served) -> None:
    assert await api.call("GET", "/v1/stack") == (200, {"pid": 1})


async def test_a_list_is_applied_and_deleted_one_by_one_and_answered_in_order(api: Served) -> None:
    wrong = {**ADAPTER, "spec": {}}
    other = {**ADAPTER, "metadata": {"name": "lower", "namespace": "acme"}}
    status, answer = await api.call("POST", "/v1/apply", {"kind": "List", "items": [ADAPTER, wrong, other, ADAPTER]})
    assert status == 200
    results = [item.get("result") or item["error"]["reason"] for item in answer["items"]]
    assert results == ["created", "Invalid", "created", "unchanged"]
    gone = {"kind": "List", "items": [other, other, {"kind": "Pod", "metadata": {}}, ADAPTER]}
    _, answer = await api.call("POST", "/v1/delete", gone)
    results = [item.get("result") or item["error"]["reason"] for item in answer["items"]]
    assert results == ["deleted", "NotFound", "BadRequest", "deleted"]
    assert api.store.objects() == []
