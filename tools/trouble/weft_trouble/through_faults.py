"""Run cells of `weft bench faults` on a stack of our own."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

from weft_stage.errors import StackFailed
from weft_trouble import fault_host
from weft_trouble.fault_stage import LATE, Moment, Stage, meshed_stage, postgresql_stage, sqlite_stage, stage
from weft_trouble.fault_streams import Difference, Streams, difference
from weft_trouble.faults import LOSS, MIN_STREAMS, POSTGRESQL, PROMPT_RUNNER, SQLITE, TOKEN_RUNNER, Cell, Run
from weft_trouble.links import Links, Quality

LASTS_S, EVERY_S = 10.0, 2.0  # of a stop or stall; between two requests meanwhile
SILENCE_S = 14.0  # longer than one process waits for another one
BAD = {"delay": Quality(delay_s=0.2, jitter_s=0.2), "narrow": Quality(bytes_per_s=32 * 1024)}
LOST_SHARE = 0.1
ATTEMPTS = 5  # rounds in which the moment to strike may come
STAGES: Mapping[str, Callable[[Path, int, int], AbstractAsyncContextManager[Stage]]] = {
    "unified": stage,
    "split": partial(stage, split=True),
    "linked": partial(stage, split=True, kv_links=True),
    "meshed": meshed_stage,
    "hosted": partial(meshed_stage, hosted=True),
    SQLITE: sqlite_stage,
    POSTGRESQL: postgresql_stage,
}
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
    """Each run in turn; `keep` gets it when it is over.

    Raises StackFailed: at once where a stack fails, at the end where cells had no moment to strike.
    """
    without_moment = list[Cell]()
    by_stack = groupby(sorted(runs, key=lambda run: _stack_of(run[0])), key=lambda run: _stack_of(run[0]))
    for stack, of_stack in by_stack:
        wanted = list(of_stack)
        cold = ATTEMPTS * sum(cell.phase == "loading" for cell, _ in wanted)
        say("recording the answers of an undisturbed run")
        async with STAGES[stack](folder / stack, seed, cold) as made:
            for cell, number in wanted:
                if (run := await _run(made, cell, number, say)) is not None:
                    keep(run)
                else:
                    without_moment.append(cell)
    if without_moment:
        names = ", ".join(map(str, without_moment))
        raise StackFailed(f"no moment to strike in {ATTEMPTS} rounds; the same command tries again: {names}")


def _stack_of(cell: Cell) -> str:
    if cell.meshed:
        return "meshed"
    if cell.of_host:
        return "hosted"
    if cell.of_store:
        return cell.target
    return "linked" if cell.between_runners else "split" if cell.split else "unified"


async def _run(made: Stage, cell: Cell, number: int, say: Callable[[str], None]) -> Run | None:
    """None: the moment did not come in any round."""
    for attempt in range(ATTEMPTS):
        name = f"{str(cell).replace(' ', '-')}-{number}-{attempt}"
        with made.no_trouble():
            run = await _attempt(made, cell, number, name, say)
        if run is not None:
            return run
    return None


async def _attempt(made: Stage, cell: Cell, number: int, name: str, say: Callable[[str], None]) -> Run | None:
    """None: the moment did not come."""
    killed, struck_at, applied = None, 0.0, ""
    async with Streams(made.url, name) as streams:
        moment = await (made.in_transfer(streams, cell.share) if cell.split else AIMS[cell.phase](made, streams))
        running = sum(not stream.ended for stream in streams.all)
        if moment is not None and (running < MIN_STREAMS or not _can_be_struck(made, cell, moment)):
            moment.release()
            moment = None
        if moment is not None:
            applied = await made.apply_adapter() if cell.meshed or cell.of_host else ""
            struck_at = time.perf_counter()
            killed = await _strike(made, cell, moment, streams)
    over_at = time.perf_counter()
    await made.healthy(streams, killed)
    if applied:
        await made.adapter_ready(applied)
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


def _struck_component(cell: Cell, moment: Moment) -> str:
    found = {"runner": moment.runner, PROMPT_RUNNER: moment.runner, TOKEN_RUNNER: moment.token_runner}
    return found.get(cell.target, cell.target)


def _struck_links(made: Stage, cell: Cell, component: str) -> tuple[Links, list[str]]:
    """The links, and where they lead to."""
    return made.mesh.get(cell.source, made.links), made.kv_peers if cell.between_runners else [made.peer(component)]


def _can_be_struck(made: Stage, cell: Cell, moment: Moment) -> bool:
    """A link that is struck has a connection now."""
    if not cell.is_link or cell.fault == LOSS:
        return True
    links, addresses = _struck_links(made, cell, _struck_component(cell, moment))
    return any(map(links.count, addresses))


async def _strike(made: Stage, cell: Cell, moment: Moment, streams: Streams) -> int | None:
    """The fault from its beginning to its end, and requests meanwhile. Returns the process that was killed."""
    if cell.of_store:
        async with made.store.struck(cell.fault):
            moment.release()
            await _meanwhile(made, streams, LASTS_S)
        return None
    component = _struck_component(cell, moment)
    if made.host and cell.of_host:
        pid = made.stack.pid(component)
        async with fault_host.struck(made.host, cell.fault, component, pid, made.files(component)):
            moment.release()
            await _meanwhile(made, streams, LASTS_S)
        return None if fault_host.lives(pid) else pid
    links, addresses = _struck_links(made, cell, component)
    pid = None if cell.between_runners else made.stack.pid(component)
    silent = cell.between_runners or (cell.meshed and cell.fault in ("stall", "deaf", "mute"))
    lasts_s = SILENCE_S if silent else LASTS_S
    with _lasting(cell, links, addresses, pid):
        if cell.fault == "kill" and pid is not None:
            os.kill(pid, signal.SIGKILL)
        elif cell.fault == "cut":
            await asyncio.gather(*map(links.cut, addresses))
        moment.release(None if cell.is_link else pid)
        await _meanwhile(made, streams, lasts_s if cell.lasts else 0.0)
    return pid if cell.fault == "kill" else None


async def _meanwhile(made: Stage, streams: Streams, lasts_s: float) -> None:
    """Requests right after the strike, and now and then while it lasts."""
    late = iter(made.late)
    streams.start(itertools.islice(late, LATE))
    for _ in range(round(lasts_s / EVERY_S)):
        await asyncio.sleep(EVERY_S)
        streams.start([next(late)])


@contextmanager
def _lasting(cell: Cell, links: Links, addresses: Sequence[str], pid: int | None) -> Generator[None]:
    """A process that stands still, or a link that is bad, for the length of the block."""
    if cell.fault == LOSS:
        with contextlib.ExitStack() as rules:
            for address in addresses:
                rules.enter_context(_lossy(address))
            yield
        return
    if cell.fault == "stop" and pid is not None:
        os.kill(pid, signal.SIGSTOP)
    for address in addresses if cell.is_link else ():
        match cell.fault:
            case "stall" | "deaf" | "mute":
                links.stall(address, there=cell.fault != "mute", back=cell.fault != "deaf")
            case "abandon":
                links.abandon(address)
            case "delay" | "narrow":
                links.degrade(address, BAD[cell.fault])
            case _:
                pass
    try:
        yield
    finally:
        if cell.fault == "stop" and pid is not None:
            os.kill(pid, signal.SIGCONT)
        for address in addresses if cell.is_link else ():
            links.resume(address)


@contextmanager
def _lossy(address: str) -> Generator[None]:
    """A share of the packets to and from an address is dropped. Raises StackFailed."""
    port = address.rpartition(":")[2]
    rules = [
        ["INPUT", "--protocol", "tcp", side, port, "--match", "statistic", "--mode", "random", "--probability",
         str(LOST_SHARE), "--jump", "DROP"]
        for side in ("--dport", "--sport")
    ]  # fmt: skip
    with contextlib.ExitStack() as ends:
        for rule in rules:
            _iptables("--insert", rule)
            ends.callback(_iptables, "--delete", rule)
        yield


def _iptables(action: str, rule: Sequence[str]) -> None:
    command = ["iptables", "--wait", action, *rule]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or str(error)
        raise StackFailed(f"{' '.join(command)}: {words.strip()}") from error
