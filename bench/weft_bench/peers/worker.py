"""A worker: an engine in a process of its own, asked through pipes; see `serve.py`.

Idle threads of an engine may spin. A worker's process group is therefore stopped while the worker is not asked. What
the engine prints is kept in a file, and its end is part of an error.
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
from typing import Any, Self

from weft_stage.errors import PeerFailed

SERVE = Path(__file__).parent / "serve.py"
START_S = 900.0  # vllm compiles for minutes at its first start
ANSWER_S = 1800.0  # zentorch compiles during its first batches
SAID_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch that a worker ran: seconds, and (tokens, adapter's folder) of each row."""

    seconds: float
    rows: tuple[tuple[int, str | None], ...]


def command(python: Path | str, module: str) -> list[str]:
    """Return the command of a worker."""
    return [str(python), str(SERVE), module]


class Worker:
    """One process from enter to exit. All methods raise PeerFailed."""

    def __init__(
        self, name: str, command: Sequence[str], work: Mapping[str, Any], log: Path,
        environment: Mapping[str, str] | None = None, answer_s: float = ANSWER_S,
    ) -> None:  # fmt: skip
        self.name, self.versions, self._log, self._answer_s = name, "", log, answer_s
        self._command, self._work = list(command), work
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Self:
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                    env=self._environment,
                )  # fmt: skip
        except OSError as error:
            raise PeerFailed(f"{self.name} cannot be started: {error}") from error
        try:
            self.versions = str(self.ask(self._work, START_S)["ready"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        with suppress(BrokenPipeError), self._process:
            pass  # its pipes are closed

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Ran:
        """Run these prompts as one batch."""
        answer = self.ask({"prompts": prompts, "tokens": tokens})
        return Ran(float(answer["seconds"]), tuple((count, adapter) for count, adapter in answer["rows"]))

    def ask(self, arguments: Mapping[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        """Return the answer of the worker's module, which is short and written in one piece."""
        stdin, stdout, timeout_s = self._process.stdin, self._process.stdout, timeout_s or self._answer_s
        assert stdin is not None
        assert stdout is not None
        self._signal(signal.SIGCONT)
        try:
            stdin.write(json.dumps(arguments).encode() + b"\n")
            stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                if not selector.select(timeout_s):
                    raise TimeoutError(f"nothing within {timeout_s:.0f} s")
            if line := stdout.readline():
                return json.loads(line)
            raise EOFError("it ended")
        except (OSError, EOFError, ValueError) as error:
            said = self._log.read_text(errors="replace")[-SAID_CHARS:]
            raise PeerFailed(f"{self.name} did not answer: {error}\n{said}") from error
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
