"""Run cells of `weft bench faults` on a stack of our own."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from weft_bench.errors import StackFailed
from weft_bench.fault_stage import LATE, Moment, Stage, stage
from weft_bench.fault_streams import Difference, Streams, difference
from weft_bench.faults import LEAST_STREAMS, PROMPT_RUNNER, TOKEN_RUNNER, Cell, Run

LASTS_S, EVERY_S = 10.0, 2.0  # of a stop or stall; between two requests meanwhile
BETWEEN_RUNNERS_S = 14.0  # longer than a runner waits for the other one
ATTEMPTS = 5  # rounds in which the moment to strike may come
Aim = Callable[[Stage, Streams], Awaitable[Moment | None]]
AIMS: Mapping[str, Aim] = {
    "decode": Stage.in_decode,
    "prefill": Stage.in_prefill,
    "loading": Stage.in_loading,
    "swapping": Stage.in_swapping,
}


async def measure(
    runs: Sequence[tuple[Cell, int]], folder: Path, seed: int, keep: Callable[[Run], None], say: Callable[[str], None]
) -> None:
    """Each run in turn; `keep` gets it when it is over. Raises StackFailed."""
    for stack, split, kv_links in (("unified", False, False), ("split", True, False), ("linked", True, True)):
        wanted = [(c, number) for c, number in runs if (c.split, c.between_runners) == (split, kv_links)]
        if not wanted:
            continue
        cold = ATTEMPTS * sum(cell.phase == "loading" for cell, _ in wanted)
        say("recording the answers of an undisturbed run")
        async with stage(folder / stack, seed, cold, split=split, kv_links=kv_links) as made:
            for cell, number in wanted:
                keep(await _run(made, cell, number, say))


async def _run(made: Stage, cell: Cell, number: int, say: Callable[[str], None]) -> Run:
    for attempt in range(ATTEMPTS):
        name = f"{str(cell).replace(' ', '-')}-{number}-{attempt}"
        with made.no_trouble():
            run = await _attempt(made, cell, number, name, say)
        if run is not None:
            return run
    raise StackFailed(f"{cell}: no moment to strike in {ATTEMPTS} rounds")


async def _attempt(made: Stage, cell: Cell, number: int, name: str, say: Callable[[str], None]) -> Run | None:
    """None: the moment did not come."""
    killed, struck_at = None, 0.0
    async with Streams(made.url, name) as streams:
        moment = await (made.in_transfer(streams, cell.share) if cell.split else AIMS[cell.phase](made, streams))
        running = sum(not stream.ended for stream in streams.all)
        if moment is not None and running < LEAST_STREAMS:
            moment.release()
            moment = None
        if moment is not None:
            struck_at = time.perf_counter()
            killed = await _strike(made, cell, moment, streams)
    over_at = time.perf_counter()
    await made.healthy(streams, killed)
    if moment is None:
        return None
    total = Difference()
    for stream in streams.all:
        found = difference(made.expected(stream.ask), stream.tokens, failed=bool(stream.error))
        if found != Difference() or stream.error:
            say(f"{cell}: {stream.request_id}: {found} {stream.error}")
        total += found
    gaps_s = tuple(stream.gap_s(struck_at) for stream in streams.all if (stream.ended or 0.0) > struck_at)
    failed = sum(bool(stream.error) for stream in streams.all)
    return Run(cell, number, running, total, failed, gaps_s, time.perf_counter() - over_at)


async def _strike(made: Stage, cell: Cell, moment: Moment, streams: Streams) -> int | None:
    """The fault from its beginning to its end, and requests meanwhile. Returns the process that was killed."""
    component = {"runner": moment.runner, PROMPT_RUNNER: moment.runner, TOKEN_RUNNER: moment.token_runner}.get(
        cell.target, cell.target
    )
    addresses = made.kv_peers if cell.between_runners else [made.peer(component)]
    if cell.is_link and not any(map(made.links.count, addresses)):
        raise StackFailed(f"{cell}: no connection passes through it")
    pid = None if cell.between_runners else made.stack.pid(component)
    late, lasts_s = iter(made.late), BETWEEN_RUNNERS_S if cell.between_runners else LASTS_S
    with _lasting(made, cell, addresses, pid):
        if cell.fault == "kill" and pid is not None:
            os.kill(pid, signal.SIGKILL)
        elif cell.fault == "cut":
            await asyncio.gather(*map(made.links.cut, addresses))
        moment.release(pid)
        streams.start(itertools.islice(late, LATE))
        for _ in range(round(lasts_s / EVERY_S) if cell.lasts else 0):
            await asyncio.sleep(EVERY_S)
            streams.start([next(late)])
    return pid if cell.fault == "kill" else None


@contextmanager
def _lasting(made: Stage, cell: Cell, addresses: Sequence[str], pid: int | None) -> Generator[None]:
    """A process that stands still, or a link, for the length of the block."""
    if cell.fault == "stop" and pid is not None:
        os.kill(pid, signal.SIGSTOP)
    elif cell.fault == "stall":
        for address in addresses:
            made.links.stall(address)
    try:
        yield
    finally:
        if cell.fault == "stop" and pid is not None:
            os.kill(pid, signal.SIGCONT)
        elif cell.fault == "stall":
            for address in addresses:
                made.links.resume(address)
