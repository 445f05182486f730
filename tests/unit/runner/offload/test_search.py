"""Laws of the search: budgets hold, more is never worse, no linear program is beaten, no other policy is better."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.domain.model.config import parse_spec
from weft_runner.errors import NoPolicyFits, PolicyInvalid
from weft_runner.offload import (
    EVERYTHING,
    MATRICES,
    BlockWork,
    Budgets,
    Case,
    Formats,
    MachineRates,
    MemoryTier,
    ModelSizes,
    OffDeviceShares,
    OffloadPlan,
    PolicySearch,
    Supports,
    check_plan,
    costs,
    find_plan,
    find_plans,
    least_budgets,
    model_sizes,
    pipeline_time,
    prompt_streams,
    request_json,
    request_of,
    residents,
    rising,
    round_case,
    solve_each,
    solve_ranks,
    solver,
    spread,
    token_streams,
)

MIB = 1 << 20
SPEC = parse_spec(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1376,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }
)  # fmt: skip
PRODUCTS = {
    "bf16": rising({1: 1e-10, 4: 1e-10, 16: 1.2e-10, 64: 3e-10, 256: 1.1e-9}),
    "int4": rising({1: 5e-11, 4: 6e-11, 16: 1.2e-10, 64: 3.2e-10, 256: 1.2e-9}),
}
MACHINE = MachineRates(1e9, 5e8, 1e10, 8e9, 2e10, 1e10, 5e9, 1e11, PRODUCTS)
WORK = BlockWork(64, 16, adapters=4, adapter_rank=16, batch_tokens=128)
ON_DEVICE = Supports((MemoryTier.DEVICE,), (MemoryTier.DEVICE,))

budgets = st.builds(
    lambda device, host: Budgets(device * MIB // 2, host * MIB // 2, 400 * MIB),
    st.integers(16, 130),
    st.integers(0, 90),
)
machines = st.builds(
    lambda read, copy, overlap, duplex, one: replace(
        MACHINE, disk_read=read * 1e7, to_device=copy * 1e8, to_host=copy * 9e7, overlap=overlap, duplex=duplex,
        request_s=1e-5, one_memory=one,
    ),
    st.integers(1, 400), st.integers(1, 200), st.sampled_from([1.0, 0.9, 0.5]), st.sampled_from([1.0, 0.2]),
    st.booleans(),
)  # fmt: skip
few = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def request(
    machine: MachineRates = MACHINE,
    budget: Budgets | None = None,
    *,
    most_block: int = 4,
    supports: Supports = EVERYTHING,
) -> PolicySearch:
    return PolicySearch(SPEC, machine, budget or Budgets(30 * MIB), Formats(), WORK, supports, most_block)


def plan_of(asked: PolicySearch) -> OffloadPlan | None:
    try:
        return find_plan(asked, solver.relax)
    except NoPolicyFits:
        return None


@few
@given(machines, budgets, st.sampled_from([EVERYTHING, ON_DEVICE]))
def test_a_plan_keeps_to_its_budgets_and_no_bound_is_beaten(
    machine: MachineRates, budget: Budgets, supports: Supports
) -> None:
    asked = request(machine, budget, supports=supports)
    plan = plan_of(asked)
    if plan is None:
        least = least_budgets(asked)
        assert any(least.of(tier) > asked.tiers.of(tier) for tier in MemoryTier)
        return
    check_plan(plan)
    assert plan.relaxed_s <= plan.predicted.block_s
    assert plan.predicted.block_s >= plan.predicted.bound_s * (1 - 1e-9)
    assert _bytes_by_tier(plan, asked.sizes) == pytest.approx(
        [share * asked.sizes.weights for share in _weight_shares(plan)], abs=1.0
    )


def _bytes_by_tier(plan: OffloadPlan, sizes: ModelSizes) -> list[int]:
    """Sum the bytes of each tier, from the matrices' own places."""
    rows = [[*zip(layer, sizes.matrices, strict=True)] for layer in plan.tiers.layers]
    places = [*itertools.chain(*rows), (plan.tiers.head, sizes.head)]
    return [sum(size for tier, size in places if tier is wanted) for wanted in MemoryTier]


def _weight_shares(plan: OffloadPlan) -> list[float]:
    return [plan.policy.weights.device, plan.policy.weights.host, plan.policy.weights.disk]


@few
@given(machines, budgets, st.integers(0, 40), st.integers(0, 40), st.floats(1.0, 8.0))
def test_more_memory_or_a_faster_disk_is_never_slower(
    machine: MachineRates, budget: Budgets, device: int, host: int, factor: float
) -> None:
    before = plan_of(request(machine, budget))
    if before is None:
        return
    more = Budgets(budget.device_bytes + device * MIB, budget.host_bytes + host * MIB, budget.disk_bytes)
    faster = replace(machine, disk_read=machine.disk_read * factor, disk_write=machine.disk_write * factor)
    for asked in (request(machine, more), request(faster, budget)):
        after = plan_of(asked)
        assert after is not None
        assert after.predicted.tokens_per_s >= before.predicted.tokens_per_s * (1 - 1e-9)


@few
@given(machines, budgets)
def test_no_policy_of_a_grid_is_faster_than_its_linear_program(machine: MachineRates, budget: Budgets) -> None:
    """Brute force over shares in quarters, where the cost model itself says that they fit."""
    asked = request(machine, budget)
    case = Case(asked.sizes, machine, asked.formats, asked.work, 8, 4, 2)
    bound = solver.relax(case, asked.tiers, EVERYTHING)
    parts, prompt, token = costs.memory(case), prompt_streams(case), token_streams(case)
    quarters = [(h / 4, d / 4) for h in range(5) for d in range(5 - h) if not (machine.one_memory and h)]
    best = math.inf
    for weights, hidden, kv in itertools.product(quarters, repeat=3):
        outside = OffDeviceShares(*weights, *hidden, *kv)
        fits = all(
            sum(part.at(outside) for part in parts[tier].values()) <= asked.tiers.of(tier) for tier in MemoryTier
        )
        if fits:
            prompts = costs.phase(case, prompt, outside, case.passes).pass_s
            best = min(best, prompts + 15 * costs.phase(case, token, outside).pass_s)
    assert bound is not None or best == math.inf
    if bound is not None:
        assert bound <= best * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("device_mib", [24])
@pytest.mark.parametrize("host_mib", [0, 20])
def test_what_is_found_is_the_best_of_all_roundings(device_mib: int, host_mib: int) -> None:
    """Bounds only leave out what cannot be the best: rounding every case finds nothing faster."""
    asked = request(replace(MACHINE, one_memory=not host_mib), Budgets(device_mib * MIB, host_mib * MIB, 400 * MIB))
    plan, cases = find_plan(asked, solver.relax), []
    for block, batch, passes, buffers in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2)):
        if block % batch == 0 and block % passes == 0:
            cases.append(Case(asked.sizes, asked.machine, asked.formats, asked.work, block, batch, passes, buffers))
    every = [(case, round_case(case, asked.tiers, EVERYTHING)) for case in cases]
    best = max(case.block * 16 / found.prediction.block_s for case, found in every if found)
    assert plan.predicted.tokens_per_s == pytest.approx(best)


def test_rounding_costs_little_where_layers_are_many() -> None:
    plan = find_plan(request(most_block=16, supports=ON_DEVICE), solver.relax)
    assert plan.predicted.block_s <= 1.1 * plan.relaxed_s


def test_budgets_that_hold_nothing_are_refused_with_the_tier_the_bytes_and_what_would_fit() -> None:
    asked = request(budget=Budgets(4 * MIB), supports=ON_DEVICE)
    with pytest.raises(NoPolicyFits, match=r"the device has 4194304 bytes, .* too few") as refused:
        find_plan(asked, solver.relax)
    assert refused.value.tier is MemoryTier.DEVICE
    enough = replace(asked, budgets=Budgets(4 * MIB + refused.value.short_bytes))
    assert find_plan(enough, solver.relax).policy.block == 1
    with pytest.raises(NoPolicyFits):
        find_plan(replace(enough, budgets=Budgets(enough.budgets.device_bytes - 1)), solver.relax)
    with pytest.raises(NoPolicyFits, match="the disk has") as refused:
        find_plan(request(budget=Budgets(40 * MIB, 0, 1 * MIB)), solver.relax)
    assert refused.value.tier is MemoryTier.DISK


def test_an_executor_without_other_places_keeps_kv_and_activations_on_the_device() -> None:
    plan = find_plan(request(supports=ON_DEVICE), solver.relax)
    assert (plan.policy.kv.device, plan.policy.activations.device, plan.kv_device) == (1.0, 1.0, plan.policy.block)


def test_int4_weights_that_fit_are_faster_than_bf16_that_do_not() -> None:
    asked = request(budget=Budgets(35 * MIB))
    small = find_plan(replace(asked, formats=Formats("int4")), solver.relax)
    assert small.predicted.tokens_per_s > 2 * find_plan(asked, solver.relax).predicted.tokens_per_s


@pytest.mark.parametrize(("times", "off"), [(0.0, True), (1.2, True), (0.5, False)])
def test_sparse_attention_is_off_where_it_takes_longer_as_measured(times: float, *, off: bool) -> None:
    """`times`: as long as attention to all keys; 0: not measured."""
    rate = MACHINE.attention / times if times else 0.0
    asked = request(replace(MACHINE, disk_read=1e11, sparse_attention=rate), budget=Budgets(60 * MIB))
    dense, sparse = (
        find_plan(replace(asked, formats=Formats(sparse_attention=on)), solver.relax) for on in (False, True)
    )
    assert sparse.formats.sparse_attention is not off
    assert (sparse == dense) is off
    assert sparse.predicted.tokens_per_s >= dense.predicted.tokens_per_s


def test_attention_on_the_host_copies_no_kv_and_takes_the_hosts_time() -> None:
    """Two machines: one whose host attends as fast as its device, and one whose host is slower."""
    slow, sizes = replace(MACHINE, one_memory=False), request().sizes
    fast = replace(slow, host_attention=MACHINE.attention)

    def seconds(machine: MachineRates, outside: OffDeviceShares, *, delegated: bool) -> list[float]:
        case = Case(sizes, machine, Formats(cpu_attention=delegated), WORK, 4, 4)
        return [stream.at(outside) for stream in token_streams(case)]

    on_host = OffDeviceShares(kv_host=1.0)
    (read, up, *others), (same_read, none, *same) = (seconds(fast, on_host, delegated=on) for on in (False, True))
    assert none == 0.0 < up
    assert [same_read, *same] == pytest.approx([read, *others])
    assert seconds(slow, on_host, delegated=True)[-1] > same[-1]
    assert seconds(slow, OffDeviceShares(), delegated=True) == seconds(slow, OffDeviceShares(), delegated=False)


@given(st.integers(1, 40), st.integers(1, 40))
def test_tokens_beside_later_prompts_are_those_of_sequences_that_begin_pass_after_pass(
    passes: int, output: int
) -> None:
    """One sequence a pass; its first token is the prompt's, the others come one a pass."""
    work = replace(WORK, output=output)
    case = Case(model_sizes(SPEC, Formats()), MACHINE, Formats(), work, passes, 1, passes)
    early = [min(output - 1, passes - began) for began in range(1, passes + 1)]
    assert passes * case.beside == pytest.approx(sum(early))
    assert (output - 1) * passes * case.left == pytest.approx((output - 1) * passes - sum(early))


def test_kv_on_the_disk_takes_its_requests_and_what_is_written_keeps_from_reading() -> None:
    asked = request(replace(MACHINE, request_s=1e-3, duplex=0.25))
    case = Case(asked.sizes, asked.machine, asked.formats, asked.work, 4, 4)
    streams, outside = token_streams(case), OffDeviceShares(kv_disk=1.0)
    token, plain = costs.phase(case, streams, outside), costs.phase(replace(case, machine=MACHINE), streams, outside)
    requests = 4 * asked.sizes.layers  # a sequence's pages of a layer are one
    assert token.disk_write_s == pytest.approx(4 * 16 * asked.sizes.kv_token / MACHINE.disk_write + requests * 1e-3)
    assert token.disk_read_s == pytest.approx(4 * 72 * asked.sizes.kv_token / MACHINE.disk_read + (requests + 4) * 1e-3)
    disk = sorted((token.disk_read_s, token.disk_write_s))
    assert plain.pass_s == pytest.approx(disk[1])
    assert token.pass_s == pytest.approx(disk[1] + 0.75 * disk[0])


def test_one_request_alone_is_bound_by_the_bytes_that_are_not_resident() -> None:
    plan = find_plan(request(most_block=1), solver.relax)
    streamed = plan.policy.weights.disk * request().sizes.weights
    assert plan.predicted.token_1_s >= streamed / MACHINE.disk_read
    if plan.buffers > 1:
        assert plan.predicted.token_1_s == pytest.approx(streamed / MACHINE.disk_read)


def test_ranks_get_policies_of_their_own_and_two_are_as_fast_as_their_budgets_together() -> None:
    """Each of two with 40 % of the weights holds 80 % of its half (FlexGen, section 4.4): the disk reads a third."""
    weights = request().sizes.weights
    budget = Budgets(weights * 2 // 5 + 8 * MIB)
    one = find_plan(request(budget=budget), solver.relax)
    ranks = {0: range(3), 1: range(3, 6)}
    two = find_plans(
        {rank: replace(request(budget=budget), layers=layers) for rank, layers in ranks.items()}, solver.relax
    )
    assert {plan.policy.block for plan in two.values()} == {two[0].policy.block}
    assert [plan.tiers.head is None for plan in two.values()] == [True, False]
    assert len(two[0].tiers.layers) == 3
    plans = [two[0], two[1]]
    turns, beside = (pipeline_time(plans, hosts) for hosts in (1, 2))
    assert turns.tokens_per_s > 1.8 * one.predicted.tokens_per_s  # though they take turns
    assert beside.tokens_per_s == min(plan.predicted.tokens_per_s for plan in plans)
    for time in (turns, beside):
        assert max(time.relaxed_s, time.bound_s) <= time.block_s * (1 + 1e-9)
        block, work = two[0].policy.block, request().work
        assert time.tokens_per_s == pytest.approx(block * work.output / time.block_s)
    with pytest.raises(NoPolicyFits, match="rank 1: "):
        find_plans({0: request(budget=budget), 1: request(budget=Budgets(MIB))}, solver.relax)


@given(st.integers(1, 40), st.data())
def test_resident_matrices_are_spread_evenly(layers: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, layers))
    places = sorted(spread(n, range(layers)))
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert len(places) == n
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_can_be_resident_ascends_and_its_ring_holds_the_largest_streamed_layer() -> None:
    sizes = request().sizes
    every = residents(sizes, 2)
    assert [one.bytes for one in every] == sorted({one.bytes for one in every})
    assert (every[0].bytes, every[-1].bytes, every[-1].ring) == (0, sizes.weights, 0)
    for one in every:
        streamed = [sum(size for n, size in zip(one.counts, sizes.matrices, strict=True) if n < sizes.layers)]
        assert one.ring == 2 * max(*streamed, 0 if one.head else sizes.panel)
    assert len(MATRICES) == len(sizes.matrices)


def test_sizes_are_those_of_the_packed_matrices() -> None:
    sizes = request().sizes
    assert sizes.matrices[0] == (512 + 2 * 128) * 512 * 2
    assert sizes.head == 4096 * 512 * 2
    assert sizes.file == 6 * sizes.layer + 2 * sizes.head
    assert sizes.kv_token == 6 * 2 * 128 * 2
    asked = request()
    packed, odd = Formats(kv="int4"), replace(asked.spec, head_dim=48)
    assert model_sizes(asked.spec, packed).kv_token == 6 * 2 * 128 * 9 // 16
    with pytest.raises(PolicyInvalid, match="head_dim is 48"):
        model_sizes(odd, packed)
    assert sizes.adapter == 2 * 16 * 6 * (2 * (512 + 512) + 2 * (512 + 128) + 3 * (512 + 1376))


@pytest.mark.slow
def test_the_search_in_its_own_process_answers_as_here() -> None:
    asked = request(most_block=2)
    small = request(budget=Budgets(MIB))
    found, refused, again = solve_each([{0: asked}, {0: small}, {0: asked}])
    assert found == again == {0: find_plan(asked, solver.relax)}
    assert isinstance(refused, NoPolicyFits)
    assert refused.short_bytes > 0
    with pytest.raises(NoPolicyFits, match="too few"):
        solve_ranks({0: small})
    assert len(solve_each([{0: small}, {0: asked}])) == 1
    assert request_of(json.loads(json.dumps(request_json(asked)))) == asked
