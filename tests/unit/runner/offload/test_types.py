"""Policies, plans and machines: their laws, and that JSON keeps them."""

import json
from dataclasses import asdict, replace

import pytest

from weft_runner.errors import MachineInvalid, PolicyInvalid
from weft_runner.offload import (
    BlockTime,
    Budgets,
    Formats,
    MachineRates,
    MemoryTier,
    OffloadPlan,
    PassTime,
    Policy,
    Shares,
    Usage,
    WeightTiers,
    check_machine,
    check_plan,
    check_policy,
    machine_of,
    plan_of,
    product_s,
    rising,
)

ALL = Shares(1.0, 0.0, 0.0)
POLICY = Policy(8, 4, Shares(0.25, 0.0, 0.75), ALL, ALL)
PHASE = PassTime(1.0, 0.0, 0.0, 0.0, 0.5, 1.0)
PLAN = OffloadPlan(
    policy=POLICY,
    formats=Formats(),
    budgets=Budgets(1000, 0, 5000),
    tiers=WeightTiers(((MemoryTier.DEVICE, MemoryTier.DISK, MemoryTier.DISK, MemoryTier.DISK),), MemoryTier.DISK),
    activations=MemoryTier.DEVICE,
    kv_device=8,
    kv_host=0,
    prompt_passes=2,
    batch_tokens=512,
    buffers=2,
    usage={
        MemoryTier.DEVICE: Usage(weights=300, ring=100),
        MemoryTier.HOST: Usage(),
        MemoryTier.DISK: Usage(weights=900),
    },
    predicted=BlockTime(PHASE, PHASE, 32.0, 30.0, 8.0, 1.0),
    relaxed_s=31.0,
)
MACHINE = MachineRates(1e9, 5e8, 1e10, 1e10, 2e10, 1e10, 1e10, 1e11, {"bf16": ((1, 1e-10), (16, 3e-10))})


def test_a_plan_and_a_machine_come_back_from_json() -> None:
    assert plan_of(json.loads(json.dumps(asdict(PLAN)))) == PLAN
    assert machine_of(json.loads(json.dumps(asdict(MACHINE)))) == MACHINE


@pytest.mark.parametrize(
    "policy",
    [
        replace(POLICY, batch=9),
        replace(POLICY, batch=0),
        replace(POLICY, kv=Shares(0.5, 0.0, 0.4)),
        replace(POLICY, weights=Shares(1.5, -0.5, 0.0)),
        replace(POLICY, weights=Shares(float("nan"), 0.0, 1.0)),
    ],
)
def test_a_policy_that_breaks_a_law_is_refused(policy: Policy) -> None:
    with pytest.raises(PolicyInvalid):
        check_policy(policy)


def test_a_plan_above_a_budget_is_refused_with_the_tier_and_both_numbers() -> None:
    with pytest.raises(PolicyInvalid, match="900 bytes on the disk, which has 800"):
        check_plan(replace(PLAN, budgets=Budgets(1000, 0, 800)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"disk_read": 0}, "disk_read is 0"),
        ({"disk_read": "fast"}, "disk_read is 'fast'"),
        ({"overlap": 2.0}, "overlap"),
        ({"duplex": -1.0}, "duplex"),
        ({"request_s": "long"}, "request_s is 'long'"),
        ({"sparse_attention": -1.0}, "sparse_attention"),
        ({"products": {}}, "no format"),
        ({"products": {"bf16": [[16, 1e-9], [1, 1e-9]]}}, "do not ascend"),
        ({"products": {"bf16": 3}}, "products"),
        ({"speed": 3}, "unknown: speed"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(MachineInvalid, match=named):
        machine_of({**asdict(MACHINE), **change})


def test_products_lie_on_lines_between_what_was_measured_and_go_on_beyond_it() -> None:
    table = MACHINE.products["bf16"]
    assert product_s(table, 1) == 1e-10
    assert product_s(table, 8.5) == pytest.approx(2e-10)
    assert product_s(table, 31) == pytest.approx(5e-10)


def test_noise_of_measured_products_falls_to_what_more_rows_took() -> None:
    table = rising({1: 2e-10, 2: 1.5e-10, 4: 3e-10})
    assert table == ((1, 1.5e-10), (2, 1.5e-10), (4, 3e-10))
    check_machine(replace(MACHINE, products={"bf16": table}))
