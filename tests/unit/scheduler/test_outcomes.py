"""One outcome a request reaches the store, whatever repeats or breaks in between."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.effects import AckOutcomes, ForwardOutcome, HangUp
from weft_scheduler.core.events import GatewayDown, OutcomesStored, SupervisorDown, SupervisorUp
from weft_scheduler.core.outcomes import Ledger

Picked = Callable[..., list[Any]]


def test_an_outcome_is_forwarded_kept_and_acknowledged_once_stored(desk: Any, picked: Picked) -> None:
    desk.start()
    assert [e.record for e in picked(desk.outcome("r"), ForwardOutcome)] == [b"r"]
    assert not picked(desk.outcome("r"), ForwardOutcome)  # on its way already
    (ack,) = picked(desk.handle(OutcomesStored("s", ("r", "unknown"))), AckOutcomes)
    assert (ack.gateway, ack.request_ids) == ("g", ("r",))
    assert not picked(desk.handle(OutcomesStored("s", ("r",))), AckOutcomes)


def test_without_a_supervisor_it_waits_and_goes_to_the_next(desk: Any, picked: Picked) -> None:
    desk.gateway()
    assert not picked(desk.outcome("r"), ForwardOutcome)
    assert [e.request_id for e in picked(desk.supervisor(), ForwardOutcome)] == ["r"]
    desk.handle(SupervisorDown("s"))
    assert [e.request_id for e in picked(desk.supervisor(), ForwardOutcome)] == ["r"]


def test_a_second_supervisor_takes_over_what_the_first_did_not_store(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.handle(SupervisorUp("t"))
    desk.outcome("r")
    assert [e.supervisor for e in picked(desk.handle(SupervisorDown("s")), ForwardOutcome)] == ["t"]


def test_the_acknowledgement_goes_to_the_stream_that_asked_last(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.outcome("r")
    desk.handle(GatewayDown("g"))
    assert not picked(desk.handle(OutcomesStored("s", ("r",))), AckOutcomes)
    desk.gateway()
    assert picked(desk.outcome("r"), ForwardOutcome)  # told again: the store says once more that it has it
    assert picked(desk.handle(OutcomesStored("s", ("r",))), AckOutcomes)


def test_a_full_ledger_turns_gateways_away_and_calls_them_again_when_half_is_free(
    new_desk: Any, picked: Picked
) -> None:
    desk = new_desk(max_outcomes=4).start()
    for i in range(6):
        desk.outcome(f"r{i}")
    assert len(desk.core.context.outcomes.kept) == 4
    assert not picked(desk.handle(OutcomesStored("s", ("r0",))), HangUp)
    assert [e.gateway for e in picked(desk.handle(OutcomesStored("s", ("r1",))), HangUp)] == ["g"]
    desk.handle(GatewayDown("g"))
    desk.gateway()
    assert picked(desk.outcome("r4"), ForwardOutcome)


@given(st.lists(st.tuples(st.sampled_from(["keep", "store"]), st.sampled_from("abcdef")), max_size=40))
def test_the_ledger_is_bounded_and_acknowledges_what_it_kept_exactly_once(steps: list[tuple[str, str]]) -> None:
    ledger, kept = Ledger(3), set[str]()
    for what, request_id in steps:
        if what == "keep":
            new = ledger.keep(request_id, "g", b"")
            assert new == (request_id not in kept and len(kept) < 3)
            kept |= {request_id} if new else set()
        else:
            acknowledged = ledger.stored((request_id,))
            assert acknowledged == ({"g": (request_id,)} if request_id in kept else {})
            kept.discard(request_id)
        assert set(ledger.kept) == kept
