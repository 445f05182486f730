"""One program, kept running: started, watched, started again after a bounded pause, stopped in a bounded time.

Restarts go on until the owner stops the program. After a quick end (it was never ready, or ran for less than
`STABLE_S`) the pause doubles, up to `MAX_PAUSE_S`. Three quick ends in a row are a crash loop, reported with the
program's last words. Children die with this process (`die_with_parent.py`). Standard output and error go to the
component's log file.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from weft.telemetry.logs import kv
from weft_operator.local.logs import CHUNK_BYTES, LogFile

log = logging.getLogger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
STABLE_S = 5.0  # a ready program that ran this long has not ended quickly
CRASH_LOOP = 3
STOP_S = 15.0  # SIGTERM to SIGKILL: longer than the 10 s drain of gateway and runner
# Until the next question, by phase: a start is followed closely; at rest each question costs both sides a millisecond.
PROBE_S: Mapping[str, float] = {"Starting": 0.05, "Ready": 30.0}
PROBE_OTHER_S, PROBE_TIMEOUT_S = 2.0, 2.0
ANSWER_BYTES = 4096
LAST_WORDS = 5
CHILD = Path(__file__).with_name("die_with_parent.py")

Phase = Literal["Starting", "Ready", "NotReady", "Backoff", "Stopping", "Stopped"]


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run. `probe`: the (host, port) of its `/readyz`; None: ready when started."""

    name: str
    argv: tuple[str, ...]
    probe: tuple[str, int] | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The present state of a program."""

    phase: Phase = "Starting"
    pid: int | None = None
    restarts: int = 0
    quick_ends: int = 0  # in a row
    exit_code: int | None = None  # of the last end; negative: the signal
    detail: str = ""  # why it is not ready, or its last words

    @property
    def crash_loop(self) -> bool:
        return self.quick_ends >= CRASH_LOOP


class ChildProcess:
    """The owner of one program. `run()` lasts until `stop()`.

    `on_change` is called for every new state and must not block.
    """

    def __init__(
        self,
        program: Program,
        logfile: LogFile,
        on_change: Callable[[ProcessState], None],
        *,
        pauses_s: tuple[float, float] = (MIN_PAUSE_S, MAX_PAUSE_S),
        stop_s: float = STOP_S,
    ) -> None:
        self._program, self.logfile, self._on_change = program, logfile, on_change
        self._pauses_s, self._stop_s = pauses_s, stop_s
        self._stop, self._replace = asyncio.Event(), asyncio.Event()
        self._stop_signal = signal.SIGTERM
        self._was_ready = False  # in its present life
        self.state = ProcessState()

    @property
    def program(self) -> Program:
        return self._program

    def stop(self, signum: signal.Signals = signal.SIGTERM, within_s: float | None = None) -> None:
        """End the program (this signal, then SIGKILL after `within_s`, or `stop_s`) and `run()`."""
        self._stop_signal = signum
        self._stop_s = self._stop_s if within_s is None else within_s
        self._stop.set()

    def replace(self, program: Program) -> None:
        """End the present program and run this program instead."""
        self._program = program
        self._replace.set()

    async def run(self) -> None:
        """Keep it running until `stop()`. Cancelling kills the program at once."""
        while not self._stop.is_set():
            self._replace.clear()
            self._was_ready = False
            started = asyncio.get_running_loop().time()
            code = await self._once()
            if not self._stop.is_set() and not self._replace.is_set():
                self._ended(code, asyncio.get_running_loop().time() - started)
                await self._pause()
        self._set(phase="Stopped", pid=None)

    async def _once(self) -> int:
        """Run the program once, to its end. Returns its exit code."""
        program = self._program
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), *program.argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **program.env},
            start_new_session=True,  # a Ctrl-C at the terminal is only for the controller
        )
        self._set(phase="Starting", pid=child.pid, detail="")
        pump, probe = asyncio.create_task(self._pump(child)), asyncio.create_task(self._watch(program))
        try:
            await self._until_end(child)
        finally:
            probe.cancel()
            _kill(child)
            await asyncio.wait([pump], timeout=1.0)  # its last words; a grandchild may hold the pipe
            pump.cancel()
        return await child.wait()

    async def _until_end(self, child: asyncio.subprocess.Process) -> None:
        """Wait until the program ends by itself or on request. After the time limit of a request, stop waiting."""
        end = asyncio.create_task(child.wait())
        waits = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._replace.wait())]
        try:
            await asyncio.wait([end, *waits], return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                self._set(phase="Stopping")
                with suppress(ProcessLookupError):
                    child.send_signal(self._stop_signal)
                await asyncio.wait([end], timeout=self._stop_s)
                if not end.done():
                    log.warning("killed: it did not end in time", extra=kv(name=self._program.name, pid=child.pid))
        finally:
            for task in (end, *waits):
                task.cancel()

    async def _pump(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        while data := await child.stdout.read(CHUNK_BYTES):
            self.logfile.write(data)

    async def _watch(self, program: Program) -> None:
        """Follow readiness: quickly until the program is ready, slowly while it is."""
        if program.probe is None:
            self._set(phase="Ready")
            return
        while True:
            reason = await not_ready(*program.probe)
            if self.state.phase != "Stopping":
                unready: Phase = "Starting" if self.state.phase == "Starting" else "NotReady"
                self._set(phase="Ready" if reason is None else unready, detail=reason or "")
            await asyncio.sleep(PROBE_S.get(self.state.phase, PROBE_OTHER_S))

    def _ended(self, code: int, lived_s: float) -> None:
        stable = self._was_ready and lived_s >= STABLE_S
        quick = 1 if stable else self.state.quick_ends + 1
        words = " | ".join(self.logfile.tail(LAST_WORDS)[-1:])
        detail = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        detail = f"{detail}: {words}" if words else detail
        log.warning("process ended", extra=kv(name=self._program.name, code=code, quick_ends=quick, detail=detail))
        restarts = self.state.restarts + 1
        self._set(phase="Backoff", pid=None, exit_code=code, quick_ends=quick, restarts=restarts, detail=detail)

    async def _pause(self) -> None:
        least_s, most_s = self._pauses_s
        pause_s = min(least_s * 2 ** min(self.state.quick_ends - 1, 20), most_s)
        waits = [asyncio.create_task(event.wait()) for event in (self._stop, self._replace)]
        await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _set(self, **changes: object) -> None:
        state = replace(self.state, **changes)
        self._was_ready = self._was_ready or state.phase == "Ready"
        if state != self.state:
            self.state = state
            self._on_change(state)


def described(process: ChildProcess) -> dict[str, Any]:
    """Describe a process as `stack.json` and `weft status` show it."""
    state, program = process.state, process.program
    flags = dict(zip(program.argv, program.argv[1:], strict=False))
    return {
        "phase": state.phase,
        "pid": state.pid,
        "restarts": state.restarts,
        "detail": state.detail,
        "listen": flags.get("--listen") or flags.get("--http"),
        "probes": ":".join(map(str, program.probe)) if program.probe else None,
        "log": str(process.logfile.path),
    }


async def not_ready(host: str, port: int) -> str | None:
    """Ask `/readyz` why the process is not ready; None: it is."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /readyz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                answer = b""
                while len(answer) < ANSWER_BYTES and (part := await reader.read(ANSWER_BYTES)):
                    answer += part  # the head may come before the reason
                head, _, body = answer.partition(b"\r\n\r\n")
                if head.split(b" ", 2)[1:2] == [b"200"]:
                    return None
                return body.decode(errors="replace").strip() or head.decode(errors="replace")[:200]
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        return f"no answer from {host}:{port} ({type(error).__name__})"


def _kill(child: asyncio.subprocess.Process) -> None:
    """Kill the whole process group, with all its children."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
