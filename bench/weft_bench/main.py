"""`weft bench ...`: measure, render, check."""

import signal
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from inspect import cleandoc
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from weft.process import CannotStart
from weft_bench.cases import BENCHMARKS, Benchmark
from weft_bench.command import run, single
from weft_bench.render import page
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, append, missed, newest, read

app = typer.Typer(no_args_is_help=True, help="Benchmarks: each writes raw lines and a page under docs/benchmarks/.")

Folder = Annotated[
    Path | None, typer.Option(help="An empty folder for data and logs, which stay; default: a temporary one.")
]
Docs = Annotated[Path, typer.Option("--docs", help="Where pages and raw lines are kept.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets; absent ones are skipped.")]
Models = Annotated[Path | None, typer.Option("--models", help="Where models are kept; default: the user's cache.")]
SHAPE_NAMES = ("tiny", "small", "m135", "mid")
DEFAULT_DOCS = Path("docs/benchmarks")


@app.command()
def turns(
    old: Annotated[Path, typer.Option(help="The checkout to compare with: a folder with this repository's tree.")],
    new: Annotated[Path, typer.Option(help="The checkout that is compared.")] = Path(),
    cases: Annotated[
        str, typer.Option(help="Cases, with commas: decode, prefill, reports, decisions, path, request, refused.")
    ] = "decode,prefill",
    shapes: Annotated[
        str, typer.Option(help="Models of decode, prefill: tiny, small, m135, mid; with commas.")
    ] = "m135",
    rows: Annotated[str, typer.Option(help="Sequences of decode and prefill, with commas.")] = "1,16",
    adapters: Annotated[
        str, typer.Option(help="Their adapters: base, Identical, Uniform, Skewed, Distinct; with commas.")
    ] = "base",
    dtype: Annotated[str, typer.Option(help="bf16, fp32, int8 or int4 (weights), as the runner's flag.")] = "bf16",
    level: Annotated[str, typer.Option(help="Kernels: amx_bf16, avx512, avx2; default: the best.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads of the engine; 0: as a runner chooses.")] = 0,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each case, after one that warms up.")] = 20,
    target_percent: Annotated[
        float | None, typer.Option(min=0.1, help="More rounds of a case until its CPU interval is +-PERCENT.")
    ] = None,
    max_rounds: Annotated[int, typer.Option(min=0, help="Most rounds of a case; 0: 10 times --rounds.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    models: Models = None,
) -> None:
    """Two checkouts measured in turn: the ratio new / old of CPU and wall time, with its 95 % interval.

    Each checkout has a worker process, which is stopped while the other one runs. A round measures every case on both
    sides and gives one ratio; the order of the sides alternates. The table has the geometric mean of the ratios with
    its interval, and the median time of a unit: a decode step of all rows, a prefill of all rows (prompts of 128
    tokens), a report, a placement, a request.

    How to read it: an interval that holds 1 shows no difference. 0.95 [0.93, 0.97] in the column CPU: new takes 3 to
    7 % less. Measure a checkout against itself first: the interval is what this machine can tell, and --target-percent
    says how many rounds it needs. CPU of decode and prefill is the engine's process; of request and refused, the
    gateway's. reports, decisions and path are the cores alone, without network.

    Kernels of a checkout are built at its first run, models are made at first use.

    Example: git worktree add ../old HEAD~1; weft bench turns --old ../old --adapters base,Distinct --target-percent 2
    """
    from weft_bench import turns as bench
    from weft_stage.cpu_models import cache_dir

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stopped worker must not outlive this process
    wanted, counts = among("cases", cases, bench.CASES), _numbers("rows", rows)
    chosen, kinds = among("shapes", shapes, SHAPE_NAMES), among("adapters", adapters, bench.ADAPTERS)
    options = bench.Options(
        models or cache_dir(), dtype, level, threads, seed, rounds, target_percent,
        max(rounds, max_rounds or 10 * rounds),
    )  # fmt: skip
    results = list[bench.Result]()
    with failures_told():
        made = bench.cases_of(wanted, chosen, counts, kinds, options.models)
        with progress("turns", len(made) * rounds) as advance:
            for result in bench.measure(old, new, made, options, complain, advance):
                typer.echo("\n" * sys.stderr.isatty() + ("" if results else f"{bench.HEADER}\n") + result.row())
                results.append(result)
        for result in results:
            typer.echo(result.verdict(options))


def _numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers from 1 on, separated by commas. Raises typer.BadParameter."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--{option} {text!r}: numbers separated by commas") from error
    if min(found) < 1:
        raise typer.BadParameter(f"--{option} {text!r}: numbers from 1 on")
    return found


@app.command()
def fidelity(
    part: Annotated[str, typer.Option(help="Parts, with commas: live, silicon, vllm, adapters.")] = "live",
    models_: Annotated[
        str, typer.Option("--of", help="For live: quickstart, m135, 'm135 Unified', 'm135 Split' (two runners).")
    ] = "quickstart,m135,m135 Unified,m135 Split",
    loads: Annotated[str, typer.Option(help="Percent of the saturating load: 25, 50, 80.")] = "25,50,80",
    runs: Annotated[int, typer.Option(min=1, help="Live runs of each load.")] = 5,
    again: Annotated[bool, typer.Option("--again", help="Also live cells that are there.")] = False,
    minutes: Annotated[float, typer.Option(help="Minutes after which no live cell begins.")] = 1e6,
    quick: Annotated[bool, typer.Option("--quick", help="Two short runs: shows that it works, not how well.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, prompts and lengths.")] = 0,
    fit: Annotated[
        Path | None, typer.Option(help="For silicon, for adapters: write the constants, fitted on all of it, here.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="For adapters: simulations at a time.")] = 2,
    every: Annotated[int, typer.Option(min=1, help="For adapters: simulate one run in EVERY.")] = 1,
    models: Models = None,
    data: Data = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Simulated beside measured. live: the simulator beside the live CPU engine, at 25, 50 and 80 % of saturation.

    live starts stacks of its own, one for each model; two minutes to calibrate and one for each load, on an otherwise
    idle machine. A cell that is there is not measured again.
    The others need --data and no quiet machine. silicon: performance models beside published points of H100 and H200,
    fitted on others; two minutes. vllm: requests through real vLLM and through the engine simulation; ten seconds.
    adapters: hours of real vLLM with 8 to 384 adapters, simulated; about 20 minutes of a core.
    """
    from weft_bench import fidelity as bench
    from weft_bench import fidelity_parts
    from weft_stage.cpu_models import cache_dir
    from weft_stage.machine import origin

    names = among("of", models_, bench.MODELS)
    shares = [int(share) for share in among("loads", loads, [str(load) for load in bench.LOADS])]
    amounts = bench.QUICK if quick else bench.Amounts(runs=runs)
    parts = among("part", part, ("live", *fidelity_parts.PARTS))
    with failures_told():
        lines = fidelity_parts.figures(
            origin("scipy"), [name for name in parts if name != "live"], data, fit, every, jobs, progress
        )
        if "live" in parts:
            raw, of = docs / "raw" / "fidelity.jsonl", origin("tokenizers")
            there = newest(read(raw)) if raw.exists() and not again else []
            known = [line for line in there if line.machine == of.machine]
            wanted = bench.Measurement(amounts, seed, known, time.monotonic() + 60 * minutes)
            live = bench.figures(of, names, shares, wanted, models or cache_dir(), progress)
            lines = chain(live, lines)
        keep("fidelity", fidelity_parts.ABOUT, lines, docs)


@app.command()
def s3(
    part: Annotated[str, typer.Option(help="What to measure; default: every part. Separated by commas.")] = "",
    traces: Annotated[str, typer.Option(help="LMSYS, ShareGPT, Alpaca; separated by commas.")] = "",
    loads: Annotated[str, typer.Option(help="For queues: 1.6, 1.3, 1; separated by commas.")] = "1.6,1.3,1",
    data: Data = None,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = 1,
    requests: Annotated[int, typer.Option(min=100, help="Requests of each queue.")] = 10_000,
    quick: Annotated[bool, typer.Option("--quick", help="Few requests: shows that it works, not how well.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also live cells that are there.")] = False,
    minutes: Annotated[float, typer.Option(help="Minutes after which no live cell begins.")] = 1e6,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, and of which rows are served.")] = 0,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Scheduling with speculated output lengths (S3): queue policies, reservations, fairness, the paper's settings.

    Simulated on described hardware, but for `live`, `penalty`, `fairness-live` and `consolidation-live`, which start
    stacks of their own and want an otherwise idle machine: `live` takes five minutes for each trace and load, the
    others four to eight minutes, `consolidation-live` twenty a cell; a cell of theirs that is there is not measured
    again. A queue of 10,000 requests takes half a minute to three minutes of one idle core, and there are ten of each
    trace; lines are kept as they are measured.
    """
    from weft_bench import s3 as bench
    from weft_bench.s3_lengths import TRACES
    from weft_stage.machine import origin

    parts, pictures = among("part", part or ",".join(bench.PARTS), bench.PARTS), docs / "pictures" / "s3"
    names = among("traces", traces or ",".join(TRACES), TRACES)
    shares = [float(load) for load in among("loads", loads, [f"{load:g}" for load in bench.LOADS])]
    raw, of = docs / "raw" / "s3.jsonl", origin("scipy")
    there = newest(read(raw)) if raw.exists() and not again else []
    known = {(line.case, line.metric): line.value for line in there if line.machine == of.machine}
    context = bench.Context(
        of, data, names, shares, pictures, seed, quick, requests, jobs, progress, complain, known,
        time.monotonic() + 60 * minutes,
    )  # fmt: skip
    with failures_told():
        keep("s3", lambda: bench.about(pictures, docs), bench.figures(context, parts), docs)


@app.command()
def splitwise(
    part: Annotated[str, typer.Option(help="compat, batching, budget, throughput, plan; default: all.")] = "",
    data: Data = None,
    seconds: Annotated[float, typer.Option(min=5, help="Length of each drawn trace.")] = 120,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Also figures that are there.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and lengths.")] = 0,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Prompt and token phases apart (Splitwise): its simulator's runs, batching mechanisms, the paper's comparisons.

    Simulated in planning mode, with splitwise-sim's published performance model. Figures are kept as they are found:
    after an interruption the same command goes on. All of it takes a quarter of an hour of two cores.
    """
    from weft_bench import splitwise as bench
    from weft_stage.machine import origin

    parts, raw, of = (
        among("part", part or ",".join(bench.PARTS), bench.PARTS),
        docs / "raw" / "splitwise.jsonl",
        origin(),
    )
    there = newest(read(raw)) if raw.exists() and not again else []
    known = {(line.case, line.metric): line.value for line in there if line.machine == of.machine}
    context = bench.SplitwiseContext(of, data, seconds, seed, jobs, progress, known)
    with failures_told():
        keep("splitwise", lambda: bench.about(docs), bench.figures(context, parts, complain), docs)


@app.command()
def slots(
    part: Annotated[str, typer.Option(help="Parts, separated by commas: grid, live.")] = "grid",
    quick: Annotated[bool, typer.Option("--quick", help="Few requests: shows that it works, not how well.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also runs that are there: the newest of each counts.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and adapters.")] = 0,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Adapters and KV in one memory without a number of slots, against the best number for each load.

    Simulated with the step times that `weft bench fidelity` measured here. A run is kept once it is over: after an
    interruption the same command goes on with those that are missing. All of it takes about ten minutes of one core.
    `live` starts stacks, for five more.
    """
    from weft_bench import slots as bench
    from weft_bench import slots_live
    from weft_stage.cpu_models import cache_dir
    from weft_stage.machine import origin

    parts = among("part", part, ("grid", "live"))
    raw, pictures = docs / "raw" / "slots.jsonl", docs / "pictures"

    def about() -> str:
        return f"{bench.about(read(raw), pictures / 'slots.svg', docs)}\n\n{slots_live.about()}"

    with failures_told():
        known, of, lines = read(raw) if raw.exists() and not again else [], origin(), list[Iterable[Line]]()
        if "grid" in parts:
            machine = bench.engine_of(docs / "raw" / "fidelity.jsonl")
            lines.append(bench.figures(of, machine, known, seed=seed, quick=quick, bar=progress))
        if "live" in parts:
            lines.append(slots_live.figures(of, cache_dir(), known, seed=seed, quick=quick, bar=progress))
        keep("slots", about, chain.from_iterable(lines), docs)


def _add(name: str, benchmark: Benchmark) -> None:
    """Add a row of the table of benchmarks. It parses its own options."""
    words = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=cleandoc(benchmark.options.__doc__ or ""), add_help_option=False, context_settings=words)
    def _command(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
        raise typer.Exit(run(name, context.args))


for _name, _benchmark in BENCHMARKS.items():
    _add(_name, _benchmark)


@app.command()
def check(docs: Docs = DEFAULT_DOCS) -> None:
    """List every target that the newest figures miss (unmeasured ones too); exit 1 if there is one."""
    failures = [(raw.stem, line) for raw in sorted((docs / "raw").glob("*.jsonl")) for line in missed(read(raw))]
    for name, line in failures:
        value = "not measured" if line.value is None else f"{line.value:.4g} {line.unit}"
        typer.echo(
            f"{name}: {line.case}, {line.metric}: {value}, target {line.target} ({line.machine}, {line.date[:10]})"
        )
    if failures:
        raise typer.Exit(1)
    typer.echo("every target that was set is met")


def shape_lines(shape: str, models: Path | None, streams: int, repetitions: int, seed: int) -> list[Line]:
    """Measure what `weft bench path --model-shape` shows."""
    from weft_bench.path_shape import measure
    from weft_stage.cpu_models import cache_dir
    from weft_stage.machine import origin

    return measure(shape, models or cache_dir(), streams, repetitions, seed, origin("tokenizers"))


def keep(
    name: str,
    about: str | Callable[[], str],
    lines: Iterable[Line],
    docs: Path,
    render: Callable[[str, str, Iterable[Line]], str] = page,
) -> None:
    """Append the lines as they are measured, write the page anew, show it: also of a run that fails half-way.

    `about`: what the page says first, or what returns that once the lines are there.
    """
    raw = docs / "raw" / f"{name}.jsonl"
    try:
        for line in lines:
            append(raw, [line])
    finally:
        if raw.exists():
            text = render(name, about() if callable(about) else about, read(raw))
            (docs / f"{name}.md").write_text(text, encoding="utf-8")
            typer.echo(text)


def among(option: str, text: str, known: Collection[str]) -> list[str]:
    """Parse a list separated by commas, each word known, none twice. Raises typer.BadParameter."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise typer.BadParameter(f"--{option} {text!r}: choose among {', '.join(known)}")
    return words


def complain(text: str) -> None:
    """Say on standard error what is skipped."""
    typer.echo(text, err=True)


@contextmanager
def progress(label: str, length: int) -> Generator[Callable[[int], None]]:
    """Show a bar on a terminal's standard error, else a line when it begins; call what it gives with each advance."""
    with typer.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update


@contextmanager
def failures_told() -> Generator[None]:
    """Tell in a line each what stops a benchmark; exit code 1."""
    failures: list[BaseException] = []
    try:
        yield
    except* (BenchFailed, CannotStart) as group:
        failures += single(group)
    for failure in failures:
        typer.echo(f"error: {failure}", err=True)
    if failures:
        raise typer.Exit(1)
