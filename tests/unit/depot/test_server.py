"""The HTTP side on a real application: resolve to blob, bad bodies, ranges, retain and its leases, stopping."""

import asyncio
import errno
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.fake_hub import FakeHub
from harness.waiting import PATIENCE_S, soon
from tests.unit.artifacts.making import write_adapter
from tests.unit.depot.conftest import Bench
from tests.unit.depot.reading import remote_source
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import digest_of
from weft.leadership.errors import LeadershipLost
from weft.telemetry.invariants import VIOLATIONS
from weft_depot import metrics, service
from weft_depot.core import ConcurrencyLimits, Operations
from weft_depot.server import build_app
from weft_depot.service import Depot

ADAPTER = {"kind": "adapter", "uri": "file:adapters/upper", "namespace": "default"}
MODEL = {"kind": "model", "uri": "file:models/tiny", "namespace": "default"}
JSON = {"content-type": "application/json; charset=utf-8"}
ODD_RANGES = ["lines=1-2", "bytes", "bytes=a-b", "bytes=" + "9" * 5000 + "-", "bytes=" + "0-0," * 200]


class Served:
    """The application with a client; `hold` stops every resolve before its first chunk until it is set."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.now = bench, 0.0
        self.release = threading.Event()
        self.release.set()
        operations = Operations(max_unfinished=3, keep_s=100)
        self.depot = Depot(
            bench.resolver, limits=ConcurrencyLimits(2, 2, 2), operations=operations, now=lambda: self.now
        )
        transport = httpx2.ASGITransport(app=build_app(self.depot))
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://depot")

    def hold(self) -> None:
        """From here on resolves stop when they read their source."""
        self.release.clear()
        real = self.bench.resolver.sources["file"]

        class Slow:
            accepted_options, remote, host = real.accepted_options, real.remote, real.host

            def open(inner, *args: Any) -> Any:  # noqa: N805
                self.release.wait(PATIENCE_S)
                return real.open(*args)

        self.bench.resolver.sources["file"] = Slow()  # type: ignore[index]

    async def ask(self, body: dict[str, Any]) -> str:
        response = await self.http.post("/v1/resolve", json=body)
        assert response.status_code == 202, response.text
        return response.json()["operation"]

    async def finish(self, operation: str) -> dict[str, Any]:
        while True:
            found = (await self.http.get(f"/v1/operations/{operation}", params={"wait_s": 60})).json()
            if found["state"] in ("Fetched", "Failed"):
                return found

    async def resolve(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.finish(await self.ask(body))

    async def base(self) -> dict[str, Any]:
        return {"digest": (await self.resolve(MODEL))["digest"], "name": "tiny"}


@pytest.fixture
async def served(bench: Bench) -> AsyncIterator[Served]:
    served = Served(bench)
    yield served
    served.release.set()
    served.depot.close()
    await served.http.aclose()


async def test_a_model_and_an_adapter_are_resolved_and_served(served: Served) -> None:
    found = await served.resolve({**ADAPTER, "base": await served.base(), "maxRank": 64})
    assert found["state"] == "Fetched"
    assert found["verdict"]["rank"] == 4
    assert 'weft_depot_resolves_total{kind="model",reason=""}' in (await served.http.get("/metrics")).text
    blob = await served.http.get(f"/v1/blobs/{found['digest']}")
    assert digest_of(blob.content) == found["digest"]
    assert blob.headers["etag"] == f'"{found["digest"]}"'
    for entry in blob.json()["files"]:
        assert digest_of((await served.http.get(f"/v1/blobs/sha256:{entry['sha256']}")).content).endswith(
            entry["sha256"]
        )


async def test_a_resolved_source_is_asked_for_by_its_watch(served: Served) -> None:
    served.bench.at_rest()
    found = await served.resolve({**ADAPTER, "base": await served.base()})
    asked = {"watches": [found["watch"], "other"]}
    assert (await served.http.post("/v1/changed", json=asked)).json() == {"changed": ["other"]}
    (served.bench.root / "adapters" / "upper" / "adapter_config.json").touch()
    assert (await served.http.post("/v1/changed", json=asked)).json() == {"changed": ["other", found["watch"]]}


async def test_a_question_about_watches_waits_for_a_change(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_depot.server.WATCH_S", 0.01)
    served.bench.at_rest()
    found = await served.resolve({**ADAPTER, "base": await served.base()})
    depot, looks, look = served.depot, asyncio.Queue[None](), served.depot.changed

    async def looked(watches: tuple[str, ...]) -> list[str]:
        looks.put_nowait(None)
        return await look(watches)

    monkeypatch.setattr(depot, "changed", looked)
    asked = {"watches": [found["watch"]]}
    assert (await served.http.post("/v1/changed?wait_s=0.05", json=asked)).json() == {"changed": []}
    assert looks.qsize() >= 1, "how often it looks in that time depends on the machine"
    asking = asyncio.create_task(served.http.post("/v1/changed?wait_s=60", json=asked))
    for _ in range(looks.qsize() + 3):
        await soon(looks.get())
    (served.bench.root / "adapters" / "upper" / "adapter_config.json").touch()
    assert (await soon(asking)).json() == {"changed": [found["watch"]]}


async def test_after_a_429_a_source_gets_no_request_of_that_namespace_until_retry_after(served: Served) -> None:
    with FakeHub() as hub:
        hub.repo("org/lora", {"adapter_config.json": b"{}"})
        hub.fault("/api/models", times=1, status=429, headers={"Retry-After": "30"})
        served.bench.resolver.sources["hf"] = remote_source("hf", f"--hf-endpoint={hub.url}")  # type: ignore[index]
        body = {"kind": "adapter", "uri": "hf:org/lora", "namespace": "acme", "base": await served.base()}
        found = await served.resolve(body)
        assert (found["state"], found["reason"], found["retryAfterSeconds"]) == ("Failed", "SourceUnreachable", 30)
        asked, served.now = len(hub.seen), 12.5
        for uri in ("hf:org/lora", "hf:org/other"):
            found = await served.resolve({**body, "uri": uri})
            assert (found["reason"], found["retryAfterSeconds"]) == ("SourceUnreachable", 18)
            assert "asked to wait for 18 s more" in found["message"]
        assert len(hub.seen) == asked
        assert "retryAfterSeconds" not in await served.resolve({**body, "namespace": "globex"})
        assert len(hub.seen) > asked, "another namespace may have another token"
        asked, served.now = len(hub.seen), 30.0
        assert "retryAfterSeconds" not in await served.resolve(body)
        assert len(hub.seen) > asked


async def test_a_host_that_hangs_counts_as_unchanged_and_is_checked_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CHECK_S", 0.01)
    served.bench.at_rest()
    found = await served.resolve(MODEL)
    begun, looks = threading.Event(), list[list[str]]()

    def stuck(watches: list[str]) -> list[str]:
        looks.append(watches)
        begun.set()
        served.release.wait(PATIENCE_S)
        return watches

    monkeypatch.setattr(served.bench.resolver.watches, "changed", stuck)
    served.release.clear()
    for _ in range(3):
        assert (await served.http.post("/v1/changed", json={"watches": [found["watch"]]})).json() == {"changed": []}
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    assert looks == [[found["watch"]]]
    monkeypatch.setattr(service, "CHECK_S", PATIENCE_S)
    served.release.set()
    assert (await served.http.post("/v1/changed", json={"watches": [found["watch"]]})).json() == {
        "changed": [found["watch"]]
    }


async def test_who_waits_has_the_answer_of_a_known_source_in_one_request(served: Served) -> None:
    known = await served.resolve(MODEL)
    response = await served.http.post("/v1/resolve", params={"wait_s": 60}, json=MODEL)
    assert response.status_code == 200
    assert {**response.json(), "id": known["id"]} == known


async def test_a_failure_says_reason_and_message_and_after_the_headers_keeps_its_verdict(served: Served) -> None:
    found = await served.resolve({**MODEL, "uri": "file:models/none"})
    assert (found["state"], found["reason"]) == ("Failed", "SourceNotFound")
    assert "none" in found["message"]
    assert "verdict" not in found
    found = await served.resolve({**ADAPTER, "base": await served.base(), "digest": digest_of(b"another")})
    assert (found["reason"], found["verdict"]["rank"]) == ("DigestMismatch", 4)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"{", "body"),
        (b"{}", "kind"),
        (b'{"kind": "virus", "uri": "file:a", "namespace": "n"}', "kind"),
        (b'{"kind": "model", "uri": "file:a", "namespace": "n", "max_ranks": 1}', "max_ranks"),
        (b'{"kind": "model", "uri": "file:a", "namespace": "n", "digest": "sha256:x"}', "digest"),
        (b'{"kind": "model", "uri": 5, "namespace": "n"}', "uri"),
        (b'{"kind": "adapter", "uri": "file:a", "namespace": "n", "base": {"digest": "x"}}', "base.digest"),
        (b'{"kind": "adapter", "uri": "file:a", "namespace": "n", "maxRank": 0}', "maxRank"),
        (b'{"kind": "model", "uri": "file:\\ud800", "namespace": "n"}', "body"),
    ],
)
async def test_a_body_that_does_not_fit_is_a_400_that_names_the_field(served: Served, body: bytes, says: str) -> None:
    response = await served.http.post("/v1/resolve", content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["reason"] == "BadRequest"
    assert says in response.json()["message"]


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_what_a_web_page_may_send_to_anybody_is_not_taken(served: Served, media_type: str) -> None:
    found = await served.resolve(MODEL)
    served.now = 101.0
    served.depot.forget()
    headers = {"content-type": media_type} if media_type else {}
    refused = await served.http.post("/v1/retain", content=b'{"digests": []}', headers=headers)
    assert (refused.status_code, refused.json()["reason"]) == (415, "NotJson")
    assert "application/json" in refused.json()["message"]
    assert served.bench.store.holds(found["digest"])
    assert (await served.http.post("/v1/resolve", content=b"{}", headers=headers)).status_code == 415


@pytest.mark.parametrize(
    "config", [{"\ud800x": 1}, {"base_model_name_or_path": "x/\ud800"}, {"eva_config": [{"a": ["\udfff"]}]}]
)
async def test_half_a_character_in_a_config_is_a_reason_and_no_broken_answer(
    served: Served, config: dict[str, Any]
) -> None:
    write_adapter(served.bench.root / "half", config=config)
    found = await served.resolve({**ADAPTER, "uri": "file:half", "base": await served.base()})
    assert (found["state"], found["reason"]) == ("Failed", "ConfigInvalid")
    assert "surrogate" in found["message"]


async def test_only_a_new_result_of_a_source_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        lines = [r.kv["reason"] for r in caplog.records if r.message == "resolved" and r.levelname == "INFO"]  # type: ignore[attr-defined]
        caplog.clear()
        return lines

    caplog.set_level("DEBUG")
    for expected in ([""], [], []):
        await served.resolve(MODEL)
        assert told() == expected
    config = served.bench.root / "models" / "tiny" / "config.json"
    good = config.read_bytes()
    config.write_bytes(b"{}")
    for expected in (["UnsupportedModel"], []):
        await served.resolve(MODEL)
        assert told() == expected
    config.write_bytes(good)
    await served.resolve(MODEL)
    assert told() == [""]


async def test_equal_requests_share_one_operation_and_too_many_are_turned_away(served: Served) -> None:
    served.hold()
    first = await served.ask(MODEL)
    assert await served.ask(MODEL) == first
    await served.ask({**MODEL, "uri": "file:a"})
    await served.ask({**MODEL, "uri": "file:b"})
    refused = await served.http.post("/v1/resolve", json={**MODEL, "uri": "file:c"})
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    served.release.set()
    assert (await served.finish(first))["state"] == "Fetched"
    assert await served.ask({**MODEL, "uri": "file:c"})


async def test_an_operation_can_be_asked_for_without_waiting(served: Served) -> None:
    served.hold()
    operation = await served.ask(MODEL)
    assert (await served.http.get(f"/v1/operations/{operation}")).json() == {"id": operation, "state": "Pending"}
    waited = await served.http.get(f"/v1/operations/{operation}", params={"wait_s": 0.01})
    assert waited.json()["state"] == "Pending"
    again = await served.http.post("/v1/resolve", params={"wait_s": 0.01}, json=MODEL)
    assert (again.status_code, again.json()["operation"]) == (202, operation)


async def test_what_is_under_way_is_listed_with_its_bytes_until_it_ends(served: Served) -> None:
    served.hold()
    operation = await served.ask(MODEL)
    (listed,) = (await served.http.get("/v1/operations")).json()["operations"]
    assert listed.items() >= {"id": operation, "kind": "model", "uri": MODEL["uri"], "doing": "waiting"}.items()
    served.release.set()
    assert (await served.finish(operation))["state"] == "Fetched"
    assert (await served.http.get("/v1/operations")).json() == {"operations": []}


async def test_an_operation_is_forgotten_after_its_time(served: Served) -> None:
    found = await served.resolve(MODEL)
    served.now = 99.0
    served.depot.forget()
    assert (await served.http.get(f"/v1/operations/{found['id']}")).status_code == 200
    served.now = 101.0
    served.depot.forget()
    assert (await served.http.get(f"/v1/operations/{found['id']}")).status_code == 404
    assert (await served.http.get("/v1/operations/never")).status_code == 404


@pytest.mark.parametrize("wait_s", ["x", "-1", "nan", ""])
async def test_a_wait_that_is_no_time_is_a_400(served: Served, wait_s: str) -> None:
    assert (await served.http.get("/v1/operations/x", params={"wait_s": wait_s})).status_code == 400


async def test_blobs_are_served_in_ranges(served: Served) -> None:
    data = bytes(range(256)) * 10_000
    url = f"/v1/blobs/{served.bench.store.put(data)}"
    whole = await served.http.get(url)
    assert (whole.status_code, whole.content) == (200, data)
    part = await served.http.get(url, headers={"range": "bytes=1000-1999"})
    assert (part.status_code, part.content) == (206, data[1000:2000])
    assert part.headers["content-range"] == f"bytes 1000-1999/{len(data)}"
    rest = await served.http.get(url, headers={"range": "bytes=2500000-"})
    assert (rest.status_code, rest.content) == (206, data[2_500_000:])
    outside = await served.http.get(url, headers={"range": f"bytes={len(data)}-"})
    assert (outside.status_code, outside.headers["content-range"]) == (416, f"bytes */{len(data)}")
    head = await served.http.head(url)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(data)), b"")
    empty = f"/v1/blobs/{served.bench.store.put(b'')}"
    assert (await served.http.get(empty)).content == b""
    assert (await served.http.get(empty, headers={"range": "bytes=0-"})).status_code == 416


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.from_regex(r"bytes=[0-9, -]{0,20}", fullmatch=True) | st.sampled_from(ODD_RANGES))
async def test_no_range_leads_outside_the_blob(served: Served, header: str) -> None:
    data = bytes(range(200))
    url = f"/v1/blobs/{served.bench.store.put(data)}"
    answer = await served.http.get(url, headers={"range": header})
    assert answer.status_code in (200, 206, 400, 416)
    if answer.status_code == 200:
        assert answer.content == data
    if answer.status_code == 206 and (span := answer.headers.get("content-range")):
        start, end = map(int, span.removeprefix("bytes ").partition("/")[0].split("-"))
        assert answer.content == data[start : end + 1] != b""


def rot(served: Served, digest: str) -> None:
    """One bit of a blob flips; size and time stay."""
    path = served.bench.store.path(digest)
    was, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


async def report(served: Served, digest: str) -> httpx2.Response:
    """What a caller asks after a download that did not match, until the blob has been verified."""
    while True:
        answer = await served.http.get(f"/v1/blobs/{digest}", headers={"weft-mismatch": "1"})
        if answer.json().get("message") != "the blob is being verified; try again":
            return answer
        await asyncio.sleep(0)  # the client runs the application itself and never leaves the loop to others


async def test_a_rotten_blob_is_removed_when_a_download_did_not_match_and_the_next_resolve_copies_it_again(
    served: Served,
) -> None:
    served.bench.at_rest()
    request = {**ADAPTER, "base": await served.base()}
    found = await served.resolve(request)
    weights = served.bench.manifest(found["digest"]).file("adapter_model.safetensors").digest
    before = metrics.DAMAGED._value.get()
    rot(served, weights)
    gone = await report(served, weights)
    assert (gone.status_code, gone.headers["retry-after"]) == (503, "1"), "not 404: it comes back"
    assert metrics.DAMAGED._value.get() == before + 1
    assert (await served.http.post("/v1/changed", json={"watches": [found["watch"]]})).json()["changed"], "noticed"
    assert (await served.resolve(request))["digest"] == found["digest"]
    back = await served.http.get(f"/v1/blobs/{weights}", headers={"weft-mismatch": "1"})
    assert digest_of(back.content) == weights
    assert metrics.DAMAGED._value.get() == before + 1
    served.bench.check()


async def test_a_report_about_a_whole_blob_costs_one_reading_and_holds_up_nobody_else(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read, really = b"x" * 1000, list[str](), served.bench.store.verify
    digest = served.bench.store.put(data)

    def verify(*arguments: Any) -> None:
        read.append(digest)
        really(*arguments)

    monkeypatch.setattr(served.bench.store, "verify", verify)
    for _ in range(3):
        while (await served.http.get(f"/v1/blobs/{digest}", headers={"weft-mismatch": "1"})).status_code == 503:
            assert (await served.http.get(f"/v1/blobs/{digest}")).content == data, "others are served meanwhile"
            await asyncio.sleep(0)
    assert read == [digest]
    served.now += 61.0
    assert (await served.http.get(f"/v1/blobs/{digest}", headers={"weft-mismatch": "1"})).status_code == 503


@pytest.mark.parametrize(("digest", "status"), [("sha256:" + "0" * 64, 404), ("x", 400), ("sha256:" + "A" * 64, 400)])
async def test_a_digest_that_is_none_or_unknown_has_its_status(served: Served, digest: str, status: int) -> None:
    response = await served.http.get(f"/v1/blobs/{digest}")
    assert response.status_code == status
    assert response.json()["reason"] in ("DigestMismatch", "SourceNotFound")


async def test_retain_keeps_the_list_and_what_operations_hold(served: Served) -> None:
    base = await served.base()
    found = await served.resolve({**ADAPTER, "base": base})
    store = served.bench.store
    assert (await served.http.post("/v1/retain", json={"digests": []})).json() == {"removed": 0}, "leased"
    served.now = 101.0
    served.depot.forget()
    removed = (await served.http.post("/v1/retain", json={"digests": [base["digest"]]})).json()["removed"]
    assert removed == 3
    assert store.holds(base["digest"])
    assert not store.has(found["digest"])
    bad = await served.http.post("/v1/retain", json={"digests": ["x"]})
    assert bad.status_code == 400
    assert store.holds(base["digest"])


async def test_a_depot_that_another_one_may_have_replaced_removes_nothing(served: Served) -> None:
    def lost() -> None:
        raise LeadershipLost("the Lease was not renewed in time")

    base = await served.base()
    another = Depot(served.bench.resolver, require_turn=lost)
    transport = httpx2.ASGITransport(app=build_app(another))
    async with httpx2.AsyncClient(transport=transport, base_url="http://depot") as http:
        answer = await http.post("/v1/retain", json={"digests": []})
    another.close()
    assert (answer.status_code, answer.json()["reason"]) == (503, "Busy")
    assert served.bench.store.holds(base["digest"])


@pytest.mark.parametrize(
    ("error", "reason", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "DepotFull", "No space left on device"),
        (OSError("\ud800\x1b[2J"), "SourceUnreachable", r"\ud800\x1b[2J"),  # no message breaks the answer
    ],
)
async def test_an_unexpected_error_ends_the_operation_and_the_next_one_works(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: OSError, reason: str, says: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("weft.artifacts.blobs.BlobWriter.write", Mock(side_effect=error))
        found = await served.resolve(MODEL)
    assert (found["state"], found["reason"]) == ("Failed", reason)
    assert found["message"].endswith(says)
    assert (await served.resolve(MODEL))["state"] == "Fetched"


@pytest.mark.parametrize(
    ("error", "of_disk"),
    [
        (OSError(errno.EIO, "x"), True),
        (OSError(errno.EROFS, "x"), True),
        (ConnectionResetError(), False),
        (TimeoutError(), False),
        (ssl.SSLError(), False),
        (socket.gaierror(), False),
        (ValueError(), False),
    ],
    ids=repr,
)
def test_the_network_is_no_disk(error: Exception, of_disk: bool) -> None:
    assert service.is_of_disk(error) == of_disk


async def test_a_disk_that_fails_is_named_and_no_bug(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = OSError(errno.EIO, os.strerror(errno.EIO))

    def fails(*_: object, **__: object) -> Any:
        raise broken

    with monkeypatch.context() as patched:
        patched.setattr(BlobStore, "writer", fails)
        failed = await served.resolve(MODEL)
        assert failed["reason"] == "SourceUnreachable"
        assert failed["message"] == "the depot's disk fails: Input/output error"
    done = await served.resolve(MODEL)
    with monkeypatch.context() as patched:
        patched.setattr(BlobStore, "path", fails)
        answer = await served.http.get(f"/v1/blobs/{done['digest']}")
        assert (answer.status_code, answer.json()["reason"]) == (503, "DiskFailed")
        assert "Input/output error" in answer.json()["message"]
    with monkeypatch.context() as patched:  # in the middle of an answer
        patched.setattr(BlobStore, "path", lambda *_: Path("/proc/self/mem"))
        with pytest.raises(AssertionError):  # the test's transport: an answer without an end
            await served.http.get(f"/v1/blobs/{done['digest']}")
    assert [record.message for record in caplog.records if record.exc_info] == []
    assert {"the disk fails", "a blob cannot be read"} <= {record.message for record in caplog.records}
    assert (await served.http.get(f"/v1/blobs/{done['digest']}")).status_code == 200


async def test_a_body_that_is_too_large_is_not_gathered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_depot.server.MAX_BODY_BYTES", 1000)
    read: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            read.append(1)
            yield b" " * 400

    response = await served.http.post("/v1/resolve", content=endless(), headers=JSON)
    assert response.status_code == 400


async def rounds(depot: Depot, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Housekeeping goes round so often; raises what ends it."""
    done, sweep = asyncio.Semaphore(0), depot.store.sweep
    loop = asyncio.get_running_loop()

    def swept(before: float) -> int:
        loop.call_soon_threadsafe(done.release)
        return sweep(before)

    monkeypatch.setattr("weft_depot.service.HOUSEKEEPING_S", 0.0)
    monkeypatch.setattr(depot.store, "sweep", swept)
    running = asyncio.create_task(depot.run())
    try:
        for _ in range(count + 1):  # the next one has begun: that one is over
            turn = asyncio.create_task(done.acquire())
            await asyncio.wait([turn, running], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                turn.cancel()
                running.result()
            assert turn.done()
    finally:
        running.cancel()


async def test_housekeeping_survives_the_disks_trouble_and_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> tuple[int, int]:
        raise OSError(5, "Input/output error")

    before = metrics.HOUSEKEEPING_FAILURES._value.get()
    with monkeypatch.context() as patch:
        patch.setattr(served.depot.store, "usage", broken)
        await rounds(served.depot, 3, patch)
    assert metrics.HOUSEKEEPING_FAILURES._value.get() >= before + 3
    assert "Input/output error" in str([record.__dict__.get("kv") for record in caplog.records])
    served.depot.store.put(b"weft")
    await rounds(served.depot, 1, monkeypatch)
    assert metrics.BLOBS._value.get() == 1


async def test_housekeeping_counts_a_broken_account_and_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check_queue() -> None:
        raise AssertionError("too many run")

    violations = VIOLATIONS.labels("check_queue")
    before = violations._value.get()
    monkeypatch.setattr(served.depot._queue, "check_queue", check_queue)
    await rounds(served.depot, 2, monkeypatch)
    assert violations._value.get() >= before + 2
    assert "an invariant does not hold" in caplog.text


async def test_stopping_in_the_middle_of_a_resolve_leaves_nothing_half_done(served: Served) -> None:
    served.hold()
    operation = await served.ask(MODEL)
    closer = threading.Thread(target=served.depot.close)
    closer.start()
    assert served.depot._stopping.wait(PATIENCE_S)
    served.release.set()
    closer.join()
    assert served.depot.operations.find(operation).state == "Pending"  # type: ignore[union-attr]
    assert served.bench.blobs() == set()
    served.bench.check()


async def test_a_client_that_disconnects_within_its_body_is_no_error(served: Served) -> None:
    """An operator that is killed while it asks: before, the depot logged a traceback."""
    parts = iter([{"type": "http.request", "body": b'{"kind"', "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(parts)

    async def send(_: Any) -> None: ...

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/resolve",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await build_app(served.depot)(scope, receive, send)
