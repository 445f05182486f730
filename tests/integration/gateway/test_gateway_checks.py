"""What must always hold is checked in a running gateway; a violation is reported, and streams go on."""

from typing import Any

import pytest
from prometheus_client import REGISTRY

from weft_gateway.shell import request_manager

from .conftest import until


def violations() -> float:
    return REGISTRY.get_sample_value("weft_invariant_violations_total", {"check": "check_broken"}) or 0.0


async def test_a_violation_is_reported_at_every_look_and_ends_nothing(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_broken(_: Any) -> None:
        raise AssertionError("a live request has an outcome")

    before = violations()
    monkeypatch.setattr(request_manager, "check_gateway", check_broken)
    await until(lambda: violations() >= before + 2)
    answer = await world.client().completions.create(model="tiny", prompt="w", max_tokens=5)
    assert answer.choices[0].text
