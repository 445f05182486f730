"""A time after which pytest begins no test: a plugin, registered where `harness.changed` has set one."""

import os
import time

import pytest

VARIABLE = "WEFT_TEST_DEADLINE"  # by time.monotonic


def register(config: pytest.Config) -> None:
    """Register the plugin where a deadline is set."""
    if ends := os.environ.get(VARIABLE):
        config.pluginmanager.register(Deadline(config, float(ends)), "weft-deadline")


class Deadline:
    """Runs tests as their files stand on the command line, until it is too late to begin one."""

    def __init__(self, config: pytest.Config, ends: float) -> None:
        self._places = {(config.rootpath / name).resolve(): place for place, name in enumerate(config.args)}
        self._ends, self._done = ends, set[str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort by file; pytest's --ff then puts before them what failed last time."""
        items.sort(key=lambda item: self._places.get(item.path, len(self._places)))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count what is done."""
        self._done.add(nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Stop instead of a test that would begin too late."""
        if time.monotonic() < self._ends:
            return None
        left = len(item.session.items) - len(self._done)
        item.session.shouldstop = f"the time is over: {left} tests of these files are left"
        return True
