"""Conditions: messages that the API server can take, times as it writes them, advice for each reason."""

import re
from pathlib import Path

from weft.api.meta import Condition, sanitize_message
from weft.api.reasons import ADVICE
from weft.domain.model.errors import Reason


def test_a_message_is_cut_where_it_would_burden_the_server() -> None:
    message = sanitize_message("x" * 10_000)
    assert len(message) == 4096
    assert message.endswith("...")


def test_times_are_in_utc_on_the_wire() -> None:
    wire = {"type": "Ready", "status": "True", "reason": "Published", "message": ""}
    ready = Condition.model_validate({**wire, "lastTransitionTime": "2026-01-01T01:00:01+01:00"})
    assert ready.to_dict() == {**wire, "lastTransitionTime": "2026-01-01T00:00:01Z"}


def test_every_reason_that_conditions_have_is_listed() -> None:
    """A condition's reason is written where its facts are judged: as a name there, or from those lists."""
    written = (Path(__file__).parents[3] / "operator" / "weft_operator" / "core" / "status.py").read_text()
    named = set(re.findall(r'Condition\(\s*"?\w*"?,\s*[^,]+,\s*"(\w+)"', written))
    assert {"Publishing", "Converging", "ScaledToZero", "Accepted"} <= named
    assert named <= set(ADVICE)


def test_every_reason_comes_with_advice() -> None:
    assert set(Reason) < set(ADVICE)
    assert all(reason[0].isupper() and reason.isalnum() for reason in ADVICE)
