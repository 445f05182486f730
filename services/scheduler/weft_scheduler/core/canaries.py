"""Counts of requests' ends at a canary and at the content beside it, for the registry that promotes or rolls it back.

An adapter's counts begin anew with another pair of contents. They are published a bounded number of times, however many
requests end.
"""

from weft.domain.request import OutcomeReport
from weft.domain.routes import AdapterSpec, CanaryCounts
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind


def declare(state: State, adapter: AdapterSpec, stored: tuple[str, CanaryCounts] | None) -> None:
    """Count the requests of an adapter with a canary. `stored`: previous counts, continued for the same contents."""
    canary = adapter.canary
    if canary is not None:
        is_same_content = stored is not None and (stored[0], stored[1].digest) == (adapter.digest, canary.digest)
        anew = adapter.digest, CanaryCounts(canary.digest)
        state.registry.canaries[adapter.uid] = stored if is_same_content and stored is not None else anew


def forget(state: State, uid: str) -> None:
    state.registry.canaries.pop(uid, None)
    state.timers.clear(Timer(TimerKind.CANARY_STATUS, uid))


def on_status_due(state: State, timer: Timer) -> None:
    """Let an adapter's status be published with the latest counts of its canary."""
    state.published.mark_adapters((timer.name,))
    state.schedule_publish()


def count(state: State, report: OutcomeReport) -> None:
    """Count an ended request of an adapter."""
    route = state.routes.book.routes.get(report.model_name)
    if route is None or (stored := state.registry.canaries.get(route.uid)) is None:
        return
    stable, counts = stored
    if report.adapter == counts.digest:
        counts = counts._replace(requests=counts.requests + 1, failed=counts.failed + report.failed)
    elif report.adapter == stable:
        counts = counts._replace(
            stable_requests=counts.stable_requests + 1, stable_failed=counts.stable_failed + report.failed
        )
    else:
        return  # an earlier content
    state.registry.canaries[route.uid] = stable, counts
    timer = Timer(TimerKind.CANARY_STATUS, route.uid)
    if timer not in state.timers:
        state.timers.set(timer, state.now + state.config.canary_status_s)
