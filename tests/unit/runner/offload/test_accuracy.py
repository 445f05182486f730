"""Predicted against measured."""

from dataclasses import replace

import pytest

from weft_runner.offload import Accuracy, Budgets, PassWork, WeightPlacement, find_plan, predict_pass, solver

from .test_search import MACHINE, MIB, ON_DEVICE, request


@pytest.mark.parametrize("overlap", [1.0, 0.5])
def test_a_pass_of_the_plan_is_predicted_as_in_the_plan_and_the_ratio_is_followed(overlap: float) -> None:
    machine = replace(MACHINE, overlap=overlap, request_s=1e-5, duplex=0.5)
    asked = request(machine, budget=Budgets(30 * MIB), supports=ON_DEVICE)
    plan = find_plan(asked, solver.relax)
    block, work, sizes = plan.policy.block, asked.work, asked.sizes
    placement = WeightPlacement(
        "bf16", round(plan.policy.weights.disk * sizes.weights), batch_tokens=plan.batch_tokens, buffers=plan.buffers,
        gathers=True,
    )  # fmt: skip
    accuracy = Accuracy(placement, sizes, asked.machine)
    token = PassWork(block, block, block * (work.prompt + work.output // 2), adapter_bytes=block * sizes.adapter)
    assert accuracy.predict(token).pass_s == pytest.approx(plan.predicted.token.pass_s, rel=0.02)
    rows = block * work.prompt // plan.prompt_passes
    prompts = PassWork(rows, block // plan.prompt_passes, pairs=rows * work.prompt // 2)
    expected = plan.predicted.prompt.pass_s / plan.prompt_passes
    assert predict_pass(prompts, placement, sizes, asked.machine).pass_s == pytest.approx(expected, rel=0.1)
    assert accuracy.figures.predicted_s == 0.0
    for _ in range(3):
        accuracy.learn(token, 1.2 * accuracy.predict(token).pass_s)
    accuracy.learn(prompts, 1.2 * accuracy.predict(prompts).pass_s)
    figures = accuracy.figures
    assert figures.passes == 4
    assert figures.measured_s == pytest.approx(1.2 * figures.predicted_s)
    assert figures.token_measured_s == pytest.approx(1.2 * accuracy.predict(token).pass_s)
    assert figures.token_predicted_s == pytest.approx(accuracy.predict(token).pass_s)
    assert 0.0 < figures.alone_s <= accuracy.predict(token).pass_s


@pytest.mark.parametrize(("disk_read", "reads"), [(1e8, True), (1e13, False)])
def test_one_request_alone_is_bound_by_the_slower_of_disk_and_processor(disk_read: float, reads: bool) -> None:
    machine = replace(MACHINE, disk_read=disk_read)
    asked = request(machine, budget=Budgets(30 * MIB), supports=ON_DEVICE)
    placement = WeightPlacement("bf16", asked.sizes.weights // 2, batch_tokens=128, buffers=2, gathers=True)
    figures = Accuracy(placement, asked.sizes, machine).figures
    assert figures.alone_reads is reads
