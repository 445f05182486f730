"""Files, batches and lines: the official client and raw forms against the real gateway and a played batch service."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import orjson
import psutil
import pytest

from harness.gateway_peers import FakeBatch
from harness.grpc_server import listening
from harness.spans import in_memory, traceparent_of
from weft.wire import upload_rate
from weft.wire.codec.batch import STORAGE_FULL
from weft.wire.v1 import batch_pb2, batch_pb2_grpc, common_pb2, scheduler_pb2
from weft_gateway.openai import LINES_AT_ONCE, LineRunner

from .conftest import ANSWER, World, key_route, serving, soon, until

BATCH_ID = "batch_0123"
FORM = "multipart/form-data; boundary=B"
BODY = {"model": "tiny", "prompt": "hello", "temperature": 0}


@dataclass
class Batched:
    """A world whose gateway has a batch service."""

    world: World
    batch: FakeBatch
    lines: LineRunner

    async def answer(self, body: dict[str, Any] | bytes, **where: str) -> tuple[Any, Any]:
        """A line's result and its body, parsed."""
        self.batch.run(1, body=body if isinstance(body, bytes) else orjson.dumps(body), **where)
        result = await self.batch.next("result")
        return result, orjson.loads(result.body)


@asynccontextmanager
async def batched(world: World, tmp_path: Path, **changes: Any) -> AsyncIterator[Batched]:
    batch = FakeBatch()
    async with listening(lambda s: batch_pb2_grpc.add_BatchServicer_to_server(batch, s)) as address:
        settings = world.settings(tmp_path, batch=address, **changes)
        async with serving(world, settings):
            lines = LineRunner(world.gateway)
            async with lines.running():
                await batch.up.wait()
                yield Batched(world, batch, lines)


@pytest.fixture
async def made(parts: World, tmp_path: Path) -> AsyncIterator[Batched]:
    async with batched(parts, tmp_path) as made:
        yield made


@pytest.fixture
def small(made: Batched, monkeypatch: pytest.MonkeyPatch) -> Batched:
    """One that takes small files."""
    monkeypatch.setattr("weft_gateway.openai.files.MAX_FILE_BYTES", 100_000)
    return made


def form(*parts: tuple[str, bytes]) -> bytes:
    """Parts by their disposition's parameters."""
    heads = [b"--B\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (how.encode(), data) for how, data in parts]
    return b"".join(heads) + b"--B--\r\n"


FILE, PURPOSE = ('name="file"; filename="in.jsonl"', b"{}\n"), ('name="purpose"', b"batch")


async def post_form(made: Batched, body: Any, **headers: str) -> httpx2.Response:
    async with made.world.http() as http:
        return await http.post("/v1/files", content=body, headers={"content-type": FORM} | headers)


# ---------------------------------------------------------------- files


async def test_the_official_client_uploads_lists_reads_and_deletes_a_file(made: Batched) -> None:
    client, data = made.world.client(), b'{"custom_id": "a"}\n' * 100_000  # more than one message
    file: Any = await client.files.create(file=("../../in \N{SLIGHTLY SMILING FACE}.jsonl", data), purpose="batch")
    assert (file.object, file.purpose, file.bytes, file.status) == ("file", "batch", len(data), "processed")
    assert file.filename == "../../in \N{SLIGHTLY SMILING FACE}.jsonl", "a name is text"
    assert (await client.files.retrieve(file.id)) == file
    assert (await client.files.content(file.id)).content == data
    page = await client.files.list(purpose="batch", order="asc", limit=7, after="file-x")
    assert [one.id for one in page.data] == [file.id]
    assert page.has_more
    asked = made.batch.asked[-1]
    assert (asked.purpose, asked.oldest_first, asked.limit, asked.after) == ("batch", True, 7, "file-x")
    gone = await client.files.delete(file.id)
    assert (gone.id, gone.deleted, gone.object) == (file.id, True, "file")
    with pytest.raises(openai.NotFoundError, match=file.id):
        await client.files.content(file.id)


BAD_FORMS = [
    ((FILE,), 400, "purpose"),
    ((PURPOSE,), 400, "file"),
    ((FILE, ('name="purpose"', b"fine-tune")), 400, "purpose"),
    ((('name="purpose"', b"assistants"), FILE), 400, "purpose"),
    ((('name="purpose"', b"b" * 3_000), FILE), 400, "purpose"),
    ((PURPOSE, FILE, FILE), 400, "file"),
    ((PURPOSE, FILE, ('name="expires_after[anchor]"', b"created_at")), 400, "expires_after[anchor]"),
    ((PURPOSE, ('name="file"; filename="big"', b"x" * 200_000)), 413, None),
]


async def test_a_bad_form_is_refused_by_name_and_nothing_of_it_is_kept(small: Batched) -> None:
    for fields, status, param in BAD_FORMS:
        response = await post_form(small, form(*fields))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
        assert not small.batch.files, error


async def test_what_is_no_form_or_packed_or_comes_from_a_foreign_page_is_refused(made: Batched) -> None:
    assert (await post_form(made, b"{}", **{"content-type": "application/json"})).status_code == 415
    assert (await post_form(made, b"no boundary at all")).json()["error"]["code"] == "invalid_form"
    assert (await post_form(made, form(PURPOSE, FILE)[:-9])).json()["error"]["code"] == "invalid_form"
    foreign = await post_form(made, form(PURPOSE, FILE), **{"sec-fetch-site": "cross-site"})
    assert foreign.status_code == 403
    bomb = gzip.compress(form(PURPOSE, ('name="file"; filename="in.jsonl"', bytes(50 << 20))))
    packed = await post_form(made, bomb, **{"content-encoding": "gzip"})
    assert (packed.status_code, "'gzip'" in packed.json()["error"]["message"]) == (415, True)
    assert not made.batch.files
    assert (await post_form(made, form(FILE, PURPOSE))).status_code == 200, "the order of parts is free"


async def test_an_upload_that_breaks_off_is_none(made: Batched) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield form(PURPOSE, FILE)[:-9]
        await made.batch.uploading.wait()
        raise ConnectionError("the client's machine went off")

    with pytest.raises(ConnectionError):
        await post_form(made, half())
    await until(lambda: made.batch.broken_uploads == 1)
    assert not made.batch.files


async def test_an_upload_that_drips_is_given_up(made: Batched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_rate, "GRACE_S", 0.05)

    host, port = made.world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {FORM}\r\ncontent-length: 100000\r\n\r\n"
    writer.write(head.encode() + form(PURPOSE, FILE)[:-9])
    answer = await soon(reader.read())
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"upload_too_slow"' in answer
    await until(lambda: made.batch.broken_uploads == 1)
    assert not made.batch.files


async def test_50_megabytes_stream_through_a_gateway_that_holds_a_few(made: Batched) -> None:
    """The service is slower than the client: what it has not read yet waits at the client, not in the gateway."""
    piece, pieces, most, process = b"x" * (1 << 20), 50, 0, psutil.Process()

    async def body() -> AsyncIterator[bytes]:
        nonlocal most
        head, tail = form(PURPOSE, (FILE[0], b"SPLIT")).split(b"SPLIT")
        yield head
        before = process.memory_info().rss
        for _ in range(pieces):
            yield piece
            most = max(most, process.memory_info().rss - before)
        yield tail

    received = 0

    async def count(request_iterator: Any, context: Any) -> Any:
        nonlocal received
        async for message in request_iterator:
            received += len(message.chunk)
        return batch_pb2.File(file_id="file-x", filename="x", purpose="batch", bytes=received)

    made.batch.UploadFile = count  # type: ignore[method-assign] (a server that keeps nothing: it shares our process)
    async with listening(lambda s: batch_pb2_grpc.add_BatchServicer_to_server(made.batch, s)) as address:
        made.world.gateway.batch = type(made.world.gateway.batch)(address, None)
        assert (await post_form(made, body())).status_code == 200
        await made.world.gateway.batch.close()
    assert received == pieces << 20
    assert most < 24 << 20


async def test_tenants_have_files_of_their_own(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = parts.routes(keys=[key_route("a", "acme"), key_route("r", "rival")])
    async with batched(parts, tmp_path, auth=True) as made:
        acme, rival = parts.client(api_key="a"), parts.client(api_key="r")
        file = await acme.files.create(file=("in", b"{}"), purpose="batch")
        assert [one.id for one in (await acme.files.list()).data] == [file.id]
        assert (await rival.files.list()).data == []
        for ask in (rival.files.retrieve, rival.files.content, rival.files.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(file.id)
        with pytest.raises(openai.AuthenticationError):
            await parts.client(api_key="none").files.list()
        assert made.batch.files


# ---------------------------------------------------------------- batches


def job(**fields: Any) -> batch_pb2.BatchJob:
    common = {"endpoint": "/v1/completions", "completion_window": "24h", "created_unix_s": 100, "expires_unix_s": 200}
    return batch_pb2.BatchJob(batch_id=BATCH_ID, input_file_id="file-1", **(common | fields))


async def test_the_official_client_creates_reads_lists_and_cancels_a_batch(made: Batched) -> None:
    client = made.world.client()
    made.batch.job = job(status=batch_pb2.BATCH_STATUS_VALIDATING, metadata={"k": "v"})
    batch = await client.batches.create(
        input_file_id="file-1", endpoint="/v1/completions", completion_window="24h", metadata={"k": "v"}
    )
    asked = made.batch.asked[-1]
    assert (asked.input_file_id, asked.endpoint, asked.completion_window) == ("file-1", "/v1/completions", "24h")
    assert (batch.id, batch.object, batch.status, batch.metadata) == (BATCH_ID, "batch", "validating", {"k": "v"})
    assert (batch.created_at, batch.expires_at, batch.in_progress_at) == (100, 200, None)
    assert (batch.output_file_id, batch.error_file_id, batch.errors) == (None, None, None)

    made.batch.job = job(
        status=batch_pb2.BATCH_STATUS_COMPLETED,
        output_file_id="file-2",
        total=3,
        completed=2,
        failed=1,
        completed_unix_s=150,
        prompt_tokens=5,
        completion_tokens=7,
        cached_tokens=4,
        reasoning_tokens=3,
    )
    batch = await client.batches.retrieve(BATCH_ID)
    assert (batch.output_file_id, batch.completed_at) == ("file-2", 150)
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (5, 7, 12)
    details = batch.usage.input_tokens_details, batch.usage.output_tokens_details
    assert [one.to_dict() for one in details] == [{"cached_tokens": 4}, {"reasoning_tokens": 3}]

    made.batch.job = job(status=batch_pb2.BATCH_STATUS_FAILED, errors=[batch_pb2.BatchError(code="c", message="m")])
    page = await client.batches.list(limit=5, after="batch_0")
    assert (made.batch.asked[-1].limit, made.batch.asked[-1].after) == (5, "batch_0")
    errors = page.data[0].errors
    assert errors.object == "list"
    assert [one.model_dump() for one in errors.data or ()] == [
        {"code": "c", "message": "m", "line": None, "param": None}
    ]

    made.batch.refuses = grpc.StatusCode.FAILED_PRECONDITION, "The batch has ended."
    with pytest.raises(openai.ConflictError, match="has ended"):
        await client.batches.cancel(BATCH_ID)


BAD_BATCHES = [
    ({"endpoint": "/v1/moderations"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {"k": 1}}, "metadata"),
    ({"input_file_id": None}, "input_file_id"),
    ({"output_expires_after": {"seconds": 1}}, "output_expires_after"),
]


async def test_a_bad_batch_is_refused_by_name(made: Batched) -> None:
    good = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    async with made.world.http() as http:
        for change, param in BAD_BATCHES:
            response = await http.post("/v1/batches", json=good | change)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), change
        assert (await http.get("/v1/batches?limit=101")).json()["error"]["param"] == "limit"
        assert (await http.get("/v1/files?order=up")).json()["error"]["param"] == "order"
        assert (await http.get("/v1/batches?offset=1")).json()["error"]["code"] == "unsupported_parameter"


REFUSALS = {"INVALID_ARGUMENT": 400, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503, "INTERNAL": 500, "ABORTED": 503}


async def test_refusals_of_the_service_have_their_status_and_a_busy_store_is_asked_again(made: Batched) -> None:
    for code, status in REFUSALS.items():
        made.batch.refuses = grpc.StatusCode[code], "because of this"
        async with made.world.http() as http:
            for response in (await http.get("/v1/files"), await post_form(made, form(PURPOSE, FILE))):
                assert response.status_code == status, code
                assert ("because of this" in response.text) == (status < 500)
                assert (response.json()["error"]["code"] == "batch_busy") == (code == "ABORTED")
                assert code != "ABORTED" or response.headers["retry-after"] == "1"


async def test_full_storage_is_a_507_and_readiness_names_it(made: Batched) -> None:
    made.batch.refuses = grpc.StatusCode.UNAVAILABLE, "database or disk is full", (STORAGE_FULL,)
    async with made.world.http() as http:
        assert (await http.get("/readyz")).text == "ok\n"
        for response in (
            await post_form(made, form(PURPOSE, FILE)),
            await http.post(
                "/v1/batches", json={"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
            ),
        ):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (507, "batch_full")
            assert "storage is full: database or disk is full" in error["message"]
        answer = (await http.post("/v1/responses", json={"model": "tiny", "input": "hello"})).json()
        assert (answer["store"], answer["store_error"]["code"]) == (False, "batch_full")
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.text) == (200, "ok, but batch_full\n")


async def test_without_a_batch_service_the_answer_says_what_to_configure(world: World) -> None:
    async with world.http() as http:
        for path in ("/v1/files", "/v1/batches"):
            response = await http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (501, "batch_not_configured")
            assert "--batch" in response.json()["error"]["message"]


# ---------------------------------------------------------------- lines


async def test_a_line_is_answered_as_its_client_would_be_and_counts_as_a_batch_request(made: Batched) -> None:
    made.world.runner.reused = lambda _: 2
    result, body = await made.answer(BODY)
    direct = await made.world.client().completions.create(**BODY)
    assert (result.status, body["choices"][0]["text"]) == (200, ANSWER)
    assert body["usage"] == direct.usage.model_dump(exclude_unset=True)  # type: ignore[union-attr]
    assert (result.cached_tokens, result.reasoning_tokens) == (2, 0)
    assert (result.prompt_tokens, result.completion_tokens) == (
        body["usage"]["prompt_tokens"],
        body["usage"]["completion_tokens"],
    )
    assert body["id"] == f"cmpl-{result.request_id}"
    submit = await made.world.scheduler.next("submit")
    assert (submit.request_id, submit.priority) == (result.request_id, common_pb2.PRIORITY_BATCH)
    await made.world.settled()
    assert made.world.scheduler.outcomes[result.request_id].completion_tokens == result.completion_tokens

    chat = {"model": "acme/upper", "messages": [{"role": "user", "content": "hello"}], "n": 2}
    _, body = await made.answer(chat, endpoint="/v1/chat/completions")
    assert [choice["message"]["content"] for choice in body["choices"]] == [ANSWER, ANSWER]


BAD_LINES = [
    (b"\xff", 400, None),
    (b"[" * 100_000, 400, None),
    (b"{}", 400, "model"),
    (orjson.dumps(BODY | {"stream": True}), 400, "stream"),
    (orjson.dumps(BODY | {"model": "rival/secret"}), 404, "model"),
    (orjson.dumps(BODY | {"max_tokens": 1_000_000}), 400, "max_tokens"),
    (orjson.dumps(BODY | {"n": 129}), 400, "n"),
    (orjson.dumps(BODY | {"prompt": "hello " * 900_000}), 413, None),
]


async def test_a_bad_line_costs_that_line_alone(made: Batched) -> None:
    for body, status, param in BAD_LINES:
        result, answer = await made.answer(body, namespace="team")
        assert (result.status, answer["error"]["param"]) == (status, param), answer
        assert result.request_id
        assert (await made.answer(BODY, namespace="team"))[0].status == 200
    await made.world.settled()


async def test_a_line_has_a_span_under_that_of_its_batch(made: Batched) -> None:
    made.world.gateway.tracer, exporter = in_memory(ratio=1.0)
    batch = f"00-{'a' * 32}-{'b' * 16}-01"
    await made.answer(BODY, traceparent=batch)
    await made.answer(BODY | {"max_tokens": 1_000_000}, traceparent=batch)
    await made.answer(BODY)  # of a batch that is not sampled
    answered, refused = exporter.get_finished_spans()
    for span in (answered, refused):
        assert f"{span.parent.span_id:x}" == "b" * 16
        assert span.name == f"text_completion {BODY['model']}"
    assert (refused.attributes or {})["error.type"] == "context_length_exceeded"
    start = await made.world.runner.next("start")
    assert start.traceparent == traceparent_of(answered)
    await made.world.settled()


async def test_a_bug_that_one_line_hits_is_that_lines(made: Batched, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr("weft_gateway.openai.prepare.select_form", broken)
        result, answer = await made.answer(BODY)
    assert (result.status, answer["error"]["code"]) == (500, "internal_error")
    assert (await made.answer(BODY))[0].status == 200
    await made.world.settled()


async def test_a_cancelled_line_ends_at_its_runner_and_is_not_answered(made: Batched) -> None:
    made.world.runner.autopilot = False
    made.batch.run(1, body=orjson.dumps(BODY))
    start = await made.world.runner.next("start")
    made.batch.cancel(1)
    assert (await made.world.runner.next("stop")).request_id == start.request_id
    await made.world.settled()
    assert made.world.outcome().finish == common_pb2.FINISH_REASON_CANCELLED
    made.world.runner.autopilot = True
    made.batch.run(2, body=orjson.dumps(BODY))
    assert (await made.batch.next("result")).line == 2


async def test_the_end_of_the_stream_ends_its_lines_and_the_next_one_runs_them_again(made: Batched) -> None:
    made.world.runner.autopilot = False
    made.batch.run(1, body=orjson.dumps(BODY))
    first = await made.world.runner.next("start")
    made.batch.up.clear()
    made.batch.outbox.close()
    assert (await made.world.runner.next("stop")).request_id == first.request_id
    await made.batch.up.wait()
    made.world.runner.autopilot = True
    result, _ = await made.answer(BODY)
    assert result.status == 200
    assert result.request_id != first.request_id


async def test_a_refusal_that_a_client_would_retry_releases_the_line(
    made: Batched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_gateway.openai.lines.RETRY_S", 0.0)
    made.world.scheduler.autopilot = False
    made.batch.run(1, body=orjson.dumps(BODY))
    submit = await made.world.scheduler.next("submit")
    full = scheduler_pb2.Reject(request_id=submit.request_id, reason=scheduler_pb2.Reject.QUEUE_FULL)
    made.world.scheduler.send(reject=full)
    released = await made.batch.next("released")
    assert (released.batch_id, released.line) == ("batch_1", 1)
    assert "full" in released.reason
    made.batch.run(2, body=orjson.dumps(BODY))
    submit = await made.world.scheduler.next("submit")
    worn = scheduler_pb2.Reject(request_id=submit.request_id, reason=scheduler_pb2.Reject.TOO_MANY_MIGRATIONS)
    made.world.scheduler.send(reject=worn)
    result = await made.batch.next("result")
    assert (result.line, result.status) == (2, 503), "what would go wrong again is an answer"


async def test_a_line_that_waits_is_shown_apart_from_requests_that_do(made: Batched) -> None:
    made.world.scheduler.autopilot = False
    made.batch.run(1, body=orjson.dumps(BODY))
    await made.world.scheduler.next("submit")
    async with made.world.http() as http:
        (pool,) = (await http.get("/status")).json()["pools"]
    assert (pool["held"], pool["held_lines"]) == (1, 1)
    made.batch.cancel(1)
    await made.world.settled()


async def test_a_gateway_that_drains_gives_its_lines_back_and_takes_no_more(made: Batched) -> None:
    hello = await made.batch.next("hello")
    assert hello.max_lines == LINES_AT_ONCE
    made.world.runner.autopilot = False
    made.batch.run(1, body=orjson.dumps(BODY))
    await made.world.runner.next("start")
    draining = asyncio.create_task(made.lines.drain())
    assert (await made.batch.next("hello")).max_lines == 0
    assert (await made.batch.next("released")).line == 1
    await draining
    await made.world.settled()


async def test_no_more_lines_run_than_the_gateway_has_named(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_gateway.openai.lines.LINES_AT_ONCE", 1)
    async with batched(parts, tmp_path) as made:
        parts.runner.autopilot = False
        made.batch.run(1, body=orjson.dumps(BODY))
        await parts.runner.next("start")
        made.batch.up.clear()
        made.batch.run(2, body=orjson.dumps(BODY))
        await made.batch.up.wait()  # the stream is another one: this one broke its contract


async def test_lines_that_end_together_share_a_message(made: Batched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_gateway.openai.lines.GATHER_S", 0.3)
    made.batch.run(*range(1, 21), body=orjson.dumps(BODY))
    results = [await made.batch.next("result") for _ in range(20)]
    assert {result.line for result in results} == set(range(1, 21))
    assert made.batch.messages < 20
    assert {result.status for result in results} == {200}


async def test_a_batch_of_the_time_without_keys_is_nobodys_once_they_are_on(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = parts.routes(keys=[key_route("a", "acme")])
    async with batched(parts, tmp_path, auth=True) as made:
        result, answer = await made.answer(BODY)
        assert (result.status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await made.answer(BODY | {"model": "acme/upper"}, namespace="acme"))[0].status == 200
        assert (await made.answer(BODY | {"model": "rival/secret"}, namespace="acme"))[0].status == 404
