"""Streamed completions whose tokens are compared one by one with those of an undisturbed run."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, NamedTuple, Self

import httpx2

from weft_stage.errors import StackFailed

SILENCE_S = 300.0  # without any progress of any stream: nothing will come any more
NO_END = {"1": -100}  # a bias: an answer has all of its tokens


class Token(NamedTuple):
    """One token as its client read it."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its answer depends on nothing else: equal ones have equal answers."""

    model: str
    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self) -> dict[str, Any]:
        return {
            "model": self.model, "prompt": self.prompt, "max_tokens": self.max_tokens, "seed": self.seed,
            "temperature": self.temperature, "logprobs": 0, "logit_bias": NO_END, "stream": True,
        }  # fmt: skip


@dataclass(slots=True)
class Stream:
    """An answer as it comes; times on a monotonic clock. `error`: why it failed."""

    ask: Ask
    request_id: str
    tokens: list[Token] = field(default_factory=list[Token])
    read_at: list[float] = field(default_factory=list[float])  # of each event
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    error: str = ""

    def gap_s(self, since: float) -> float:
        """The longest time without a token that ended after `since`."""
        times = [self.started, *self.read_at, self.ended or time.perf_counter()]
        return max((after - before for before, after in itertools.pairwise(times) if after > since), default=0.0)


@dataclass(frozen=True, slots=True)
class Difference:
    """Tokens by which an answer differs from the undisturbed one."""

    lost: int = 0
    repeated: int = 0
    wrong: int = 0

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(self.lost + other.lost, self.repeated + other.repeated, self.wrong + other.wrong)


def difference(expected: Sequence[Token], got: Sequence[Token], *, failed: bool = False) -> Difference:
    """What is missing, too much, and other (a token or its log probability). What a `failed` one lacks is not lost."""
    if failed:
        expected = expected[: len(got)]
    total = Difference()
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, expected, got, autojunk=False).get_opcodes():
        if tag != "equal":
            old, new = i2 - i1, j2 - j1
            total += Difference(max(0, old - new), max(0, new - old), min(old, new))
    return total


class Streams:
    """Streams of one gateway, for the length of `async with`, which waits for the end of each."""

    def __init__(self, base_url: str, name: str) -> None:
        self.name, self.all = name, list[Stream]()
        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.AsyncClient(base_url=base_url, timeout=SILENCE_S, limits=limits, trust_env=False)
        self._changed = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.until(lambda: all(stream.ended for stream in self.all))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._http.aclose()

    def start(self, asks: Iterable[Ask]) -> list[Stream]:
        """Send requests now."""
        begun = [Stream(ask, f"{self.name}-{number}") for number, ask in enumerate(asks, len(self.all))]
        self.all += begun
        self._tasks |= {asyncio.create_task(self._follow(stream)) for stream in begun}
        return begun

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for progress that makes it hold. Raises StackFailed when there is none any more."""
        while not holds():
            self._changed.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._changed.wait()
            except TimeoutError:
                waiting = [stream.request_id for stream in self.all if not stream.ended]
                raise StackFailed(f"no token for {SILENCE_S:.0f} s: {', '.join(waiting)}") from None

    async def _follow(self, stream: Stream) -> None:
        headers = {"x-request-id": stream.request_id}
        try:
            async with self._http.stream("POST", "/v1/completions", json=stream.ask.body(), headers=headers) as answer:
                if answer.status_code != 200:
                    stream.error = f"{answer.status_code}: {(await answer.aread()).decode()}"
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        self._take(stream, line[6:])
        except httpx2.HTTPError as error:
            stream.error = repr(error)
        finally:
            stream.ended = time.perf_counter()
            self._changed.set()

    def _take(self, stream: Stream, data: str) -> None:
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            stream.error = json.dumps(event["error"])
            return
        for choice in event["choices"]:
            if found := choice.get("logprobs"):
                stream.tokens += map(Token, found["tokens"], found["token_logprobs"])
                stream.read_at.append(time.perf_counter())
        self._changed.set()


async def recorded(url: str, asks: Iterable[Ask]) -> dict[Ask, list[Token]]:
    """The answers of a gateway that nothing disturbs. Raises StackFailed."""
    async with Streams(url, "first") as streams:
        streams.start(asks)
    if failed := [f"{stream.request_id}: {stream.error}" for stream in streams.all if stream.error]:
        raise StackFailed("; ".join(failed))
    return {stream.ask: stream.tokens for stream in streams.all}
