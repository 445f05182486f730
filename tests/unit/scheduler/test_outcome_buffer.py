"""One outcome a request reaches the store, whatever repeats or breaks in between."""

from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, of, peers
from weft.domain.machine import Close
from weft.domain.request import OutcomeAck, OutcomeReport
from weft_scheduler.core.outcome_buffer import OutcomeBuffer


def test_an_outcome_is_forwarded_kept_and_acknowledged_once_stored(driver: Driver) -> None:
    driver.start()
    assert [e.record for e in of(driver.outcome("r"), OutcomeReport)] == [b"r"]
    assert not of(driver.outcome("r"), OutcomeReport)  # on its way already
    effects = driver.supervisor_sends(OutcomeAck(("r", "unknown")))
    assert (peers(effects, OutcomeAck), of(effects, OutcomeAck)) == (["g"], [OutcomeAck(("r",))])
    assert not of(driver.supervisor_sends(OutcomeAck(("r",))), OutcomeAck)


def test_without_a_supervisor_it_waits_and_goes_to_the_next(driver: Driver) -> None:
    driver.gateway()
    assert not of(driver.outcome("r"), OutcomeReport)
    assert [e.request_id for e in of(driver.supervisor(), OutcomeReport)] == ["r"]
    driver.close_supervisor()
    assert [e.request_id for e in of(driver.supervisor(), OutcomeReport)] == ["r"]


def test_a_second_supervisor_takes_over_what_the_first_did_not_store(driver: Driver) -> None:
    driver.start()
    driver.supervisor(name="t")
    driver.outcome("r")
    assert peers(driver.close_supervisor(), OutcomeReport) == ["t"]


def test_the_acknowledgement_goes_to_the_stream_that_asked_last(driver: Driver) -> None:
    driver.start()
    driver.outcome("r")
    driver.close_gateway()
    assert not of(driver.supervisor_sends(OutcomeAck(("r",))), OutcomeAck)
    driver.gateway()
    assert of(driver.outcome("r"), OutcomeReport)  # told again: the store says once more that it has it
    assert of(driver.supervisor_sends(OutcomeAck(("r",))), OutcomeAck)


def test_a_full_buffer_rejects_gateways_and_closes_their_streams_when_half_is_free() -> None:
    driver = Driver(max_outcomes=4).start()
    driver.submit("waits")
    for i in range(6):
        driver.outcome(f"r{i}")
    assert len(driver.state.outcomes.outcomes) == 4
    assert not of(driver.supervisor_sends(OutcomeAck(("r0",))), Close)
    assert [e.peer.name for e in of(driver.supervisor_sends(OutcomeAck(("r1",))), Close)] == ["g"]
    assert not driver.knows("waits"), "it submits it again, if it lives: else nobody would answer its Assign"
    driver.gateway()
    assert of(driver.outcome("r4"), OutcomeReport)


@given(st.lists(st.tuples(st.sampled_from(["keep", "store"]), st.sampled_from("abcdef")), max_size=40))
def test_the_buffer_is_bounded_and_acknowledges_what_it_kept_exactly_once(steps: list[tuple[str, str]]) -> None:
    buffer, kept = OutcomeBuffer(3), set[str]()
    for what, request_id in steps:
        if what == "keep":
            new = buffer.add(OutcomeReport(request_id, "p", "", 1, False, b""), "g")
            assert new == (request_id not in kept and len(kept) < 3)
            kept |= {request_id} if new else set()
        else:
            assert buffer.stored((request_id,)) == ({"g": (request_id,)} if request_id in kept else {})
            kept.discard(request_id)
        assert set(buffer.outcomes) == kept
