"""A small load generator: streams through the OpenAI API, one connection each, timed on this side.

Closed loop: `streams` clients send their next request when the last one has ended. What is timed is what a client sees:
time to the first piece of text, the gaps between pieces, the end.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from weft_stage.errors import RequestFailed


@dataclass(slots=True)
class Timing:
    """One request as its client saw it; seconds on a monotonic clock."""

    start: float
    pieces: list[float] = field(default_factory=list[float])
    end: float = 0.0
    text: str = ""
    completion_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.pieces[0] - self.start

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


async def complete(client: httpx2.AsyncClient, body: dict[str, Any]) -> Timing:
    """Stream one `/v1/completions` request. Raises RequestFailed."""
    timing = Timing(start=time.perf_counter())
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        if answer.status_code != 200:
            raise RequestFailed(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _take(timing, json.loads(line[6:]))
    timing.end = time.perf_counter()
    return timing


async def run(base_url: str, bodies: Sequence[dict[str, Any]], streams: int) -> list[Timing]:
    """Send all bodies from `streams` clients at once; returns their timings in order of the bodies."""
    waiting = list(enumerate(bodies))[::-1]
    timings: dict[int, Timing] = {}

    async def client_loop(client: httpx2.AsyncClient) -> None:
        while waiting:
            index, body = waiting.pop()
            timings[index] = await complete(client, body)

    limits = httpx2.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx2.AsyncClient(base_url=base_url, timeout=120, limits=limits) as http, asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(client_loop(http))
    return [timings[i] for i in range(len(bodies))]


def _take(timing: Timing, event: dict[str, Any]) -> None:
    if "error" in event:
        raise RequestFailed(json.dumps(event["error"]))
    if event.get("usage"):
        timing.completion_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        if choice["text"]:
            timing.pieces.append(time.perf_counter())
            timing.text += choice["text"]
