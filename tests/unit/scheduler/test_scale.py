"""What a decision costs at thousands of runners and of adapters, in lines of Python: on every machine the same."""

import random
import statistics
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from weft_scheduler.core import events as ev
from weft_scheduler.core.effects import Assign
from weft_scheduler.core.invariants import check_room, check_shelves
from weft_scheduler.core.scheduler import Scheduler
from weft_scheduler.core.values import (
    AdapterSpec,
    AdapterView,
    Config,
    PoolSpec,
    RunnerId,
    RunnerReport,
    RunnerSpec,
    SequenceView,
)

POOL, BATCH, SLOTS, PAGES = "acme/p", 32, 8, 1024


def fleet(runners: int, adapters: int, seed: int = 0) -> tuple[Scheduler, random.Random]:
    """Runners with 0 to 31 reported sequences of Zipf-like adapters, most of them short of pages."""
    chance = random.Random(seed)
    core = Scheduler(Config(), 1)
    specs = tuple(
        AdapterSpec(f"uid{i}", "acme", f"a{i}", f"acme/a{i}", POOL, f"sha256:{i}", 16) for i in range(adapters)
    )
    core.handle(ev.RegistryChange(True, (PoolSpec(POOL, "b", "base", max_queue=100_000),), specs), 0.0)
    core.handle(ev.GatewayUp("g"), 0.0)
    core.handle(ev.ResubmitComplete("g"), 0.0)
    core.handle(ev.SupervisorUp("s"), 0.0)
    core.handle(ev.ClusterReport("s", tuple(state(i, chance, adapters) for i in range(runners))), 0.1)
    return core, chance


def state(i: int, chance: random.Random, adapters: int) -> RunnerReport:
    busy = chance.randrange(BATCH)
    digests = [digest(chance, adapters) for _ in range(SLOTS)]
    views = tuple(
        SequenceView(f"old{i}-{k}", (1, 0), digests[k % SLOTS], 64)  # type: ignore[arg-type]
        for k in range(busy)
    )
    spec = RunnerSpec("h:1", POOL, 16, PAGES, BATCH, SLOTS, 64, 16384)
    resident = tuple(AdapterView(d, True) for d in digests)
    return RunnerReport(
        RunnerId(f"{chance.getrandbits(128):032x}", "i"), spec, 1, chance.randrange(64), views, resident
    )


def digest(chance: random.Random, adapters: int) -> str:
    return f"sha256:{min(adapters - 1, int(chance.paretovariate(0.5)) - 1)}"


def submit(core: Scheduler, chance: random.Random, n: int, adapters: int) -> tuple[bool, int]:
    """(placed, lines that were run) for one request."""
    event = ev.Submit(
        "g", f"r{n}", POOL, "acme", "m", digest(chance, adapters), chance.randint(16, 600), 512,
        p90_tokens=chance.randint(16, 256),
    )  # fmt: skip
    effects, lines = counted(lambda: core.handle(event, 1.0 + n * 1e-4))
    return any(isinstance(e, Assign) for e in effects), lines


def counted(work: Callable[[], Any]) -> tuple[Any, int]:
    """What it gives, and how many lines it ran: a loop over everything shows, however fast it is."""
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        return work(), lines
    finally:
        sys.settrace(before)


def measured(runners: int, adapters: int, requests: int) -> tuple[float, int]:
    """(median of the lines of a decision, placed)."""
    core, chance = fleet(runners, adapters)
    results = [submit(core, chance, n, adapters) for n in range(requests)]
    check_room(core.state)
    check_shelves(core.state)
    return statistics.median(lines for _, lines in results), sum(placed for placed, _ in results)


def test_every_step_of_a_loop_is_counted() -> None:
    few, many = (counted(lambda n=n: sum(i for i in range(n)))[1] for n in (10, 1000))
    assert many - few >= 990


@pytest.mark.parametrize("runners", [3_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_decision_costs_little_more_at_thousands_of_runners_than_at_a_hundred(runners: int) -> None:
    small, _ = measured(100, 1_000, 100)
    large, placed = measured(runners, 10 * runners, 500)
    assert placed == 500
    # A linear decision would cost thirty or a hundred times more; a logarithmic one less than twice as much.
    assert large < 2 * small
