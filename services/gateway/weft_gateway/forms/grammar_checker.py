"""Structured outputs -> grammars that compile, by a process of its own that is bounded in time and memory."""

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

WAIT_S = 20.0  # for one grammar, or for the process to start, on a machine that is busy
MAX_KNOWN = 256
_LINE = 1 << 20
_Answer = tuple[str, str, str]  # a grammar; what is wrong, and the parameter
_PROBE = StructuredOutput("", "regex", "a")
_ENDINGS: dict[int | None, str] = {  # of the process, where it gave no answer
    -signal.SIGPROF: f"it takes more than {CPU_S:g} s of processor time to compile",
    -signal.SIGABRT: TOO_LARGE,  # how the library ends where it gets none
}


class GrammarTurns(Protocol):
    """Lets one tenant after the other have the process. `enter` raises Overloaded where too many wait."""

    async def enter(self, tenant: str) -> None: ...
    def leave(self, tenant: str, cost_s: float) -> None: ...


class GrammarChecker:
    """Owned by the event loop. The process starts with the first grammar, and again after one that ended it."""

    def __init__(self, turns: GrammarTurns) -> None:
        self._process: Process | None = None
        self._turns = turns
        self._answers: LruDict[StructuredOutput, _Answer] = LruDict(MAX_KNOWN)

    async def grammar(self, tenant: str, output: StructuredOutput) -> str:
        """Have a grammar built. Raises ParameterError where none compiles, Overloaded, ServiceUnavailable."""
        if (answer := self._answers.get(output)) is None:
            answer = await self._at_its_turn(tenant, output)
        self._answers[output] = grammar, fault, param = answer
        if fault:
            raise ParameterError(f"{fault}.", param=param)
        return grammar

    async def _at_its_turn(self, tenant: str, output: StructuredOutput) -> _Answer:
        """Wait behind the tenant's own and among others'. Raises ParameterError, Overloaded, ServiceUnavailable."""
        await self._turns.enter(tenant)
        began = time.monotonic()
        try:
            return self._answers.get(output) or await self._ask(output)  # another one may have asked meanwhile
        finally:
            self._turns.leave(tenant, time.monotonic() - began)

    async def _ask(self, output: StructuredOutput) -> _Answer:
        """Ask the process, which may have to be started. Raises ParameterError, ServiceUnavailable."""
        process = self._process
        if process is None or process.returncode is not None:
            arguments = sys.executable, "-m", "weft_gateway.forms.grammar_worker"
            self._process = process = await create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, limit=_LINE)
            late = ServiceUnavailable("The process that checks grammars did not start in time.")
            if await self._answer(process, _PROBE, late) is None:
                raise ServiceUnavailable("The process that checks grammars ended as it started.")
        late = ServiceUnavailable("The process that checks grammars is held up.", retry_after_ms=1000)
        if (answer := await self._answer(process, output, late)) is not None:
            return answer
        if (code := process.returncode) in _ENDINGS:
            return "", f"{output.param}: {_ENDINGS[code]}", output.param
        raise ParameterError(f"{output.param}: the process that compiles it ended with {code}.", param=output.param)

    async def _answer(self, process: Process, output: StructuredOutput, late: ServiceUnavailable) -> _Answer | None:
        """Wait for an answer; None: the process has ended by itself.

        A request that is cancelled meanwhile ends the process: its answer would be taken for the next one's.
        Raises `late`.
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
        """End the process; the next grammar starts another one."""
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
    if not process.stdin.is_closing():  # uvloop raises RuntimeError where asyncio's own loop writes in vain
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(json.dumps(output).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
    if not line:
        await process.wait()
        return None
    grammar, fault, param = json.loads(line)
    return grammar, fault, param
