"""A runner's measured best batch: placement keeps to it while it can, and never refuses for its sake."""

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, of, sequence
from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Assign
from weft.domain.routes import PoolStatus
from weft.domain.runner import RunnerSpec, SequenceState
from weft_scheduler.core.policy.placement.punica import placement_score

LOADS = st.integers(0, 40)


def others(n: int) -> tuple[SequenceState, ...]:
    return tuple(sequence(f"other{i}", Epoch(1, 0), "", 8) for i in range(n))


@given(LOADS, st.integers(1, 40), LOADS, st.integers(1, 40))
def test_the_fuller_is_preferred_up_to_its_best_batch(load: int, best: int, other_load: int, other_best: int) -> None:
    here, there = placement_score(load, best), placement_score(other_load, other_best)
    if load < best and other_load < other_best:
        assert (here > there) == (load > other_load)
    elif load < best:
        assert here > there
    elif other_load >= other_best:
        assert (here > there) == (load - best < other_load - other_best)


def test_where_the_pool_packs_full_batches_come_before_lightly_loaded_runners() -> None:
    """At a best batch of 8, packed up to 12: at least half full, then beyond the best, then below half, then above."""
    preferred = sorted(range(16), key=lambda load: placement_score(load, 8, 12), reverse=True)
    assert preferred == [7, 6, 5, 4, 8, 9, 10, 11, 3, 2, 1, 0, 12, 13, 14, 15]
    assert placement_score(9, 8, 12) == placement_score(5, 4, 12), "as far beyond"


@pytest.mark.parametrize(
    ("best", "step_ms_best", "packed"),
    [(0, 0.0, 64), (32, 0.0, 32), (32, 16.0, 48), (32, 64.0, 35), (64, 16.0, 64)],
    ids=["nothing measured", "no steps", "half as many more", "a tenth slower", "no more than it takes"],
)
def test_a_packed_batch_is_a_tenth_slower_and_half_larger_at_most(best: int, step_ms_best: float, packed: int) -> None:
    spec = RunnerSpec(RunnerId("u", "i"), "h:1", "n/p", 16, 100, 64, 2, 64, 1600, best_batch=best, step_ms_1=14.0)
    assert min(replace(spec, step_ms_best=step_ms_best).packed_sequences, spec.max_sequences) == packed


class Stand(NamedTuple):
    """A runner of a drawn fleet."""

    load: int
    best: int
    free: int


FLEET = st.dictionaries(
    st.sampled_from("abcdef"), st.builds(Stand, st.integers(0, 6), st.integers(0, 6), st.sampled_from([0, 2, 50]))
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture is a class
@given(FLEET)
def test_requests_wait_only_without_room_and_pass_full_batches_only_for_better_ones(fleet: dict[str, Stand]) -> None:
    """Two pages are asked for; a runner holds 6 sequences."""
    driver = Driver().start()
    for uuid, at in fleet.items():
        driver.runner(uuid, *others(at.load), free=at.free, max_sequences=6, best_batch=at.best)
    takers = {uuid for uuid, at in fleet.items() if at.load < 6 and at.free >= 2}
    assigned = [a.runner.uuid for a in of(driver.submit("r", prompt_tokens=16, p90_tokens=16), Assign)]
    assert bool(assigned) == bool(takers), "who has room takes it, whatever its best batch"
    if not takers:
        return
    under = {uuid for uuid in takers if fleet[uuid].load < (fleet[uuid].best or 6)}
    if under:
        assert assigned == [max(under, key=lambda uuid: (fleet[uuid].load, uuid))]
    else:
        assert assigned == [min(takers, key=lambda uuid: (fleet[uuid].load - fleet[uuid].best, -ord(uuid)))]


def test_half_of_its_best_batch_is_no_light_load(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=32, best_batch=4)
    driver.place("r0")
    assert not driver.record("a").accounts.is_loaded
    driver.place("r1")
    assert driver.record("a").accounts.is_loaded


@pytest.mark.parametrize(("best", "wanted"), [(0, 1), (4, 3), (32, 1)])
def test_a_pool_asks_for_as_many_runners_as_keep_to_their_best_batch(driver: Driver, best: int, wanted: int) -> None:
    """Ten run: two and a half best batches of four, and half a runner in hand."""
    driver.start(max_runners=9).runner("a", max_sequences=32, best_batch=best, total_pages=10_000)
    for i in range(10):
        driver.place(f"r{i}", p90_tokens=1)
    assert of(driver.wait(1.0), PoolStatus)[-1].wanted_runners == wanted
