"""A worker: another engine in a process of its own, asked through pipes; stopped (SIGSTOP) while it is not asked.

A peer's idle threads may spin, and so may ours: whoever is not measured does not run at all. Its process group is
paused and resumed as a whole, since some engines have processes of their own. What it prints is kept in a file and
told when it fails.
"""

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft_stage.errors import PeerFailed

START_S = 900.0  # vllm compiles for minutes at its first start
ANSWER_S = 600.0
SAID_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch as the worker ran it: the seconds it took, and the tokens and the adapter of each row."""

    seconds: float
    tokens: tuple[int, ...]
    adapters: tuple[str | None, ...]


class Worker:
    """One process from enter to exit; paused whenever nobody waits for its answer. Raises PeerFailed."""

    def __init__(
        self, name: str, command: Sequence[str], work: Mapping[str, Any], log: Path,
        environment: Mapping[str, str] | None = None, answer_s: float = ANSWER_S,
    ) -> None:  # fmt: skip
        self.name, self.versions, self._log, self._answer_s = name, "", log, answer_s
        self._command, self._work = list(command), work
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Self:
        self._process = self._started()
        try:
            self.versions = str(self._exchange(self._work, START_S)["ready"])
        except BaseException:
            self._kill()
            raise
        self._pause()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Ran:
        """Run these prompts as one batch. Raises PeerFailed."""
        got = self.ask({"prompts": prompts, "tokens": tokens})
        return Ran(float(got["seconds"]), tuple(got["tokens"]), tuple(got["adapters"]))

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to what this worker's script understands. Raises PeerFailed."""
        self._signal(signal.SIGCONT)
        try:
            return self._exchange(what, self._answer_s)
        finally:
            self._pause()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            try:
                return subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                    env=self._environment,
                )  # fmt: skip
            except OSError as error:
                raise PeerFailed(f"{self.name} cannot be started: {error}") from error

    def _exchange(self, what: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._line(timeout_s))
        except (OSError, ValueError) as error:
            raise PeerFailed(f"{self.name} did not answer: {error}\n{self._said()}") from error

    def _line(self, timeout_s: float) -> bytes:
        """Read the worker's next answer: short, and written in one piece."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise PeerFailed(f"{self.name} did not answer within {timeout_s:.0f} s\n{self._said()}")
        if not (line := self._process.stdout.readline()):
            raise PeerFailed(f"{self.name} ended\n{self._said()}")
        return line

    def _said(self) -> str:
        """Return the end of what the worker printed."""
        return self._log.read_text(errors="replace")[-SAID_CHARS:]

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
