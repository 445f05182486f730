"""Predicted against measured."""

import pytest

from weft_runner.offload.accuracy import Accuracy
from weft_runner.offload.policy import Budgets
from weft_runner.offload.search import find_plan
from weft_runner.offload.solver import relax

from .test_search import MACHINE, MIB, ON_DEVICE, request


def test_a_pass_of_the_plan_is_predicted_as_in_the_plan_and_the_ratio_is_followed() -> None:
    asked = request(budget=Budgets(30 * MIB), supports=ON_DEVICE)
    plan = find_plan(asked, relax)
    accuracy = Accuracy(plan, asked.sizes, MACHINE)
    rows = plan.policy.block
    predicted_s = accuracy.predict_s(rows, rows, rows * 72)
    assert predicted_s == pytest.approx(plan.predicted.token.pass_s, rel=0.05)
    assert accuracy.figures.ratio == 0.0
    for _ in range(3):
        accuracy.learn(rows, rows, rows * 72, 1.2 * predicted_s)
    assert accuracy.figures.passes == 3
    assert accuracy.figures.ratio == pytest.approx(1.2)
    assert accuracy.figures.recent == pytest.approx(1.2)
