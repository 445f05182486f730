"""What every case of `weft bench offload` is given: a shape, its file of packed weights, engines that offload it."""

import hashlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from weft_bench.cpu_context import WEIGHT_BYTES, adapter_pages
from weft_bench.cpu_decode import Batch
from weft_bench.cpu_engine import Ask, Offload, Played, Sizes, Subject
from weft_bench.cpu_machine import Machine
from weft_bench.cpu_shapes import BASE, RANK, SHAPES, prompts
from weft_bench.roofline import Work, base_bytes
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.memory_estimate import available_memory
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.offload import OffloadFigures
from weft_stage.cpu_models import adapter, base_model, files
from weft_stage.lines import Origin

PROMPT_TOKENS, TOKENS = 512, 32
MIN_BOUND_SHARE = 0.8
BATCH_TOKENS = 4096  # of a pass
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `usual`: figures may be held against targets."""

    folder: Path
    shares: tuple[float, ...]
    rows: tuple[int, ...]
    popularities: tuple[str, ...]
    dtype: str = "bf16"
    threads: int = 0
    seed: int = 0
    prompt_tokens: int = PROMPT_TOKENS
    tokens: int = TOKENS
    usual: bool = True
    peers_python: Path | None = None  # that has llama.cpp
    grid: int = 200  # policies

    @property
    def quota(self) -> int:
        """Threads of the engine."""
        return self.threads or cpu_quota()


class OffloadModel:
    """One shape on this machine."""

    def __init__(self, options: Options, name: str, machine: Machine) -> None:
        self.options, self.name, self.shape, self.machine = options, name, SHAPES[name], machine
        self.base = base_model(options.folder, name, self.shape)
        self.packed = options.folder / "offload"
        self.rng = random.Random(options.seed)

    @property
    def title(self) -> str:
        """How the names of cases begin."""
        return f"{self.name} {self.options.dtype}"

    @property
    def lengths(self) -> str:
        """How the names of cases end that are not the usual ones."""
        options = self.options
        return "" if options.usual else f", {options.prompt_tokens} + {options.tokens} tokens"

    @property
    def path(self) -> Path:
        """The file of the packed weights, once an engine has begun."""
        found = self.packed.glob(f"{self.digest.removeprefix('sha256:')}-{self.options.dtype}-*.packed")
        return max(found, key=lambda path: path.stat().st_size)  # the others are of a pipeline's stages

    @property
    def digest(self) -> str:
        """The digest of the model's shape: its weights follow from that."""
        return f"sha256:{hashlib.sha256(repr(self.shape).encode()).hexdigest()}"

    def figures(self, batch: Batch) -> tuple[OffloadFigures, int]:
        """Return the figures of an engine for this batch with no weight in memory, and what it needs beside weights."""
        with self.subject(self.sizes(batch, self.offload(available_memory().n_bytes // 2, 0.0))) as subject:
            executor = executor_of(subject)
            return executor.figures, executor.beside_bytes

    def bound_s(self, tokens: int, rows: int, disk_s: float) -> float:
        """Return the bound of a pass: the disk, the FLOPs, or the weights' bytes in memory."""
        shape = self.shape
        flops = 2 * (shape.layers * shape.layer_weights * tokens + shape.vocab * shape.hidden * rows)
        weights = base_bytes(shape, WEIGHT_BYTES[self.options.dtype])
        return max(disk_s, Work(weights, flops).bound_s(self.machine.rates(weights)))

    def play(self, subject: Subject, batch: Batch, *, warm: bool = False, streams: int | None = None) -> Played:
        """Play a batch of new prompts, at most `streams` at a time. `warm`: two tokens of short prompts."""
        options = self.options
        made = prompts(self.rng, batch.rows, options.prompt_tokens, self.shape.vocab)
        asks = list[Ask]()
        for number, prompt in zip(batch.adapters, made, strict=True):
            digest = "" if number is None else f"{self.name}-{number}"
            if number is not None:
                subject.adapters.paths[digest] = self.adapter(number)
            asks.append(Ask(digest, prompt[: 16 if warm else None], 2 if warm else options.tokens))
        return subject.play(asks, streams=streams)

    def adapter(self, number: int) -> Path:
        """Return the folder of adapter `number`, written if it is not there."""
        return adapter(self.options.folder, self.name, self.shape, number, RANK)

    def subject(self, sizes: Sizes) -> Subject:
        return Subject(files(self.base), sizes)

    def sizes(self, batch: Batch, offload: Offload) -> Sizes:
        options = self.options
        return Sizes(
            executor="cpu", dtype=options.dtype, threads=options.threads, rows=batch.rows, slots=max(1, batch.rows),
            context_tokens=options.prompt_tokens + options.tokens + 1, prefills=batch.rows, max_rank=RANK,
            batch_tokens=min(BATCH_TOKENS, batch.rows * options.prompt_tokens), adapter_pages=self.adapter_pages(batch),
            offload=offload,
        )  # fmt: skip

    def adapter_pages(self, batch: Batch) -> int:
        """Return the KV pages that the batch's adapters take."""
        if batch.popularity == BASE:
            return 0
        return adapter_pages(self.shape, batch.adapters_work(self.shape).n_bytes, batch.rows)

    def offload(self, device_bytes: int, share: float = 1.0) -> Offload:
        return Offload(self.packed, self.digest, device_bytes, share)


@dataclass(frozen=True, slots=True)
class Context:
    """What a case is given beside its model. `said`: is called with what could not be measured, and why."""

    origin: Origin
    bar: Bar
    said: Callable[[str], None]


def executor_of(subject: Subject) -> OffloadExecutor:
    executor = subject.built.engine.executor
    assert isinstance(executor, OffloadExecutor)
    return executor
