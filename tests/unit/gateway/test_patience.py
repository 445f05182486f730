"""Messages to the scheduler that may wait for others: none that somebody waits for."""

from weft.domain.ids import Epoch
from weft.domain.request import Cancel, Failed, FailReason, OutcomeReport, ResubmitComplete, Started
from weft_gateway.shell import patience_of


def test_only_what_is_noted_waits() -> None:
    epoch = Epoch(1, 1)
    awaited = [
        OutcomeReport("r", "n/p", "", 1, False, b"x"),
        Started("r", epoch, handed_off=True),
        Failed("r", epoch, FailReason.SESSION_LOST, 0),
        Cancel("r", 0),
        ResubmitComplete(),
    ]
    assert 0 < patience_of(Started("r", epoch)) <= 0.25
    assert not any(patience_of(message) for message in awaited)
