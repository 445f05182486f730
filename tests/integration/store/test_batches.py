"""Files, batches and results of lines, on both databases."""

import asyncio
from itertools import count

import pytest

from weft.domain.batch import BatchError, BatchStatus, NewBatch, NewFile, Page, Purpose
from weft.store import batches, fencing_terms, files
from weft.store.batches import StoredResult
from weft.store.errors import Absent, Conflict, OverQuota, Superseded

NOW = 1_700_000_000_000
ROOMY = 1 << 40


@pytest.fixture
async def term(engine) -> int:
    return await fencing_terms.take(engine, "batch")


async def add_file(engine, term, file_id="file-1", namespace="a", size=10, now=NOW, purpose=Purpose.BATCH):
    new = NewFile(namespace, "in.jsonl", purpose)
    await files.begin(engine, term, new, file_id, now_unix_ms=now, max_files=100)
    return await files.complete(engine, term, file_id, size, max_bytes=ROOMY)


async def add_batch(engine, term, batch_id="batch_1", namespace="a", file_id="file-1", now=NOW, **metadata):
    new = NewBatch(namespace, file_id, "/v1/completions", metadata=metadata)
    return await batches.create(engine, term, new, batch_id, now_unix_ms=now, max_unfinished=3)


async def started(engine, term, batch_id="batch_1", total=3):
    await add_file(engine, term)
    await add_batch(engine, term, batch_id)
    await batches.mark_validated(engine, term, batch_id, total, b"index", now_unix_ms=NOW + 1000)


async def test_every_start_takes_a_higher_term_also_at_the_same_time(engine):
    taken = await asyncio.gather(*(fencing_terms.take(engine, "batch") for _ in range(10)))
    assert sorted(taken) == list(range(1, 11))
    assert await fencing_terms.highest(engine) == 0, "the scheduler's terms are others"


async def test_a_service_that_was_replaced_changes_nothing(engine, term):
    await started(engine, term)
    await files.begin(engine, term, NewFile("a", "x", Purpose.BATCH), "file-2", now_unix_ms=NOW, max_files=9)
    await fencing_terms.take(engine, "batch")
    for change in (
        files.begin(engine, term, NewFile("a", "x", Purpose.BATCH), "file-3", now_unix_ms=NOW, max_files=9),
        files.complete(engine, term, "file-2", 1, max_bytes=ROOMY),
        files.mark_deleting(engine, term, "a", "file-1"),
        add_batch(engine, term, "batch_2"),
        batches.cancel(engine, term, "a", "batch_1", now_unix_ms=NOW),
        batches.mark_failed(engine, term, "batch_1", (), now_unix_ms=NOW),
        batches.add_results(engine, term, [StoredResult("batch_1", 1, True, b"{}")]),
        batches.begin_finalizing(engine, term, "batch_1", BatchStatus.COMPLETED, now_unix_ms=NOW),
        batches.finish(
            engine, term, "batch_1", BatchStatus.COMPLETED, now_unix_ms=NOW, output=None, errors=None, failed=0
        ),
    ):
        with pytest.raises(Superseded, match="term 2"):
            await change
    assert (await batches.find(engine, "a", "batch_1")).status is BatchStatus.IN_PROGRESS
    assert await batches.finished_lines(engine, "batch_1") == []


async def test_a_file_is_seen_once_it_is_whole_and_by_its_tenant_alone(engine, term):
    assert await files.begin(engine, term, NewFile("a", "x", Purpose.BATCH), "f", now_unix_ms=NOW, max_files=9) == 0
    with pytest.raises(Absent, match="no file with the id 'f'"):
        await files.find(engine, "a", "f")
    whole = await files.complete(engine, term, "f", 7, max_bytes=7)
    assert (whole.bytes, await files.find(engine, "a", "f")) == (7, whole)
    for refused in (files.find(engine, "b", "f"), files.mark_deleting(engine, term, "b", "f")):
        with pytest.raises(Absent):
            await refused
    assert await files.list_page(engine, Page("b", 10)) == ([], False)
    with pytest.raises(Absent):
        await add_batch(engine, term, namespace="b", file_id="f")


async def test_quotas_of_a_tenant_are_its_own(engine, term):
    await add_file(engine, term, "f1", size=60)
    await add_file(engine, term, "f2", "b", size=100)
    new = NewFile("a", "x", Purpose.BATCH)
    assert await files.begin(engine, term, new, "f3", now_unix_ms=NOW, max_files=2) == 60
    with pytest.raises(OverQuota, match="2 files are stored, the quota is 2"):
        await files.begin(engine, term, new, "f4", now_unix_ms=NOW, max_files=2)
    with pytest.raises(OverQuota, match="101 bytes in all, the quota is 100"):
        await files.complete(engine, term, "f3", 41, max_bytes=100)
    await files.mark_deleting(engine, term, "a", "f1")
    assert (await files.complete(engine, term, "f3", 41, max_bytes=100)).bytes == 41
    for i in range(3):
        await add_batch(engine, term, f"batch_{i}", file_id="f3")
    with pytest.raises(OverQuota, match="3 batches have not ended, the quota is 3"):
        await add_batch(engine, term, "batch_4", file_id="f3")


async def test_the_bytes_of_a_file_are_deleted_before_its_row(engine, term):
    await add_file(engine, term, "gone")
    await files.mark_deleting(engine, term, "a", "gone")
    new = NewFile("a", "x", Purpose.BATCH)
    await files.begin(engine, term, new, "old", now_unix_ms=NOW - 10, max_files=9)
    await files.begin(engine, term, new, "young", now_unix_ms=NOW, max_files=9)
    assert sorted(await files.list_abandoned(engine, before_unix_ms=NOW)) == ["gone", "old"]
    await files.forget(engine, ["old"])
    assert "old" in await files.list_abandoned(engine, before_unix_ms=NOW), "it was not marked"
    assert await files.mark_abandoned(engine, ["old"]) == ["old"]
    with pytest.raises(Conflict, match="too long"):
        await files.complete(engine, term, "old", 1, max_bytes=ROOMY)
    await files.forget(engine, ["gone", "old"])
    assert await files.list_abandoned(engine, before_unix_ms=NOW) == []


async def test_a_file_that_an_unfinished_batch_reads_cannot_be_deleted(engine, term):
    await started(engine, term)
    with pytest.raises(Conflict, match="file-1 is the input of batch_1"):
        await files.mark_deleting(engine, term, "a", "file-1")
    await batches.mark_failed(engine, term, "batch_1", (), now_unix_ms=NOW)
    assert (await files.mark_deleting(engine, term, "a", "file-1")).file_id == "file-1"


async def test_an_output_is_no_input(engine, term):
    await add_file(engine, term, purpose=Purpose.BATCH_OUTPUT)
    with pytest.raises(Conflict, match="'batch_output'"):
        await add_batch(engine, term)


@pytest.mark.parametrize("oldest_first", [False, True])
async def test_lists_come_in_pages_with_every_row_once(engine, term, oldest_first):
    times = count(NOW)
    for i in range(7):
        await add_file(engine, term, f"f{i}", now=NOW if i < 3 else next(times))
    for i in range(3):
        await add_batch(engine, term, f"b{i}", file_id="f0", now=next(times))
    for of, name, expected in ((files, "file_id", 7), (batches, "batch_id", 3)):
        seen, after, more = [], "", True
        while more:
            rows, more = await of.list_page(engine, Page("a", 2, after, oldest_first=oldest_first))
            seen += [getattr(row, name) for row in rows]
            after = seen[-1]
        by_age = seen if oldest_first else seen[::-1]
        assert len(set(seen)) == len(seen) == expected
        assert by_age == sorted(seen)
        with pytest.raises(Absent):
            await of.list_page(engine, Page("a", 2, "never"))
    assert await files.list_page(engine, Page("a", 2, purpose=Purpose.BATCH_OUTPUT)) == ([], False)


async def test_a_second_result_of_a_line_changes_nothing(engine, term):
    await started(engine, term)
    first = StoredResult("batch_1", 1, True, b"first", 5, 7, 3, 2)
    assert await batches.add_results(engine, term, [first, StoredResult("batch_1", 2, False, b"bad", 1, 1)]) == 2
    assert await batches.add_results(engine, term, [StoredResult("batch_1", 1, False, b"second", 9, 9)]) == 0
    assert await batches.add_results(engine, term, []) == 0
    job = await batches.find(engine, "a", "batch_1")
    assert (job.completed, job.failed, job.prompt_tokens, job.completion_tokens) == (1, 1, 5, 7)
    assert (job.cached_tokens, job.reasoning_tokens) == (3, 2)
    assert [row async for row in batches.results(engine, "batch_1", pages_of=1)] == [
        (1, True, b"first"), (2, False, b"bad"),
    ]  # fmt: skip
    assert await batches.finished_lines(engine, "batch_1") == [1, 2]


async def test_a_batch_is_found_again_as_it_was(engine, term):
    await add_file(engine, term)
    made = await add_batch(engine, term, kind="nightly", nul="\0")
    assert made.metadata == {"kind": "nightly", "nul": "\0"}
    assert (made.status, made.expires_unix_s - made.created_unix_s) == (BatchStatus.VALIDATING, 86_400)
    await batches.mark_validated(engine, term, "batch_1", 3, b"\x00index", now_unix_ms=NOW + 2000)
    [left] = await batches.unfinished(engine)
    assert (left.namespace, left.line_index, left.ending) == ("a", b"\x00index", BatchStatus.IN_PROGRESS)
    assert (left.job.total, left.job.in_progress_unix_s) == (3, NOW // 1000 + 2)
    errors = (BatchError("empty_file", "nothing", 0, ""), BatchError("invalid_json_line", "é\0", 4, "x"))
    await batches.mark_failed(engine, term, "batch_1", errors, now_unix_ms=NOW)
    assert (await batches.find(engine, "a", "batch_1")).errors == errors
    assert await batches.unfinished(engine) == []
    with pytest.raises(Conflict, match="is failed and cannot be cancelled"):
        await batches.cancel(engine, term, "a", "batch_1", now_unix_ms=NOW)


async def test_a_batch_cancelled_while_its_input_is_read_stays_cancelled(engine, term):
    await add_file(engine, term)
    await add_batch(engine, term)
    for _ in range(2):  # again is the same
        job = await batches.cancel(engine, term, "a", "batch_1", now_unix_ms=NOW)
        assert job.status is BatchStatus.CANCELLING
    await batches.mark_validated(engine, term, "batch_1", 3, b"", now_unix_ms=NOW)
    await batches.begin_finalizing(engine, term, "batch_1", BatchStatus.CANCELLED, now_unix_ms=NOW)
    [left] = await batches.unfinished(engine)
    assert (left.job.status, left.ending) == (BatchStatus.CANCELLING, BatchStatus.CANCELLED)


async def test_files_and_end_of_a_batch_become_visible_together(engine, term):
    await started(engine, term)
    await batches.add_results(engine, term, [StoredResult("batch_1", line, True, b"x") for line in range(1, 4)])
    await batches.begin_finalizing(engine, term, "batch_1", BatchStatus.COMPLETED, now_unix_ms=NOW)
    for file_id in ("out", "err"):
        await files.begin(
            engine, term, NewFile("a", file_id, Purpose.BATCH_OUTPUT), file_id, now_unix_ms=NOW, max_files=0
        )
    end = {"now_unix_ms": NOW, "output": ("out", 5), "failed": 0}
    with pytest.raises(Conflict):  # one of them was swept: neither is there
        await batches.finish(engine, term, "batch_1", BatchStatus.COMPLETED, errors=("swept", 1), **end)
    with pytest.raises(Absent):
        await files.find(engine, "a", "out")
    await batches.finish(engine, term, "batch_1", BatchStatus.COMPLETED, errors=("err", 1), **end)
    job = await batches.find(engine, "a", "batch_1")
    assert (job.status, job.output_file_id, job.error_file_id) == (BatchStatus.COMPLETED, "out", "err")
    assert (await files.find(engine, "a", "out")).bytes == 5
    assert await batches.ended_with_results(engine) == ["batch_1"]
    await batches.drop_results(engine, "batch_1")
    assert await batches.ended_with_results(engine) == await batches.finished_lines(engine, "batch_1") == []
    assert await batches.forget(engine, before_unix_ms=NOW + 1) == 1
    with pytest.raises(Absent):
        await batches.find(engine, "a", "batch_1")
