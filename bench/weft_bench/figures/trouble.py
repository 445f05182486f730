"""Benchmarks that assert, on stacks of their own: faults, a soak, crowds of clients, histories, side channels."""

import asyncio
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench.cases import Clients, Faults, Histories, SideChannels, Soak
from weft_bench.run import Run
from weft_stage.errors import BadOption, BenchFailed
from weft_stage.lines import Line
from weft_trouble import through_clients, through_faults, through_histories, through_side_channels, through_soak
from weft_trouble.faults import Run as Strike
from weft_trouble.faults import chosen, lines, listing, told


def faults(options: Faults, run: Run) -> Iterator[Line]:
    """Strike each chosen cell `repeat` times. Runs before one that fails count. Raises StackFailed."""
    if not (cells := chosen(options.only)):
        remedy = "`weft bench faults --cells` lists them"
        raise BadOption("--only", "names of cells", ",".join(options.only), remedy)
    if options.cells:
        run.say("\n".join(listing(cells)))
        return
    runs = [(cell, number) for number in range(1, options.repeat + 1) for cell in cells]
    strikes, failure = list[Strike](), None

    def keep(strike: Strike) -> None:
        strikes.append(strike)
        run.say(f"{len(strikes)} of {len(runs)}: {told(strike)}")

    with _folder(options.folder) as folder:
        try:
            asyncio.run(through_faults.measure(runs, folder, options.seed, keep, run.say))
        except BenchFailed as error:
            failure = error
    yield from lines(run.origin(), strikes, "" if options.only == ("*",) else ",".join(options.only))
    if failure:
        raise failure


def soak(options: Soak, run: Run) -> Iterable[Line]:
    """Do everything at once for some time. Raises StackFailed."""
    if options.warm_minutes >= options.minutes:
        raise BadOption("--warm-minutes", f"less than --minutes {options.minutes:g}", f"{options.warm_minutes:g}")
    with _folder(options.folder) as folder, run.progress("soak, seconds", round(60 * options.minutes)) as advance:
        measured = through_soak.measure(
            folder, run.origin(), options.seed, minutes=options.minutes, warm_minutes=options.warm_minutes,
            advance=advance, say=run.say,
        )  # fmt: skip
        return asyncio.run(measured)


def clients(options: Clients, run: Run) -> Iterable[Line]:
    """Measure what others notice of each crowd. Raises StackFailed, RequestFailed."""
    return asyncio.run(through_clients.measure(options.only, options.repeat, options.seed, run.origin(), run.say))


def histories(options: Histories, run: Run) -> Iterable[Line]:
    """Record what many clients do and see, then check it. Raises StackFailed."""
    with _folder(options.folder) as folder:
        measured = through_histories.measure(
            folder, run.origin(), options.seed, minutes=options.minutes, say=run.say
        )  # fmt: skip
        return asyncio.run(measured)[0]


def side_channels(options: SideChannels, run: Run) -> Iterable[Line]:
    """Time requests of both kinds of each secret. Raises StackFailed."""
    return asyncio.run(through_side_channels.measure(options.requests, options.seed, run.origin(), run.say))


@contextmanager
def _folder(given: Path | None) -> Generator[Path]:
    """Yield the folder of data and logs: the given one, which stays, or a temporary one."""
    if given is not None:
        yield given
        return
    with TemporaryDirectory(prefix="weft-bench-") as folder:
        yield Path(folder)
