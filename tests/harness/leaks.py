"""A test fails that leaves open what nobody can reach any more: a socket, a pipe, a file, a transport.

The garbage collector would close such a thing in whatever test runs then, and warn there. A warning is an error where
hypothesis resolves a type, so a test that has nothing to do with the thing failed once in a few thousand runs. After
tests of whole processes it is only collected: on a busy machine a loop may end amid the last of its connections.
"""

import gc
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest

DESCRIPTORS = Path("/proc/self/fd")
OF_PROCESSES = frozenset(("integration", "e2e", "operator", "cluster"))
_OPEN = pytest.StashKey[set[tuple[str, str]]]()


def register(config: pytest.Config) -> None:
    """Register the plugin."""
    config.pluginmanager.register(Leaks(), "weft-leaks")


class Leaks:
    """Looks for garbage with descriptors where a test has left more of them than it found."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """Note what is open before the test."""
        item.stash[_OPEN] = open_descriptors()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        """Fail the test for what its end has left to the collector."""
        result = yield
        left = collected() if open_descriptors() - item.stash[_OPEN] else []
        if left and OF_PROCESSES.isdisjoint(item.nodeid.split("/")):
            pytest.fail("expected everything closed at the test's end, got\n" + "\n".join(left), pytrace=False)
        return result


def open_descriptors() -> set[tuple[str, str]]:
    """List this process's descriptors, each with what it leads to. None where there is no /proc."""
    found = set[tuple[str, str]]()
    for path in DESCRIPTORS.iterdir() if DESCRIPTORS.exists() else ():
        try:
            found.add((path.name, str(path.readlink())))
        except OSError:  # the one that lists them, or one that another thread has closed
            continue
    return found


def collected() -> list[str]:
    """Collect garbage. Returns what it says of things that were open."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    return sorted(str(one.message) for one in caught if issubclass(one.category, ResourceWarning))
