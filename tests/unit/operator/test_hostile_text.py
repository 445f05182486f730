"""What strangers say (a source, a runner, a URI) becomes part of statuses and Events: printable, of bounded size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.planning import adapter_ref
from weft.api.meta import MAX_MESSAGE_CHARS
from weft_operator.core import RecordEvent
from weft_operator.core.status import UndatedCondition, merged
from weft_operator.kubernetes import event_manifest

NOTE_BYTES = 1024  # events.k8s.io: noteLengthLimit


@given(st.text(st.characters(codec=None), max_size=2 * MAX_MESSAGE_CHARS))
def test_a_message_is_stored_printable_and_bounded(message: str) -> None:
    (stored,) = merged((), [UndatedCondition("Ready", "False", "LoadFailed", message)], 1, 0.0)
    assert stored["message"].isprintable()
    assert len(stored["message"]) <= MAX_MESSAGE_CHARS
    again = merged([stored], [UndatedCondition("Ready", "False", "LoadFailed", message)], 1, 9.0)
    assert again == [stored], "a message that is cut is no news each time"


def test_an_escape_sequence_does_not_reach_a_terminal() -> None:
    (stored,) = merged((), [UndatedCondition("Ready", "False", "LoadFailed", "r1: \x1b[2J\u202egpj.exe\n")], 1, 0.0)
    assert stored["message"] == r"r1: \x1b[2J\u202egpj.exe\n"


@pytest.mark.parametrize("letter", ["x", "é", "漢", "🦄"])
def test_an_event_fits_the_api_in_any_script(letter: str) -> None:
    event = event_manifest(RecordEvent(adapter_ref("upper"), "u1", "Warning", "LoadFailed", letter * 3000), "me", 0.0)
    assert NOTE_BYTES - 4 < len(event["note"].encode()) <= NOTE_BYTES
    assert set(event["note"]) == {letter}
