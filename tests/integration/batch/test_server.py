"""The service over real gRPC: files, batches, lines at played gateways, tenants kept apart."""

import asyncio
import threading

import grpc
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import update

from harness.spans import in_memory, traceparent_of
from harness.waiting import PATIENCE_S, eventually, soon, until
from tests.integration.batch.conftest import answer, input_file, input_line, serving
from weft.domain.batch import BatchStatus, LineResult, NewFile, Purpose
from weft.store import batches, transactions
from weft.store.database import turns_of
from weft.store.models import BatchRow
from weft.wire.codec import batch as codec
from weft_batch import calls, inputs, metrics
from weft_batch.core import InputReader, LineCounters
from weft_batch.errors import StorageUnavailable
from weft_batch.tenant_files import TenantQuotas


def refused(code: grpc.StatusCode, what: str):
    return pytest.raises(grpc.aio.AioRpcError, match=f"(?s){code.name}.*{what}")


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
EXHAUSTED, PRECONDITION = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION


async def test_a_batch_runs_from_upload_to_output(world) -> None:
    client = world.client()
    async with world.gateway(max_lines=7) as gateway:
        job = await client.submit(input_file(50), metadata={"kind": "test"})
        assert (job.status, job.metadata) == (BatchStatus.VALIDATING, {"kind": "test"})
        ended = await client.ended(job.batch_id)
    assert (ended.status, ended.total, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 50, 50, 0)
    assert (ended.prompt_tokens, ended.completion_tokens, ended.error_file_id) == (150, 200, "")
    assert (ended.cached_tokens, ended.reasoning_tokens) == (100, 50)
    assert set(gateway.runs.values()) == {1}
    lines = await client.lines(ended.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"id-{i}" for i in range(50)]
    assert len({line["id"] for line in lines}) == 50
    assert lines[7] | {"id": ""} == {
        "id": "",
        "custom_id": "id-7",
        "error": None,
        "response": {
            "status_code": 200,
            "request_id": "req-8",
            "body": {"echo": {"model": "m", "prompt": "p", "n": 7}},
        },
    }
    [output] = await client.files(purpose=Purpose.BATCH_OUTPUT)
    assert (output.file_id, output.bytes) == (ended.output_file_id, len(await client.content(output.file_id)))
    with refused(PRECONDITION, "is completed and cannot be cancelled"):
        await client.cancel(job.batch_id)


async def test_a_batch_that_has_ended_leaves_no_line_in_the_store(world) -> None:
    """Prompts and answers are in its file then: who reads the database finds none."""

    async def none_is_kept() -> bool:
        return not await batches.ended_with_results(world.engine)

    client = world.client()
    async with world.gateway():
        ended = await client.ended((await client.submit(input_file(3))).batch_id)
    assert len(await client.lines(ended.output_file_id)) == 3
    await eventually(none_is_kept)


@pytest.mark.parametrize("ratio", [1.0, 0.0])
async def test_lines_have_the_trace_of_a_batch_that_is_sampled(store, storage, ratio: float) -> None:
    """The second batch is not over when the service ends."""
    tracer, exporter = in_memory(ratio)
    async with serving(store, storage, tracer=tracer) as world, world.gateway(answers=lambda _: None) as gateway:
        first = await world.client().submit(input_file(2))
        await gateway.until(lambda one: len(one.kept) == 2)
        given = {run.traceparent for run in gateway.kept.values()}
        gateway.end(*map(answer, gateway.kept.values()))
        await world.client().ended(first.batch_id)
        second = await world.client().submit(input_file(1))
        await gateway.until(lambda one: any(batch == second.batch_id for batch, _ in one.kept))
    spans = exporter.get_finished_spans()
    assert given == ({traceparent_of(spans[0])} if ratio else {""})
    about = [(span.attributes["weft.batch_id"], span.attributes["weft.batch.status"]) for span in spans]
    assert about == [(first.batch_id, "completed"), (second.batch_id, "in_progress")][: 2 * int(ratio)]


async def test_bad_lines_fail_alone_and_by_name(world) -> None:
    client = world.client()
    content = b"\n".join(
        [input_line("a"), b"{", input_line("b"), input_line("a"), b"\xff", input_line("c"), input_line("foreign")]
    )

    def answers(run):
        known = run.line != 7
        return answer(run) if known else answer(run, 404)

    async with world.gateway(answers=answers):
        ended = await client.ended((await client.submit(content)).batch_id)
    assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 3, 4)
    assert [line["custom_id"] for line in await client.lines(ended.output_file_id)] == ["a", "b", "c"]
    errors = await client.lines(ended.error_file_id)
    assert [(line["custom_id"], (line["error"] or {}).get("code")) for line in errors] == [
        (None, "invalid_json_line"), ("a", "duplicate_custom_id"), (None, "invalid_json_line"), ("foreign", None),
    ]  # fmt: skip
    assert errors[0]["error"]["message"].startswith("line 2: ")
    assert errors[3]["response"]["status_code"] == 404


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [(b"", "empty_file", 0), (b"{\n{", "invalid_json_line", 1), (input_file(6), "too_many_lines", 6)],
)
async def test_a_file_without_a_line_that_can_run_fails_its_batch(store, storage, content, code, line) -> None:
    async with serving(store, storage, TenantQuotas(max_lines=5)) as world:
        client = world.client()
        ended = await client.ended((await client.submit(content)).batch_id)
        assert (ended.status, ended.errors[0].code, ended.errors[0].line) == (BatchStatus.FAILED, code, line)
        assert (ended.total, ended.completed, ended.failed) == (0, 0, 0)
        assert [file.purpose for file in await client.files()] == [Purpose.BATCH]


async def test_long_inputs_of_others_are_read_a_block_at_a_time(world, monkeypatch) -> None:
    """Six inputs of a tenant, and one of another: a newcomer waits for a block of each, and for no other."""
    begun, may_end, feed = [], threading.Semaphore(0), InputReader.feed

    def stands(reader, block):
        if b"stand" in block:
            begun.append(block)
            assert may_end.acquire(timeout=PATIENCE_S)
        yield from feed(reader, block)

    monkeypatch.setattr(InputReader, "feed", stands)
    monkeypatch.setattr(inputs, "READ_BYTES", 1000)
    long = b"\n".join(input_line(f"stand-{number}") for number in range(100))
    jobs = [await world.client(tenant).submit(long) for tenant in "aaaaaac"]
    try:
        await until(lambda: begun)
        job = await soon(world.client("b").submit(input_file(1)))
        may_end.release(3)  # for it waits twice: its input is read in two pieces
        await world.client("b").in_status(job.batch_id, BatchStatus.IN_PROGRESS)
        assert len(begun) <= 4
    finally:
        may_end.release(10_000)
    for job, tenant in zip(jobs, "aaaaaac", strict=True):
        await world.client(tenant).in_status(job.batch_id, BatchStatus.IN_PROGRESS)


async def test_a_tenant_leaves_slots_of_uploads_to_others(store, storage, monkeypatch) -> None:
    monkeypatch.setattr(calls, "MAX_UPLOADS", 4)
    may_end, before = asyncio.Event(), uploaded_bytes()

    async def slow_parts():
        yield codec.upload_header(NewFile("a", "in.jsonl", Purpose.BATCH))
        yield codec.upload_chunk(b"x")
        await may_end.wait()
        yield codec.upload_chunk(b"")

    async with serving(store, storage) as world:
        client = world.client("a")
        slow = [world.stub.UploadFile(slow_parts()) for _ in range(2)]
        await until(lambda: uploaded_bytes() == before + 2)
        with refused(EXHAUSTED, "too many uploads"):
            await client.upload(b"x")
        await world.client("b").upload(b"x")
        may_end.set()
        for upload in slow:
            await upload
        await client.upload(b"x")


def uploaded_bytes() -> float:
    return REGISTRY.get_sample_value("weft_batch_uploaded_bytes_total") or 0.0


async def test_another_tenant_finds_nothing(world) -> None:
    client, other = world.client("a"), world.client("b")
    job = await client.submit(input_file(1))
    named = codec.pb.FileRequest(namespace="b", file_id=job.input_file_id)
    for call in (
        world.stub.GetFile(named),
        world.stub.DeleteFile(named),
        other.content(job.input_file_id),
        other.create(job.input_file_id),
        other.batch(job.batch_id),
        other.cancel(job.batch_id),
    ):
        with refused(NOT_FOUND, "no (file|batch) with the id"):
            await call
    assert await other.files() == []
    assert codec.batch_jobs(await world.stub.ListBatches(codec.pb.ListRequest(namespace="b", limit=9))) == ([], False)
    assert len(job.batch_id) == len("batch_") + 32
    assert len(job.input_file_id) == len("file-") + 32


async def test_quotas_refuse_by_name(store, storage) -> None:
    limits = TenantQuotas(max_file_bytes=1000, tenant_bytes=1500, tenant_batches=1)
    async with serving(store, storage, limits) as world:
        client = world.client()
        with refused(EXHAUSTED, "larger than 1000 bytes"):
            await client.upload([b"x" * 100_000] * 100)  # its reason is not lost among the writes
        first = await client.upload(input_file(1) + b"\n" * 800)
        with refused(EXHAUSTED, "the quota is 1500"):
            await client.upload(b"x" * 900)
        with refused(EXHAUSTED, "the quota is 1500"):
            await world.stub.KeepResponse(codec.pb.KeepResponseRequest(namespace="a", response_id="r", body=b"x" * 900))
        await client.create(first.file_id)
        with refused(EXHAUSTED, "1 batches have not ended, the quota is 1"):
            await client.create(first.file_id)
        with refused(PRECONDITION, "is the input of batch_"):
            await client.delete(first.file_id)


async def test_packed_uploads_are_refused_and_leave_nothing(world) -> None:
    for start, name in ((b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"PK\x03\x04", "zip")):
        with refused(INVALID, f"packed with {name}"):
            await world.client().upload([start[:1], start[1:], b"x" * 100])
        await world.nothing_left()


async def test_an_upload_that_does_not_say_it_is_whole_leaves_nothing(world) -> None:
    header = codec.upload_header(codec.NewFile("a", "x", Purpose.BATCH))
    with refused(INVALID, "broke off"):
        await world.stub.UploadFile(iter([header, codec.upload_chunk(b"x")]))
    await world.nothing_left()


async def test_a_filename_is_text_and_never_a_path(world, storage) -> None:
    kept = set()
    for name in ("../../etc/passwd", "/abs", "a\0b\x1b[2J\nc", "..\\x", " " * 9, "é" * 900):
        file = await world.client().upload(b"x", filename=name)
        assert file.filename.isprintable(), name
        assert len(file.filename) <= 255, name
        kept.add(file.file_id)
        assert {path.name for path in storage._folder.iterdir()} == kept, name


async def test_an_order_that_is_not_known_is_refused(world) -> None:
    file = await world.client().upload(b"x")
    for changes, what in (
        ({"endpoint": "/v1/moderations"}, "endpoint is"),
        ({"completion_window": "48h"}, "not '24h'"),
    ):
        with refused(INVALID, what):
            await world.client().create(file.file_id, **changes)


async def test_a_deleted_file_is_gone_with_its_bytes(world, storage) -> None:
    client = world.client()
    file = await client.upload(b"content")
    assert await client.content(file.file_id) == b"content"
    assert await client.delete(file.file_id) == file
    with refused(NOT_FOUND, "no file"):
        await client.content(file.file_id)
    assert list(storage._folder.iterdir()) == []


async def test_a_cancelled_batch_keeps_what_was_finished(world) -> None:
    client = world.client()

    async with world.gateway(max_lines=4, answers=lambda run: answer(run) if run.line <= 2 else None) as gateway:
        job = await client.submit(input_file(9))
        await gateway.until(lambda it: len(it.kept) == 4)
        await client.until(job.batch_id, lambda job: job.completed == 2)
        assert (await client.cancel(job.batch_id)).status is BatchStatus.CANCELLING
        ended = await client.ended(job.batch_id)
        await gateway.until(lambda it: len(it.cancelled) == 4)
    assert (ended.status, ended.completed, ended.failed, ended.total) == (BatchStatus.CANCELLED, 2, 0, 9)
    assert [line["custom_id"] for line in await client.lines(ended.output_file_id)] == ["id-0", "id-1"]
    assert ended.error_file_id == ""


async def test_lines_of_a_lost_gateway_run_at_another_and_only_those(world) -> None:
    client = world.client()
    async with world.gateway("g1", max_lines=5, answers=lambda run: answer(run) if run.line % 2 else None) as first:
        job = await client.submit(input_file(20))
        await first.until(lambda it: len(it.kept) == 5)
        await client.until(job.batch_id, lambda job: job.completed == 5)
    async with world.gateway("g2") as second:
        ended = await client.ended(job.batch_id)
    assert ended.completed == 20
    assert {line for _, line in second.runs} == set(range(1, 21)) - {1, 3, 5, 7, 9}


async def test_an_answer_that_is_no_json_never_damages_the_output(world) -> None:
    client = world.client()

    def answers(run):
        body = [b"{\n}", b"no json", b"\xff", b'"\\ud800"', b"NaN"][run.line - 1]
        return LineResult(run.batch_id, run.line, 200, "r", body)

    async with world.gateway(answers=answers):
        ended = await client.ended((await client.submit(input_file(5))).batch_id)
    assert [line["custom_id"] for line in await client.lines(ended.output_file_id)] == ["id-0"]
    assert [line["error"]["code"] for line in await client.lines(ended.error_file_id)] == ["invalid_answer"] * 4


async def test_lines_and_batches_are_counted_by_namespace(world) -> None:
    namespace = world.engine.dialect.name  # counters are the process's

    def counted(name, **labels):
        return REGISTRY.get_sample_value(f"weft_batch_{name}", {"namespace": namespace} | labels) or 0

    client = world.client(namespace)
    async with world.gateway(max_lines=2, answers=lambda run: answer(run) if run.line == 2 else None) as gateway:
        job = await client.submit(b"{\n" + input_file(4))
        await gateway.until(lambda it: len(it.kept) == 2)
        await eventually(lambda: asyncio.sleep(0, counted("results_total", result="succeeded")))
        metrics.update(world.server.core, LineCounters())
        assert counted("open_batches") == 1
        assert [counted("lines", state=state) for state in ("waiting", "running", "storing")] == [1, 2, 0]
        assert counted("results_total", result="failed") == 1
        await client.cancel(job.batch_id)
        await eventually(lambda: asyncio.sleep(0, counted("ended_total", status="cancelled")))
    assert counted("results_total", result="succeeded") == 1
    metrics.update(world.server.core, LineCounters())
    assert (counted("open_batches"), counted("lines", state="waiting")) == (0, 0)


async def test_a_window_that_ends_leaves_every_line_in_a_file(store, storage) -> None:
    async with serving(store, storage) as world:
        client = world.client()
        async with world.gateway(max_lines=3, answers=lambda run: answer(run) if run.line == 3 else None):
            job = await client.submit(b"{\n" + input_file(5))
            await client.until(job.batch_id, lambda job: job.completed == 1)
    async with store.begin() as connection:
        await connection.execute(update(BatchRow).values(expires_unix_ms=job.created_unix_s * 1000))
    async with serving(store, storage) as world:
        client = world.client()
        ended = await client.ended(job.batch_id)
        assert (ended.status, ended.completed, ended.failed, ended.total) == (BatchStatus.EXPIRED, 1, 5, 6)
        assert [line["custom_id"] for line in await client.lines(ended.output_file_id)] == ["id-1"]
        errors = await client.lines(ended.error_file_id)
        assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [
            (None, "invalid_json_line"), *[(f"id-{i}", "batch_expired") for i in (0, 2, 3, 4)],
        ]  # fmt: skip


async def test_a_newer_service_takes_over_and_the_older_one_does_nothing_more(store, storage) -> None:
    async with serving(store, storage, sole=False) as older:
        client = older.client()
        async with older.gateway("g1", answers=lambda run: answer(run) if run.line <= 3 else None) as first:
            job = await client.submit(input_file(10))
            await client.until(job.batch_id, lambda job: job.completed == 3)
            async with serving(store, storage, sole=False) as newer:
                first.end(answer(first.kept[job.batch_id, 4]))  # too late: it may not be stored
                async with newer.gateway("g2") as second:
                    ended = await newer.client().ended(job.batch_id)
                assert {line for _, line in second.runs} == set(range(4, 11))
                assert len(await newer.client().lines(ended.output_file_id)) == 10
                with refused(grpc.StatusCode.UNAVAILABLE, "newer batch service"):
                    await client.create(job.input_file_id)
                assert older.server.trouble == "a newer batch service has taken over"


async def test_storage_that_is_full_is_named_and_a_batch_waits_for_it(world, storage, monkeypatch) -> None:
    client, real = world.client(), type(storage).writer
    file = await client.upload(input_file(3))

    class Full:
        def write(self, chunk):
            raise StorageUnavailable("file storage: No space left on device")

        def abandon(self):
            pass

    monkeypatch.setattr(type(storage), "writer", lambda _self, _name: Full())
    with refused(grpc.StatusCode.UNAVAILABLE, "No space left on device"):
        await client.upload(input_file(3))
    async with world.gateway():
        job = await client.create(file.file_id)
        await client.in_status(job.batch_id, BatchStatus.FINALIZING)
        monkeypatch.setattr(type(storage), "writer", real)
        ended = await client.ended(job.batch_id)
    assert len(await client.lines(ended.output_file_id)) == 3
    assert len(await client.files()) == 2


async def test_a_busy_store_is_named(world, storage, monkeypatch) -> None:
    turns = turns_of(world.engine)
    tenants = [f"tenant-{place}" for place in range(turns.places)]
    for tenant in tenants:
        await turns.enter(tenant)
    with monkeypatch.context() as patched:
        patched.setattr(transactions, "TURN_S", 0.01)
        for call in (world.client().files(), world.client().upload(b"x")):
            with refused(grpc.StatusCode.ABORTED, "the store is busy"):
                await call
    for tenant in tenants:
        turns.leave(tenant, 0.0)
    await world.nothing_left()


async def test_a_gateway_that_breaks_the_contract_loses_its_stream(world) -> None:
    for message, what in (
        ({"ends": {"released": [{"batch_id": "b", "line": 1}]}}, "ends before the hello"),
        ({"hello": {"gateway_id": ""}}, "a gateway's id is empty"),
        ({}, "unknown message"),
    ):
        with refused(INVALID, what):
            async for _ in world.stub.Lines(iter([codec.pb.GatewayToBatch(**message)])):
                pass
    assert await world.client().files() == []
