"""Waiting for what another process or the kernel does without an event to this one."""

import os
import time
from collections.abc import Callable

# `make test` says 600: it may run on one core beside four busy ones. Who runs one test waits less for its failure.
PATIENCE_S = float(os.environ.get("WEFT_TEST_PATIENCE_S", "120"))
POLL_S = 0.02


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Ask until it holds. Raises TimeoutError, which says that `what` did not happen."""
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)
