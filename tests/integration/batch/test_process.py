"""The service as a process: kill -9 at drawn moments, many lines, large uploads, a full disk, wrong settings."""

import asyncio
import itertools
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import httpx2
import pytest

from conftest import SEED
from harness.other_constants import NO_OTHERS, Constants, command
from harness.ports import free_addresses
from harness.processes import started
from harness.small_disk import fill
from harness.waiting import PATIENCE_S, soon
from tests.integration.batch.conftest import Client, PlayedGateway, answer, input_file, input_line
from weft.domain.batch import BatchStatus
from weft.wire.codec.batch import STORAGE_FULL
from weft.wire.streams import channel
from weft.wire.v1.batch_pb2_grpc import BatchStub
from weft_batch.main import main

MIB = 1 << 20


def service(data: Path, address: str, *flags: str, constants: Constants = NO_OTHERS, **options):
    at = ("--data-dir", str(data), "--listen", address, "--probes", free_addresses(1)[0])
    return started(*command("weft_batch", constants), *at, *flags, **options)


@asynccontextmanager
async def connected(address: str):
    """A stub that waits for the service, and a gateway that reconnects."""
    async with channel(address) as opened:
        await soon(opened.channel_ready())
        stub = BatchStub(opened)
        gateway = PlayedGateway(stub)

        async def run() -> None:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await opened.channel_ready()
                    await gateway.run()

        running = asyncio.create_task(run())
        try:
            yield Client(stub), gateway
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def stored_lines(data: Path) -> set[tuple[str, int]]:
    with sqlite3.connect(data / "batch.sqlite") as store:
        return set(store.execute("SELECT batch_id, line FROM batch_results"))


def peak_memory(process: subprocess.Popen) -> int:
    """Bytes, by the kernel's account; of the process itself, not of the one that started it."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_whatever_moment_it_is_killed_at_each_line_has_one_result_in_one_file(tmp_path, seed) -> None:
    rng, total, address = random.Random(SEED * 100 + seed), 400, free_addresses(1)[0]
    content = input_file(total // 2) + b"{\n" + input_line("id-0") + b"\n" + input_file(total // 2, total // 2)
    job, kills = None, 0
    finished: set[tuple[str, int]] = set()
    for number in itertools.count():
        with service(tmp_path, address) as process:
            async with connected(address) as (client, gateway):
                gateway.max_lines = 1 if number == 0 else 40  # of its first hello, which is sent later
                if job is None:
                    with suppress(grpc.aio.AioRpcError):
                        job = await client.submit(content)
                watch = asyncio.create_task(client.ended(job.batch_id))
                after = rng.choice([0, rng.randint(1, 100), rng.randint(1, total), total - len(finished) + 2])
                killed = number < 8
                if killed:
                    done = asyncio.create_task(gateway.until(lambda it, after=after: it.runs.total() >= after))
                    await asyncio.wait((done, watch), return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.sleep(rng.uniform(0, 0.03))  # the drawn moment
                    process.kill()
                    process.wait()
                    kills += 1
                    done.cancel()
                    watch.cancel()
                    await asyncio.gather(done, watch, return_exceptions=True)
                else:
                    ended = await watch
            again = finished & gateway.runs.keys()
            assert not again, f"finished lines ran again: {sorted(again)[:5]}"
            finished |= stored_lines(tmp_path)
            if not killed:
                break
    assert (ended.status, ended.total, ended.completed, ended.failed) == (BatchStatus.COMPLETED, total + 2, total, 2)
    with service(tmp_path, address) as process:
        async with connected(address) as (client, gateway):
            output = await client.lines(ended.output_file_id)
            assert [line["custom_id"] for line in output] == [f"id-{i}" for i in range(total)]
            errors = [(line["custom_id"], line["error"]["code"]) for line in await client.lines(ended.error_file_id)]
            assert errors == [(None, "invalid_json_line"), ("id-0", "duplicate_custom_id")]
            names = {file.file_id for file in await client.files()}
            assert {path.name for path in (tmp_path / "files").iterdir()} == names, "bytes without a file"
            assert names == {job.input_file_id, ended.output_file_id, ended.error_file_id}
        assert stored_lines(tmp_path) == set()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0


@pytest.mark.slow
async def test_an_upload_that_was_killed_is_not_there_and_nothing_is_left_of_it(tmp_path) -> None:
    address = free_addresses(1)[0]
    with service(tmp_path, address) as process:
        async with connected(address) as (client, _):

            def chunks():
                yield b"x" * MIB
                while not list((tmp_path / "files").iterdir()):
                    yield b"x" * MIB
                process.kill()
                yield b"x" * MIB

            with pytest.raises(grpc.aio.AioRpcError):
                await client.upload(chunks())
    assert len(list((tmp_path / "files").iterdir())) == 1
    with service(tmp_path, address):
        async with connected(address) as (client, _):
            assert await client.files() == []
            assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.slow
async def test_100_000_lines_run_in_bounded_memory(tmp_path) -> None:
    address, total = free_addresses(1)[0], 100_000
    with service(tmp_path, address, constants={"weft_batch.main:TenantQuotas": {"max_lines": total}}) as process:
        async with connected(address) as (client, gateway):
            gateway.max_lines = 500
            before = peak_memory(process)
            job = await client.submit(input_file(total))
            ended = await client.ended(job.batch_id)
            assert (ended.completed, ended.total, gateway.runs.total()) == (total, total, total)
            assert (await client.content(ended.output_file_id)).count(b"\n") == total
            assert peak_memory(process) - before < 80 * MIB


async def halt_and_go_on(process: subprocess.Popen) -> None:
    while True:
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.15)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_file_streams_both_ways_whatever_its_size(tmp_path) -> None:
    """What a process that stands still again and again has in flight of a stream is far below this file."""
    address = free_addresses(1)[0]
    with service(tmp_path, address) as process:
        async with connected(address) as (client, _):
            await client.upload(b"x")
            before = peak_memory(process)
            halting = asyncio.create_task(halt_and_go_on(process))
            file = await client.upload(itertools.repeat(b"x" * MIB, 160))
            halting.cancel()
            process.send_signal(signal.SIGCONT)
            assert file.bytes == 160 * MIB
            assert peak_memory(process) - before < 48 * MIB
            assert len(await client.content(file.file_id)) == 160 * MIB
            assert peak_memory(process) - before < 48 * MIB


async def test_a_full_disk_refuses_uploads_and_loses_no_result(tmp_path, small_disk) -> None:
    address = free_addresses(1)[0]
    with service(tmp_path, address):
        async with connected(address) as (client, gateway):
            gateway.answers = lambda _run: None
            job = await client.submit(input_file(50))
            with pytest.raises(grpc.aio.AioRpcError, match=r"(?s)UNAVAILABLE.*No space left on device") as refused:
                await client.upload(itertools.repeat(b"x" * MIB, 6))
            assert STORAGE_FULL in tuple(refused.value.trailing_metadata())
            await gateway.until(lambda it: len(it.kept) == 50)
            filler = small_disk / "filler"
            with suppress(OSError), filler.open("wb", 0) as file:
                while len(list(small_disk.iterdir())) > 2 or file.write(b"x" * 4096):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            for kept in gateway.kept.values():
                gateway.end(answer(kept))
            await client.in_status(job.batch_id, BatchStatus.FINALIZING)
            filler.unlink()
            ended = await client.ended(job.batch_id)
            assert len(await client.lines(ended.output_file_id)) == ended.completed == 50
            assert set(gateway.runs.values()) == {1}


async def test_a_full_disk_of_the_store_is_named_at_once_and_heals_without_a_restart(tmp_path, small_disk) -> None:
    address, probes = free_addresses(2)
    at = ("--data-dir", str(small_disk), "--listen", address, "--probes", probes)
    with started(*command("weft_batch", NO_OTHERS), *at):
        async with connected(address) as (client, gateway):
            gateway.answers = lambda _run: None
            file = await client.upload(input_file(1))
            filler = fill(small_disk)
            for call in (client.upload(b"{}"), client.create(file.file_id)):
                began = time.monotonic()
                with pytest.raises(grpc.aio.AioRpcError, match=r"(?s)UNAVAILABLE.*full") as refused:
                    await call
                assert STORAGE_FULL in tuple(refused.value.trailing_metadata())
                assert time.monotonic() - began < 1
            async with httpx2.AsyncClient() as http:
                ready = await http.get(f"http://{probes}/readyz")
            assert (ready.status_code, "storage is full" in ready.text) == (200, True)
            filler.unlink()
            await client.upload(b"{}")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--files", "http://x"), "not s3://BUCKET/PREFIX"),
        (("--files", "s3://bucket"), "needs --s3-credentials"),
        (("--files", "s3://bucket", "--s3-credentials", "."), "no file accessKeyId"),
        (("--database", "mysql://x"), "postgresql"),
    ],
)
@pytest.mark.usefixtures("main_here")
def test_what_cannot_work_stops_the_start_with_its_name(tmp_path, flags, what, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    listen, probes = free_addresses(2)
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["--data-dir", str(tmp_path), "--listen", listen, "--probes", probes, *flags]))
    assert ended.value.code == 2
    assert what in capfd.readouterr().err


def test_two_services_do_not_share_a_directory(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    first, second = free_addresses(2)
    with service(tmp_path / "data", first, stderr=subprocess.PIPE, text=True) as one:
        assert "serving" in next(line for line in one.stderr if "serving" in line)
        with service(tmp_path / "data", second, stderr=subprocess.PIPE, text=True) as other:
            _, said = other.communicate(timeout=PATIENCE_S)
            assert (other.returncode, "DataDirInUse" in said) == (2, True)
