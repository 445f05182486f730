"""A plugin of pytest for tests on a GPU: their order, the device between them, and what is known when they are stopped.

A bad address or a failed assertion of a kernel stays an error for every later call of the process. pytest-xdist counts
the process as crashed in that test, whose report it has already, and runs the next test in another one.
"""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from types import FrameType

import pytest

EXIT_CODE = 70
FIRST = ("test_engine.py", "test_graphs.py", "test_executor.py", "test_loading.py")  # if time ends: what they run on


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LastWords())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give back what the test held of the device, since other processes run theirs on it; or end without a device."""
    done = yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(EXIT_CODE)
            pytest.exit(f"{item.nodeid} left the device unusable: {error}", EXIT_CODE)
    return done


class LastWords:
    """On SIGINT and SIGTERM say which tests have failed, and why, and end at once: no process is waited for."""

    def __init__(self) -> None:
        self._out = os.dup(1)  # a handler may run amid a write to the stream
        self._outcomes = Counter[str]()
        self._failures = list[str]()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._end)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once, or what went wrong around it."""
        if report.failed:
            self._failures.append(f"FAILED {report.nodeid}\n{report.longreprtext}\n")
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1

    def _end(self, number: int, frame: FrameType | None) -> None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._outcomes.items()))
        for text in ("\n", *self._failures, f"interrupted: {counts or 'no test was done'}\n"):
            os.write(self._out, text.encode(errors="replace"))
        os._exit(128 + number)
