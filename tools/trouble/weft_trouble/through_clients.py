"""Run `weft bench clients` on a stack of our own."""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from weft_stage import sse
from weft_stage.errors import StackFailed
from weft_stage.lines import Line, Origin
from weft_stage.process import cpu_s, resident_mb
from weft_stage.sse import WORDS
from weft_stage.stack import Stack, quickstart
from weft_stage.waiting import until
from weft_trouble.clients import COUNTS, TOKENS, Found, lines
from weft_trouble.crowds import ATTACKS, BLANKS, BURSTS, FLOOD, HEALTH, READERS, form_of

OTHERS, CROWD, UNLIMITED = "acme", "initech", "umbrella"
RATE, REQUESTS, WARM = 20.0, 300, 40
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
START_S, PATIENCE_S, POLL_S, BATCH_POLL_S = 120.0, 180.0, 0.25, 0.02


async def measure(
    crowds: Sequence[str], repeat: int, seed: int, origin: Origin, say: Callable[[str], None], scale: float = 1.0
) -> list[Line]:
    """Each crowd in turn, `scale` times as large. Raises StackFailed, RequestFailed."""
    with TemporaryDirectory(prefix="weft-bench-") as scratch, Stack(quickstart(), Path(scratch), "--auth") as stack:
        made = await asyncio.to_thread(lambda: [*map(stack.create_key, (OTHERS, CROWD, UNLIMITED))])
        stack.key, crowds_key, unlimited_key = made
        stack.cli("limit", "set", "-n", CROWD, "--model", "*", "requests-per-minute=1")
        await asyncio.to_thread(stack.wait_for_models)
        found = list[Line]()
        rounds = Rounds(stack, random.Random(seed), round(REQUESTS * min(1.0, scale)))
        await rounds.one()
        for crowd in crowds:
            count = max(1, round(COUNTS[crowd] * scale))
            say(f"{count:,} {crowd}")
            # A stopped reader is no tenant with a limit of its own: its answers have to come to be not read.
            key = {READERS: stack.key, **dict.fromkeys((*BURSTS, *ATTACKS), unlimited_key)}.get(crowd, crowds_key)
            found += lines(origin, await _beside(stack, rounds, crowd, count, key, repeat))
    return found


class Rounds:
    """Requests of others, at their times."""

    def __init__(self, stack: Stack, rng: random.Random, requests: int) -> None:
        self._stack, self._rng, self._requests = stack, rng, requests

    async def one(self) -> tuple[list[sse.Streamed], list[float]]:
        """Return a round's answers, without what warms it up, and the seconds of each `/healthz` beside them."""
        bodies = list(self._bodies(self._requests + WARM))
        at_s = [number / RATE for number in range(len(bodies))]
        keys = [self._stack.key] * len(bodies)
        async with _probed(self._stack.port) as probes_s:
            answers = await sse.run_at("127.0.0.1", self._stack.port, bodies, at_s, keys)
        return answers[WARM:], probes_s

    def _bodies(self, count: int) -> Iterator[dict[str, Any]]:
        for number in range(count):
            model = ("weft-quickstart", f"{OTHERS}/upper")[number % 2]
            prompt = " ".join(self._rng.choices(WORDS, k=12))
            yield {"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


async def _beside(stack: Stack, rounds: Rounds, crowd: str, count: int, key: str, repeat: int) -> Found:
    alone, beside, seen = list[sse.Streamed](), list[sse.Streamed](), Counter[str]()
    most, cut_off_s, batch_s, gateway = 0.0, 0.0, 0.0, stack.pid("gateway")
    probes_s, resident_before = (list[float](), list[float]()), resident_mb(gateway)
    marks_s = list[float]()
    for _ in range(repeat):
        marks_s.append(cpu_s(gateway))
        answers, seconds = await rounds.one()
        alone += answers
        probes_s[0].extend(seconds)
        marks_s.append(cpu_s(gateway))
        before = _descriptors(gateway)
        async with _crowd(stack, crowd, count, key, seen):
            begun = time.perf_counter()
            if crowd not in (FLOOD, *BURSTS, *ATTACKS):
                await _until(lambda: not _computes(stack), "a runner with nothing to compute")
            async with _watched(gateway) as resident:
                answers, seconds = await rounds.one()
                beside += answers
                probes_s[1].extend(seconds)
                if crowd == BLANKS:
                    batch_s = max(batch_s, await _batch_s(stack))
                if crowd == READERS:
                    await _until(partial(_are_closed, gateway, before), "stopped readers cut off")
                    cut_off_s = max(cut_off_s, time.perf_counter() - begun)
            most = max(most, *resident)
        marks_s.append(cpu_s(gateway))
        await _until(partial(_are_closed, gateway, before), "the crowd's connections closed")
    alone_s, beside_s = (
        sum(end - begin for begin, end in zip(marks_s[at::3], marks_s[at + 1 :: 3], strict=True)) for at in (0, 1)
    )
    return Found(
        crowd, count, alone, beside, probes_s, resident_before, most, batch_s, cut_off_s, seen, (alone_s, beside_s)
    )


@asynccontextmanager
async def _probed(port: int) -> AsyncGenerator[list[float]]:
    """Yield the seconds of each `/healthz`, which are added from enter to exit."""
    seconds, ends = list[float](), await asyncio.open_connection("127.0.0.1", port)

    async def probe() -> None:
        while True:
            begun = time.perf_counter()
            ends[1].write(HEALTH)
            await ends[0].readuntil(b"\r\n\r\nok\n")
            seconds.append(time.perf_counter() - begun)
            await asyncio.sleep(1 / RATE)

    async with asyncio.TaskGroup() as group:
        probing = group.create_task(probe())
        try:
            yield seconds
        finally:
            probing.cancel()
            ends[1].close()


async def _batch_s(stack: Stack) -> float:
    """Return the seconds from the upload of a batch of one line to its end. Raises StackFailed."""
    body = {"model": "weft-quickstart", "prompt": "a", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    headers = {"authorization": f"Bearer {stack.key}"}
    begun, form = time.perf_counter(), form_of({"purpose": "batch"}, "one.jsonl", json.dumps(line).encode())
    async with httpx2.AsyncClient(base_url=stack.url, headers=headers, timeout=PATIENCE_S, trust_env=False) as http:
        kind = {"content-type": "multipart/form-data; boundary=b"}
        file = (await http.post("/v1/files", content=form, headers=kind)).json()
        order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=order)).json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(BATCH_POLL_S)  # the API has no event for it
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    if batch["status"] != "completed":
        raise StackFailed(f"expected a completed batch, got {batch}")
    return time.perf_counter() - begun


@asynccontextmanager
async def _crowd(stack: Stack, kind: str, count: int, key: str, seen: Counter[str]) -> AsyncGenerator[None]:
    """The clients are there from enter to exit; what they saw is added to `seen`."""
    address = f"127.0.0.1:{stack.port}"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "weft_trouble.crowds", kind, str(count), address, key,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            if not await child.stdout.readline():
                raise StackFailed(f"the crowd of {kind} ended")
        yield
        child.stdin.close()
        seen.update(json.loads(await child.stdout.readline()))
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def _computes(stack: Stack) -> bool:
    """Whether a runner has anything to compute."""
    return any(stack.metric("runner", name) for name in BUSY)


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _are_closed(pid: int, before: int) -> bool:
    return _descriptors(pid) <= before


async def _until(holds: Callable[[], bool], what: str) -> None:
    await until(partial(asyncio.to_thread, holds), what, PATIENCE_S, POLL_S)


@asynccontextmanager
async def _watched(pid: int) -> AsyncGenerator[list[float]]:
    """Resident megabytes of a process, looked at all the time from enter to exit."""
    found = [resident_mb(pid)]

    async def look() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            found.append(resident_mb(pid))

    looking = asyncio.create_task(look())
    try:
        yield found
    finally:
        looking.cancel()
