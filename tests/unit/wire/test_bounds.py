"""What a runner may say of itself: every value is bounded before anybody computes with it."""

from typing import Any

import pytest

from weft.identities import MAX_TERM
from weft.wire import bounds
from weft.wire.bounds import check_hello, check_state
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2
from weft.wire.v1.supervisor_pb2 import RunnerHello, RunnerState, SequenceState

ID = common_pb2.RunnerId(uuid="ns.u", incarnation="i")
TERM, COUNTER = MAX_TERM - 1, 2**64 - 1


def hello(**fields: Any) -> RunnerHello:
    values: dict[str, Any] = {
        "runner": ID, "address": "h:1", "pool": "ns/p", "page_tokens": 16, "total_pages": 64, "max_sequences": 2,
        "max_adapters": 4, "max_rank": 8, "max_context_tokens": 1024, "best_batch": 2**32 - 1,
    }  # fmt: skip
    return RunnerHello(**values | fields)


def sequence(request_id: str, term: int = TERM) -> SequenceState:
    return SequenceState(request_id=request_id, epoch=common_pb2.Epoch(term=term, counter=COUNTER))


def test_the_largest_honest_words_pass() -> None:
    check_hello(hello())
    check_hello(hello(**bounds.CAPACITIES))
    check_state(RunnerState(free_pages=64, used_pages=64, sequences=[sequence("a"), sequence("b")]), hello())
    check_state(RunnerState(), hello())


@pytest.mark.parametrize("name", sorted(bounds.CAPACITIES))
def test_a_capacity_is_neither_missing_nor_absurd(name: str) -> None:
    for value in (0, bounds.CAPACITIES[name] + 1, 2**32 - 1):
        with pytest.raises(PeerError, match=f"{name} is {value}"):
            check_hello(hello(**{name: value}))


@pytest.mark.parametrize("name", sorted(bounds.TEXTS))
def test_a_text_is_bounded(name: str) -> None:
    with pytest.raises(PeerError, match=f"{name} has more than"):
        check_hello(hello(**{name: "x" * (bounds.TEXTS[name] + 1)}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pool": ""}, "needed"),
        ({"address": ""}, "needed"),
        ({"runner": common_pb2.RunnerId(uuid="u")}, "incarnation has 1 to"),
        ({"runner": common_pb2.RunnerId(uuid="u" * 129, incarnation="i")}, "uuid has 1 to"),
        ({"max_context_tokens": 1025}, "more than its pages hold"),
    ],
)
def test_what_a_hello_may_not_say(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        check_hello(hello(**fields))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (RunnerState(free_pages=65), "free_pages is 65"),
        (RunnerState(used_pages=2**32 - 1), "used_pages is"),
        (RunnerState(adapter_pages=65), "adapter_pages is 65"),
        (RunnerState(sequences=[sequence(name) for name in "abc"]), "3 sequences are more"),
        (RunnerState(sequences=[sequence("a"), sequence("a")]), "a request id of its own"),
        (RunnerState(sequences=[sequence("")]), "a request id of its own"),
        (RunnerState(sequences=[sequence("a", MAX_TERM)]), "term"),
    ],
)
def test_what_a_state_may_not_say(state: RunnerState, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        check_state(state, hello())


def test_a_state_is_no_larger_than_a_message_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_STATE_BYTES", 100)
    with pytest.raises(PeerError, match="bytes are more than 100"):
        check_state(RunnerState(sequences=[sequence("a" * 100)]), hello())
