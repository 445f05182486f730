"""Whose turn it is: virtual token counters."""

from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, adapter, of
from harness.waiting_request import Runners, WaitingRequest
from weft.domain.request import Assign, Cancel, Reject, RejectReason
from weft.domain.routes import RegistryChange
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.orders import QUEUE_POLICIES
from weft_scheduler.core.policy.queue.overtaking import Overtaking, QueuePass
from weft_scheduler.core.policy.queue.token_counters import TokenCounters
from weft_scheduler.core.policy.queue.waiting_queue import WaitingQueue
from weft_scheduler.core.pool.queue import BEYOND_SHARE_S

SHAPE = RunnerShape(8, 1000)


class Server(Runners):
    """One runner with `tokens` tokens of memory; each running request computes a token a step (VTC, section 2)."""

    def __init__(self, queue: WaitingQueue[WaitingRequest], tokens: int, bound: int = 1_000_000) -> None:
        self.queue, self.free, self.running = queue, tokens, list[WaitingRequest]()
        self.overtaking, self.bound = Overtaking[WaitingRequest](), bound
        self.served: dict[str, int] = {}

    def place(self, request: WaitingRequest, closed: AbstractSet[RunnerShape]) -> RunnerShape | None:
        if SHAPE in closed or request.size > self.free:
            return None
        self.free -= request.size
        self.queue.counters.charge(request.tenant, request.size)  # a prediction that is exact
        self.queue.remove(request)
        request.left = request.size
        self.running.append(request)
        return SHAPE

    def shapes_for(self, request: WaitingRequest) -> AbstractSet[RunnerShape]:
        return {SHAPE}

    def free_tokens(self) -> int:
        return self.free

    def has_capacity(self, closed: AbstractSet[RunnerShape]) -> bool:
        return self.free > 0 and SHAPE not in closed

    def run_pass(self, window: int = 64) -> None:
        placement: Any = self
        self.answer(QueuePass(self.overtaking, self.queue, placement, bound=self.bound, window=window))

    def step(self) -> list[WaitingRequest]:
        """Admit, then a token for each running request. Returns those that end."""
        self.run_pass()
        for request in self.running:
            request.left -= 1
            self.served[request.tenant] = self.served.get(request.tenant, 0) + 1
        ended = [request for request in self.running if not request.left]
        self.running = [request for request in self.running if request.left]
        self.free += sum(request.size for request in ended)
        return ended


def queue_of(*waiting: tuple[str, int], policy: str = "fcfs", weights: dict[str, int] | None = None) -> Any:
    """Queue one request a second, of these tenants and sizes."""
    queue = WaitingQueue[WaitingRequest](QUEUE_POLICIES[policy](), TokenCounters(weights or {}, burst_tokens=0))
    for name, (tenant, size) in enumerate(waiting):
        queue.push(WaitingRequest(name, size, tenant))
    return queue


@given(
    policy=st.sampled_from(sorted(QUEUE_POLICIES)),
    sizes=st.lists(st.tuples(st.sampled_from("fgh"), st.integers(1, 9)), min_size=25, max_size=40),
    weights=st.fixed_dictionaries({"f": st.integers(1, 4), "g": st.integers(1, 4)}),
    memory=st.integers(9, 20),
)
def test_the_service_of_two_tenants_that_both_wait_differs_by_a_bounded_amount(
    policy: str, sizes: list[tuple[str, int]], weights: dict[str, int], memory: int
) -> None:
    """VTC, theorem 4.4: |W_f - W_g| <= 2 max(input, batch tokens) in any time in which both have requests waiting."""
    server = Server(queue_of(*sizes, policy=policy, weights=weights), memory, bound=0)
    begin, both_wait = dict[str, float](), False
    while len(server.queue):
        server.step()
        if {*server.queue.tenants()} >= {"f", "g"}:
            served = {t: server.served.get(t, 0) / weights[t] for t in "fg"}
            begin = begin if both_wait else served
            both_wait = True
            assert abs((served["f"] - begin["f"]) - (served["g"] - begin["g"])) <= 2 * max(9, memory), (served, begin)
        else:
            both_wait = False


@given(
    policy=st.sampled_from(sorted(QUEUE_POLICIES)),
    sizes=st.lists(st.tuples(st.sampled_from("fgh"), st.integers(1, 9)), min_size=1, max_size=30),
    bound=st.integers(0, 3),
)
def test_all_are_served_and_nothing_idles_while_one_fits(policy: str, sizes: list[tuple[str, int]], bound: int) -> None:
    server = Server(queue_of(*sizes, policy=policy), 9, bound)
    for _ in range(sum(size for _, size in sizes) + 1):
        waited, served = len(server.queue), sum(server.served.values())
        server.step()
        assert all(count <= bound for count in server.overtaking.counts.values())
        assert not waited or sum(server.served.values()) > served
    assert not len(server.queue)


def test_a_flood_delays_another_tenant_by_no_more_than_one_request() -> None:
    server = Server(queue_of(*[("flood", 5)] * 50, ("victim", 5), ("victim", 5)), 5)
    first = [server.step() or server.running for _ in range(20)]
    turns = [one.tenant for one in dict.fromkeys(r for running in first for r in running)]
    assert turns[:4] == ["flood", "victim", "flood", "victim"]


def test_a_request_too_large_for_now_is_passed_by_other_tenants_up_to_the_bound() -> None:
    """The large request's tenant is next all the time: small ones of the others would fill the runner for ever."""
    server = Server(queue_of(("large", 9), *[("small", 1)] * 30), 9, bound=2)
    server.free = 5
    server.step()
    assert server.overtaking.counts["0"] == 2
    assert {r.tenant for r in server.running} <= {"small"}
    server.free = 9
    server.step()
    assert "large" in {r.tenant for r in server.running}


def test_the_part_of_the_window_of_a_tenant_that_waits_no_more_is_the_others() -> None:
    """What is behind their own part would else wait for the next event, although it fits."""
    server = Server(queue_of(("large", 9), ("large", 9), ("large", 1), ("small", 1)), 5)
    server.run_pass(window=4)
    assert [(r.tenant, r.size) for r in server.running] == [("small", 1), ("large", 1)]


def test_as_many_tenants_as_the_window_are_offered_one_request_each_where_none_fits() -> None:
    queue = queue_of(*((tenant, 9) for tenant in "abcd"), ("a", 9))
    queue_pass = QueuePass(Overtaking[WaitingRequest](), queue, Server(queue, 5), bound=9, window=2)  # pyright: ignore[reportArgumentType]
    assert [offer.request.tenant for offer in queue_pass.offers()] == ["a", "b"]
    assert queue.share(2) == 1


def test_old_requests_of_a_flood_do_not_force_their_way_before_another_tenant() -> None:
    queue = queue_of(*[("flood", 5)] * 10, *[("victim", 5)] * 6)
    queue.counters.charge("flood", 1000)
    server = Server(queue, 5, bound=1)
    assert [one.tenant for _ in range(30) for one in server.step()] == ["victim"] * 6
    assert not server.overtaking.counts, "those that the order of tenants lets pass are no passes"


def test_who_was_idle_has_no_credit_and_a_weight_is_a_share() -> None:
    counters = TokenCounters({"gold": 4}, burst_tokens=0)
    counters.enter("busy")
    counters.charge("busy", 1000)
    counters.enter("idle")
    assert counters.counter("idle") == 1000
    assert [tenant for tenant in ("idle", "busy", "nobody") if counters.is_next(tenant)] == ["busy"], "it came first"
    counters.enter("gold")
    counters.charge("gold", 1000)
    counters.charge("idle", 1000)
    assert (counters.counter("gold"), counters.counter("idle"), counters.spread) == (1250, 2000, 1000)
    assert counters.waiting_weight == 6
    for tenant in ("busy", "idle", "gold"):
        counters.leave(tenant)
    counters.enter("new")
    assert counters.counter("new") == 1250, "of the tenant that left last"
    counters.charge("absent", 5)
    assert [counters.counter(tenant) for tenant in ("absent", "nobody")] == [5, 0]
    assert TokenCounters({}).spread == 0


def test_tenants_that_do_not_wait_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_scheduler.core.policy.queue.token_counters.MAX_IDLE", 10)
    counters = TokenCounters({}, burst_tokens=0)
    for number in range(100):
        counters.enter(f"t{number}")
        counters.charge(f"t{number}", 1)
        counters.leave(f"t{number}")
    assert len(counters._idle) == 10
    assert counters.counter("t99") == 100


def test_in_the_core_another_tenant_passes_a_flood_and_its_prompts_do_too(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=2)
    driver.wait(100.0)
    for number in range(2):
        driver.place(f"f{number}", namespace="flood")
    driver.runner("a", driver.view("f0"), driver.view("f1"), free=90)
    for number in range(2, 9):
        driver.submit(f"f{number}", namespace="flood", waited_s=60.0)
    (at_once,) = of(driver.submit("v", namespace="victim"), Assign)
    assert (at_once.request_id, at_once.allotment.parks, at_once.allotment.delay_s) == ("v", ("f1",), 0)
    placed = [of(driver.outcome(f"f{number}"), Assign) for number in range(2)]
    placed += [of(driver.runner("a", free=96), Assign)]
    delays = [round(a.allotment.delay_s) for some in placed for a in some]
    assert delays
    assert all(delay == 60 for delay in delays), "its prompt does not run before that of the victim"


def test_a_tenant_alone_keeps_the_order_of_arrival_on_the_runner(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=2)
    assert driver.place("r", waited_s=60.0).allotment.delay_s == 0


def test_a_prediction_is_corrected_at_the_end(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=9)
    counters = driver.pool().waiting.queue.counters
    driver.place("long", namespace="acme", prompt_tokens=16, p10_tokens=10, p50_tokens=40, p90_tokens=80)
    assert counters.counter("acme") == 2 + 40
    driver.outcome("long", tokens=90)
    assert counters.counter("acme") == 2 + 90
    driver.place("gone", namespace="acme", prompt_tokens=16, p10_tokens=10, p50_tokens=40, p90_tokens=80)
    driver.gateway_sends(Cancel("gone", 3))
    assert counters.counter("acme") == 2 + 90 + 2 + 3


def test_a_cold_adapter_is_charged_and_one_on_the_device_is_not(driver: Driver) -> None:
    driver.start("sha256:x")
    driver.change(RegistryChange(False, adapters=(replace(adapter("sha256:x"), bytes=1 << 30),)))
    driver.runner("a", max_sequences=9)
    driver.pool().scaling.autoscaler.throughput.measure(5000, 10.0)
    counters, cost = driver.pool().waiting.queue.counters, {"prompt_tokens": 16, "p10_tokens": 1, "p50_tokens": 40}
    driver.place("cold", "sha256:x", p90_tokens=80, **cost)
    assert counters.counter("acme") == pytest.approx(42 + 500)
    driver.place("warm", "sha256:x", p90_tokens=80, **cost)
    assert counters.counter("acme") == pytest.approx(42 + 500 + 42)


def test_a_flood_that_fills_the_queue_leaves_others_their_share_of_it(driver: Driver) -> None:
    driver.start(max_queue=4)
    for number in range(4):
        assert not of(driver.submit(f"f{number}", namespace="flood"), Reject)
    full = of(driver.submit("f9", namespace="flood"), Reject)
    assert [reject.reason for reject in full] == [RejectReason.QUEUE_FULL]
    for number in range(2):
        assert not of(driver.submit(f"v{number}", namespace="victim"), Reject)
    assert of(driver.submit("v2", namespace="victim"), Reject), "half of the bound is its share"


def test_a_tenant_beyond_its_share_leaves_the_last_places_and_its_prompts_come_after_others(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=16)
    driver.place("v0", namespace="victim")
    assigned = [a for n in range(20) for a in of(driver.submit(f"f{n}", namespace="flood"), Assign)]
    assert [a.request_id for a in assigned] == [f"f{n}" for n in range(13)], "two of 16 places are left"
    assert [a.allotment.delay_s for a in assigned] == [0] * 9 + [BEYOND_SHARE_S] * 4, "from the ninth of 16 on"
    assert driver.place("v1", namespace="victim").allotment.delay_s == 0
    assert not of(driver.outcome("v0"), Assign), "the places that are free stay for the victim, which runs less"
    assert [a.request_id for a in of(driver.outcome("f0"), Assign)] == ["f13"]
    assert {a.request_id for a in of(driver.outcome("v1"), Assign)} >= {"f14", "f15"}, "alone it fills the runner"
