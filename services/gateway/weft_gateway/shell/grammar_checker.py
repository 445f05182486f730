"""Forms of answers -> grammars that compile, by a process of its own that is bounded in time and memory."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process

from weft.domain.lru import LruDict
from weft_gateway.errors import Overloaded, ParameterError, ServiceUnavailable
from weft_gateway.grammar_worker import CPU_S, TOO_LARGE
from weft_gateway.openai.structured_outputs import Form

WAIT_S = 20.0  # for one grammar, or for the process to start, on a machine that is busy
MOST_WAITING = 64
MAX_KNOWN = 256
_LINE = 1 << 20
_PROBE = Form("", "regex", "a")
_ENDINGS: dict[int | None, str] = {  # of the process, where it gave no answer
    -signal.SIGPROF: f"it takes more than {CPU_S:g} s of processor time to compile",
    -signal.SIGABRT: TOO_LARGE,  # how the library ends where it gets none
}


class GrammarChecker:
    """Owned by the event loop. The process starts with the first form, and again after one that ended it."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._one = asyncio.Lock()
        self._waiting = 0
        self._known: LruDict[Form, tuple[str, str]] = LruDict(MAX_KNOWN)

    async def grammar(self, form: Form) -> str:
        """Raises ParameterError where it does not compile, or takes too much; Overloaded, ServiceUnavailable."""
        grammar, fault = self._known.get(form) or await self._ask_in_turn(form)
        self._known[form] = grammar, fault
        if fault:
            raise ParameterError(f"{form.param}: {fault}.", param=form.param)
        return grammar

    async def close(self) -> None:
        """No form is asked about any more."""
        await self._end()

    async def _ask_in_turn(self, form: Form) -> tuple[str, str]:
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} requests wait for their grammars to be checked.", retry_after_ms=1000)
        self._waiting += 1
        try:
            async with self._one:
                return await self._ask(form)
        finally:
            self._waiting -= 1

    async def _ask(self, form: Form) -> tuple[str, str]:
        """A request that is cancelled meanwhile ends the process: its answer would be taken for the next one's."""
        process, answer = await self._running(), None
        try:
            answer = await asyncio.wait_for(_answer(process, form), WAIT_S)
        except TimeoutError as error:
            raise ServiceUnavailable("The process that checks grammars is held up.", retry_after_ms=1000) from error
        finally:
            if answer is None:
                await self._end()
        if answer is None:
            code = process.returncode
            if code not in _ENDINGS:
                text = f"{form.param}: the process that compiles it ended with {code}."
                raise ParameterError(text, param=form.param)
            return "", _ENDINGS[code]
        return answer

    async def _running(self) -> Process:
        """The process, which may have to be started. Raises ServiceUnavailable."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        arguments = sys.executable, "-m", "weft_gateway.grammar_worker"
        self._process = process = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, limit=_LINE)
        answer = None
        try:
            answer = await asyncio.wait_for(_answer(process, _PROBE), WAIT_S)
        except TimeoutError as error:
            raise ServiceUnavailable("The process that checks grammars did not start in time.") from error
        finally:
            if answer is None:
                await self._end()
        if answer is None:
            raise ServiceUnavailable("The process that checks grammars ended as it started.")
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ends by itself meanwhile
                process.kill()
            await process.wait()


async def _answer(process: Process, form: Form) -> tuple[str, str] | None:
    """None: the process has ended by itself."""
    assert process.stdin is not None
    assert process.stdout is not None
    line = b""
    if not process.stdin.is_closing():  # uvloop raises RuntimeError where asyncio's own loop writes in vain
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(json.dumps(form).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
    if not line:
        await process.wait()
        return None
    grammar, fault = json.loads(line)
    return grammar, fault
