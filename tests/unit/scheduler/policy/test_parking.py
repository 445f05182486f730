"""A tenant within its share does not wait for places that another one holds beyond its own."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, adapter, of
from weft.domain.request import Assign, FailReason, Priority
from weft.domain.routes import RegistryChange
from weft.domain.runner import Parking, SequenceState


def flood(driver: Driver, count: int, uuid: str = "a", **state: Any) -> Driver:
    """Let the flood run `count` requests on a runner, which has reported them."""
    for number in range(count):
        driver.place(f"f{number}", namespace="flood")
    driver.runner(uuid, *seen(driver), **state)
    return driver


def seen(driver: Driver, **parking: Parking) -> list[SequenceState]:
    """Return all that runs, as its runner reports it."""
    views = [driver.view(r.id) for r in driver.state.requests.values() if r.placed]
    return [view._replace(parking=parking.get(view.request_id, Parking.NONE)) for view in views]


def parks(effects: list[Any]) -> dict[str, tuple[str, ...]]:
    return {assign.request_id: assign.allotment.parks for assign in of(effects, Assign)}


@pytest.fixture
def flooded(driver: Driver) -> Driver:
    """A runner of four places, which the flood has."""
    driver.start().runner("a", max_sequences=4)
    return flood(driver, 4)


def test_a_request_within_its_share_takes_the_latest_places_of_the_flood_down_to_its_share(flooded: Driver) -> None:
    assert parks(flooded.submit("v0", namespace="victim")) == {"v0": ("f3",)}
    assert parks(flooded.submit("v1", namespace="victim")) == {"v1": ("f2",)}
    assert parks(flooded.submit("v2", namespace="victim")) == {}, "each has its two places"
    assert parks(flooded.submit("f9", namespace="flood")) == {}
    flooded.runner("a", *seen(flooded, f2=Parking.PARKED, f3=Parking.PARKED))
    assert flooded.record("a").accounts.working_set == 4
    assert parks(flooded.outcome("v0")) == {}, "the flood has its share, and no more"
    assert parks(flooded.runner("a", *seen(flooded, f2=Parking.PARKED, f3=Parking.PARKED))) == {"v2": ()}


def test_shares_are_by_weight(driver: Driver) -> None:
    driver.start(tenant_weights=(("flood", 3),)).runner("a", max_sequences=4)
    flood(driver, 4)
    assert parks(driver.submit("v0", namespace="victim")) == {"v0": ("f3",)}
    assert parks(driver.submit("v1", namespace="victim")) == {}


def test_only_what_its_runner_has_reported_and_may_still_park_makes_room(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=2)
    for number in range(2):
        driver.place(f"f{number}", namespace="flood")
    assert parks(driver.submit("v", namespace="victim")) == {}, "their Starts may still be on their way"
    over = driver.runner("a", *seen(driver, f0=Parking.OVER, f1=Parking.OVER))
    assert parks(over) == {}, "they were parked for their time"
    assert parks(driver.runner("a", *seen(driver, f1=Parking.OVER))) == {"v": ("f0",)}


def test_lines_of_batches_leave_first(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=4)
    driver.place("line", namespace="flood", priority=Priority.BATCH)
    flood(driver, 3)
    assert parks(driver.submit("v", namespace="victim")) == {}
    driver.failed("line", FailReason.PREEMPTED)
    assert parks(driver.runner("a", *seen(driver))) == {"v": ()}


def test_pages_are_made_where_the_runner_swaps_and_those_of_parked_ones_first(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=8, swaps=True)
    flood(driver, 8, free=0)
    first, _ = driver.submit("v0", namespace="victim"), driver.submit("v1", namespace="victim", prompt_tokens=600)
    assert parks(first) == {"v0": ("f7", "f6")}, "a page each: its prompt and its reservation need two"
    assert not driver.request("v1").placed, "two more do not leave enough"


def test_pages_are_not_made_where_the_runner_swaps_nothing(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=8)
    flood(driver, 6, free=0)
    assert parks(driver.submit("v0", namespace="victim")) == {}


def test_a_runner_without_a_slot_for_its_adapter_is_none_for_a_request(driver: Driver) -> None:
    driver.start("x", "y", "z").runner("a", max_sequences=4)
    driver.change(RegistryChange(False, adapters=tuple(map(adapter, "xyz"))))
    for number, digest in enumerate("xyxy"):
        driver.place(f"f{number}", digest, namespace="flood")
    driver.runner("a", *seen(driver))
    assert parks(driver.submit("v", "z", namespace="victim")) == {}
    assert parks(driver.submit("w", "y", namespace="victim")) == {"w": ("f3",)}


def test_a_restarted_scheduler_counts_whom_a_runner_parks(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=2)
    assign = driver.place("f0", namespace="flood")
    driver.place("f1", namespace="flood")
    running = seen(driver, f0=Parking.PARKED)
    again = Driver(term=2).start()
    again.runner("a", *running, max_sequences=2)
    again.submit("f0", namespace="flood", epoch=assign.epoch, runner=assign.runner)
    assert again.pool().waiting.shares.parked == {"f0"}
    again.runner("a", *(one._replace(parking=Parking.NONE) for one in running))
    assert not again.pool().waiting.shares.parked


TENANTS = st.sampled_from(["flood", "flood", "flood", "blue", "green"])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), TENANTS),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("report"), st.booleans()),
        st.tuples(st.just("over"), st.sets(st.integers(0, 30))),
    ),
    min_size=10,
    max_size=60,
)


@given(EVENTS, st.sampled_from([(), (("flood", 2),), (("blue", 3),)]))
def test_nobody_is_brought_below_its_share_nor_a_request_beyond_its_own(events: list[Any], weights: Any) -> None:
    """Every event is followed by all laws: nobody within its share waits where others could make room."""
    driver = Driver().start(tenant_weights=weights)
    for uuid in ("a", "b"):
        driver.runner(uuid, max_sequences=3)

    def report(over: set[int], *, kept: bool) -> list[Any]:
        """Let the runners report all that they have. `kept`: who was parked is so still."""
        effects = list[Any]()
        for uuid in ("a", "b"):
            here = [one for one in driver.state.requests.values() if one.runner and one.runner.uuid == uuid]
            views = [driver.view(one.id) for one in here]
            of_runner = driver.record(uuid).accounts.parked.ids
            states = [
                Parking.OVER if int(one.request_id[1:]) in over
                else Parking.PARKED if one.request_id in of_runner and kept
                else Parking.NONE
                for one in views
            ]  # fmt: skip
            effects += driver.runner(
                uuid, *(view._replace(parking=state) for view, state in zip(views, states, strict=True))
            )
        return effects

    for number in range(1000, 1006):
        driver.place(f"r{number}", namespace="flood")
    report(set(), kept=True)
    for number, (kind, of_event) in enumerate(events):
        shares = driver.pool().waiting.shares
        running = sorted(one.id for one in driver.state.requests.values() if one.placed)
        match kind:
            case "submit":
                effects = driver.submit(f"r{number}", namespace=of_event)
            case "end" if running:
                effects = driver.outcome(running[of_event % len(running)])
            case "report":
                effects = report(set(), kept=of_event)
            case "over":
                effects = report(of_event, kept=True)
            case _:
                continue
        for assign in of(effects, Assign):
            if not assign.allotment.parks:
                continue
            tenant = driver.request(assign.request_id).tenant
            others = {driver.request(one).tenant for one in assign.allotment.parks}
            assert len(others) == 1, "one tenant makes room"
            (other,) = others
            assert other != tenant
            allowed = driver.pool().fleet.capacity.sum.sequences / shares.weight
            weight = driver.pool().waiting.queue.counters.weight
            assert len(shares.running[tenant]) <= allowed * weight(tenant)
            assert len(shares.running[other]) >= allowed * weight(other)
            assert {driver.request(one).runner for one in assign.allotment.parks} == {assign.runner}
