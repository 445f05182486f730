"""What a decision costs at 10,000 runners and 100,000 adapters. Printed (`-s`), and asserted only as a growth rate."""

import random
import statistics
import time

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


def submit(core: Scheduler, chance: random.Random, n: int, adapters: int) -> tuple[int, float]:
    """(placed, seconds) for one request."""
    event = ev.Submit(
        "g", f"r{n}", POOL, "acme", "m", digest(chance, adapters), chance.randint(16, 600), 512,
        p90_tokens=chance.randint(16, 256),
    )  # fmt: skip
    begin = time.perf_counter()
    effects = core.handle(event, 1.0 + n * 1e-4)
    return any(isinstance(e, Assign) for e in effects), time.perf_counter() - begin


def measured(runners: int, adapters: int, requests: int) -> tuple[float, float, int]:
    """(median, 99th percentile in microseconds, placed)."""
    core, chance = fleet(runners, adapters)
    results = [submit(core, chance, n, adapters) for n in range(requests)]
    check_room(core.state)
    check_shelves(core.state)
    spent = sorted(1e6 * seconds for _, seconds in results)
    return statistics.median(spent), spent[len(spent) * 99 // 100], sum(placed for placed, _ in results)


def test_a_decision_costs_little_more_at_ten_thousand_runners_than_at_a_hundred() -> None:
    small, small_p99, placed_small = measured(100, 1_000, 100)
    large, large_p99, placed = measured(10_000, 100_000, 2_000)
    print(f"\n100 runners: {small:.0f} us (p99 {small_p99:.0f}), {placed_small} of 100 placed")
    print(f"10,000 runners, 100,000 adapters: {large:.0f} us (p99 {large_p99:.0f}), {placed} of 2,000 placed")
    assert placed == 2_000
    # A linear decision would cost a hundred times more; a logarithmic one about twice. Machines are noisy.
    assert large < 20 * small
