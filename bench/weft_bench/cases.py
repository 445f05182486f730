"""The table of benchmarks: the options of each, the page of its figures, and the pages.

A row of `BENCHMARKS` is all that `weft bench` knows of a benchmark. Its module is `weft_bench.figures.NAME` with `-` as
`_`, unless the row names another, and has a function `figures(options, run)` that yields lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_bench.options import option

DOCS = Path("docs/benchmarks")
SHAPES = ("tiny", "small", "m135", "mid")
READABLE_SHAPES = SHAPES[1:]  # a client cannot tell the tokens of tiny apart
POPULARITIES = ("base", "Identical", "Distinct")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: the class of its options, its page, the metrics (patterns) that the page shows, its module."""

    options: type[Any]
    page: str
    shown: Sequence[str] = ("*",)
    module: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of figures: its title, and the metric of its picture."""

    title: str
    picture: str = ""


def models_folder() -> Any:
    """Describe `--models`."""
    return option(None, "folder of models and adapters; default: the user's cache")


def data_folder() -> Any:
    """Describe `--data`."""
    return option(None, "folder of the data sets; absent sets are skipped")


def random_seed() -> Any:
    """Describe `--seed`."""
    return option(0, "seed of everything that is drawn")


def quick_run() -> Any:
    """Describe `--quick`."""
    return option(False, "few rounds: shows that it works, not how fast")


def measure_again() -> Any:
    """Describe `--again`."""
    return option(False, "measure figures again that this machine has measured")


@dataclass(frozen=True, slots=True)
class Push:
    """From an adapter's bytes to its first token: upload, publish, ask, through a whole stack.

    Starts its own stack in a temporary folder and stops it again; two minutes.
    """

    model_shape: str = option("m135", "random model", READABLE_SHAPES)
    pushes: int = option(100, "contents that are published, after one that warms up", minimum=1)
    models: Path | None = models_folder()


# Simulated: scheduling, phases and planning, and the simulator beside live stacks.
S3_PARTS, S3_TRACES = ("queue", "reservations"), ("LMSYS", "ShareGPT", "Alpaca")
STACKS = ("quickstart", "m135")
SPLITWISE_PARTS = ("batching", "throughput", "plan")


def simulations() -> Any:
    """Describe `--jobs`."""
    return option(1, "simulations at a time", minimum=1)


@dataclass(frozen=True, slots=True)
class S3:
    """Scheduling with predicted output lengths (S3), simulated: queue policies, and reservations of memory.

    Lengths are those of public traces. A queue of 10,000 requests takes half a minute to three minutes of one idle
    core, and there are seven of each trace.
    """

    part: tuple[str, ...] = option(S3_PARTS, "what to measure", S3_PARTS)
    traces: tuple[str, ...] = option(S3_TRACES, "traces of lengths", S3_TRACES)
    loads: tuple[float, ...] = option((1.6, 1.3, 1.0), "of a queue, in multiples of what fcfs sustains", minimum=0.1)
    requests: int = option(10_000, "requests of each queue", minimum=100)
    jobs: int = simulations()
    quick: bool = quick_run()
    seed: int = random_seed()
    data: Path | None = data_folder()


@dataclass(frozen=True, slots=True)
class Slots:
    """Adapters and KV in one memory without a number of adapters, beside each of some numbers.

    Simulated with the step times of m135 that `weft bench fidelity` measured; ten minutes of one core.
    """

    quick: bool = quick_run()
    seed: int = random_seed()


@dataclass(frozen=True, slots=True)
class Splitwise:
    """Prompt and token phases apart (Splitwise), simulated: batching mechanisms, the paper's clusters, a plan.

    Uses splitwise-sim's published performance model. All of it takes a quarter of an hour of two cores.
    """

    part: tuple[str, ...] = option(SPLITWISE_PARTS, "what to measure", SPLITWISE_PARTS)
    seconds: float = option(120.0, "length of each drawn trace", minimum=5)
    jobs: int = simulations()
    seed: int = random_seed()
    data: Path | None = data_folder()


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The simulator's times beside those of the live CPU engine, for the same requests.

    Starts a stack for each model; two minutes to calibrate it and one for each load, on an otherwise idle machine.
    """

    stacks: tuple[str, ...] = option(STACKS, "models to serve", STACKS)
    loads: tuple[int, ...] = option((50, 80), "percent of the load that saturates the stack", minimum=1)
    runs: int = option(5, "live runs of each load", minimum=1)
    quick: bool = quick_run()
    seed: int = random_seed()
    models: Path | None = models_folder()


BENCHMARKS: Mapping[str, Benchmark] = {
    "push": Benchmark(Push, "stack"),
    "s3": Benchmark(
        S3, "scheduling", ("times lower than fcfs", "longest decile*", "pooled, of oracle", "calibrated, of*")
    ),
    "slots": Benchmark(Slots, "scheduling", ("no bound / best bound",)),
    "splitwise": Benchmark(Splitwise, "phases", ("machines", "took", "TBT p99", "TTFT p99")),
    "fidelity": Benchmark(Fidelity, "phases", ("TTFT p??, off by", "end to end p??, off by")),
}
PAGES: Mapping[str, Page] = {
    "engine-cpu": Page("The engine on CPUs"),
    "engine-gpu": Page("The engine on GPUs"),
    "peers": Page("Peers"),
    "stack": Page("The whole stack"),
    "scheduling": Page("Scheduling"),
    "phases": Page("Phases and planning"),
    "offload": Page("Offload"),
    "control-plane": Page("Control plane and operator"),
    "reliability": Page("Reliability"),
}
