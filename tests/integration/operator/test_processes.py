"""Programs under supervision: real processes, ended in every way there is."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.processes import started
from harness.waiting import PATIENCE_S, soon
from weft_operator.local import (
    CHILD,
    CRASH_LOOP,
    STABLE_S,
    ChildProcess,
    LogFile,
    ProcessState,
    Program,
    not_ready,
    processes,
)

READY = """
import http.server, os, sys, time
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *a): pass
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H)
print("serving", flush=True)
server.serve_forever()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", end="", flush=True)
while True: signal.pause()
"""
PARENT = """
import asyncio, sys
from pathlib import Path
from weft_operator.local import LogFile
from weft_operator.local import ChildProcess, Program

async def main():
    program = Program("child", (sys.executable, "-c", "import signal; signal.pause()"))
    process = ChildProcess(program, LogFile(Path(sys.argv[1])), lambda state: print(state.pid, flush=True))
    await process.run()

asyncio.run(main())
"""


class Watched:
    """A process whose states can be awaited."""

    def __init__(self, process: ChildProcess, states: list[ProcessState], changed: asyncio.Event) -> None:
        self.process, self.states, self._changed = process, states, changed

    async def until(self, wanted: Callable[[ProcessState], bool]) -> ProcessState:
        async with asyncio.timeout(PATIENCE_S):
            while not (found := [state for state in self.states if wanted(state)]):
                self._changed.clear()
                await self._changed.wait()
        return found[0]


@asynccontextmanager
async def watched(
    tmp_path: Path, code: str, *args: str, port: int | None = None, stop_s: float = PATIENCE_S
) -> AsyncIterator[Watched]:
    states: list[ProcessState] = []
    changed = asyncio.Event()

    def on_change(state: ProcessState) -> None:
        states.append(state)
        changed.set()

    probe = ("127.0.0.1", port) if port else None
    program = Program("p", (sys.executable, "-c", code, *args), probe=probe, env={"SEEN": "yes"})
    logfile = LogFile(tmp_path / "p.log")
    process = ChildProcess(program, logfile, on_change, pauses_s=(0.01, 0.05), stop_s=stop_s)
    running = asyncio.create_task(process.run())
    try:
        yield Watched(process, states, changed)
    finally:
        process.stop()
        await running
        logfile.close()


def ended(pidfd: int) -> bool:
    """Wait for the end of a process: a pidfd is readable then."""
    done, _, _ = select.select([pidfd], [], [], PATIENCE_S)
    os.close(pidfd)
    return bool(done)


@pytest.fixture(autouse=True)
def no_end_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, these programs end quickly."""
    monkeypatch.setattr(processes, "STABLE_S", 3600.0)


async def test_a_program_is_ready_when_its_probe_says_so(tmp_path: Path) -> None:
    port = free_port()
    may_listen = tmp_path / "may-listen"
    async with watched(tmp_path, READY, str(port), str(may_listen), port=port) as one:
        assert "no answer" in (await one.until(lambda state: state.phase == "Starting" and state.detail != "")).detail
        may_listen.touch()
        assert (await one.until(lambda state: state.phase == "Ready")).restarts == 0
    assert one.process.state.phase == "Stopped"


async def test_a_program_is_asked_often_until_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, pauses = ["no", "no", None, None, "no", None], list[float]()

    async def answer(_: str, __: int) -> str | None:
        return answers.pop(0)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if not answers:
            raise asyncio.CancelledError

    monkeypatch.setattr(processes, "not_ready", answer)
    monkeypatch.setattr(asyncio, "sleep", pause)
    program = Program("p", (), probe=("127.0.0.1", 1))
    process = ChildProcess(program, LogFile(tmp_path / "log"), lambda _: None)
    with pytest.raises(asyncio.CancelledError):
        await process._watch(program)  # pyright: ignore[reportPrivateUsage]
    assert pauses == [0.05, 0.05, 30.0, 30.0, 2.0, 30.0]


async def test_output_and_environment_reach_the_program(tmp_path: Path) -> None:
    code = "import os, sys; print('out', os.environ['SEEN']); print('err', file=sys.stderr); sys.exit(3)"
    async with watched(tmp_path, code) as one:
        ended = await one.until(lambda state: state.exit_code is not None)
    assert ended.exit_code == 3
    assert sorted((tmp_path / "p.log").read_text().splitlines()[:2]) == ["err", "out yes"]


async def test_a_program_that_keeps_ending_is_a_crash_loop_with_its_last_words(tmp_path: Path) -> None:
    async with watched(tmp_path, "import sys; print('no memory'); sys.exit(1)") as one:
        state = await one.until(lambda state: state.crash_loop)
        assert (state.quick_ends, state.detail) == (CRASH_LOOP, "exit code 1: no memory")
        assert (await one.until(lambda state: state.quick_ends == CRASH_LOOP + 2)).restarts == CRASH_LOOP + 2


async def test_a_program_that_ran_for_a_while_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert STABLE_S <= 5.0, "one that is killed now and then is no crash loop"
    monkeypatch.setattr(processes, "STABLE_S", 0.0)
    async with watched(tmp_path, "import sys; sys.exit(1)") as one:  # without a probe it is ready once it runs
        await one.until(lambda state: state.restarts == CRASH_LOOP + 2)
    assert {state.quick_ends for state in one.states if state.phase == "Backoff"} == {1}


async def test_a_program_that_is_never_ready_is_a_crash_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STABLE_S", 0.0)
    async with watched(tmp_path, "import sys; sys.exit(1)", port=free_port()) as one:
        await one.until(lambda state: state.crash_loop)


async def test_a_killed_program_is_started_again(tmp_path: Path) -> None:
    async with watched(tmp_path, "import signal; signal.pause()") as one:
        first = await one.until(lambda state: state.phase == "Ready")
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        assert (await one.until(lambda state: state.phase == "Ready" and state.pid != first.pid)).restarts == 1
        assert (await one.until(lambda state: state.exit_code == -9)).detail.startswith("signal SIGKILL")


async def test_a_program_that_ignores_sigterm_is_killed_in_bounded_time(tmp_path: Path) -> None:
    async with watched(tmp_path, STUBBORN, stop_s=0.2) as one:
        with one.process.logfile.follow() as news:
            assert await soon(news.get()) == b"deaf"
        pid = one.process.state.pid
        assert pid is not None
        watch = os.pidfd_open(pid)
    assert ended(watch)


async def test_a_replaced_program_runs_its_new_command_line(tmp_path: Path) -> None:
    async with watched(tmp_path, "import signal; signal.pause()") as one:
        first = await one.until(lambda state: state.phase == "Ready")
        one.process.replace(Program("p", (sys.executable, "-c", "import signal; print('new'); signal.pause()")))
        again = await one.until(lambda state: state.phase == "Ready" and state.pid not in (None, first.pid))
        assert again.quick_ends == 0


async def test_cancelling_kills_at_once(tmp_path: Path) -> None:
    logfile = LogFile(tmp_path / "p.log")
    process = ChildProcess(Program("p", (sys.executable, "-c", STUBBORN)), logfile, lambda _: None)
    running = asyncio.create_task(process.run())
    with logfile.follow() as news:
        assert await soon(news.get()) == b"deaf"
    pid = process.state.pid
    assert pid is not None
    watch = os.pidfd_open(pid)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    logfile.close()
    assert ended(watch)


def test_children_die_when_their_parent_is_killed(tmp_path: Path) -> None:
    with started(sys.executable, "-c", PARENT, tmp_path / "p.log", stdout=subprocess.PIPE, text=True) as parent:
        watch = os.pidfd_open(int(parent.stdout.readline()))
    assert ended(watch)


def test_a_child_whose_parent_is_already_gone_does_not_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(CHILD), "1", sys.executable, "-c", "print('began')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "the parent is gone" in done.stderr


async def test_the_reason_may_come_after_the_head_of_the_answer() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        await writer.drain()
        await head_read.wait()
        writer.write(b"loading\n")
        writer.close()

    head_read = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, head_read.set)  # by then the head has arrived alone
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        assert await not_ready(*server.sockets[0].getsockname()) == "loading"


async def test_a_port_where_nobody_listens_is_not_ready() -> None:
    assert "ConnectionRefusedError" in str(await not_ready("127.0.0.1", free_port()))
