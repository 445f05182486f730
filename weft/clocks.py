"""Clocks of processes, and times as Kubernetes writes them."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], float]
_EVEN = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first one is Linux's


def since_boot() -> float:
    """Seconds that also pass while this process, or the whole machine, is stopped."""
    return time.clock_gettime(_EVEN)


def micro_time(unix_s: float) -> str:
    """Write Unix seconds as the API's MicroTime."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
