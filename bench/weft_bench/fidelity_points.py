"""The measured points of `silicon_dense_h100_h200`, and the iterations that each of them consists of.

A point is a closed loop: a number of clients, each of which sends its next request when its answer ends. The order of
iterations does not depend on how long they take, so each point is simulated once (`weft_bench.engine_simulation`), and
any step model then gives its TTFT and TPOT as a weighted sum of the seconds of its iterations.

Three ways to measure are told apart by how points are named; `Protocol` says what they differ in. `batch_size` is the
number of clients, but for points whose name gives none ("_c_"): there it is what a planner recommended.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft_bench.data import known
from weft_bench.engine_request import EngineRequest
from weft_bench.engine_simulation import EngineLimits, EngineSimulation, PromptBatching, serve
from weft_sim.performance.accelerator import accelerator
from weft_sim.performance.architecture import architecture
from weft_sim.performance.models import kv_tokens
from weft_sim.performance.roofline import Efficiency, Roofline
from weft_sim.performance.step import StepShape

HARDWARE = {"h100_sxm": "H100", "h200_sxm": "H200"}
ARCHITECTURES = {
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "Llama-3.1-8B-Instruct-FP8": "meta-llama/Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
}
BATCHING = {"vllm": PromptBatching.CHUNKED, "trtllm": PromptBatching.WHOLE, "sglang": PromptBatching.PROMPTS_FIRST}
COLUMNS: Sequence[str] = (
    "id", "mode", "backend", "backend_version", "model_path", "system", "precision", "gemm_quant_mode", "tp_size",
    "batch_size", "isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
BATCH_TOKENS = 8192  # the default of all three engines on devices of 80 GB and more
MAX_SEQUENCES = 1024
SEED = 0
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a point was measured. `rounds`: requests of each client; `shortest`: lengths are even between this share of
    the nominal one and it. `grouped`: the order in which clients come back is not that of the simulation: a request
    finds `together` prompts before its own ends, of which the fit finds the number."""

    rounds: float
    shortest: float = 1.0
    kv_dtype: str = "bf16"
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point: times in seconds."""

    name: str
    backend: str
    version: str
    model: str
    hardware: str
    dtype: str
    tensor_parallel: int
    clients: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    protocol: Protocol

    @property
    def source(self) -> tuple[str, ...]:
        """What was measured in one go: engine, version, model, hardware, dtype."""
        return self.backend, self.version or "2026-04", self.model.split("/")[1], self.hardware, self.dtype

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, on average."""
        return self.prompt_tokens * (1 + self.protocol.shortest) / 2

    @property
    def mean_gaps(self) -> float:
        """Tokens of an answer after its first, on average."""
        return self.output_tokens * (1 + self.protocol.shortest) / 2 - 1

    @property
    def e2e_s(self) -> float:
        """End to end: TTFT, and TPOT for every token after the first."""
        return self.ttft_s + self.tpot_s * self.mean_gaps

    @property
    def counted(self) -> bool:
        """True where it is known how many clients there were."""
        return "_c_" not in self.name


def points(rows: Iterable[Mapping[str, str]]) -> list[Point]:
    """Return the points of one pool (mode agg); of disaggregated ones the number of clients is not known."""
    return [_point(row) for row in rows if row["mode"] == "agg"]


def _point(row: Mapping[str, str]) -> Point:
    known(BATCHING, row["backend"], "backend")
    clients = int(float(row["batch_size"]))
    return Point(
        name=row["id"],
        backend=row["backend"],
        version=row["backend_version"],
        model=known(ARCHITECTURES, row["model_path"].split("/")[-1], "model"),
        hardware=known(HARDWARE, row["system"], "system"),
        dtype="fp8" if "fp8" in row["precision"] + row["gemm_quant_mode"] else "bf16",
        tensor_parallel=int(float(row["tp_size"])),
        clients=clients,
        prompt_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
        protocol=_protocol(row, clients),
    )


def _protocol(row: Mapping[str, str], clients: int) -> Protocol:
    if row["id"][:4].isdigit():  # named by a day: InferenceMAX, ten prompts a client, lengths from 80 % up
        return Protocol(rounds=10, shortest=0.8, kv_dtype="fp8")
    if row["backend_version"].startswith(("0.5.1", "0.5.8")):  # SGLang's prompts first bring clients into step
        return Protocol(rounds=3)
    if row["isl"] in ("1000", "2000", "4000", "8000"):  # about a thousand requests a point
        return Protocol(rounds=max(1.0, 1000 / clients), grouped=True)
    return Protocol(rounds=10, grouped=True)


@dataclass(frozen=True)
class Played:
    """Points of one model on one hardware, with their iterations.

    `steps` [n, 6]: the amounts of a step (prompts, tokens, pairs, rows, context) and how many are alike; `owner` [n]:
    the point; `waiting`, `decoding` [n]: its requests in these states; `requests`, `gaps` [points]: all of them.
    """

    points: Sequence[Point]
    roofline: Roofline
    steps: Array
    owner: NDArray[np.int64]
    waiting: Array
    decoding: Array
    requests: Array
    gaps: Array

    def times(self, efficiency: Efficiency, together: float) -> tuple[Array, Array]:
        """Return TTFT and TPOT of each point, in seconds."""
        model = replace(self.roofline, efficiency=efficiency)
        seconds = model.seconds_of(*self.steps[:, :5].T) * self.steps[:, 5]
        count = len(self.points)
        ttft = np.bincount(self.owner, seconds * self.waiting, count) / self.requests
        tpot = np.bincount(self.owner, seconds * self.decoding, count) / self.gaps
        gaps = self._of(lambda one: one.mean_gaps)
        grouped, e2e = self._grouped(model, together), ttft + tpot * gaps
        # Where clients wait for memory the simulation's own time counts: it is above that of computing all prompts.
        mine = self._of(lambda one: one.protocol.grouped) * (
            ttft < self._of(lambda one: one.clients) * self._alone(model)
        )
        ttft = np.where(mine > 0, grouped, ttft)
        tpot = np.where(mine > 0, (e2e - grouped) / gaps, tpot)
        return ttft + efficiency.request_ms / 1e3, tpot

    def _grouped(self, model: Roofline, together: float) -> Array:
        """Return the first round, in which all clients come at once, and the others, in which they do not."""
        clients, rounds = self._of(lambda one: one.clients), self._of(lambda one: one.protocol.rounds)
        prompt = self._prompt
        context = (clients - 1) * (prompt + self._of(lambda one: one.mean_gaps) / 2)
        own = model.seconds_of(1, prompt, prompt * (prompt + 1) / 2, clients - 1, context)
        first = clients / 2 * self._alone(model)
        return first / rounds + (1 - 1 / rounds) * own * np.minimum(together, (clients + 1) / 2)

    def _alone(self, model: Roofline) -> Array:
        return model.seconds_of(1, self._prompt, self._prompt * (self._prompt + 1) / 2, 0, 0)

    @cached_property
    def _prompt(self) -> Array:
        return self._of(lambda one: one.mean_prompt)

    def _of(self, value: Callable[[Point], float]) -> Array:
        return np.array([value(one) for one in self.points], dtype=float)


def play(chosen: Sequence[Point], start: Efficiency) -> list[Played]:
    """Simulate every point, those of one roofline together. `start` sets the memory, not the order of iterations."""
    groups = dict[tuple[Any, ...], list[Point]]()
    for one in chosen:
        key = (one.model, one.hardware, one.tensor_parallel, one.dtype, one.protocol.kv_dtype)
        groups.setdefault(key, []).append(one)
    return [_played(group, start) for group in groups.values()]


def _played(group: Sequence[Point], start: Efficiency) -> Played:
    first = group[0]
    model = Roofline(
        accelerator(first.hardware), architecture(first.model), start, first.tensor_parallel, first.dtype,
        first.protocol.kv_dtype,
    )  # fmt: skip
    steps, owner, requests, gaps = list[list[tuple[float, ...]]](), list[int](), list[int](), list[int]()
    for number, one in enumerate(group):
        trace, served = _iterations(one, model)
        steps.append(trace)
        owner += [number] * len(trace)
        requests.append(len(served))
        gaps.append(sum(request.output_tokens - 1 for request in served))
    table = np.array([row for trace in steps for row in trace], dtype=float)
    return Played(
        group, model, table[:, :6], np.array(owner), table[:, 6], table[:, 7], np.array(requests, float),
        np.array(gaps, float),
    )  # fmt: skip


def _iterations(one: Point, model: Roofline) -> tuple[list[tuple[float, ...]], list[EngineRequest]]:
    rng = random.Random(SEED)
    protocol, rounds = one.protocol, 3 if one.protocol.grouped else int(one.protocol.rounds)
    trace = list[tuple[float, ...]]()

    def request() -> EngineRequest:
        lengths = (rng.randint(int(n * protocol.shortest), n) for n in (one.prompt_tokens, one.output_tokens))
        return EngineRequest(0.0, *lengths)

    def seen(step: StepShape, count: int, _: float, waiting: int, decoding: int) -> None:
        amounts = (step.prompts, step.prompt_tokens, step.prompt_pairs, step.decode_rows, step.context_tokens)
        trace.append((*amounts, count, waiting, decoding))

    left = iter(range(one.clients * (rounds - 1)))
    engine = EngineSimulation(model, limits(one, model), seen)
    first = [request() for _ in range(one.clients)]
    served = serve(engine, first, answered=lambda _: request() if next(left, None) is not None else None)
    return trace, served


def limits(one: Point, model: Roofline) -> EngineLimits:
    """Return the engine's limits there; InferenceMAX gives TensorRT-LLM a batch of a whole request and 512 tokens."""
    tokens = BATCH_TOKENS
    if one.backend == "trtllm" and one.protocol.shortest < 1:
        tokens = one.prompt_tokens + one.output_tokens + 512
    return EngineLimits(kv_tokens(model), MAX_SEQUENCES, tokens, BATCHING[one.backend], reserve=one.backend == "trtllm")
