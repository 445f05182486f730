"""The scheduler's machine behind a driver (`harness/scheduler_driver.py`)."""

import pytest

from harness.scheduler_driver import Driver


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def served(driver: Driver) -> Driver:
    """A pool with one runner, `a`."""
    driver.start().runner("a")
    return driver
