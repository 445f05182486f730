"""`python -m weft_scheduler`: starts, answers its probes, drains, survives, refuses."""

import asyncio
import contextlib
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest

from harness.processes import tied
from harness.waiting import PATIENCE_S, soon

EPHEMERAL = ("--listen", "127.0.0.1:0", "--probes", "127.0.0.1:0")
Start = Callable[..., Coroutine[None, None, Process]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts schedulers with flags; they end with the test."""
    processes: list[Process] = []

    async def started(data_dir: Path, *flags: str) -> Process:
        command = tied(sys.executable, "-m", "weft_scheduler", "--data-dir", data_dir, *EPHEMERAL, *flags)
        processes.append(await asyncio.create_subprocess_exec(*command, stderr=PIPE))
        return processes[-1]

    yield started
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def hear(process: Process, pattern: str) -> re.Match[str]:
    """The first line of the log that matches."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        async for line in process.stderr:
            if found := re.search(pattern, line.decode()):
                return found
    raise AssertionError(f"ended without {pattern}")


async def test_it_takes_a_higher_term_at_every_start_and_stops_cleanly(tmp_path: Path, start: Start) -> None:
    taken: list[int] = []
    for sign, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        process = await start(tmp_path)
        taken.append(int((await hear(process, r"term taken  term=(\d+)"))[1]))
        await hear(process, "serving")
        process.send_signal(sign)
        assert await soon(process.wait()) == code
    assert taken[1] == taken[0] + 1
    assert (tmp_path / "term").read_text() == f"{taken[1]}\n"


async def test_a_data_directory_of_another_scheduler_is_refused(tmp_path: Path, start: Start) -> None:
    first = await start(tmp_path)
    await hear(first, "serving")
    second = await start(tmp_path)
    await hear(second, "DataDirInUse .* another scheduler")
    assert await soon(second.wait()) == 2
    first.terminate()
    assert await soon(first.wait()) == 0
