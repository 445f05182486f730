"""`python -m weft_scheduler`: starts, answers its probes, drains, survives, refuses."""

import asyncio
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

LOOPBACK = "127.0.0.1:0"


async def start(data_dir: Path, *flags: str) -> Process:
    command = [sys.executable, "-m", "weft_scheduler", "--data-dir", str(data_dir)]
    return await asyncio.create_subprocess_exec(
        *command, "--listen", LOOPBACK, "--probes", LOOPBACK, *flags, stderr=PIPE
    )


async def hear(process: Process, pattern: str) -> re.Match[str]:
    """The first line of the log that matches."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        async for line in process.stderr:
            if found := re.search(pattern, line.decode()):
                return found
    raise AssertionError(f"ended without {pattern}")


async def test_it_takes_a_higher_term_at_every_start_and_stops_cleanly(tmp_path: Path) -> None:
    for sign, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        process = await start(tmp_path)
        term = await hear(process, r"term taken  term=(\d+)")
        assert term[1] == {signal.SIGKILL: "1", signal.SIGTERM: "2"}[sign]
        await hear(process, "serving")
        process.send_signal(sign)
        assert await asyncio.wait_for(process.wait(), 10) == code
    assert (tmp_path / "term").read_text() == "2\n"


@pytest.mark.parametrize("flag", ["--listen", "--probes"])
async def test_an_address_in_use_is_named(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await start(tmp_path, flag, f"127.0.0.1:{taken.getsockname()[1]}")
        await hear(process, f"AddressInUse .*{flag}")
        assert await asyncio.wait_for(process.wait(), 10) == 2


async def test_wrong_settings_are_all_listed(tmp_path: Path) -> None:
    process = await start(tmp_path, "--assign-ms", "0", "--drain-s", "soon")
    _, text = await process.communicate()
    assert process.returncode == 2
    assert b"--assign-ms" in text
    assert b"--drain-s" in text


async def test_a_data_directory_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    first = await start(tmp_path)
    await hear(first, "serving")
    second = await start(tmp_path)
    await hear(second, "DataDirInUse .* another scheduler")
    assert await second.wait() == 2
    first.terminate()
    assert await asyncio.wait_for(first.wait(), 10) == 0
