"""The accounts of a planned cluster, whatever it serves: nothing lost, nothing twice, KV balances."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.domain.runner import RunnerRole
from weft_sim.performance import StepShape
from weft_sim.planning import (
    BATCHINGS,
    BLOOM_176B,
    H100,
    SPLIT,
    Cluster,
    HeapClock,
    KvLink,
    MachineKind,
    PlannedRequest,
    Rules,
    ServedModel,
    Stepping,
    UnsupportedRules,
    machine_kind,
)
from weft_sim.traces import TraceArrival

Machines = list[tuple[MachineKind, RunnerRole]]
MODEL = ServedModel("small", 4, 1_000, 0)


class Linear:
    """A model that is linear in every amount of a step."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def seconds(self, step: StepShape) -> float:
        linear = 5e-3 + 1e-4 * step.decode_rows + 2e-5 * step.prompt_tokens + 1e-4 * step.adapters
        bound = max(1e-6 * step.context_tokens, 2e-3)
        return self.scale * (linear + bound + 1e-8 * step.prompt_pairs)


KIND = MachineKind("kind", Linear(), 2_000_000, max_sequences=8, max_batch_tokens=256)
# Roots: what comes exactly at the end of a step would join the next or the one after it by rounding.
SLOW = replace(KIND, name="slow", model=Linear(sqrt(3)))

arrivals = st.lists(
    st.builds(TraceArrival, st.floats(0, 2.0), st.integers(1, 700), st.integers(1, 60), st.integers(-1, 3)),
    min_size=1,
    max_size=40,
)
whole = st.builds(lambda count: [(KIND, RunnerRole.MIXED)] * count, st.integers(1, 4))
apart = st.builds(
    lambda prompts, tokens, mixed: (
        [(KIND, RunnerRole.PROMPT)] * prompts + [(SLOW, RunnerRole.TOKEN)] * tokens + [(KIND, RunnerRole.MIXED)] * mixed
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1),
)
transfers = st.builds(
    KvLink,
    st.sampled_from([sqrt(2) * 1e6, sqrt(2) * 1e8]),
    st.sampled_from([1, 200, 10_000]),
    one_at_a_time=st.booleans(),
)


def rules(*batchings: str) -> st.SearchStrategy[Rules]:
    return st.builds(
        Rules,
        st.sampled_from(["shortest_queue", "mixed_pool"]),
        st.builds(Stepping, st.sampled_from(batchings)),
        transfers,
        st.sampled_from([300, 8_192]),
    )


PHASED = [name for name in BATCHINGS if name != "request"]
clusters = st.one_of(st.tuples(whole, rules(*BATCHINGS)), st.tuples(apart, rules(*PHASED)))


def served(cluster: Cluster, requests: Sequence[TraceArrival]) -> list[tuple[float, float]]:
    cluster.serve(requests)
    cluster.check()
    return [(request.ttft_s, request.e2e_s) for request in cluster.requests]


@settings(deadline=None)
@given(clusters, arrivals)
def test_every_request_is_served_once_and_kv_balances(
    described: tuple[Machines, Rules], requests: list[TraceArrival]
) -> None:
    machines, rules = described
    cluster = Cluster(machines, MODEL, rules)
    served(cluster, requests)
    decoded = sum(arrival.output_tokens - 1 for arrival in requests)
    assert sum(machine.prompt_tokens for machine in cluster.machines) == sum(one.prompt_tokens for one in requests)
    assert sum(machine.gaps.total() for machine in cluster.machines) == decoded
    for machine in cluster.machines:
        assert (machine.kv_used, machine.kv_promised, machine.pending_tokens) == (0, 0, 0)
        assert not machine.requests
        assert machine.role is machine.home
    sent = [request for request in cluster.requests if request.transferred]
    assert cluster.transferred_bytes == sum((request.prompt_tokens + 1) * 1_000 for request in sent)


A_TURN_WITHOUT_AN_EVENT = [  # a small prompt that was passed over as often as may be, while decode rows run
    TraceArrival(*each, 0)
    for each in (
        (1.5, 538, 60), (1.75, 272, 38), (1.5, 695, 60), (1.625, 1, 27), (1.625, 284, 26), (1.8125, 1, 1),
        (1.75, 278, 60),
    )
]  # fmt: skip
PLACES_TAKEN_AND_LEFT = [  # the batch that a selection gives changes what the next one selects
    TraceArrival(*each, 0)
    for each in (
        (0.0, 466, 60), (0.0, 537, 31), (0.25, 1, 1), (0.125, 255, 8), (0.125, 685, 1), (0.0, 235, 28), (0.0, 466, 60),
        (0.0, 116, 2),
    )
]  # fmt: skip


@settings(deadline=None)
@given(clusters, arrivals)
@example(([(KIND, RunnerRole.MIXED)], Rules(stepping=Stepping("mixed"))), A_TURN_WITHOUT_AN_EVENT)
@example(([(KIND, RunnerRole.MIXED)], Rules("shortest_queue", Stepping("mixed"))), PLACES_TAKEN_AND_LEFT)
def test_steps_in_one_piece_give_what_single_steps_give(
    described: tuple[Machines, Rules], requests: list[TraceArrival]
) -> None:
    machines, rules = described
    stepped = replace(rules, stepping=replace(rules.stepping, jumps=False))
    pieces = served(Cluster(machines, MODEL, rules), requests)
    singles = served(Cluster(machines, MODEL, stepped), requests)
    assert pieces == [pytest.approx(times, rel=1e-9) for times in singles]


def test_kv_that_arrives_when_a_step_begins_waits_for_the_next_step() -> None:
    """Both KVs arrive in the moment in which the first one's step begins."""
    machines = [(KIND, RunnerRole.PROMPT), (KIND, RunnerRole.PROMPT), (SLOW, RunnerRole.TOKEN)]
    requests = [TraceArrival(0.0, 1, 3), TraceArrival(0.0, 1, 2)]
    ends = [
        served(Cluster(machines, MODEL, Rules(stepping=Stepping("continuous", jumps=jumps))), requests)
        for jumps in (True, False)
    ]
    assert ends[0] == [pytest.approx(times) for times in ends[1]]


def alone(rules: Rules, machines: Machines, *requests: TraceArrival) -> list[PlannedRequest]:
    cluster = Cluster(machines, MODEL, rules)
    served(cluster, requests)
    return cluster.requests


def test_a_prompt_that_is_sent_by_layers_is_there_one_layer_after_its_end() -> None:
    pair = [(KIND, RunnerRole.PROMPT), (KIND, RunnerRole.TOKEN)]
    whole_s = 201 * 1_000 / 1e8
    for layer_wise_from, seconds in ((1e9, 200 * 1_000 / 1e8), (1, 200 * 1_000 / 1e8 / 4)):
        (request,) = alone(Rules(transfer=KvLink(1e8, layer_wise_from)), pair, TraceArrival(0, 200, 2))
        assert request.resumed is not None
        assert request.first_at is not None
        assert request.resumed - request.first_at == pytest.approx(seconds)
        assert seconds < whole_s


def test_request_level_batching_lets_nobody_join() -> None:
    early, late = TraceArrival(0, 100, 50), TraceArrival(0.01, 10, 2)
    machine = [(KIND, RunnerRole.MIXED)]
    waits, joins = (
        alone(Rules("shortest_queue", Stepping(batching)), machine, early, late) for batching in ("request", "mixed")
    )
    assert (waits[1].began or 0) >= (waits[0].ended or 0)
    assert (joins[1].ended or 0) < (joins[0].ended or 0)


def test_request_level_batching_is_refused_on_machines_of_one_phase() -> None:
    pair = [(KIND, RunnerRole.PROMPT), (KIND, RunnerRole.TOKEN)]
    with pytest.raises(UnsupportedRules, match="request-level batching"):
        Cluster(pair, MODEL, Rules(stepping=Stepping("request")))


def test_continuous_batching_stops_decode_rows_for_a_prompt_and_mixed_does_not() -> None:
    early, late = TraceArrival(0, 100, 50), TraceArrival(0.1, 200, 2)
    longest = {}
    for batching in ("continuous", "mixed"):
        cluster = Cluster([(KIND, RunnerRole.MIXED)], MODEL, Rules("shortest_queue", Stepping(batching)))
        served(cluster, [early, late])
        longest[batching] = max(cluster.machines[0].gaps)
    assert longest["continuous"] > longest["mixed"]


def test_full_token_machines_bring_a_prompt_machine_into_the_mixed_set_until_it_is_idle() -> None:
    small = replace(KIND, kv_bytes=300_000)
    cluster = Cluster([(KIND, RunnerRole.PROMPT), (small, RunnerRole.TOKEN)], MODEL, Rules())
    served(cluster, [TraceArrival(0, 200, 50), TraceArrival(0, 200, 50)])
    assert [roles.mixed for roles in cluster.roles] == [0, 1, 0]


def test_unfit_splitwise_runs_end_as_theirs_with_requests_unfinished() -> None:
    """Prompts fill the only machines, and none has memory left for a token phase."""
    kind = replace(machine_kind(H100), kv_bytes=3_000 * BLOOM_176B.kv_token_bytes)
    machines = [(kind, RunnerRole.MIXED)]
    cluster = Cluster(machines, BLOOM_176B, replace(SPLIT, scheduling="shortest_queue"), clock=HeapClock())
    cluster.serve([TraceArrival(0, 1_400, 400), TraceArrival(0, 1_400, 400)])
    assert sum(request.ended is None for request in cluster.requests) == 2
