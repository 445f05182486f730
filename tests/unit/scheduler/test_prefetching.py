"""Forecast prefetch at work: who is sent what, when, and that it is no more than a hint."""

from typing import Any

from harness.scheduler_driver import Driver, of
from weft.domain.adapter import DesiredAdapter
from weft.domain.routes import RegistryChange
from weft.domain.runner import OrderedRunner, RunnerOrder
from weft_scheduler.core import Prefetched


def sent(effects: Any) -> list[tuple[str, tuple[str, ...]]]:
    """The hints, by runner."""
    return [(o.runner.uuid, o.order.prefetch) for o in of(effects, OrderedRunner) if o.order.prefetch]


def two(driver: Any, *digests: str, **spec: Any) -> None:
    """Runner b has a request for "hot"; runner a is the next that placement would choose."""
    driver.start(*(digests or ("hot",)), min_runners=2, max_runners=2, **({"prefetch": "forecast"} | spec))
    driver.runner("a")
    driver.runner("b")
    driver.place("r", "hot")
    assert driver.request("r").runner.uuid == "b"
    driver.runner("b", driver.view("r"))


def test_the_next_runner_in_line_is_sent_what_was_requested_and_only_once(driver: Driver) -> None:
    two(driver)
    effects = driver.wait(10.0)
    assert sent(effects) == [("a", ("hot",))]
    (order,) = [o.order for o in of(effects, OrderedRunner)]
    assert order == RunnerOrder(prefetch=("hot",)), "no desired adapters, no version"
    (effect,) = of(effects, Prefetched)
    assert (effect.runner.uuid, effect.digests) == ("a", ("hot",))
    assert not sent(driver.wait(60.0))


def test_a_runner_that_still_fetches_is_sent_nothing(driver: Driver) -> None:
    two(driver)
    driver.runner("a", prefetching=3)
    assert not sent(driver.wait(10.0))
    driver.runner("a", prefetching=0)
    assert sent(driver.wait(10.0)) == [("a", ("hot",))]


def test_a_new_incarnation_is_sent_it_again(driver: Driver) -> None:
    two(driver)
    driver.wait(10.0)
    driver.runner("a", incarnation="i2")
    assert sent(driver.wait(10.0)) == [("a", ("hot",))]


def test_with_never_no_arrival_is_remembered_and_nothing_is_sent(driver: Driver) -> None:
    two(driver, prefetch="never")
    assert not sent(driver.wait(60.0))
    assert not driver.pool().candidates.known


def test_what_runners_hold_anyway_and_what_is_gone_is_not_sent(driver: Driver) -> None:
    two(driver)
    driver.change(RegistryChange(False, removed_adapters=("uid-hot",)))
    assert not sent(driver.wait(60.0))


def test_statuses_and_what_is_desired_do_not_change(driver: Driver) -> None:
    two(driver)
    version, held = driver.pool().adapters.version, dict[str, DesiredAdapter](driver.pool().adapters.held)
    assert sent(driver.wait(60.0))
    assert (driver.pool().adapters.version, driver.pool().adapters.held) == (version, held)
