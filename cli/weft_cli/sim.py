"""The command `weft sim`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft_cli.errors import BadInput
from weft_cli.output import say
from weft_sim import report, simulate
from weft_sim.timeline import Timeline
from weft_sim.traces import TraceError, read


def run(
    trace: Path | None,
    pool: Path | None,
    changes: Sequence[str],
    *,
    speed: float,
    seed: int,
    timeline: Path | None,
    example: bool,
) -> None:
    """Run a trace on a pool that is described. Raises BadInput."""
    if example:
        say(simulate.example())
        return
    if trace is None:
        raise BadInput("which trace?", "weft sim TRACE --pool POOL.toml; more with --help")
    try:
        described, arrivals = simulate.pool_of(pool, changes), read(trace)
    except (simulate.BadPool, TraceError) as error:
        raise BadInput(str(error), "weft sim --help") from error
    drawn = Timeline() if timeline is not None else None
    result = simulate.simulate(
        described, [replace(arrival, at_s=arrival.at_s / speed) for arrival in arrivals], seed, timeline=drawn, tbt=True
    )
    for line in report.lines(result.figures):
        say(line)
    if drawn is not None and timeline is not None:
        drawn.write(timeline)
