"""The cases that other suites compare texts with are answered right and clearly, by transformers + peft in fp32."""

import json

import pytest

from harness.oracle import SURE_MODELS, TOLERANCE, smallest_gap
from harness.quickstart import SURE_CASES, Case

CASES = [Case(**json.loads(line)) for line in SURE_CASES.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("model", SURE_MODELS)
def test_no_token_of_a_sure_case_is_near_a_tie(model: str) -> None:
    of_model = [case for case in CASES if case.model == model]
    assert len(of_model) >= 20
    assert [case for case in of_model if smallest_gap(case) <= TOLERANCE] == []
