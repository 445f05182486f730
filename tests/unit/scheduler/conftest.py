"""The scheduler's machine behind a driver (`harness/scheduler_driver.py`)."""

from collections.abc import Callable
from typing import Any

import pytest

from harness import scheduler_driver
from harness.scheduler_driver import Driver
from weft.domain.adapter import AdapterSpec


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def new_driver() -> Callable[..., Driver]:
    return Driver


@pytest.fixture
def adapter_of() -> Callable[..., AdapterSpec]:
    return scheduler_driver.adapter


@pytest.fixture
def picked() -> Callable[..., Any]:
    """The effects and messages of one kind."""
    return scheduler_driver.of
