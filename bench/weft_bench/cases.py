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


BENCHMARKS: Mapping[str, Benchmark] = {"push": Benchmark(Push, "stack")}
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
