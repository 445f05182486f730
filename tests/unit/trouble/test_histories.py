"""The checker of histories: what may be is not wrong, and each promise that is broken is found."""

import random

import pytest

from weft_trouble.histories import REVOKED_S, Applied, Deleted, History, KeyUsed, Read, Revoked, SeenReady

FIRST, SECOND = Applied("a", 0, 1, "one", 0.0), Applied("a", 0, 2, "two", 10.0)
READY, READY_AGAIN = SeenReady("a", 0, 1, 5.0), SeenReady("a", 0, 2, 15.0)
DELETED, AGAIN = Deleted("a", 0, 20.0, 25.0), Applied("a", 1, 1, "three", 30.0)


def wrong_read(begin: float, end: float, digest: str) -> list[str]:
    """What is wrong with a request in the history of one adapter."""
    found = History([FIRST, SECOND, AGAIN], [READY, READY_AGAIN], [DELETED], [Read("a", begin, end, digest)])
    return list(found.check())


@pytest.mark.parametrize(
    ("begin", "end", "digest"),
    [
        (1.0, 2.0, "one"),  # before anybody saw it Ready
        (1.0, 2.0, ""),
        (6.0, 7.0, "one"),
        (9.0, 11.0, "two"),  # applied while it was asked for
        (11.0, 12.0, "one"),  # the newer one is not Ready yet
        (16.0, 17.0, "two"),
        (14.0, 17.0, "one"),  # Ready after the request began
        (19.0, 21.0, ""),  # the deletion had begun
        (21.0, 24.0, "two"),  # the deletion is not over
        (26.0, 27.0, ""),
        (26.0, 31.0, "three"),
        (31.0, 32.0, ""),
    ],
)
def test_what_may_be_is_not_wrong(begin: float, end: float, digest: str) -> None:
    assert not wrong_read(begin, end, digest)


@pytest.mark.parametrize(
    ("begin", "end", "digest", "why"),
    [
        (6.0, 7.0, "", "not found, though"),
        (16.0, 17.0, "one", "though (0, 2) was Ready before"),
        (8.0, 9.0, "two", "nobody had applied"),
        (16.0, 17.0, "four", "nobody had applied"),
        (26.0, 27.0, "two", "life 0, which was gone"),
        (31.0, 32.0, "two", "life 0, which was gone"),
    ],
)
def test_a_broken_promise_is_found(begin: float, end: float, digest: str, why: str) -> None:
    (sentence,) = wrong_read(begin, end, digest)
    assert why in sentence


@pytest.mark.parametrize(
    ("uses", "wrong"),
    [
        ([(0.0, 1.0, False), (1.0, 2.0, True), (5.0, 6.0, True)], ""),
        ([(10.0, 11.0, True), (10.5 + REVOKED_S, 14.0, True)], ""),
        ([(11.1 + REVOKED_S, 14.0, True)], "though revoked"),
        ([(1.0, 2.0, True), (3.0, 4.0, False)], "though it was known"),
        ([(1.0, 3.0, True), (2.0, 4.0, False)], ""),  # not after one another
        ([(1.0, 2.0, True), (9.5, 10.5, False)], ""),  # being revoked
    ],
)
def test_a_key_opens_from_its_first_use_to_its_revocation(uses: list[tuple[float, float, bool]], wrong: str) -> None:
    found = History(used=[KeyUsed("k", *use) for use in uses], revoked=[Revoked("k", 10.0, 11.0)])
    sentences = list(found.check())
    assert len(sentences) == bool(wrong)
    assert not wrong or wrong in sentences[0]


def test_a_gateway_need_not_know_a_key_because_another_one_does() -> None:
    uses = [KeyUsed("k", 1.0, 2.0, accepted=True), KeyUsed("k", 3.0, 4.0, accepted=False, gateway=1)]
    assert not list(History(used=uses).check())
    assert len(list(History(used=[*uses, KeyUsed("k", 5.0, 6.0, accepted=False)]).check())) == 1


@pytest.mark.parametrize("seed", range(20))
def test_what_an_atomic_store_answers_is_right_and_a_late_answer_of_it_is_not(seed: int) -> None:
    """Requests read the content of one moment within them; a reader that lags behind Ready is found."""
    rng, found, now, current, ready_at = random.Random(seed), History(), 0.0, 0, 0.0
    for generation in range(1, 30):
        now += 1.0
        found.applied.append(Applied("a", 0, generation, f"d{generation}", now))
        for _ in range(3):
            at = now + rng.uniform(0.1, 0.8)
            seen = generation if at > now + 0.3 else current
            if seen:
                found.reads.append(Read("a", at - rng.uniform(0, 0.1), at + rng.uniform(0, 0.1), f"d{seen}"))
        current, ready_at = generation, now + 0.9
        found.ready.append(SeenReady("a", 0, generation, ready_at))
    assert not list(found.check())
    found.reads.append(Read("a", ready_at + 0.01, ready_at + 0.02, f"d{current - 1}"))
    assert len(list(found.check())) == 1
