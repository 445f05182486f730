"""The table of benchmarks: the options of each, the page of its figures, and the pages.

A row of `BENCHMARKS` is all that `weft bench` knows of a benchmark. Its lines come from the function
`figures(options, run)` of `weft_bench.figures.NAME`, unless the row names another as `module:function`.
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
CROWDS = (  # as `weft_trouble.crowds` names them
    "idle", "slow heads", "slow bodies", "stopped readers", "flood", "small requests", "large bodies", "long prompts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: the class of its options, its page, the metrics (patterns) that the page shows, its function."""

    options: type[Any]
    page: str
    shown: Sequence[str] = ("*",)
    function: str = ""


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


# ---------------------------------------------------------------- reliability: benchmarks that assert


def data_and_logs() -> Any:
    """Describe `--folder`."""
    return option(None, "an empty folder for data and logs, which stay; default: a temporary one")


@dataclass(frozen=True, slots=True)
class Faults:
    """Processes killed and stopped, links cut and stalled, while streams run: tokens lost, repeated, wrong.

    Starts its own stacks on free ports. A run takes 5 to 30 s; its counts do not depend on how busy the machine is.
    """

    only: tuple[str, ...] = option(("*",), "cells by name, as patterns: 'kill runner *,* prefill'")
    cells: bool = option(False, "list the cells and end")
    repeat: int = option(3, "runs of each cell", minimum=1)
    seed: int = random_seed()
    folder: Path | None = data_and_logs()


@dataclass(frozen=True, slots=True)
class Soak:
    """Everything at once for hours: memory, descriptors and threads of each process; answers stay right.

    Starts its own stack on free ports. Slopes do not depend on how busy the machine is; how much is done does.
    """

    minutes: float = option(75.0, "minutes that it takes", minimum=0.1)
    warm_minutes: float = option(15.0, "minutes before slopes are taken", minimum=0)
    seed: int = random_seed()
    folder: Path | None = data_and_logs()


@dataclass(frozen=True, slots=True)
class Clients:
    """Crowds of idle, slow, stopped and flooding clients: what others notice, and the gateway's memory.

    Starts its own stack on free ports; 17 minutes. Needs 10,000 free descriptors and two cores with nothing else on.
    """

    only: tuple[str, ...] = option(CROWDS, "crowds", CROWDS)
    repeat: int = option(3, "rounds without and beside each crowd", minimum=1)
    seed: int = random_seed()


@dataclass(frozen=True, slots=True)
class Histories:
    """Many clients publish, delete, ask, make and revoke keys; what each saw is recorded and checked.

    Starts its own stack on free ports. Its counts do not depend on how busy the machine is.
    """

    minutes: float = option(10.0, "minutes that it takes", minimum=0.1)
    seed: int = random_seed()
    folder: Path | None = data_and_logs()


@dataclass(frozen=True, slots=True)
class SideChannels:
    """What a tenant can learn from the time of its own requests: others' prompts, models, keys, load.

    Starts its own stack on free ports. Both kinds of requests are sent in turn, on a busy machine too.
    """

    requests: int = option(400, "requests of each kind", minimum=10)
    seed: int = random_seed()


# ---------------------------------------------------------------- the engine alone


CPU_CASES = ("decode", "retention", "batch1", "prefill", "whole", "int8", "int4", "loading", "slots")
CPU_OTHER_CASES = ("kv", "swap", "operator")
CPU_SHOWN = (
    "kept of what the bound allows", "whole run", "bf16 step / *", "decode step p50, a* / *", "first token, from *",
    "attention of all keys *", "read bandwidth",
)  # fmt: skip
GPU_CASES = {"exact": 60, "steps": 110, "streams": 190, "stack": 100, "operator": 25, "offload": 60}  # shares of time
GPU_MODELS = ("8B", "1B")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU engine alone: decode, prefill, what adapters cost, many adapters over few slots.

    kv: attention over long contexts. swap: KV to host memory and back, and prefixes read from there. operator: LoRA
    alone, beside torch with a loop or gathered batched products (Punica). Random models are made on first use (mid:
    1.6 GB). The default cases take about an hour; `--quick --shapes tiny --cases decode` takes seconds.
    """

    shapes: tuple[str, ...] = option(SHAPES, "random models", SHAPES)
    cases: tuple[str, ...] = option(CPU_CASES, "cases", (*CPU_CASES, *CPU_OTHER_CASES))
    quick: bool = quick_run()
    executor: str = option("auto", "the runner's executor", ("auto", "cpu", "reference"))
    dtype: str = option("bf16", "weights, as the runner's flag", ("bf16", "fp32", "int8", "int4"))
    threads: int = option(0, "threads of the engine; 0: the runner chooses", minimum=0)
    seed: int = random_seed()
    models: Path | None = models_folder()


@dataclass(frozen=True, slots=True)
class Gpu:
    """The engine on this machine's GPU, beside what the GPU was measured to give; `make gpu-bench`.

    Needs torch, triton, numpy, safetensors and psutil; the case exact transformers and peft, the case stack what `weft
    up` needs. Exit code 2: a package is missing, 3: there is no GPU. A case that breaks off costs itself alone, unless
    the device is lost with it. `make gpu-check` shows that results are right. TRITON_INTERPRET=1 runs tiny cases on a
    CPU: it shows that they work.
    """

    cases: tuple[str, ...] = option(tuple(GPU_CASES), "cases, in this order", tuple(GPU_CASES))
    model: str | None = option(None, "model of all cases; default: 8B, over HTTP 1B", GPU_MODELS)
    budget_s: float = option(540.0, "seconds of all cases", minimum=1)


# ---------------------------------------------------------------- the table

TROUBLE = "weft_bench.figures.trouble"
BENCHMARKS: Mapping[str, Benchmark] = {
    "push": Benchmark(Push, "stack"),
    "faults": Benchmark(Faults, "reliability", ("streams struck", "tokens lost*", "longest gap"), f"{TROUBLE}:faults"),
    "soak": Benchmark(Soak, "reliability", ("resident, slope", "minutes", "wrong", "runners*"), f"{TROUBLE}:soak"),
    "clients": Benchmark(Clients, "reliability", ("others' first token p99", "gateway*"), f"{TROUBLE}:clients"),
    "histories": Benchmark(Histories, "reliability", function=f"{TROUBLE}:histories"),
    "side-channels": Benchmark(SideChannels, "reliability", ("AUC",), f"{TROUBLE}:side_channels"),
    "cpu": Benchmark(Cpu, "engine-cpu", CPU_SHOWN),
    "gpu": Benchmark(Gpu, "engine-gpu", ("output tokens, steady", "of the bandwidth", "largest error of a row / *")),
}
PAGES: Mapping[str, Page] = {
    "engine-cpu": Page("The engine on CPUs", "kept of what the bound allows"),
    "engine-gpu": Page("The engine on GPUs", "output tokens, steady"),
    "peers": Page("Peers"),
    "stack": Page("The whole stack"),
    "scheduling": Page("Scheduling"),
    "phases": Page("Phases and planning"),
    "offload": Page("Offload"),
    "control-plane": Page("Control plane and operator"),
    "reliability": Page("Reliability"),
}
