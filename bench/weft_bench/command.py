"""One run of one benchmark: parse its options, keep its lines as they come, write its page."""

import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

from weft.process import CannotStart
from weft_bench.cases import BENCHMARKS, DOCS
from weft_bench.options import parse
from weft_bench.page import write_page
from weft_bench.run import Run
from weft_stage.errors import BenchFailed


def main(words: Sequence[str]) -> int:
    """Run `NAME [OPTIONS]`. Returns the exit code: 0, 1 if the benchmark failed, 2 for an unknown name."""
    name = words[0] if words else ""
    if name not in BENCHMARKS:
        print(f"usage: weft bench NAME [OPTIONS]; NAME is one of: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 0 if name in ("--help", "-h") else 2
    return run(name, words[1:])


def run(name: str, words: Sequence[str]) -> int:
    """Run a benchmark. Its lines and its page are kept, also of a run that fails half-way."""
    row = BENCHMARKS[name]
    options, docs = parse(name, row.options, words, DOCS)
    module, _, function = (row.function or f"weft_bench.figures.{name.replace('-', '_')}:figures").partition(":")
    figures = getattr(import_module(module), function)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stack or a peer must not outlive this process
    this = Run(name, docs)
    failures = list[BaseException]()
    try:
        lines = figures(options, this)
        for line in lines or ():
            this.keep(line)
        if lines is not None and not this.lines:
            raise BenchFailed("nothing was measured: every case was skipped, for the reasons above")
    except* (BenchFailed, CannotStart) as group:
        failures += single(group)
    finally:
        if this.lines:
            this.compact()
            print(f"page: {write_page(docs, row.page)}", file=sys.stderr)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def single(error: BaseException) -> Iterator[BaseException]:
    """Return the exceptions in a group, and in groups in it."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from single(inner)
    else:
        yield error
