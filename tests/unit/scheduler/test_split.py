"""Prompt and token phase on two runners: what each is assigned, what is counted where, and until when."""

from typing import Any

import pytest

from harness.scheduler_driver import POOL, Driver, of, sequence
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import Send
from weft.domain.request import Assign, Cancel, FailReason, Preempt, Reject, RejectReason, RunnerGone, Started, Submit
from weft.domain.routes import GroupPhase, PhaseCounts, PhaseGroups, PoolStatus
from weft.domain.runner import OrderedRunner, RunnerRole
from weft_scheduler.core.effects import Effect, KvHandOff
from weft_scheduler.core.model.request import Phase, Placement

KV = {"kv_address": "tcp:1", "kv_layout": "m135", "prefill_tokens_per_s": 1000.0}


def both(driver: Driver, **spec: Any) -> None:
    """Start a pool with two runners that exchange KV."""
    driver.start(**spec)
    for uuid in "ab":
        driver.runner(uuid, **KV)


@pytest.fixture
def split(driver: Driver) -> Driver:
    """Runner a computes prompts, b the tokens after them."""
    both(driver, phases="split", min_runners=2, max_runners=4)
    assert [driver.record(uuid).role for uuid in "ab"] == [RunnerRole.PROMPT, RunnerRole.TOKEN]
    return driver


def orders(effects: list[Effect]) -> dict[str, RunnerRole | None]:
    sent = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, OrderedRunner)]
    return {order.runner.uuid: order.order.role for order in sent if order.order.role is not None}


def started(driver: Driver, request_id: str, *, handed_off: bool = False) -> list[Effect]:
    return driver.gateway_sends(Started(request_id, driver.request(request_id).epoch, handed_off))


def test_a_request_gets_both_runners_at_once_and_pages_on_each(split: Driver) -> None:
    assign = split.place("r", prompt_tokens=64, max_tokens=100, p90_tokens=40)
    assert assign.runner.uuid == "a"
    assert assign.token_runner is not None
    assert (assign.token_runner.runner.uuid, assign.token_runner.kv_address) == ("b", "tcp:1")
    prompt, token = split.record("a").accounts, split.record("b").accounts
    assert prompt.unacked["r"].pages == 5, "64 tokens, and the first of the answer"
    assert token.unacked["r"].pages == 7, "64 tokens and 40 reserved"
    assert (prompt.pending_prompt_tokens, token.pending_prompt_tokens) == (64, 0)


def test_the_prompt_runners_pages_count_until_the_token_runner_has_taken_over(split: Driver) -> None:
    split.place("r", prompt_tokens=64)
    started(split, "r")
    assert split.record("a").accounts.unacked_pages == 5
    assert [e.result for e in of(started(split, "r", handed_off=True), KvHandOff)] == ["same"]
    assert (split.record("a").accounts.unacked, split.record("a").accounts.owned) == ({}, set())
    assert split.record("a").accounts.pending_prompt_tokens == 0, "it came and went between two reports"
    assert split.record("b").accounts.unacked_pages == 5
    split.outcome("r")
    assert split.record("b").accounts.unacked == {}


def test_what_the_prompt_runner_has_reported_counts_until_its_next_report(split: Driver) -> None:
    split.place("r", prompt_tokens=64)
    view = split.view("r")
    split.runner("a", view, free=95, pending_prompt_tokens=48)
    assert (split.record("a").accounts.pending_prompt_tokens, split.record("a").accounts.free_pages) == (48, 95)
    started(split, "r", handed_off=True)
    assert split.record("a").accounts.free_pages == 95
    split.runner("a")
    assert (split.record("a").accounts.pending_prompt_tokens, split.record("a").accounts.free_pages) == (0, 100)


def test_prompts_beyond_half_a_second_of_a_runner_wait_in_the_pool(split: Driver) -> None:
    """Prompts wait so that the queue's policy orders them: 1,000 tokens a second are 500 in the runner's queue."""
    for number in range(3):
        split.place(f"r{number}", prompt_tokens=200, max_tokens=20)
    assert not of(split.submit("late", prompt_tokens=200, max_tokens=20), Assign)
    effects = split.runner("a", *(split.view(f"r{n}") for n in range(3)), free=60, pending_prompt_tokens=450)
    assert [assign.request_id for assign in of(effects, Assign)] == ["late"]


@pytest.mark.parametrize("token_memory", [True, False])
def test_a_prompt_waits_for_prompt_runners_alone_where_tokens_have_room(driver: Any, token_memory: bool) -> None:
    """1,000 tokens of prompts a second: 400 wait behind the half second that a prompt runner has already."""
    objective = {"slo_ttft_s": 1.0, "slo_reject": True}
    both(driver, phases="split", min_runners=2, max_runners=2, **objective)
    throughput = driver.pool().scaling.autoscaler.throughput
    throughput.measure(1_000_000, 10.0)  # of token runners: far from the bottleneck, or not
    for number in range(3):
        driver.place(f"r{number}", prompt_tokens=200, max_tokens=20)
    if not token_memory:
        driver.runner("b", *(driver.view(f"r{number}") for number in range(3)), free=1)
    rejected = [of(driver.submit(f"w{n}", prompt_tokens=200, max_tokens=20), Reject) for n in range(3)]
    if token_memory:
        assert [bool(reject) for reject in rejected] == [False, False, True]
        (reject,) = rejected[2]
        assert (reject.reason, reject.retry_after_ms) == (RejectReason.SLO_UNATTAINABLE, 1000)
        assert driver.retry_ms("w1") == 1000
    else:
        assert not any(rejected), "they wait for memory, by what all runners compute"
        assert driver.retry_ms("w1") == 5000, "no prompt's rate says when"


def test_a_client_comes_back_when_half_of_the_prompts_that_wait_are_computed(driver: Driver) -> None:
    both(driver, phases="split", min_runners=2, max_runners=2)
    for number in range(3):
        driver.place(f"r{number}", prompt_tokens=200, max_tokens=20)
    for number in range(30):
        driver.submit(f"w{number}", prompt_tokens=200, max_tokens=20)
    assert driver.retry_ms("w0") == 3000, "6,000 tokens wait, and 1,000 are computed a second"


def test_scale_in_takes_the_runner_whose_role_has_more_than_it_wants(driver: Any) -> None:
    driver.start(phases="split", min_runners=5, max_runners=5)
    for uuid in "abcde":
        driver.runner(uuid, name=uuid, **KV)
    roles = {uuid: driver.pool().scaling.roles.base[uuid] for uuid in "abcde"}
    more = RunnerRole.PROMPT if [*roles.values()].count(RunnerRole.PROMPT) == 3 else RunnerRole.TOKEN
    driver.registry(phases="split", min_runners=4, max_runners=4)
    driver.wait(70.0)
    assert [roles[uuid] for uuid in driver.pool().scaling.autoscaler.victims] == [more]
    driver.registry(phases="split", min_runners=2, max_runners=2)
    driver.wait(70.0)
    assert {roles[uuid] for uuid in set("abcde") - {*driver.pool().scaling.autoscaler.victims}} == {
        RunnerRole.PROMPT,
        RunnerRole.TOKEN,
    }


def test_runners_are_wanted_and_go_by_the_phase_of_their_groups(driver: Driver) -> None:
    groups = (PhaseGroups(GroupPhase.PROMPT), PhaseGroups(GroupPhase.TOKEN))
    driver.start(phases="split", min_runners=4, max_runners=4, groups=groups)
    roles = dict(zip("abcd", (RunnerRole.PROMPT,) * 3 + (RunnerRole.TOKEN,), strict=True))
    for uuid, role in roles.items():
        driver.runner(uuid, name=uuid, **KV | {"made_for": role})
    assert [driver.record(uuid).role for uuid in "abcd"] == [*roles.values()]
    (status,) = of(driver.wait(1.0), PoolStatus)[-1:]
    assert status.wanted == PhaseCounts(2, 2), "nothing is known yet of what requests are like"
    assert driver.demanded() == PhaseCounts(0, 0)
    assert status.victims == ("c",), "one whose place a token runner takes, the newest"
    driver.lost("c")
    (status,) = of(driver.wait(1.0), PoolStatus)[-1:]
    assert (status.wanted, status.victims) == (PhaseCounts(2, 2), ())
    driver.runner("e", name="e", **KV | {"made_for": RunnerRole.TOKEN})
    assert driver.pool().scaling.autoscaler.victims == []


def test_a_failure_of_either_ends_both(split: Driver) -> None:
    split.place("r", prompt_tokens=64)
    asked, gone = of(split.lost("b"), RunnerGone)
    assert (asked.runner.uuid, asked.unless_alive, gone.runner.uuid, gone.unless_alive) == ("b", True, "b", False)
    assert split.record("a").role is RunnerRole.MIXED, "the only one that is left does both"
    (again,) = of(split.failed("r", FailReason.SESSION_LOST) + split.wait(4), Assign)
    assert (again.runner.uuid, again.token_runner) == ("a", None)


@pytest.mark.parametrize("handed_off", [False, True])
def test_a_request_that_is_cancelled_leaves_both_runners(split: Driver, handed_off: bool) -> None:
    split.place("r", prompt_tokens=64)
    started(split, "r", handed_off=handed_off)
    split.gateway_sends(Cancel("r"))
    for uuid in "ab":
        accounts = split.record(uuid).accounts
        assert (accounts.owned, accounts.unacked, accounts.pending_prompt_tokens) == (set(), {}, 0)


@pytest.mark.parametrize(("runner", "reserved"), [("a", 40), ("b", 80)])
def test_a_victim_leaves_both_and_its_token_reservation_counts(split: Driver, runner: str, reserved: int) -> None:
    split.place("r", prompt_tokens=64, p90_tokens=40)
    (preempt,) = of(split.preempt(runner, "r", 80), Preempt)
    assert preempt.request_id == "r"
    (again,) = of(split.failed("r", FailReason.PREEMPTED), Assign)
    assert again.token_runner is not None, "it is split again"
    assert again.reservation_tokens == reserved


def test_after_the_hand_over_the_prompt_runner_has_no_victim_of_it(split: Driver) -> None:
    split.place("r", prompt_tokens=64)
    started(split, "r", handed_off=True)
    assert not of(split.preempt("a", "r", 80), Preempt)
    assert of(split.preempt("b", "r", 80), Preempt)


def test_whose_kv_was_lost_runs_on_one_runner_from_then_on(split: Driver) -> None:
    split.place("r", prompt_tokens=64)
    effects = split.failed("r", FailReason.KV_LOST, emitted=1)
    (again,) = of(effects, Assign)
    assert (again.runner.uuid, again.token_runner) == ("b", None)
    assert [e.result for e in of(effects, KvHandOff)] == ["lost"]


def test_where_transfers_fail_again_and_again_no_phases_are_split_for_a_while(split: Driver) -> None:
    effects: list[Effect] = []
    for number in range(3):
        split.wait(1)
        split.place(f"r{number}", prompt_tokens=16)
        effects += split.failed(f"r{number}", FailReason.KV_LOST)
    assert orders(effects) == {"a": RunnerRole.MIXED, "b": RunnerRole.MIXED}
    assert {split.record(uuid).role for uuid in "ab"} == {RunnerRole.MIXED}
    assert split.place("whole", prompt_tokens=16).token_runner is None
    assert orders(split.wait(11)) == {"a": RunnerRole.PROMPT, "b": RunnerRole.TOKEN}


def test_a_transfer_that_arrives_between_those_that_fail_shows_that_transfers_work(split: Driver) -> None:
    for number, arrives in enumerate((False, False, True, False)):
        split.wait(1)
        split.place(f"r{number}", prompt_tokens=16)
        if arrives:
            started(split, f"r{number}", handed_off=True)
        else:
            split.failed(f"r{number}", FailReason.KV_LOST)
    assert [split.record(uuid).role for uuid in "ab"] == [RunnerRole.PROMPT, RunnerRole.TOKEN]


def test_a_scheduler_that_is_new_finds_both_runners_of_a_request(driver: Driver) -> None:
    first = Epoch(1, 9)
    driver.start(phases="split")
    ids = [RunnerId(uuid, "i1") for uuid in "ab"]
    fields: dict[str, Any] = {"pool": POOL, "namespace": "acme", "model_name": "m", "adapter": ""}
    driver.gateway_sends(
        Submit("r", prompt_tokens=64, max_tokens=100, epoch=first, runner=ids[0], token_runner=ids[1],
               reservation_tokens=40, **fields)
    )  # fmt: skip
    for uuid in "ab":
        driver.runner(uuid, sequence("r", first), free=90, **KV)
    assert [driver.record(uuid).accounts.owned for uuid in "ab"] == [{"r"}, {"r"}]
    started(driver, "r", handed_off=True)
    assert [driver.record(uuid).accounts.owned for uuid in "ab"] == [set(), {"r"}]


def test_orders_of_roles_are_sent_once_and_again_where_they_may_be_lost(driver: Driver) -> None:
    driver.start(phases="split")
    effects = driver.runner("a", **KV) + driver.runner("b", **KV)
    assert orders(effects) == {"a": RunnerRole.PROMPT, "b": RunnerRole.TOKEN}
    assert orders(driver.runner("a")) == {}, "it is on its way"
    assert orders(driver.runner("a", version=5)) == {"a": RunnerRole.PROMPT}
    assert orders(driver.runner("a", version=6, role=RunnerRole.PROMPT)) == {}
    driver.runner("b", role=RunnerRole.TOKEN)
    assert orders(driver.registry()) == {"a": RunnerRole.MIXED, "b": RunnerRole.MIXED}, "the pool splits no more"


def test_runners_that_exchange_no_kv_do_both_phases(driver: Driver) -> None:
    driver.start(phases="split").runner("a", **KV)
    driver.runner("b", **KV | {"kv_layout": "other"})
    assert {driver.record(uuid).role for uuid in "ab"} == {RunnerRole.MIXED}
    assert driver.place("r").token_runner is None


@pytest.mark.parametrize(("across", "pairs"), [(True, True), (False, False)])
def test_kv_goes_to_another_numerics_class_where_the_pool_allows_it(driver: Driver, across: bool, pairs: bool) -> None:
    driver.start(phases="split", kv_across_classes=across).runner("a", numerics_class="cpu avx2", **KV)
    driver.runner("b", numerics_class="cpu avx512", **KV)
    assert (driver.place("r").token_runner is not None) is pairs
    if pairs:
        assert [e.result for e in of(started(driver, "r", handed_off=True), KvHandOff)] == ["across"]


def test_a_runner_that_is_left_alone_takes_prompts_without_a_bound(split: Driver) -> None:
    """Whoever lost the other runner is not held in the queue: as in a pool whose phases are not split."""
    split.lost("a")
    assert split.record("b").role is RunnerRole.MIXED
    for number in range(4):
        assert split.place(f"r{number}", prompt_tokens=200, max_tokens=10, p90_tokens=5).token_runner is None
    assert split.record("b").accounts.pending_prompt_tokens > split.record("b").accounts.prompt_queue_tokens


def test_the_roles_are_published_at_once_where_runners_come_and_else_once_a_minute(split: Driver) -> None:
    def published(effects: list[Effect]) -> list[tuple[int, int, int]]:
        return [status.roles[:3] for status in of(effects, PoolStatus) if status.roles is not None]

    assert published(split.wait(0.5)) == [(1, 1, 0)]
    split.registry(phases="split", min_runners=4, max_runners=4)
    assert published(split.runner("c", **KV) + split.wait(0.5)) in ([(1, 2, 0)], [(2, 1, 0)])
    for number in range(3):
        split.wait(1)
        split.place(f"r{number}", prompt_tokens=16)
        split.failed(f"r{number}", FailReason.KV_LOST)
        split.outcome(f"r{number}")
    assert split.pool().fleet.runners_of_roles()[RunnerRole.MIXED] == 3
    assert (0, 0, 3) not in published(split.wait(8))
    split.runner("d", **KV)
    assert published(split.wait(0.5)) == [(0, 0, 4)]
    split.wait(20)
    assert split.pool().fleet.runners_of_roles()[RunnerRole.MIXED] == 0
    assert published(split.wait(20)) == []
    assert [sum(counts) for counts in published(split.wait(30))] == [4]


def test_a_runner_that_did_not_fail_is_not_avoided(split: Driver) -> None:
    """However often the prompt runner is lost, the other one takes its requests at once."""
    for number in range(3):
        assign = split.place(f"r{number}")
        assert assign.token_runner is not None
        split.failed(f"r{number}", FailReason.SESSION_LOST, runner=assign.runner)
        split.lost("a", f"i{number + 1}")
        assert split.request(f"r{number}").placement == Placement(assign.token_runner.runner)
        split.outcome(f"r{number}")
        split.runner("a", incarnation=f"i{number + 2}", **KV)


def test_a_prompt_runner_lost_after_the_hand_over_and_before_its_message_wastes_no_work(split: Driver) -> None:
    split.place("r", prompt_tokens=64)
    started(split, "r")
    split.lost("a")
    started(split, "r", handed_off=True)
    assert split.request("r").phase is Phase.RUNNING
    assert not of(split.wait(split.state.config.assign_s + 1.0), Assign)
    assert split.request("r").placement == Placement(RunnerId("b", "i1"))


def test_prompt_demand_is_of_what_runners_compute(split: Driver) -> None:
    """The prompt runner has found 384 of 512 tokens that were assigned: a quarter of what comes is work."""
    for number in range(4):
        split.place(f"r{number}", prompt_tokens=128, max_tokens=20)
    load = split.load()
    assert (load.reused_share, load.prompt_tokens_per_s > 0) == (0.0, True)
    views = [split.view(f"r{number}") for number in range(4)]
    split.runner("a", *views, free=60, prefix_reused_tokens=384)
    assert split.load().reused_share == pytest.approx(0.75)
    split.runner("a", *views, free=60, prefix_reused_tokens=384)  # no more than before
    assert split.load().reused_share == pytest.approx(0.75)
    split.runner("b", free=60, prefix_reused_tokens=0)
    split.wait(20.0)
    assert split.load().reused_share == pytest.approx(0.75), "also after a pause"
