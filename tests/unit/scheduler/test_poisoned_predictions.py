"""A gateway may send any numbers that the codec lets through; no policy is led astray by them."""

import pytest

from harness.scheduler_driver import Driver, of
from weft.domain.bounds import MAX_REQUEST_TOKENS
from weft.domain.request import Assign
from weft_scheduler.core.policy.queue.orders import QUEUE_POLICIES as QUEUES
from weft_scheduler.core.policy.reservation import RESERVATION_POLICIES as RESERVATIONS

POISON = {
    "huge": (MAX_REQUEST_TOKENS,) * 5,
    "out of order": (900, 50, 5, 1, 0),
    "a huge tail": (0, 0, 0, MAX_REQUEST_TOKENS, MAX_REQUEST_TOKENS),
    "none": (0, 0, 0, 0, 0),
}
NAMES = ("p10_tokens", "p50_tokens", "p90_tokens", "p99_tokens", "bucket_tokens")


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("reservation", RESERVATIONS)
@pytest.mark.parametrize("queue", QUEUES)
def test_a_request_with_poisoned_predictions_and_those_beside_it_run(queue: str, reservation: str, poison: str) -> None:
    """Laws are checked after each event. The poisoned one runs too, with a reservation of at most what it may say."""
    driver = Driver().start(queue=queue, reservation=reservation)
    driver.runner("a", max_sequences=1)
    first = driver.place("first", max_tokens=200)
    for name in ("poisoned", "sane"):
        numbers = dict(zip(NAMES, POISON[poison], strict=True)) if name == "poisoned" else {}
        assert not of(driver.submit(name, max_tokens=200, **numbers), Assign), "the runner takes one sequence"
    placed = {"first": first}
    while len(placed) < 3:
        done = list(placed)[-1]
        for assign in of(driver.outcome(done) + driver.runner("a"), Assign):
            placed[assign.request_id] = assign
        assert list(placed)[-1] != done, f"nothing follows {done}"
    assert 1 <= placed["poisoned"].reservation_tokens <= 200
