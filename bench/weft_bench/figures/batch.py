"""`weft bench batch`: lines of a batch beside interactive requests, through a whole stack.

Two clients stream one long answer each. Lines are those of a batch, whose rows the runner lets join, or requests of
`cap` clients: a fixed cap of rows. docs/benchmarks/scheduling.md has the method.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
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
from weft_bench.run import Run
from weft_stage import sse
from weft_stage.cpu_models import base_model, cache_dir
from weft_stage.errors import RequestFailed
from weft_stage.lines import Line, Origin, percentile
from weft_stage.stack import Stack

ROWS, INTERACTIVE = 32, 2  # sequences of the runner, interactive ones
PROMPT_TOKENS, LINE_TOKENS = 16, 64  # of a line; a prompt that no step can take in one piece keeps no token time
LINES = 2_000  # of a batch: more than can be answered while one cell is measured
TOKEN_TIMES = 2.0  # steps of one row
CAPS = (0, 1, 2, 4, 8, 12, 16, 24, ROWS - INTERACTIVE)
RAMP_S = 2.0  # until as many lines run as will
READY_S, POLL_S, ENDED_S, TIMEOUT_S = 180.0, 0.1, 30.0, 120.0
TOKENS = "weft_runner_tokens_total"
Cell = tuple[list[float], float]  # gaps between interactive tokens, seconds; tokens of lines a second


def figures(options: cases.Batch, run: Run) -> Iterator[Line]:
    """Measure rounds of every cap and of priorities, after one that warms up. Raises StackFailed, RequestFailed."""
    name, tokens, folder = options.model_shape, options.tokens, options.models or cache_dir()
    origin, shape = run.origin("tokenizers"), SHAPES[name]
    sizes = Sizes(rows=ROWS, slots=1, context_tokens=PROMPT_TOKENS + max(tokens, LINE_TOKENS), profile=True)
    rules: tuple[int | None, ...] = (*CAPS, None)
    alone, cells = list[float](), {rule: list[Cell]() for rule in rules}
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        base = base_model(folder, name, shape)
        manifests = write_manifests(Path(scratch) / "manifests", base, (), shape, sizes, {"slo": None})
        with Stack(manifests, Path(scratch) / "data") as stack:
            stack.wait_for_models(1, timeout_s=READY_S)
            clients = Clients(stack, tokens, shape.vocab, random.Random(options.seed))
            for number in range(options.repetitions + 1):
                gaps_s = asyncio.run(clients.answers(1))
                alone += gaps_s if number else ()
                for rule in rules:
                    cell = asyncio.run(clients.cell(rule))
                    cells[rule] += [cell] if number else ()
                run.say(f"round {number} of {options.repetitions}")
    yield origin.line(f"{name}, one client alone", "token time", 1e3 * median(alone), "ms")
    yield from lines_of(origin, name, cells, TOKEN_TIMES * 1e3 * median(alone))


def lines_of(origin: Origin, name: str, cells: Mapping[int | None, Sequence[Cell]], token_ms: float) -> Iterator[Line]:
    """Yield the figures of every rule. `cells`: the rounds by cap, and last for None: priorities."""
    per_s, p99_ms = dict[int | None, float](), dict[int | None, float]()
    for cap, rounds in cells.items():
        rule = f"capped at {cap} rows" if cap is not None else "by priority"
        case, gaps_s = (
            f"{name}, {INTERACTIVE} interactive rows, lines {rule}",
            [gap for gaps, _ in rounds for gap in gaps],
        )
        per_s[cap], p99_ms[cap] = median(rate for _, rate in rounds), 1e3 * percentile(gaps_s, 99)
        yield origin.line(case, "interactive token time p50", 1e3 * percentile(gaps_s, 50), "ms", baseline=token_ms)
        yield origin.line(case, "interactive token time p99", p99_ms[cap], "ms", baseline=token_ms)
        yield origin.line(case, "batch lines", per_s[cap], "tokens/s")
        if cap is None:
            yield origin.line(case, "interactive p99 / token time", p99_ms[cap] / token_ms, "x", target="<= 1")
            for kept, most_ms, target in (("keeps it", token_ms, ">= 0.9"), ("is no later", p99_ms[cap], None)):
                best = [(per_s[rows], rows) for rows in CAPS if p99_ms[rows] <= most_ms]
                most_per_s, rows = max(best, default=(0.0, 0))
                ratio = per_s[cap] / most_per_s if most_per_s else None
                metric = f"batch tokens/s / best cap that {kept} ({rows} rows)"
                yield origin.line(case, metric, ratio, "x", target=target)


class Clients:
    """The clients of one stack."""

    def __init__(self, stack: Stack, tokens: int, vocab: int, rng: random.Random) -> None:
        self._stack, self._tokens, self._vocab, self._rng = stack, tokens, vocab, rng

    async def answers(self, clients: int) -> list[float]:
        """Return the gaps between tokens of `clients` answers that are asked for at the same time."""
        bodies = self._bodies(clients, self._tokens)
        done = await sse.run("127.0.0.1", self._stack.port, bodies, clients)
        if any(answer.tokens != self._tokens for answer in done):
            raise RequestFailed(f"answers of {[answer.tokens for answer in done]} tokens, not of {self._tokens}")
        return [gap for answer in done for gap in answer.gaps()]

    async def cell(self, cap: int | None) -> Cell:
        """Measure interactive answers beside lines: of `cap` clients, or of a batch."""
        async with (
            httpx2.AsyncClient(base_url=self._stack.url, timeout=TIMEOUT_S, trust_env=False) as http,
            self._batch(http) if cap is None else self._clients(http, cap),
        ):
            await asyncio.sleep(RAMP_S)
            before, start = await self._computed(), time.perf_counter()
            gaps_s = await self.answers(INTERACTIVE)
            wall_s, after = time.perf_counter() - start, await self._computed()
        return gaps_s, (after - before - INTERACTIVE * self._tokens) / wall_s

    async def _computed(self) -> float:
        """Tokens of answers that the runner has computed."""
        return await asyncio.to_thread(self._stack.metric, "runner", TOKENS)

    @asynccontextmanager
    async def _clients(self, http: httpx2.AsyncClient, cap: int) -> AsyncGenerator[None]:
        """Let `cap` clients send one line of the batch after the other until the block ends."""

        async def ask() -> None:
            while True:
                answered(await http.post("/v1/completions", json=self._bodies(1, LINE_TOKENS)[0]))

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask()) for _ in range(cap)]
            yield
            for task in asking:
                task.cancel()

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
        where = f"/v1/batches/{answered(await http.post('/v1/batches', json=order))['id']}"
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
        made = prompts(self._rng, count, PROMPT_TOKENS, self._vocab)
        return [{"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": tokens} for prompt in made]


def answered(response: httpx2.Response) -> dict[str, Any]:
    """Return the body of a response with status 200. Raises RequestFailed."""
    if not response.is_success:
        raise RequestFailed(f"{response.status_code}: {response.text[:500]}")
    return response.json()
