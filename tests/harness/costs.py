"""What code costs, without a clock: the lines and the calls of Python that a thread executes.

Python's collector rests meanwhile: it runs the finalisers of objects that earlier tests left.
"""

import gc
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def without_collector() -> Generator[None]:
    """Keep Python's collector from running."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def traced_lines(work: Callable[[], T]) -> tuple[T, int]:
    """Return the result of some work and the lines of Python that it executes."""
    return _traced(work, "line")


def traced_calls(work: Callable[[], T]) -> tuple[T, int]:
    """Return the result of some work and the calls of Python functions that it makes."""
    return _traced(work, "call")


def lines_of(work: Callable[[], object]) -> int:
    """Return the lines of Python that some work executes."""
    return _traced(work, "line")[1]


def calls_of(work: Callable[[], object]) -> int:
    """Return the calls of Python functions that some work makes."""
    return _traced(work, "call")[1]


def _traced(work: Callable[[], T], kind: str) -> tuple[T, int]:
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == kind
        return trace if kind == "line" else None

    before = sys.gettrace()
    with without_collector():
        sys.settrace(trace)
        try:
            result = work()
        finally:
            sys.settrace(before)
    return result, count
