"""The time that a request waits for a runner, as a span: each wait has one."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Assign, Cancel, Failed, FailReason, Reject, RejectReason, Submit
from weft_scheduler.queue_spans import QueueSpans

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Recorded:
    """A tracer that keeps what it is given, and the clock."""

    now: float = 0.0
    waits: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])

    def record(self, name: str, parent: str, began: float, ended: float, _attributes: Any, error: str = "") -> str:
        assert (name, parent) == ("queue", CONTEXT)
        self.waits.append((began, ended, error))
        return ""


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def spans(recorded: Recorded) -> QueueSpans:
    return QueueSpans(recorded, lambda: recorded.now)  # type: ignore[arg-type]


def submit(traceparent: str = CONTEXT) -> Submit:
    return Submit("r", "n/p", "n", "m", "", 1, 1, traceparent=traceparent)


def assign(counter: int) -> Assign:
    return Assign("r", Epoch(1, counter), RunnerId("u", "i"), "h:1", 1)


def test_a_request_that_waits_twice_has_two_spans(spans: QueueSpans, recorded: Recorded) -> None:
    spans.received(submit())
    recorded.now = 2.0
    spans.sent(assign(1))
    recorded.now = 5.0
    spans.received(Failed("r", Epoch(1, 1), FailReason.PREEMPTED))
    recorded.now = 6.0
    spans.sent(assign(2))
    spans.sent(assign(3))  # a move: it waited for nothing
    assert recorded.waits == [(0.0, 2.0, ""), (5.0, 6.0, "")]


def test_a_rejected_request_has_a_span_with_its_reason(spans: QueueSpans, recorded: Recorded) -> None:
    spans.received(submit())
    recorded.now = 1.0
    spans.sent(Reject("r", RejectReason.QUEUE_FULL))
    assert recorded.waits == [(0.0, 1.0, "queue_full")]


@pytest.mark.parametrize("end", [Cancel("r"), None])
def test_what_is_over_or_not_sampled_has_none(spans: QueueSpans, recorded: Recorded, end: Cancel | None) -> None:
    spans.received(submit(CONTEXT if end else ""))
    spans.received(end)
    spans.sent(assign(1))
    assert not recorded.waits
