"""protobuf <-> core: every field arrives, every refusal is named."""

from dataclasses import fields
from typing import Any

import pytest

from weft.identities import MAX_TERM
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2 as cpb
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb
from weft_scheduler import wire
from weft_scheduler.core import effects as ef
from weft_scheduler.core import events as ev
from weft_scheduler.core.values import (
    AdapterView,
    DesiredAdapter,
    DesiredList,
    Epoch,
    KeyRoute,
    PoolRoute,
    PoolSpec,
    PreemptDecision,
    Route,
    RouteTable,
    RunnerId,
    RunnerReport,
    RunnerSpec,
    SequenceView,
    Tier,
)

EPOCH, R = cpb.Epoch(term=3, counter=4), cpb.RunnerId(uuid="u", incarnation="i")
SUBMIT = pb.Submit(
    request_id="r", pool="n/p", namespace="n", model_name="m", adapter_digest="d", prompt_tokens=1, emitted_tokens=2,
    max_tokens=9, p50_tokens=4, p90_tokens=5, waited_ms=1500, epoch=EPOCH, runner=R, moves=6, reservation_tokens=7,
    start_emitted_tokens=8,
)  # fmt: skip


def test_a_submit_arrives_whole() -> None:
    event = wire.gateway_event("g", pb.GatewayToScheduler(submit=SUBMIT))
    epoch, runner = Epoch(3, 4), RunnerId("u", "i")
    assert event == ev.Submit("g", "r", "n/p", "n", "m", "d", 1, 9, 2, 4, 5, 1.5, epoch, runner, 6, 7, 8)


def test_a_submit_that_runs_nowhere_has_no_runner() -> None:
    event = wire.gateway_event("g", pb.GatewayToScheduler(submit=pb.Submit(request_id="r", max_tokens=1)))
    assert isinstance(event, ev.Submit)
    assert (event.epoch, event.runner) == (Epoch(0, 0), None)


@pytest.mark.parametrize("reason", [r for r in pb.Failed.Reason.values() if r])
def test_every_reason_of_a_failure_has_a_meaning(reason: Any) -> None:
    failed = pb.Failed(request_id="r", epoch=EPOCH, reason=reason, emitted_tokens=5, detail="why")
    event = wire.gateway_event("g", pb.GatewayToScheduler(failed=failed))
    assert isinstance(event, ev.Failed)
    assert event.reason.name == pb.Failed.Reason.Name(reason)
    assert (event.epoch, event.emitted_tokens, event.detail) == (Epoch(3, 4), 5, "why")


def test_every_reason_of_a_refusal_has_a_number() -> None:
    assert {r.name for r in ef.RejectReason} == set(pb.Reject.Reason.keys()) - {"REASON_UNSPECIFIED"}
    for reason in ef.RejectReason:
        message = wire.to_gateway(ef.Reject("g", "r", reason, "text", 1200)).reject
        assert pb.Reject.Reason.Name(message.reason) == reason.name
        assert (message.request_id, message.message, message.retry_after_ms) == ("r", "text", 1200)


@pytest.mark.parametrize(
    "message",
    [
        pb.GatewayToScheduler(),
        pb.GatewayToScheduler(cancel=pb.Cancel()),
        pb.GatewayToScheduler(submit=pb.Submit(request_id="r")),
        pb.GatewayToScheduler(failed=pb.Failed(request_id="r")),
        pb.GatewayToScheduler(hello=pb.GatewayHello(gateway_id="g")),
    ],
)
def test_what_is_not_in_the_contract_is_refused(message: pb.GatewayToScheduler) -> None:
    with pytest.raises(PeerError):
        wire.gateway_event("g", message)


def test_an_outcome_is_learned_from_and_passed_on_unread() -> None:
    outcome = cpb.Outcome(request_id="r", pool="n/p", adapter_digest="d", completion_tokens=7, censored=True, moves=3)
    event = wire.gateway_event("g", pb.GatewayToScheduler(outcome=outcome))
    assert isinstance(event, ev.OutcomeReported)
    assert (event.pool, event.digest, event.completion_tokens, event.censored) == ("n/p", "d", 7, True)
    assert wire.to_supervisor(ef.ForwardOutcome("s", "r", event.record)).outcome == outcome


STATE = spb.RunnerState(
    id=R,
    runner=spb.RunnerHello(
        runner=R, address="h:1", pool="n/p", page_tokens=16, total_pages=99, max_sequences=8, max_adapters=4,
        max_rank=64, max_context_tokens=512, name="pod-1", best_batch=6,
    ),
    sequence=7,
    free_pages=30,
    sequences=[spb.SequenceState(request_id="r", epoch=EPOCH, adapter_digest="d", reservation_tokens=40)],
    adapters=[
        spb.AdapterState(digest="d", tier=spb.AdapterState.DEVICE),
        spb.AdapterState(digest="e", tier=spb.AdapterState.DISK, error="torn"),
        spb.AdapterState(digest="f", tier=spb.AdapterState.REMOTE),
        spb.AdapterState(digest="g", tier=spb.AdapterState.DISK, loading=True),
    ],
    overruns=[spb.Overrun(request_id="r", wanted_pages=2), spb.Overrun(request_id="q", wanted_pages=3)],
    draining=True,
    ready=True,
    desired_version=11,
    tokens=5000,
)  # fmt: skip


def test_a_cluster_report_arrives_whole() -> None:
    decision = pb.PreemptDecision(runner=R, request_id="r", epoch=EPOCH, for_request_id="q", reservation_tokens=80)
    message = pb.ClusterReport(runners=[STATE], lost=[R], preempts=[decision])
    event = wire.cluster_event("s", pb.SupervisorToScheduler(report=message))
    spec = RunnerSpec("h:1", "n/p", 16, 99, 8, 4, 64, 512, "pod-1", 6)
    views = (SequenceView("r", Epoch(3, 4), "d", 40),)
    adapters = (AdapterView("d", True), AdapterView("e", False, "torn"), AdapterView("g", False, loading=True))
    report = RunnerReport(RunnerId("u", "i"), spec, 7, 30, views, adapters, 5, True, True, 11, 5000)
    wanted = PreemptDecision(RunnerId("u", "i"), "r", Epoch(3, 4), "q", 80)
    assert event == ev.ClusterReport("s", (report,), (RunnerId("u", "i"),), (wanted,))


def changed(**fields: Any) -> spb.RunnerState:
    """STATE with other fields; repeated ones are added."""
    state = spb.RunnerState()
    state.CopyFrom(STATE)
    state.MergeFrom(spb.RunnerState(**fields))
    return state


@pytest.mark.parametrize(
    "state",
    [
        spb.RunnerState(),
        spb.RunnerState(id=R, runner=spb.RunnerHello(runner=R, pool="n/p", address="h:1")),
        changed(id=cpb.RunnerId(uuid="another")),
        changed(free_pages=100),
        changed(sequences=[STATE.sequences[0]]),
    ],
    ids=["empty", "no capacity", "two runners", "more free than there is", "a sequence twice"],
)
def test_a_bad_state_costs_its_runner_the_report_and_the_others_nothing(state: spb.RunnerState) -> None:
    with pytest.raises(PeerError):
        wire.runner_report(state)
    message = pb.ClusterReport(runners=[state, STATE], lost=[R])
    event = wire.cluster_event("s", pb.SupervisorToScheduler(report=message))
    assert isinstance(event, ev.ClusterReport)
    assert event.runners == (wire.runner_report(STATE),)
    assert event.lost == (RunnerId("u", "i"),)


def test_an_error_that_objects_would_show_is_cut() -> None:
    report = wire.runner_report(changed(adapters=[spb.AdapterState(digest="h", error="e" * 100_000)]))
    assert report.adapters[-1].error == "e" * 1000


def test_an_epoch_above_all_terms_is_refused() -> None:
    started = pb.Started(request_id="r", epoch=cpb.Epoch(term=MAX_TERM, counter=1))
    with pytest.raises(PeerError, match="term"):
        wire.gateway_event("g", pb.GatewayToScheduler(started=started))


def test_unset_bounds_and_policies_of_a_pool_are_the_schemas_defaults() -> None:
    (spec,) = wire.registry_event(pb.RegistryToScheduler(pools=[pb.PoolDesired(pool="n/p")])).pools
    assert spec == PoolSpec("n/p")


def test_a_registry_message_arrives_whole() -> None:
    pool = pb.PoolDesired(
        pool="n/p", base_digest="b", base_model_name="m", shared_all=True, shared_namespaces=["x"], max_queue=5,
        max_moves=2, placement="punica", queue="fcfs", reservation="calibrated", created_unix_s=9, min_runners=1,
        max_runners=4, idle_s=30, hold_s=300, drain_s=60,
    )  # fmt: skip
    adapter = pb.AdapterDesired(
        uid="u", namespace="n", name="a", model_name="n/a", pool="n/p", digest="d", rank=8, bytes=100, pinned=True,
        created_unix_s=10, tier=spb.AdapterState.HOST,
    )  # fmt: skip
    event = wire.registry_event(
        pb.RegistryToScheduler(
            version=1, snapshot=True, pools=[pool], adapters=[adapter], removed_pools=["n/q"],
            removed_adapter_uids=["v"],
        )
    )  # fmt: skip
    assert event.snapshot
    assert (event.removed_pools, event.removed_adapters) == (("n/q",), ("v",))
    for message, value in ((pool, event.pools[0]), (adapter, event.adapters[0])):
        for field in fields(value):
            name = "pool" if isinstance(value, PoolSpec) and field.name == "name" else field.name
            found = getattr(message, name)
            assert (tuple(found) if field.name == "shared_namespaces" else found) == getattr(value, field.name)


@pytest.mark.parametrize("tier", [spb.AdapterState.DEVICE, 17])
def test_a_tier_that_cannot_be_asked_for_is_refused(tier: Any) -> None:
    adapter = pb.AdapterDesired(uid="u", tier=tier)
    with pytest.raises(PeerError, match="tier"):
        wire.registry_event(pb.RegistryToScheduler(adapters=[adapter]))


def test_what_goes_out_says_what_was_ordered() -> None:
    assign = wire.to_gateway(ef.Assign("g", "r", Epoch(3, 4), RunnerId("u", "i"), "h:1", 40)).assign
    assert assign == pb.Assign(request_id="r", epoch=EPOCH, runner=R, address="h:1", reservation_tokens=40)
    assert wire.to_gateway(ef.Preempt("g", "r", Epoch(3, 4))).preempt == pb.Preempt(request_id="r", epoch=EPOCH)
    assert wire.to_gateway(ef.TellGone("g", RunnerId("u", "i"))).runner_gone.runner == R
    assert list(wire.to_gateway(ef.AckOutcomes("g", ("r", "q"))).outcome_ack.request_ids) == ["r", "q"]
    assert wire.to_supervisor(ef.TellTerm("s", 9)).hello.term == 9
    assert wire.to_registry(ef.PoolStatus("n/p", 1, 2, 3, 4, ("pod-2", "pod-1"), 5, 600, 70, 8)).pool == pb.PoolStatus(
        pool="n/p", ready_runners=1, wanted_runners=2, running=3, queued=4, victims=["pod-2", "pod-1"], max_runners=5,
        total_pages=600, reserved_pages=70, demand_runners=8,
    )  # fmt: skip
    assert wire.to_registry(ef.AdapterStatus("u", "d", True, 2, ("x: y",))).adapter == pb.AdapterStatus(
        uid="u", digest="d", routed=True, ready_runners=2, load_errors=["x: y"]
    )


def test_an_order_is_the_complete_list() -> None:
    desired = DesiredList(5, (DesiredAdapter("d", 8, 100, True), DesiredAdapter("e", 8, 9, False, Tier.DISK)))
    orders = wire.to_supervisor(ef.Order("s", RunnerId("u", "i"), desired)).orders
    assert orders.runner == R
    assert orders.order == spb.RunnerOrder(
        has_desired=True,
        desired_version=5,
        desired=[
            spb.DesiredAdapter(digest="d", rank=8, bytes=100, pinned=True),
            spb.DesiredAdapter(digest="e", rank=8, bytes=9, tier=spb.AdapterState.DISK),
        ],
    )


def test_a_route_table_goes_out_whole() -> None:
    table = RouteTable(
        8,
        (Route("n/a", "n", "n/p", "d", 8, "u", 10),),
        (PoolRoute(PoolSpec("n/p", "b", "m", True, ("x",), hold_s=300), 512, 2),),
        (KeyRoute("h", "n", "k"),),
        True,
    )
    message = wire.to_gateway(ef.SendRoutes("g", table)).routes
    assert message == pb.Routes(
        version=8,
        routes=[
            pb.Route(
                model_name="n/a", namespace="n", pool="n/p", adapter_digest="d", rank=8, uid="u", created_unix_s=10
            )
        ],
        pools=[
            pb.PoolRoute(
                pool="n/p", base_digest="b", base_model_name="m", max_context_tokens=512, ready_runners=2,
                shared_all=True, shared_namespaces=["x"], hold_s=300,
            )
        ],
        keys=[pb.KeyRoute(key_hash="h", namespace="n", key_id="k")],
        keys_known=True,
    )  # fmt: skip
