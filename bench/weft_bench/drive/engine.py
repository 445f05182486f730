"""The engine alone, without wire and gateway: the runner's own objects on a CPU or a GPU, and batches played on them.

A CPU engine reads its model from files, as a runner does. A GPU engine gets a random model that is made on the device.
Both are a `Player`: it plays requests, and checks afterwards that each row of each step ran with its adapter.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from weft_bench.cpu_shapes import BASE, RANK, adapter_of_row, distinct, prompts, ranks_of
from weft_bench.roofline import INT4_BYTES, Work, adapter_work, decode_work
from weft_runner.errors import RunnerError
from weft_stage.cpu_models import adapter
from weft_stage.errors import EngineRefused, WrongAdapter
from weft_stage.playing import Ask, Folders, Played, Player
from weft_stage.shapes import BF16_BYTES, Shape

if TYPE_CHECKING:  # packages that a GPU machine may lack
    from weft_runner.core import PoolLimits
    from weft_runner.model import Executor
    from weft_runner.settings import RunnerSettings
    from weft_runner.shell.engine import Engine, Output
    from weft_runner.shell.engine_factory import EngineBundle
    from weft_stage.gpu_device import Gpu

PAGE_TOKENS = 16
PROMPT_TOKENS = 64
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": INT4_BYTES, "fp32": 4.0}
SPARE = 1.5  # packed adapters are padded, and an adapter arrives while another still holds its pages
MAX_ROUNDS = 8  # to bring adapters into slots
FOLDERS = 32  # adapters on disk that stand for many: the engine reads and packs each digest anew
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Offload:
    """Weights on disk in `folder`, under the digest `base`; at most `share` of them stay in `device_bytes`."""

    folder: Path
    base: str
    device_bytes: int
    share: float = 1.0
    batch_tokens: int = 256
    plan: Path | None = None  # as JSON: which weights stay


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an engine is built for. `executor` and `dtype` as the runner's flags; `threads` 0: the runner chooses.

    `adapter_pages`: KV pages beside those of the rows, since adapters take their bytes from the same budget.
    """

    executor: str = "auto"
    dtype: str = "bf16"
    threads: int = 0
    rows: int = 32
    context_tokens: int = 512
    slots: int = 32
    batch_tokens: int = 1024
    prefills: int = 32
    max_rank: int = 64
    adapter_pages: int = 0
    token_time_ms: int = 60_000
    profile: bool = False
    offload: Offload | None = None
    stages: int = 1  # of a pipeline
    speculation: str = "off"


class EngineUnderTest(Player):
    """One engine under measurement, from enter to exit. `adapters`: the folder of each adapter, by digest."""

    def __init__(self, make: "Callable[[Callable[[Output], None]], Engine]") -> None:
        self.adapters = Folders()
        super().__init__(make)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()


class Subject(EngineUnderTest):
    """An engine built of files as a runner builds it. Raises EngineRefused when it cannot be built."""

    built: "EngineBundle"

    def __init__(self, files: Mapping[str, Path], sizes: Sizes) -> None:
        from weft_runner.shell.engine_factory import build_engine

        def make(told: "Callable[[Output], None]") -> "Engine":
            self.built = build_engine(settings(sizes), files, self.adapters, told)
            return self.built.engine

        try:
            super().__init__(make)
        except RunnerError as error:
            raise EngineRefused(f"the engine cannot be built: {error}") from error

    def close(self) -> None:
        super().close()
        self.built.close()

    @property
    def executor(self) -> str:
        """What computes, in words: `cpu/amx_bf16/bf16, 2 threads`."""
        return f"{self.built.numerics_class}, {self.built.threads} threads"


class DeviceSubject(EngineUnderTest):
    """An engine on a GPU, with graphs, of a random model that is made on the device. `adapter_pages` of sizes: unused.

    `waiting`: adapters that wait for a slot at a time.
    """

    def __init__(self, gpu: "Gpu", shape: Shape, sizes: Sizes, waiting: int) -> None:
        import torch

        from weft_runner.core import BatchLimits, PoolLimits
        from weft_runner.model import Partition
        from weft_runner.model.cuda.adapters import layout_of
        from weft_runner.model.cuda.cuda_graphs import MAX_GRAPH_TOKENS
        from weft_runner.model.cuda.executor import CudaExecutor
        from weft_runner.model.cuda.executor import Sizes as ExecutorSizes
        from weft_stage.gpu_models import Numbers, random_weights, spec_of
        from weft_stage.gpu_placed import pages_needed

        self._gpu, spec = gpu, spec_of(shape, sizes.context_tokens)
        per_adapter = pages_needed(layout_of(Partition(spec), RANK), RANK, 2 * shape.layers * shape.kv * PAGE_TOKENS)
        pages = pages_of(sizes) - sizes.adapter_pages + (sizes.slots + waiting) * per_adapter
        weights = random_weights(spec, Numbers(gpu.device, gpu.dtype))
        gpu.sync()
        executor = CudaExecutor(spec, weights, ExecutorSizes(
            pages, PAGE_TOKENS, sizes.slots, RANK, sizes.rows, sizes.context_tokens, graphs=True,
            tokens=min(sizes.batch_tokens, MAX_GRAPH_TOKENS),  # kernels of larger steps are compiled as they come
        ))  # fmt: skip
        gpu.sync()
        limits = PoolLimits(
            total_pages=pages, page_tokens=PAGE_TOKENS, max_sequences=sizes.rows, max_adapters=sizes.slots,
            max_context_tokens=sizes.context_tokens, vocab_size=shape.vocab,
            batch=BatchLimits(sizes.prefills, sizes.batch_tokens), page_bytes=executor.page_bytes, keep_copies=True,
        )  # fmt: skip
        torch.set_num_threads(executor.torch_threads)  # as the engine's own thread does
        super().__init__(lambda told: engine_of(executor, limits, self.adapters, told))

    def close(self) -> None:
        super().close()
        self._gpu.sync()


def engine_of(
    executor: "Executor", limits: "PoolLimits", source: Folders, told: "Callable[[Output], None]", max_rank: int = RANK
) -> "Engine":
    """Make an engine as `engine_factory.build_engine` does, around an executor."""
    from weft_runner.core import Runner
    from weft_runner.shell.adapter_pool import AdapterPool
    from weft_runner.shell.engine import Engine

    def adapters(post: Callable[[Any], None]) -> AdapterPool:
        return AdapterPool(executor.adapters, max_rank, source, post)

    return Engine(Runner(limits), executor, adapters, told)


def pages_of(sizes: Sizes) -> int:
    """Return the KV pages that rows of this context and the adapters need."""
    return sizes.rows * (-(-sizes.context_tokens // PAGE_TOKENS) + 1) + sizes.adapter_pages


def adapter_pages(shape: Shape, n_bytes: float, adapters: int) -> int:
    """Return the KV pages that adapters of `n_bytes` in all take, those included that are on their way in or out."""
    page_bytes = 2 * BF16_BYTES * shape.layers * shape.kv * PAGE_TOKENS
    return math.ceil(SPARE * n_bytes / page_bytes) + 2 * adapters


def settings(sizes: Sizes) -> "RunnerSettings":
    """Return the runner's settings. Their addresses are never used: nothing listens."""
    from weft_runner.settings import OffloadByHand, parse_settings

    nowhere = "127.0.0.1:1"
    flags = {
        "listen": nowhere, "probes": nowhere, "supervisor": nowhere, "depot": f"http://{nowhere}", "data-dir": ".",
        "pool": "bench/bench", "base-digest": f"sha256:{0:064}", "executor": sizes.executor, "dtype": sizes.dtype,
        "threads": sizes.threads, "kv-pages": pages_of(sizes), "max-sequences": sizes.rows, "max-adapters": sizes.slots,
        "max-batch-tokens": max(sizes.batch_tokens, sizes.rows),
        "max-rank": sizes.max_rank, "token-time-ms": sizes.token_time_ms, "speculation": sizes.speculation,
    }  # fmt: skip
    chosen: dict[str, Any] = {"profile": sizes.profile, "max_prefills": sizes.prefills}
    if (offload := sizes.offload) is not None:
        flags |= {
            "base-digest": offload.base, "offload": f"device={offload.device_bytes},path={offload.folder}",
        }  # fmt: skip
        chosen["by_hand"] = OffloadByHand(
            batch_tokens=offload.batch_tokens, plan=offload.plan, weights_share=offload.share
        )
    if sizes.stages > 1:
        flags["pipeline-parallel"] = sizes.stages
    return parse_settings([word for name, value in flags.items() for word in (f"--{name}", str(value))], **chosen)


# ---- batches


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows` requests of one popularity; adapter i has rank `ranks[i % len(ranks)]`."""

    rows: int
    popularity: str
    ranks: tuple[int, ...] = (RANK,)

    @property
    def name(self) -> str:
        mixed = f", ranks {min(self.ranks)}-{max(self.ranks)}" if len(self.ranks) > 1 else ""
        return f"batch {self.rows}, {self.popularity}{mixed}"

    @property
    def adapters(self) -> list[int | None]:
        """Return the adapter of each row."""
        return adapter_of_row(self.popularity, self.rows)

    def work(self, shape: Shape, context: float, weight_bytes: float = BF16_BYTES) -> Work:
        """Return what a decode step must read and compute."""
        return decode_work(shape, self.rows, context, weight_bytes) + self.adapters_work(shape)

    def adapters_work(self, shape: Shape, tokens: int = 1) -> Work:
        """Return what the adapters add to a step."""
        return adapter_work(shape, *ranks_of(self.adapters, self.ranks), tokens)


def base(rows: int) -> Batch:
    """Return a batch without adapters."""
    return Batch(rows, BASE)


@dataclass(frozen=True, slots=True)
class Model:
    """A shape, the folder of its checkpoints, and the source of its prompts."""

    name: str
    shape: Shape
    folder: Path
    rng: random.Random = field(default_factory=random.Random)

    def digest(self, subject: EngineUnderTest, number: int, rank: int = RANK) -> str:
        """Return the digest under which the subject has this adapter, which is written if need be."""
        digest = f"{self.name}-r{rank}-{number}"
        if digest not in subject.adapters.paths:
            subject.adapters.paths[digest] = adapter(self.folder, self.name, self.shape, number, rank)
        return digest

    def alias(self, subject: EngineUnderTest, digest: str, number: int, folders: int = FOLDERS) -> str:
        """Give the subject another adapter of the usual rank, with one of `folders` folders. Returns its digest."""
        subject.adapters.paths[digest] = subject.adapters.paths[self.digest(subject, number % folders)]
        return digest

    def asks(self, subject: EngineUnderTest, batch: Batch, prompt_tokens: int, tokens: int) -> list[Ask]:
        """Return a batch's requests. Their prompts are new: no cache has them."""
        made = prompts(self.rng, batch.rows, prompt_tokens, self.shape.vocab)
        names = [
            "" if number is None else self.digest(subject, number, batch.ranks[number % len(batch.ranks)])
            for number in batch.adapters
        ]
        return [Ask(name, prompt, tokens) for name, prompt in zip(names, made, strict=True)]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decode steps of a full batch: the mean step (all time included), and every step."""

    step_s: float
    steps_s: tuple[float, ...]


def load_all(model: Model, subject: Subject, kinds: Sequence[Batch]) -> None:
    """Bring every adapter of these batches into a slot. A late load may evict an adapter that was loaded before."""
    for _ in range(MAX_ROUNDS):
        adapters = set[str]()
        for kind in kinds:
            asks = model.asks(subject, kind, 1, 1)
            subject.play(asks)
            adapters.update(ask.adapter for ask in asks if ask.adapter)
        if all(subject.engine.runner.pool.adapters.adapters[digest].resident for digest in adapters):
            return


def decode(
    model: Model, subject: EngineUnderTest, batch: Batch, tokens: int, prompt_tokens: int = PROMPT_TOKENS,
    between: Callable[[], None] | None = None,
) -> Decoded:  # fmt: skip
    """Run a batch and take its steady steps. Raises WrongAdapter when a step reads another number of adapters."""
    played = subject.play(model.asks(subject, batch, prompt_tokens, tokens), between=between)
    return steady(played, batch.rows, distinct(batch.adapters))


def steady(played: Played, rows: int, adapters: int) -> Decoded:
    """Take the steps between the last row's first token and the first row's end: all rows are in each.

    Raises WrongAdapter.
    """
    beats = [beat for beat in played.beats if not beat.prefills and beat.rows == rows]
    if any(beat.distinct != adapters for beat in beats):
        raise WrongAdapter(f"steps read {sorted({beat.distinct for beat in beats})} adapters, not {adapters}")
    if not beats:
        raise WrongAdapter(f"no step had all {rows} rows in decode")
    ends = [beats[0].began, *(beat.ended for beat in beats)]
    steps = tuple(after - before for before, after in pairwise(ends))
    return Decoded((ends[-1] - ends[0]) / len(steps), steps)


def prefill_s(model: Model, subject: EngineUnderTest, batch: Batch, prompt_tokens: int) -> float:
    """Return the seconds from the first beat to the last row's first token."""
    beats = subject.play(model.asks(subject, batch, prompt_tokens, 1)).beats
    return beats[-1].ended - beats[0].began


def alternating(kinds: Sequence[Key], repetitions: int, run: Callable[[Key], float]) -> dict[Key, list[float]]:
    """Return the seconds of each kind in `repetitions` rounds, in which each runs once, after a round that warms up."""
    seconds: dict[Key, list[float]] = {kind: [] for kind in kinds}
    for number in range(repetitions + 1):
        for kind in kinds:
            took_s = run(kind)
            if number:
                seconds[kind].append(took_s)
    return seconds


def paired(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of what was measured in the same round."""
    return median(a / b for a, b in zip(over, under, strict=True))
