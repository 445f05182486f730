"""`weft bench ...`: the table of benchmarks as commands, and `check`."""

from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer

from weft_bench.cases import BENCHMARKS, DOCS, Benchmark
from weft_bench.command import run
from weft_stage.lines import missed, read, told

app = typer.Typer(no_args_is_help=True, help="Benchmarks: each keeps its figures and a page under docs/benchmarks/.")


def _add(name: str, benchmark: Benchmark) -> None:
    """Add a row of the table of benchmarks. It parses its own options."""
    words = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=cleandoc(benchmark.options.__doc__ or ""), add_help_option=False, context_settings=words)
    def _command(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
        raise typer.Exit(run(name, context.args))


for _name, _benchmark in BENCHMARKS.items():
    _add(_name, _benchmark)


@app.command()
def check(docs: Annotated[Path, typer.Option("--docs", help="Where pages and raw lines are kept.")] = DOCS) -> None:
    """List every target that the newest figures miss (unmeasured ones too); exit 1 if there is one."""
    raws = sorted((docs / "raw").glob("*.jsonl"))
    if not raws:
        raise typer.BadParameter(f"expected a folder with raw lines, got {docs}; run it in a checkout, or give --docs")
    lines = [(raw.stem, line) for raw in raws for line in missed(read(raw))]
    for name, line in lines:
        typer.echo(f"{name}: {told(line)} ({line.machine}, {line.date[:10]})")
    if lines:
        raise typer.Exit(1)
    typer.echo("every target that was set is met")
