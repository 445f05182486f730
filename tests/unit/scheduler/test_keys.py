"""The list of API keys that gateways go by: the highest version, while somebody confirms it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, of
from weft.domain.routes import KeyRoute, Keys, KeysConfirmed, Routes
from weft_scheduler.core import SchedulerConfig, Stale

CONFIG = SchedulerConfig()
GRACE_S, LAPSE_S = CONFIG.keys_grace_s, CONFIG.keys_lapse_s


def keys(version: int, *names: str) -> Keys:
    return Keys(tuple(KeyRoute(name, "acme", name) for name in names), version)


def opened(driver: Driver) -> set[str] | None:
    """Return the keys that a gateway takes; None: it refuses all."""
    table = driver.state.routes.full()
    return {key.key_hash for key in table.keys} if table.keys_known else None


@pytest.fixture
def started(driver: Driver) -> Driver:
    driver.start()
    driver.supervisor(name="t")
    driver.supervisor_sends(keys(2, "a", "b"))
    return driver


def test_an_older_list_of_a_supervisor_that_the_store_is_out_of_reach_for_revives_no_key(started: Driver) -> None:
    started.supervisor_sends(keys(3, "b"), "t")
    started.close_supervisor()
    started.supervisor()
    effects = started.supervisor_sends(keys(2, "a", "b"))
    assert opened(started) == {"b"}
    assert not of(effects, Routes)
    assert [one.event for one in effects if isinstance(one, Stale)] == ["keys"]


def test_keys_that_nobody_confirms_are_refused_after_the_grace_and_taken_again_when_confirmed(started: Driver) -> None:
    started.wait(LAPSE_S / 2)
    started.supervisor_sends(keys(2, "a", "b"), "t")  # it has read them, too
    for _ in range(3):
        started.wait(GRACE_S - 1)
        assert opened(started) == {"a", "b"}
        started.supervisor_sends(KeysConfirmed(2))
    started.wait(GRACE_S - 1)
    assert opened(started) == {"a", "b"}
    started.wait(2)
    assert opened(started) is None
    started.supervisor_sends(KeysConfirmed(2))
    assert opened(started) == {"a", "b"}


def test_who_confirms_an_older_list_confirms_nothing(started: Driver) -> None:
    started.supervisor_sends(keys(3, "b"), "t")
    for _ in range(int(GRACE_S) + 1):
        started.supervisor_sends(KeysConfirmed(2))
        started.wait(1)
    assert opened(started) is None


def test_a_store_that_went_back_counts_once_nobody_confirms_the_version_before(started: Driver) -> None:
    started.supervisor_sends(keys(9, "b"), "t")
    started.supervisor_sends(keys(4, "c"), "t")
    assert opened(started) == {"b"}
    started.wait(LAPSE_S + 1)
    started.supervisor_sends(KeysConfirmed(4), "t")
    assert opened(started) == {"c"}


def test_a_supervisor_that_confirms_nothing_is_taken_at_its_word(started: Driver) -> None:
    started.supervisor_sends(keys(0, "a"))
    started.wait(10 * GRACE_S)
    assert opened(started) == {"a"}


def test_without_a_grace_keys_stay_in_force() -> None:
    driver = Driver(keys_grace_s=0.0).start()
    driver.supervisor_sends(keys(1, "a"))
    driver.wait(100 * GRACE_S)
    assert opened(driver) == {"a"}


@given(st.lists(st.tuples(st.sampled_from("st"), st.booleans(), st.floats(0, 5)), max_size=30))
def test_whatever_two_supervisors_read_a_key_once_revoked_is_not_revived(steps: list[tuple[str, bool, float]]) -> None:
    """Version n of the store revokes key n - 1; one that does not read it says again what it knows."""
    driver = Driver().start()
    driver.supervisor(name="t")
    store, known, lowest = 1, {"s": 1, "t": 1}, 1
    driver.supervisor_sends(_version(1))
    for name, reads, seconds in steps:
        if reads:
            store += 1
            known[name] = store
        driver.supervisor_sends(_version(known[name]), name)
        lowest = max(lowest, known[name])
        driver.wait(seconds if reads else 0.0)  # below the lapse: somebody confirms the newest in time
        driver.supervisor_sends(KeysConfirmed(lowest), max(known, key=lambda one: known[one]))
        assert opened(driver) == {f"{number:03}" for number in range(lowest, 100)}


def _version(version: int) -> Keys:
    return keys(version, *(f"{number:03}" for number in range(version, 100)))
