"""Structured outputs -> compiled grammars, by a separate process with bounds of time and memory."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from typing import Protocol

from weft.domain.lru import LruDict
from weft_gateway.errors import ParameterError, ServiceUnavailable
from weft_gateway.forms.grammar_worker import CPU_S, TOO_LARGE
from weft_gateway.forms.structured_outputs import StructuredOutput

WAIT_S = 20.0  # for a grammar, or for the start of the process, on a busy machine
MAX_KNOWN = 256
_LINE = 1 << 20
_Answer = tuple[str, str, str]  # a grammar; a fault, and its parameter
_PROBE = StructuredOutput("", "regex", "a")
_ENDINGS: dict[int | None, str] = {  # of a process without an answer
    -signal.SIGPROF: f"it takes more than {CPU_S:g} s of processor time to compile",
    -signal.SIGABRT: TOO_LARGE,  # the library aborts without memory
}


class GrammarTurns(Protocol):
    """The turns of tenants at the process. `enter` raises Overloaded if too many requests wait."""

    async def enter(self, tenant: str) -> None: ...
    def leave(self, tenant: str, cost_s: float) -> None: ...


class GrammarChecker:
    """The owner of the process, used in the event loop. The process starts with the first grammar, and again after its
    end."""

    def __init__(self, turns: GrammarTurns) -> None:
        self._process: Process | None = None
        self._turns = turns
        self._answers: LruDict[StructuredOutput, _Answer] = LruDict(MAX_KNOWN)

    async def grammar(self, tenant: str, output: StructuredOutput) -> str:
        """Build a grammar in the process. Raises ParameterError for an output that does not compile, Overloaded,
        ServiceUnavailable."""
        if (answer := self._answers.get(output)) is None:
            answer = await self._at_its_turn(tenant, output)
        self._answers[output] = grammar, fault, param = answer
        if fault:
            raise ParameterError(f"{fault}.", param=param)
        return grammar

    async def _at_its_turn(self, tenant: str, output: StructuredOutput) -> _Answer:
        """Wait for the tenant's turn, then ask. Raises ParameterError, Overloaded, ServiceUnavailable."""
        await self._turns.enter(tenant)
        began = time.monotonic()
        try:
            return self._answers.get(output) or await self._ask(output)  # a parallel request may have asked meanwhile
        finally:
            self._turns.leave(tenant, time.monotonic() - began)

    async def _ask(self, output: StructuredOutput) -> _Answer:
        """Ask the process, started if necessary. Raises ParameterError, ServiceUnavailable."""
        process = self._process
        if process is None or process.returncode is not None:
            arguments = sys.executable, "-m", "weft_gateway.forms.grammar_worker"
            self._process = process = await create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, limit=_LINE)
            late = ServiceUnavailable("The grammar process did not start in time.")
            if await self._answer(process, _PROBE, late) is None:
                raise ServiceUnavailable("The grammar process ended during its start.")
        late = ServiceUnavailable("The grammar process does not answer in time.", retry_after_ms=1000)
        if (answer := await self._answer(process, output, late)) is not None:
            return answer
        if (code := process.returncode) in _ENDINGS:
            return "", f"{output.param}: {_ENDINGS[code]}", output.param
        raise ParameterError(f"{output.param}: the grammar process ended with {code}.", param=output.param)

    async def _answer(self, process: Process, output: StructuredOutput, late: ServiceUnavailable) -> _Answer | None:
        """Wait for an answer; None: the process has ended by itself.

        A cancelled request ends the process: its late answer would be taken for the next request's. Raises `late`.
        """
        answer = None
        try:
            answer = await asyncio.wait_for(_exchange(process, output), WAIT_S)
        except TimeoutError as error:
            raise late from error
        finally:
            if answer is None:
                await self.close()
        return answer

    async def close(self) -> None:
        """End the process. The next grammar starts it again."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ends by itself meanwhile
                process.kill()
            await process.wait()


async def _exchange(process: Process, output: StructuredOutput) -> _Answer | None:
    """Send a line and read the answer; None: the process has ended by itself."""
    assert process.stdin is not None
    assert process.stdout is not None
    line = b""
    if not process.stdin.is_closing():  # uvloop raises RuntimeError, while asyncio's loop writes in vain
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(json.dumps(output).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
    if not line:
        await process.wait()
        return None
    grammar, fault, param = json.loads(line)
    return grammar, fault, param
