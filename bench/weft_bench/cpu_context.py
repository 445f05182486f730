"""What every case of `weft bench cpu` is given: a model, a machine, amounts, and where lines come from."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from weft_bench.cpu_decode import Batch, Model
from weft_bench.cpu_engine import PAGE_TOKENS, Sizes, Subject
from weft_bench.cpu_machine import Machine
from weft_bench.cpu_shapes import RANK
from weft_bench.gpu_amounts import SQUARE, Operator
from weft_bench.roofline import INT4_BYTES, Work, lora_bytes
from weft_stage.cpu_models import base_model, files
from weft_stage.lines import Line, Origin
from weft_stage.shapes import BF16_BYTES, Shape

WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": INT4_BYTES, "fp32": 4.0}
SPARE = 1.5  # packed adapters are padded, and one comes while another still holds its pages
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]  # label, length -> what is called per advance


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is run. `QUICK` shows that everything works; its figures are of little use."""

    repetitions: int = 5
    rows: int = 16  # of the cases that have one batch size
    tokens: int = 64
    batches: tuple[int, ...] = (1, 8, 16, 32)
    prefills: tuple[int, ...] = (128, 512, 1024, 2048)
    crowds: tuple[int, ...] = (16, 64, 256)
    crowd_requests: int = 384
    texts: int = 1000
    operator: Operator = SQUARE
    operator_ranks: tuple[int, ...] = (8, 16, 32, 64)
    contexts: tuple[int, ...] = (512, 2048)  # of one layer
    kv_contexts: tuple[int, ...] = (2048, 4096)


QUICK = Amounts(
    1, 4, 6, (1, 4), (32, 128), (16,), 24, 24, Operator("64 -> 64", 64, (64,), most_rows=4), (8,), contexts=(32,),
    kv_contexts=(128,),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line. `dtype`: of the cpu executor."""

    folder: Path
    executor: str = "auto"
    dtype: str = "bf16"
    threads: int = 0
    seed: int = 0
    data: Path | None = None
    amounts: Amounts = field(default_factory=Amounts)

    @property
    def label(self) -> str:
        """What case names say of unusual options; executor and dtype are told as they turned out."""
        return (f" ({self.threads} threads)" if self.threads else "") + (" (quick)" if self.amounts == QUICK else "")

    @property
    def usual(self) -> bool:
        """True where the figures are held against targets."""
        return self.executor in ("auto", "cpu") and self.dtype == "bf16" and not self.label


@dataclass(frozen=True, slots=True)
class Context:
    """One model on this machine. `said` hears what is skipped, and why."""

    options: Options
    model: Model
    origin: Origin
    machine: Machine
    bar: Bar
    said: Callable[[str], None]

    def subject(
        self,
        sizes: Sizes,
        dtype: str = "",
        adapter_bytes: float | None = None,
        others: Mapping[str, Path] = MappingProxyType({}),
    ) -> Subject:
        """Make an engine with this model, as the options want it, and with room for `adapter_bytes` of adapters.

        `adapter_bytes` None: its slots are all taken by adapters of the usual rank. `others`: more files of the model.
        """
        options, shape = self.options, self.model.shape
        n_bytes = sizes.slots * lora_bytes(shape, RANK) if adapter_bytes is None else adapter_bytes
        asked = replace(
            sizes, executor=options.executor, dtype=dtype or options.dtype, threads=options.threads,
            adapter_pages=adapter_pages(shape, n_bytes, sizes.slots),
        )  # fmt: skip
        base = base_model(options.folder, self.model.name, self.model.shape)
        return Subject({**files(base), **others}, asked)

    def on(self, subject: Subject, dtype: str = "") -> "Reporter":
        """Return what makes lines about this subject."""
        reference = subject.built.numerics_class.startswith("reference")
        dtype = "fp32" if reference else dtype or self.options.dtype
        label = " (reference)" if reference else "" if dtype == "bf16" else f" ({dtype})"
        versions = f"{self.origin.versions}, {subject.executor}, seed {self.options.seed}"
        who = f"{self.model.name}{label}{self.options.label}"
        return Reporter(self, who, dtype, replace(self.origin, versions=versions), self.options.usual and not reference)


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes lines about one engine: `who` names model, executor and options. Only `usual` ones have targets."""

    context: Context
    who: str
    dtype: str
    origin: Origin
    usual: bool

    @property
    def weight_bytes(self) -> float:
        return WEIGHT_BYTES[self.dtype]

    def line(
        self, case: str, metric: str, value: float | None, unit: str, *, baseline: float | None = None,
        bound_fraction: float | None = None, target: str | None = None,
    ) -> Line:  # fmt: skip
        target = target if self.usual else None
        return self.origin.line(
            f"{self.who}, {case}", metric, value, unit, baseline=baseline, bound_fraction=bound_fraction, target=target
        )

    def bound_s(self, work: Work) -> float:
        """Return the bound of this work, with the machine's rates for its working set."""
        return work.bound_s(self.context.machine.rates(work.n_bytes))

    def step(self, case: str, metric: str, seconds: float, work: Work) -> Line:
        """Make a line of a time beside its bound."""
        bound_s = self.bound_s(work)
        return self.line(case, metric, seconds * 1e3, "ms", baseline=bound_s * 1e3, bound_fraction=bound_s / seconds)

    def decode_work(self, batch: Batch, context_tokens: float) -> Work:
        return batch.work(self.context.model.shape, context_tokens, self.weight_bytes)


def adapter_pages(shape: Shape, n_bytes: float, adapters: int) -> int:
    """Return the KV pages that adapters of `n_bytes` in all take, those included that are on their way in or out."""
    page_bytes = 2 * BF16_BYTES * shape.layers * shape.kv * PAGE_TOKENS
    return math.ceil(SPARE * n_bytes / page_bytes) + 2 * adapters
