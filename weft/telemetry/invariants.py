"""Invariants of a running service: `check_*` functions raise AssertionError; here a violation is logged and counted.

Every service reports the same way. Each service decides what follows from a violation: it ends where its own
state cannot be trusted (docs/architecture.md).
"""

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

from prometheus_client import Counter

from weft.telemetry.logs import kv

MAX_VIOLATION_CHARS = 2000  # a detail may be a whole table
P = ParamSpec("P")
VIOLATIONS = Counter("weft_invariant_violations_total", "Invariants found violated, by the failed check", ["check"])
log = logging.getLogger(__name__)


class InvariantViolated(RuntimeError):
    """A service's own state cannot be trusted any more: the process ends."""


def violation(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> str | None:
    """Run a check: None if it passes, else the name of the innermost `check_*` function that failed, reported.

    A check that cannot even read the state (KeyError and the like) has failed too.
    """
    try:
        check(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 (it is reported)
        return report(error)
    return None


def holds(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
    """Run a check. A failing check is reported, and the caller continues."""
    return violation(check, *args, **kwargs) is None


def report(error: Exception) -> str:
    """Log and count a violation. Returns the name of the innermost `check_*` function in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    name = next((frame.name for frame in reversed(frames) if frame.name.startswith("check_")), "other")
    origin = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    failed = (frames[-1].line or "") if frames else ""
    fields = kv(
        check=name, where=origin, failed=failed, detail=f"{type(error).__name__}: {error}"[:MAX_VIOLATION_CHARS]
    )
    log.error("an invariant does not hold", extra=fields)
    VIOLATIONS.labels(name).inc()
    return name
