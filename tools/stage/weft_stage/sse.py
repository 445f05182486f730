"""A client that hardly costs anything: one connection a stream, server-sent events counted and not parsed.

For measuring a server on the cores that it shares with its client. What is known of a request is when its events
came, when its answer ended, and the tokens that the server counted.
"""

import asyncio
import json
import re
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import Any

from weft_stage.errors import RequestFailed

WORDS = "the red fox jumps over seven lazy dogs while rain falls on green hills near an old stone bridge".split()
TAIL_BYTES = 4096  # the last events, with the usage
END = b"0\r\n\r\n"  # of a chunked body
EVENT = b"data: {"  # an event that a packet's end cuts in two is missed
TIMEOUT_S = 300.0
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_LENGTH = re.compile(rb"content-length:\s*(\d{1,9})\b", re.IGNORECASE)
_STOPPED = re.compile(rb'"finish_reason":\s*"stop"')


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer; seconds on a monotonic clock. `stopped`: by the model, not by its length. `at`: of each event."""

    start: float
    first: float
    end: float
    tokens: int
    prompt_tokens: int = 0
    stopped: bool = False
    at: Sequence[float] = ()

    def gaps(self) -> list[float]:
        """Seconds between two tokens: the last two events have the finish reason and the usage."""
        at = self.at[:-2]
        return [later - earlier for earlier, later in pairwise(at)]


async def run(host: str, port: int, bodies: Sequence[dict[str, Any]], streams: int) -> list[Streamed]:
    """Send all bodies over `streams` connections, each its next one when the last has ended, and return the answers.

    Raises RequestFailed.
    """
    waiting, done = deque(enumerate(bodies)), dict[int, Streamed]()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            while waiting:
                number, body = waiting.popleft()
                done[number] = await _ask(reader, writer, body)
        finally:
            writer.close()
            await writer.wait_closed()

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(client())
    return [done[number] for number in range(len(bodies))]


async def run_at(
    host: str, port: int, bodies: Sequence[dict[str, Any]], at_s: Sequence[float], keys: Sequence[str] = (),
    awaited: Sequence[int] | None = None,
) -> list[Streamed]:  # fmt: skip
    """Send each body at its time, whatever became of the others. Returns the answers in their order.

    `start` of an answer is when it was due. Connections are used again. `keys`: the API key of each. `awaited`: whose
    answers count; once these are there, all others are cancelled. Raises RequestFailed.
    """
    began = time.perf_counter()
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(number: int) -> Streamed:
        due = began + at_s[number]
        await asyncio.sleep(due - time.perf_counter())
        while idle and idle[-1][0].at_eof():  # the server has closed it: nothing was asked on it for a while
            idle.pop()[1].close()
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, port)
        try:
            answer = await _ask(reader, writer, bodies[number], keys[number] if keys else "")
        except BaseException:
            writer.close()
            raise
        idle.append((reader, writer))
        return replace(answer, start=due)

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(number)) for number in range(len(bodies))]
        if awaited is not None:
            tasks, others = [tasks[number] for number in awaited], {*tasks}
            await asyncio.gather(*tasks)
            for task in others.difference(tasks):
                task.cancel()
    for _, writer in idle:
        writer.close()
        await writer.wait_closed()
    return [task.result() for task in tasks]


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any], key: str = ""
) -> Streamed:
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}"
    head += f"\r\nAuthorization: Bearer {key}" if key else ""
    start = time.perf_counter()
    writer.write(head.encode() + b"\r\n\r\n" + content)
    answer = await reader.readuntil(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200") or b"chunked" not in answer.lower():
        length = _LENGTH.search(answer)
        reason = await reader.readexactly(min(int(length[1]), TAIL_BYTES)) if length else b""
        raise RequestFailed(f"not a stream: {(answer + reason).decode(errors='replace')}")
    first, tail, at = 0.0, b"", array("d")
    while not tail.endswith(END):
        piece = await reader.read(1 << 16)
        if not piece:
            raise RequestFailed(f"the stream broke off: {tail.decode(errors='replace')}")
        now = time.perf_counter()
        first = first or now
        at.extend(repeat(now, piece.count(EVENT)))
        tail = (tail + piece)[-TAIL_BYTES:]
    ended, prompt = time.perf_counter(), _PROMPT.search(tail)
    return Streamed(
        start, first, ended, tokens_of(tail), int(prompt[1]) if prompt else 0, _STOPPED.search(tail) is not None, at
    )


def tokens_of(tail: bytes) -> int:
    """Return the tokens that the last events count. Raises RequestFailed when they tell of an error, or count none."""
    if b"data: [DONE]" not in tail or (usage := _USAGE.search(tail)) is None:
        raise RequestFailed(f"the stream did not end well: {tail.decode(errors='replace')}")
    return int(usage[1])
