"""Which runner is sent which adapter."""

from collections.abc import Sequence

import pytest

from weft_scheduler.core.policy.prefetch.prefetch import (
    CANDIDATES,
    LEAST_HAZARD,
    ORDERS,
    RUNNER_ORDERS,
    Candidates,
    PrefetchCandidate,
    PrefetchRunner,
    orders,
)

HOT, COLD = 9.0, LEAST_HAZARD * 1.5


def ranked(*digests: str, hazard: float = HOT) -> list[PrefetchCandidate]:
    return [PrefetchCandidate(digest, hazard, 0.5) for digest in digests]


def runner(uuid: str, working_set: int = 0, *has: str, busy: bool = False) -> PrefetchRunner:
    return PrefetchRunner(uuid, working_set, 4, busy, dict.fromkeys(has))


@pytest.mark.parametrize(
    ("case", "candidates", "runners", "expected"),
    [
        ("no runner", ranked("x"), [], []),
        ("no candidate", [], [runner("a")], []),
        ("the most probable first", ranked("x", "y"), [runner("a")], [("a", ("x",))]),
        ("what it has is passed", ranked("x", "y"), [runner("a", 0, "x")], [("a", ("y",))]),
        ("it has all", ranked("x"), [runner("a", 0, "x")], []),
        ("one that still fetches", ranked("x"), [runner("a", busy=True)], []),
        ("used runners, and the next", ranked("x"), [runner("a", 2), runner("b"), runner("c")], ["a", "c"]),
        ("all are idle: the one that is filled first", ranked("x"), [runner("a"), runner("b")], ["b"]),
        ("beyond the best batch comes last", ranked("x"), [runner("a", 5), runner("b", 3)], ["b", "a"]),
        ("not worth it for each of two", ranked("x", hazard=COLD), [runner("a", 1), runner("b")], []),
        ("a full one comes before an idle one", ranked("x"), [runner("a", 5), runner("b")], ["a", "b"]),
        ("worth it for one", ranked("x", hazard=COLD), [runner("a")], ["a"]),
        ("just worth it", ranked("x", hazard=LEAST_HAZARD), [runner("a")], ["a"]),
        ("of nine used ones two more", ranked("x"), [*[runner(f"u{n}", 1, "x") for n in range(9)], *map(runner, "abc")],
         ["c", "b"]),
        ("one that fetches is in line", ranked("x"), [runner("a", 1, busy=True), runner("b"), runner("c")], ["c"]),
    ],
)  # fmt: skip
def test_the_choice(
    case: str, candidates: Sequence[PrefetchCandidate], runners: list[PrefetchRunner], expected: list[object]
) -> None:
    chosen = orders(candidates, runners)
    assert [order[0] if expected and isinstance(expected[0], str) else order for order in chosen] == expected, case


def test_the_orders_of_a_period_are_bounded() -> None:
    chosen = orders(ranked(*(f"d{n}" for n in range(50))), [runner(f"r{n:04}", 1) for n in range(20)])
    assert all(len(digests) == RUNNER_ORDERS for _, digests in chosen)
    many = orders(ranked("x", hazard=1e9), [runner(f"r{n:04}", 1) for n in range(10 * ORDERS)])
    assert len(many) == ORDERS


def test_all_registered_adapters_are_judged_in_turn_and_those_that_are_gone_leave() -> None:
    candidates, digests = Candidates(), [f"d{n:05}" for n in range(3 * CANDIDATES)]
    for digest in digests:
        candidates.arrived(digest, 1.0)
        candidates.arrived(digest, 2.0)
    for period in range(40):
        candidates.judge(lambda: digests, len(digests), 3.0 + period)
        assert len(candidates.found) <= CANDIDATES
    assert len(candidates.found) == CANDIDATES
    for period in range(40):
        candidates.judge(lambda: digests[:7], 7, 50.0 + period)
    assert candidates.found.keys() <= {*digests[:7]}


def test_an_adapter_that_has_just_been_requested_is_judged_in_the_next_period() -> None:
    candidates, digests = Candidates(), [f"d{n:05}" for n in range(10_000)]
    candidates.judge(lambda: digests, len(digests), 1.0)
    candidates.arrived(digests[0], 2.0)
    candidates.judge(lambda: digests, len(digests), 3.0)
    assert [one.digest for one in candidates.ranked()] == [digests[0]]
