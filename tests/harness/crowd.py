"""Many clients at once: streamed completions through the official client, their progress watched as it happens.

Every second one has a grammar.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import openai

from harness.quickstart import Case
from harness.waiting import PATIENCE_S, POLL_S, eventually
from weft.domain.runner import RunnerBook
from weft.wire.v1 import supervisor_pb2, supervisor_pb2_grpc
from weft_stage.reports import books, runners

# A quickstart answer takes seconds instead of 40 ms, so that there is a middle to strike in.
SLOW = {
    "PYTHONPATH": str(Path(__file__).parent / "slow_steps"), "WEFT_TEST_STEP_MS": "25", "WEFT_TEST_TOKEN_MS": "0.5",
}  # fmt: skip
SLOW_POD = {"WEFT_CPU_LEVEL": "portable"}  # where the tests' files are not: kernels in plain C++
HANG_S = 600.0  # without a byte; a request may wait for its turn


@dataclass
class Watched:
    """One streamed request. In the quickstart a character is a token.

    `counted`: by a grammar that lets the answer end at its length alone, so that a grammar's state that a move loses
    or repeats shows in the text.
    """

    case: Case
    request_id: str
    counted: bool
    text: str = ""
    finish: str | None = None
    completion_tokens: int | None = None
    error: openai.APIError | None = None
    asked_at: float = 0.0  # the loop's time
    last_at: float = 0.0  # of its newest piece, or when it was asked
    longest_pause_s: float = 0.0  # between two pieces, the first token's time included

    @property
    def share(self) -> float:
        return len(self.text) / len(self.case.expect)

    @property
    def extra_body(self) -> dict[str, Any]:
        regex = f"(?s:.{{{len(self.case.expect)}}})"
        return {"structured_outputs": {"regex": regex}} if self.counted else {}


class Crowd:
    """Streams that run; `until` waits for something to become true of them. `more`: others follow those that end."""

    def __init__(self, streams: list[Watched], *, more: bool = False) -> None:
        self.streams, self._more = streams, more
        self.changed = asyncio.Condition()

    @property
    def running(self) -> bool:
        """True while some stream has neither ended nor failed."""
        return any(w.finish is None and w.error is None for w in self.streams)

    async def until(self, holds: Callable[[], bool]) -> bool:
        """Wait for progress that makes it hold. False: all streams have ended without.

        Raises TimeoutError once there is no progress at all any more.
        """
        async with self.changed:
            while not holds() and (self.running or self._more):
                await asyncio.wait_for(self.changed.wait(), PATIENCE_S)
            return holds()

    async def follow(self, client: openai.AsyncOpenAI, watched: Watched) -> None:
        watched.asked_at = watched.last_at = asyncio.get_running_loop().time()
        try:
            stream = await client.completions.create(
                model=watched.case.model,
                prompt=watched.case.prompt,
                temperature=0,
                max_tokens=300,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-request-id": watched.request_id},
                extra_body=watched.extra_body,
            )
            async for chunk in stream:
                await self._take(watched, chunk)
        except openai.APIError as error:
            watched.error = error
        async with self.changed:
            self.changed.notify_all()

    async def _take(self, watched: Watched, chunk: openai.types.Completion) -> None:
        now = asyncio.get_running_loop().time()
        watched.longest_pause_s, watched.last_at = max(watched.longest_pause_s, now - watched.last_at), now
        for choice in chunk.choices:
            watched.text += choice.text
            watched.finish = choice.finish_reason or watched.finish
        if chunk.usage:
            watched.completion_tokens = chunk.usage.completion_tokens
        async with self.changed:
            self.changed.notify_all()


@asynccontextmanager
async def crowd(url: str, cases: Sequence[Case], name: str, key: str = "unused") -> AsyncIterator[Crowd]:
    """Start all cases at once; leaving waits for the end of every stream (or ends them on an error)."""
    made = Crowd([Watched(case, f"{name}-{i}", counted=i % 2 == 1) for i, case in enumerate(cases)])
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=HANG_S)
    async with client, asyncio.TaskGroup() as group:
        for watched in made.streams:
            group.create_task(made.follow(client, watched))
        yield made


async def finished(url: str, cases: Sequence[Case], name: str, key: str = "unused") -> list[Watched]:
    """Run all cases at once, to their ends."""
    async with crowd(url, cases, name, key) as made:
        pass
    return list(made.streams)


@asynccontextmanager
async def load(url: str, cases: Sequence[Case], name: str, width: int) -> AsyncIterator[Crowd]:
    """Let `width` clients ask case after case while the block lasts, then finish; `streams` grows meanwhile."""
    made, over = Crowd([], more=True), asyncio.Event()
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=HANG_S)

    async def ask(worker: int) -> None:
        for i in itertools.count():
            case = cases[(worker + i) % len(cases)]
            watched = Watched(case, f"{name}-{worker}-{i}", counted=(worker + i) % 2 == 1)
            made.streams.append(watched)
            await made.follow(client, watched)
            if over.is_set() or watched.error:
                return

    async with client, asyncio.TaskGroup() as group:
        for worker in range(width):
            group.create_task(ask(worker))
        try:
            yield made
        finally:
            over.set()


def longest_pause(streams: Sequence[Watched]) -> str:
    """Say for people the longest wait of any stream for its next piece."""
    worst = max(streams, key=lambda one: one.longest_pause_s)
    return f"{len(streams)} requests, longest pause {worst.longest_pause_s:.1f} s ({worst.request_id})"


def emitted(runner: RunnerBook, made: Crowd) -> list[tuple[Watched, int]]:
    """Return which streams run on a runner, and how many tokens it has emitted for each.

    The runner's own report counts: what a client has read lags behind what was generated.
    """
    tokens = zip(runner.sequences, runner.progress, strict=False)
    running = [watched for watched in made.streams if watched.finish is None]
    return [
        (watched, count - len(watched.case.prompt) - 2)  # the prompt stands between <s> and <sep>
        for request_id, count in tokens
        for watched in running
        if request_id.startswith(f"{watched.request_id}-")
    ]


Blow: TypeAlias = Callable[[RunnerBook, list[tuple[Watched, int]]], bool]


async def strike(supervisor: grpc.Channel, made: Crowd, blow: Blow) -> None:
    """Show `blow` each runner with its streams and their tokens, until it returns True: it has struck.

    In a thread: on a busy machine the loop that reads many streams comes back to a list of runners only when the
    streams that the list shows have ended. Raises TimeoutError with what the runners had at last.
    """

    def until_struck() -> None:
        until, request = time.monotonic() + PATIENCE_S, supervisor_pb2.ListRunnersRequest()
        admin = supervisor_pb2_grpc.AdminStub(supervisor)
        while True:
            listed = books(admin.ListRunners(request, timeout=PATIENCE_S, wait_for_ready=True))
            seen = {runner.spec.name: emitted(runner, made) for runner in listed}
            if any(blow(runner, seen[runner.spec.name]) for runner in listed):
                return
            if time.monotonic() > until:
                shown = {name: [(w.request_id, tokens) for w, tokens in streams] for name, streams in seen.items()}
                raise TimeoutError(f"no moment to strike in {PATIENCE_S:.0f} s; at last, tokens by stream: {shown}")
            time.sleep(POLL_S)

    with supervisor:
        await asyncio.to_thread(until_struck)


def _causes(error: BaseException) -> str:
    """Return what it was raised from: an error of the client does not say which error of the connection it was."""
    inner = error.__cause__ or error.__context__
    return f"{inner!r}, from {_causes(inner)}" if inner else "nothing"


def assert_undisturbed(streams: Sequence[Watched]) -> None:
    """Assert that every stream ended well with exactly the text of its case: nothing lost, nothing twice."""
    failed = [f"{w.request_id}: {w.error!r}, from {_causes(w.error)}" for w in streams if w.error]
    assert failed == []
    assert [w.text for w in streams] == [w.case.expect for w in streams]
    assert {w.finish for w in streams} == {"stop"}
    assert [w.completion_tokens for w in streams] == [len(w.case.expect) for w in streams]


async def until_idle(stack: Any, count: int) -> None:
    """Wait until `count` runners, and no more, have no sequence and all of their pages."""

    async def idle() -> bool:
        listed = await runners(stack.address("supervisor"))
        free = [one.figures.free_pages == one.spec.total_pages and not one.sequences for one in listed]
        return free == [True] * count

    await eventually(idle)
