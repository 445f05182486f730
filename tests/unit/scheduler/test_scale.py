"""What a decision, a report and a change cost at thousands of runners and of adapters, in lines of Python: on every
machine the same.
"""

import random
import statistics

import pytest

from harness.costs import traced_lines
from harness.scheduler_driver import adapter, of, sequence
from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import TICK, Connected, Kind, Peer, Received
from weft.domain.request import Assign, OutcomeReport, ResubmitComplete, Submit
from weft.domain.routes import AdapterStatus, PoolSpec, RegistryChange, Routes
from weft.domain.runner import ClusterReport, OrderedRunner, ReportedRunner, RunnerFigures, RunnerReport, RunnerSpec
from weft_scheduler.core import Scheduler, SchedulerConfig
from weft_scheduler.core.check import check_accounts, check_placement_index
from weft_scheduler.core.effects import Effect

POOL, BATCH, SLOTS, PAGES = "acme/p", 32, 8, 1024
GATEWAY, SUPERVISOR, REGISTRY = Peer(Kind.GATEWAY, "g"), Peer(Kind.SUPERVISOR, "s"), Peer(Kind.REGISTRY, "r")


class Fleet:
    """Runners with 0 to 31 reported sequences of Zipf-like adapters, most of them short of pages."""

    def __init__(self, runners: int, adapters: int, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.adapters, self.now, self.requests = adapters, 0.1, 0
        self.core = Scheduler(SchedulerConfig(), 1)
        specs = tuple(adapter(f"sha256:{i}", POOL, 16) for i in range(adapters))
        self.core.handle(Connected(REGISTRY), 0.0)
        self.sends(REGISTRY, RegistryChange(True, (PoolSpec(POOL, "b", "base", max_queue=100_000),), specs))
        self.core.handle(Connected(GATEWAY), 0.0)
        self.sends(GATEWAY, ResubmitComplete())
        self.core.handle(Connected(SUPERVISOR), 0.0)
        self.runners = [RunnerId(f"{self.chance.getrandbits(128):032x}", "i") for _ in range(runners)]
        self.sends(SUPERVISOR, ClusterReport(tuple(self.report(i) for i in range(runners))))

    def sends(self, peer: Peer, message: object) -> tuple[list[Effect], int]:
        """Send a message. Returns (effects, lines that were run)."""
        self.now += 1e-4
        return traced_lines(lambda: self.core.handle(Received(peer, message), self.now))

    def quiet(self) -> None:
        """Let everything be published."""
        for _ in range(self.adapters // 1_000 + 4):
            self.now += 1.0
            self.core.handle(TICK, self.now)

    def digest(self) -> str:
        return f"sha256:{min(self.adapters - 1, int(self.chance.paretovariate(0.5)) - 1)}"

    def report(self, i: int) -> ReportedRunner:
        digests = [self.digest() for _ in range(SLOTS)]
        running = [
            sequence(f"old{i}-{k}", Epoch(1, 0), digests[k % SLOTS], 64) for k in range(self.chance.randrange(BATCH))
        ]
        runner = self.runners[i]
        spec = RunnerSpec(runner, "h:1", POOL, 16, PAGES, BATCH, SLOTS, 64, 16384)
        resident = [AdapterState(d, Tier.DEVICE) for d in digests]
        figures = RunnerFigures(self.chance.randrange(64))
        return ReportedRunner(runner, RunnerReport(1, True, figures, running, adapters=resident), spec)

    def submit(self) -> tuple[bool, int]:
        """Submit one request. Returns (placed, lines that were run)."""
        self.requests += 1
        request = Submit(
            f"r{self.requests}", POOL, "acme", "m", self.digest(), self.chance.randint(16, 600), 512,
            p90_tokens=self.chance.randint(16, 256),
        )  # fmt: skip
        effects, lines = self.sends(GATEWAY, request)
        return bool(of(effects, Assign)), lines


def measured(runners: int, adapters: int, requests: int) -> tuple[float, int]:
    """Return (median of the lines of a decision, placed)."""
    fleet = Fleet(runners, adapters)
    results = [fleet.submit() for _ in range(requests)]
    check_accounts(fleet.core.state)
    check_placement_index(fleet.core.state)
    return statistics.median(lines for _, lines in results), sum(placed for placed, _ in results)


def test_every_step_of_a_loop_is_counted() -> None:
    few, many = (traced_lines(lambda n=n: sum(i for i in range(n)))[1] for n in (10, 1000))
    assert many - few >= 990


@pytest.mark.slow
@pytest.mark.parametrize("runners", [3_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_decision_costs_little_more_at_thousands_of_runners_than_at_a_hundred(runners: int) -> None:
    small, _ = measured(100, 1_000, 100)
    large, placed = measured(runners, 10 * runners, 500)
    assert placed == 500
    # A linear decision would cost thirty or a hundred times more; a logarithmic one less than twice as much.
    assert large < 2 * small


def report_lines(runners: int, adapters: int) -> dict[str, float]:
    """Count the lines of Python for each kind of report."""
    fleet = Fleet(runners, adapters)
    fleet.quiet()
    lines: dict[str, list[int]] = {"figures": [], "one request more": [], "an error": []}
    for i in range(40):
        runner, figures = fleet.runners[i], RunnerFigures(fleet.chance.randrange(64), tokens=i)
        joined = [sequence(f"new{i}", Epoch(1, 0), fleet.digest(), 64)]
        broken = [AdapterState(fleet.digest(), Tier.DISK, error="torn")]
        changes = {
            "figures": RunnerReport(2, False, figures),
            "one request more": RunnerReport(3, False, figures, joined, [f"old{i}-0"]),
            "an error": RunnerReport(4, False, figures, adapters=broken),
        }
        for what, report in changes.items():
            lines[what].append(fleet.sends(SUPERVISOR, ClusterReport((ReportedRunner(runner, report),)))[1])
    return {what: statistics.median(counts) for what, counts in lines.items()}


@pytest.mark.slow
def test_a_report_costs_what_it_carries() -> None:
    small, large = report_lines(100, 100), report_lines(2_000, 20_000)
    for what, lines in large.items():
        assert lines < 2 * small[what], what
    assert large["figures"] < 300


def change_lines(runners: int, adapters: int) -> dict[str, int]:
    """Count the lines of Python for an adapter more, another digest of it, its end, and what is published of each."""
    fleet = Fleet(runners, adapters)
    fleet.quiet()
    lines: dict[str, int] = {}
    changes = {
        "added": RegistryChange(False, adapters=(adapter("sha256:new", POOL, uid="new", model_name="acme/new"),)),
        "changed": RegistryChange(False, adapters=(adapter("sha256:newer", POOL, uid="new", model_name="acme/new"),)),
        "removed": RegistryChange(False, removed_adapters=("new",)),
    }
    for what, change in changes.items():
        effects, lines[what] = fleet.sends(REGISTRY, change)
        (routes,) = of(effects, Routes)
        assert (routes.full, len(routes.routes) + len(routes.removed_models)) == (False, 1)
        assert not of(effects, OrderedRunner), "runners load it when a request names it"
        fleet.now += 0.3
        effects, lines[f"{what}, published"] = traced_lines(lambda: fleet.core.handle(TICK, fleet.now))
        assert len(of(effects, AdapterStatus)) <= 1
    return lines


@pytest.mark.slow
def test_a_change_of_one_adapter_costs_the_same_at_any_number_of_adapters_and_runners() -> None:
    small, large = change_lines(10, 100), change_lines(1_000, 20_000)
    for what, lines in large.items():
        assert lines < 2 * small[what], what


def test_the_end_of_a_request_costs_the_same_behind_a_long_queue() -> None:
    """The request that takes its place costs the same, too."""
    lines: dict[int, int] = {}
    for queued in (100, 5_000):
        fleet = Fleet(1, 1)
        while len(fleet.core.state.pools[POOL].waiting.queue) < queued:
            fleet.submit()
        runner = fleet.runners[0]
        free = ReportedRunner(
            runner, RunnerReport(2, False, RunnerFigures(60), ended=[f"old0-{k}" for k in range(BATCH)])
        )
        effects, lines[queued] = fleet.sends(SUPERVISOR, ClusterReport((free,)))
        placed = of(effects, Assign)
        assert placed
        _, more = fleet.sends(GATEWAY, OutcomeReport(placed[0].request_id, POOL, "", 9, False, b""))
        lines[queued] += more
    assert lines[5_000] < 2 * lines[100]


def test_a_request_behind_a_long_queue_is_queued_without_a_pass_over_those_before_it() -> None:
    fleet = Fleet(1, 1)
    while len(fleet.core.state.pools[POOL].waiting.queue) < 200:
        fleet.submit()
    placed, lines = fleet.submit()
    assert (placed, lines < 350) == (False, True), lines
