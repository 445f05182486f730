"""The loops that timers drive: a change is looked at once, and at rest nothing happens."""

from typing import Any

import pytest

from harness.scheduler_driver import POOL, Driver, of
from weft.domain.routes import PoolStatus


@pytest.mark.parametrize("phases", ["unified", "split"])
def test_at_rest_no_loop_has_a_timer(phases: str) -> None:
    layout: dict[str, Any] = {"kv_layout": "l", "kv_address": "127.0.0.1:2"} if phases == "split" else {}
    driver = Driver().start(min_runners=1, max_runners=4, consolidation="always", phases=phases)
    for uuid in ("r1", "r2"):
        driver.runner(uuid, ready=True, **layout)
    driver.place("r")
    driver.outcome("r")
    driver.wait(10_000.0)
    assert driver.core.next_deadline() is None
    driver.place("r")
    assert driver.core.next_deadline() is not None


def test_a_change_is_scaled_once_and_told_in_the_same_publication() -> None:
    driver = Driver().start(max_runners=4)
    driver.runner("r1", ready=True)
    driver.wait(1_000.0)
    for number in range(9):
        driver.submit(f"r{number}")
    (status,) = of(driver.wait(driver.core.config.status_s), PoolStatus)
    assert (status.pool, status.wanted_runners) == (POOL, driver.pool().scaling.autoscaler.wanted_runners)
    assert status.wanted_runners > 1
