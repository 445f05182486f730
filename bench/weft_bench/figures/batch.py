"""`weft bench batch`: lines of a batch beside interactive requests, through a whole stack.

Two clients stream one long answer each. Lines are those of a batch, whose rows the runner lets join, or requests of
`cap` clients: a fixed cap of rows. docs/benchmarks/scheduling.md has the method.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from weft_bench import cases
from weft_bench.cpu_shapes import SHAPES, prompts
from weft_bench.drive.engine import Sizes
from weft_bench.path_shape import MODEL, write_manifests
from weft_bench.row_caps import INTERACTIVE, LINE_TOKENS, PROMPT_TOKENS, TOKEN_TIMES, RuleRun, caps
from weft_bench.row_caps import figures as rule_figures
from weft_bench.run import Run
from weft_stage import sse
from weft_stage.cpu_models import base_model, cache_dir
from weft_stage.errors import RequestFailed
from weft_stage.lines import Line
from weft_stage.stack import Stack

ROWS = 32  # sequences of the runner
LINES = 2_000  # of a batch: more than can be answered while one cell is measured
RAMP_S = 2.0  # until as many lines run as will
READY_S, POLL_S, ENDED_S, TIMEOUT_S = 180.0, 0.1, 30.0, 120.0
TOKENS = "weft_runner_tokens_total"
Prompts = Callable[[int], Sequence[Sequence[int]]]


def figures(options: cases.Batch, run: Run) -> Iterator[Line]:
    """Measure rounds of every cap and of priorities, after one that warms up. Raises StackFailed, RequestFailed."""
    name, tokens, folder = options.model_shape, options.tokens, options.models or cache_dir()
    origin, shape, rng = run.origin("tokenizers"), SHAPES[name], random.Random(options.seed)
    sizes = Sizes(rows=ROWS, slots=1, context_tokens=PROMPT_TOKENS + max(tokens, LINE_TOKENS), profile=True)
    rules: tuple[int | None, ...] = (*caps(ROWS), None)
    alone, cells = list[float](), {rule: list[RuleRun]() for rule in rules}
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        base = base_model(folder, name, shape)
        manifests = write_manifests(Path(scratch) / "manifests", base, (), shape, sizes, {"slo": None})
        with Stack(manifests, Path(scratch) / "data") as stack:
            stack.wait_for_models(1, timeout_s=READY_S)
            clients = Clients(stack, tokens, lambda count: prompts(rng, count, PROMPT_TOKENS, shape.vocab))
            for number in range(options.repetitions + 1):
                gaps_s = asyncio.run(clients.answers(1))
                alone += gaps_s if number else ()
                for rule in rules:
                    cell = asyncio.run(clients.cell(rule))
                    cells[rule] += [cell] if number else ()
                run.say(f"round {number} of {options.repetitions}")
    token_ms = 1e3 * median(alone)
    measured = {
        rule: RuleRun([gap for cell in of_rule for gap in cell.gaps_s], median(cell.lines_per_s for cell in of_rule))
        for rule, of_rule in cells.items()
    }
    yield origin.line(f"{name}, one client alone", "token time", token_ms, "ms")
    yield from rule_figures(origin.line, f"{name}, ", measured, TOKEN_TIMES * token_ms)


class Clients:
    """The clients of one stack."""

    def __init__(self, stack: Stack, tokens: int, made: Prompts) -> None:
        self._stack, self._tokens, self._prompts = stack, tokens, made

    async def answers(self, clients: int) -> list[float]:
        """Return the gaps between tokens of `clients` answers that are asked for at the same time."""
        bodies = self._bodies(clients, self._tokens)
        done = await sse.run("127.0.0.1", self._stack.port, bodies, clients)
        if any(answer.tokens != self._tokens for answer in done):
            raise RequestFailed(f"answers of {[answer.tokens for answer in done]} tokens, not of {self._tokens}")
        return [gap for answer in done for gap in answer.gaps()]

    async def cell(self, cap: int | None) -> RuleRun:
        async with (
            httpx2.AsyncClient(base_url=self._stack.url, timeout=TIMEOUT_S, trust_env=False) as http,
            self._batch(http) if cap is None else self._clients(http, cap),
        ):
            await asyncio.sleep(RAMP_S)
            before, start = await self._computed(), time.perf_counter()
            gaps_s = await self.answers(INTERACTIVE)
            wall_s, after = time.perf_counter() - start, await self._computed()
        return RuleRun(gaps_s, (after - before - INTERACTIVE * self._tokens) / wall_s)

    async def _computed(self) -> float:
        """Tokens of answers that the runner has computed."""
        return await asyncio.to_thread(self._stack.metric, "runner", TOKENS)

    @asynccontextmanager
    async def _clients(self, http: httpx2.AsyncClient, cap: int) -> AsyncGenerator[None]:
        """Let `cap` clients send one line of the batch after the other until the block ends."""

        async def ask() -> None:
            while True:
                (body,) = self._bodies(1, LINE_TOKENS)
                answered(await http.post("/v1/completions", json=body))

        asking = [asyncio.create_task(ask()) for _ in range(cap)]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()
            ends = await asyncio.gather(*asking, return_exceptions=True)
        if failed := [end for end in ends if not isinstance(end, asyncio.CancelledError)]:
            raise RequestFailed(f"a line: {failed[0]}")

    @asynccontextmanager
    async def _batch(self, http: httpx2.AsyncClient) -> AsyncGenerator[None]:
        """Run a batch until the block ends."""
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            for number, body in enumerate(self._bodies(LINES, LINE_TOKENS))
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = await http.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
        order = {"input_file_id": answered(file)["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = answered(await http.post("/v1/batches", json=order))
        where = f"/v1/batches/{batch['id']}"
        yield
        counts = answered(await http.get(where))["request_counts"]
        if counts["failed"] or counts["completed"] == LINES:
            raise RequestFailed(f"the batch did not outlast the cell, or lines of it failed: {counts}")
        answered(await http.post(f"{where}/cancel"))
        for _ in range(round(ENDED_S / POLL_S)):  # the API has no event for it
            if answered(await http.get(where))["status"] == "cancelled":
                return
            await asyncio.sleep(POLL_S)
        raise RequestFailed(f"the batch is not cancelled after {ENDED_S:.0f} s")

    def _bodies(self, count: int, tokens: int) -> list[dict[str, Any]]:
        made = self._prompts(count)
        return [{"model": MODEL, "prompt": list(prompt), "temperature": 0, "max_tokens": tokens} for prompt in made]


def answered(response: httpx2.Response) -> dict[str, Any]:
    """Return the body of a response with status 200. Raises RequestFailed."""
    if not response.is_success:
        raise RequestFailed(f"{response.status_code}: {response.text[:500]}")
    return response.json()
