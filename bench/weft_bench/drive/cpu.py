"""What every case of `weft bench cpu` gets: a model, an engine of it, the rates of the machine, lines and bounds."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from weft_bench.cases import Cpu
from weft_bench.cpu_machine import Machine
from weft_bench.cpu_shapes import RANK
from weft_bench.drive.engine import PROMPT_TOKENS, WEIGHT_BYTES, Batch, Model, Sizes, Subject, adapter_pages
from weft_bench.roofline import Work, lora_bytes
from weft_bench.run import Run
from weft_stage.cpu_models import base_model, cache_dir, files
from weft_stage.lines import Line, Origin


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is run. `QUICK` shows that everything works."""

    repetitions: int = 5
    rows: int = 16  # of the cases that have one batch size
    tokens: int = 64
    batches: tuple[int, ...] = (1, 8, 16, 32)
    prefills: tuple[int, ...] = (128, 512, 1024, 2048)
    crowds: tuple[int, ...] = (16, 64, 256)
    crowd_requests: int = 384


QUICK = Amounts(1, 4, 6, (1, 4), (32, 128), (16,), 24)


@dataclass(frozen=True, slots=True)
class Bench:
    """One model on this machine, under the options of the command line."""

    options: Cpu
    run: Run
    model: Model
    machine: Machine

    @property
    def amounts(self) -> Amounts:
        return QUICK if self.options.quick else Amounts()

    @property
    def label(self) -> str:
        """Return what names of cases say of unusual options."""
        threads = f" ({self.options.threads} threads)" if self.options.threads else ""
        return threads + (" (quick)" if self.options.quick else "")

    @property
    def usual(self) -> bool:
        """Return whether figures have targets."""
        return self.options.executor in ("auto", "cpu") and self.options.dtype == "bf16" and not self.label

    @property
    def mean_context(self) -> float:
        """Return the mean context of decode steps, in tokens."""
        return PROMPT_TOKENS + self.amounts.tokens / 2

    def subject(self, sizes: Sizes, dtype: str = "", adapter_bytes: float | None = None) -> Subject:
        """Make an engine with room for `adapter_bytes` of adapters; None: for one of the usual rank in each slot."""
        options, shape = self.options, self.model.shape
        n_bytes = sizes.slots * lora_bytes(shape, RANK) if adapter_bytes is None else adapter_bytes
        sizes = replace(
            sizes, executor=options.executor, dtype=dtype or options.dtype, threads=options.threads,
            adapter_pages=adapter_pages(shape, n_bytes, sizes.slots),
        )  # fmt: skip
        return Subject(files(base_model(self.options.models or cache_dir(), self.model.name, shape)), sizes)

    def on(self, subject: Subject, dtype: str = "") -> "Reporter":
        """Return what makes lines about this engine."""
        reference = subject.built.numerics_class.startswith("reference")
        dtype = "fp32" if reference else dtype or self.options.dtype
        label = " (reference)" if reference else "" if dtype == "bf16" else f" ({dtype})"
        origin = self.run.origin("safetensors")
        origin = replace(origin, versions=f"{origin.versions}, {subject.executor}, seed {self.options.seed}")
        return Reporter(self, f"{self.model.name}{label}{self.label}", dtype, origin, self.usual and not reference)

    def progress(self, case: str, length: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show progress of a case in `length` parts."""
        return self.run.progress(f"{self.model.name}: {case}", length)


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes lines about one engine. `who`: model, executor and options. Only lines of `usual` engines have targets."""

    bench: Bench
    who: str
    dtype: str
    origin: Origin
    usual: bool

    def line(
        self, case: str, metric: str, value: float | None, unit: str, *, baseline: float | None = None,
        bound_fraction: float | None = None, target: str | None = None,
    ) -> Line:  # fmt: skip
        """Make a line."""
        make = partial(self.origin.line, f"{self.who}, {case}", metric, value, unit)
        return make(baseline=baseline, bound_fraction=bound_fraction, target=target if self.usual else None)

    def step(self, case: str, metric: str, seconds: float, work: Work) -> Line:
        """Make a line of a time beside its bound, by the machine's rates for its working set."""
        bound_s = work.bound_s(self.bench.machine.rates(work.n_bytes))
        return self.line(case, metric, seconds * 1e3, "ms", baseline=bound_s * 1e3, bound_fraction=bound_s / seconds)

    def decode_work(self, batch: Batch) -> Work:
        """Return the work of a decode step at the mean context."""
        return batch.work(self.bench.model.shape, self.bench.mean_context, WEIGHT_BYTES[self.dtype])
