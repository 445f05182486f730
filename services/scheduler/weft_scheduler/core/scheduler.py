"""The scheduler's machine: which runner serves which request (`weft.domain.machine` is the contract).

Deterministic: equal events at equal times give equal effects. One owner calls it; nothing in it blocks. Two tables say
what follows from a message and from a deadline; whatever an event has changed is placed and published at its end.
"""

from collections.abc import Callable, Mapping
from typing import Any

from weft.domain.fleet import FleetQuery
from weft.domain.limits import LimitReport
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received
from weft.domain.request import (
    Cancel,
    Failed,
    OutcomeAck,
    OutcomeReport,
    ResubmitComplete,
    RunnerChecked,
    Started,
    Submit,
)
from weft.domain.routes import Keys, KeysConfirmed, RegistryChange, ResyncRoutes, RoutesApplied
from weft.domain.runner import ClusterReport
from weft_scheduler.core import (
    canaries,
    check,
    controllers,
    cycle,
    fleet,
    keys,
    registry,
    requests,
    rescheduling,
    runner_reports,
    status,
)
from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.cycle import schedule_pools
from weft_scheduler.core.effects import Effect, Event, Stale
from weft_scheduler.core.model.gateway import GatewayStream
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind

# A gateway's handler is given its stream, any other the peer.
MESSAGES: Mapping[tuple[Kind, type], Callable[[State, Any, Any], None]] = {
    (Kind.GATEWAY, Submit): requests.on_submit,
    (Kind.GATEWAY, Started): requests.on_started,
    (Kind.GATEWAY, Cancel): requests.on_cancel,
    (Kind.GATEWAY, OutcomeReport): requests.on_outcome,
    (Kind.GATEWAY, ResubmitComplete): requests.on_resubmit_complete,
    (Kind.GATEWAY, ResyncRoutes): requests.on_resync_routes,
    (Kind.GATEWAY, RoutesApplied): requests.on_routes_applied,
    (Kind.GATEWAY, LimitReport): requests.on_limit_report,
    (Kind.GATEWAY, Failed): rescheduling.on_failed,
    (Kind.GATEWAY, FleetQuery): fleet.on_fleet_query,
    (Kind.GATEWAY, RunnerChecked): runner_reports.on_checked,
    (Kind.SUPERVISOR, ClusterReport): runner_reports.on_cluster_report,
    (Kind.SUPERVISOR, OutcomeAck): requests.on_outcomes_stored,
    (Kind.SUPERVISOR, Keys): keys.on_keys,
    (Kind.SUPERVISOR, KeysConfirmed): keys.on_confirmed,
    (Kind.REGISTRY, RegistryChange): registry.on_change,
}
CONNECTED: Mapping[Kind, Callable[[State, Peer, Any], None]] = {
    Kind.GATEWAY: requests.on_connected,
    Kind.SUPERVISOR: runner_reports.on_connected,
    Kind.REGISTRY: registry.on_connected,
}
CLOSED: Mapping[Kind, Callable[[State, str], None]] = {
    Kind.GATEWAY: requests.on_closed,
    Kind.SUPERVISOR: runner_reports.on_closed,
    Kind.REGISTRY: registry.on_closed,
}
TIMERS: Mapping[TimerKind, Callable[[State, Timer], None]] = {
    TimerKind.ADAPTER_DRAIN: registry.on_adapter_drain,
    TimerKind.ASSIGN_TIMEOUT: rescheduling.on_assign_timeout,
    TimerKind.AVOIDANCE: rescheduling.on_avoidance_over,
    TimerKind.BATCH_HEADROOM: cycle.on_batch_headroom,
    TimerKind.CANARY_STATUS: canaries.on_status_due,
    TimerKind.CLASS_WAIT: rescheduling.on_class_wait_over,
    TimerKind.CONSOLIDATION: controllers.on_due,
    TimerKind.FIRST_ROUTES: status.on_first_routes,
    TimerKind.GATEWAY_AVOIDANCE: rescheduling.on_gateway_avoidance_over,
    TimerKind.KEYS_UNCONFIRMED: keys.on_unconfirmed,
    TimerKind.MIGRATION: controllers.on_due,
    TimerKind.RESUBMIT: requests.on_resubmit_timeout,
    TimerKind.ROLES: controllers.on_due,
    TimerKind.RUNNER_CHECKED: runner_reports.on_check_due,
    TimerKind.RUNNER_LAPSED: runner_reports.on_lapsed,
    TimerKind.RUNNER_UNREPORTED: runner_reports.on_unreported,
    TimerKind.SCALE: controllers.on_pools_changed,
    TimerKind.SCALE_DOWN: controllers.on_scale_down,
    TimerKind.SLO_STATUS: status.on_slo_status,
    TimerKind.STARTUP_GRACE: cycle.on_startup_grace,
    TimerKind.STATUS: status.on_status_due,
}


class Scheduler:
    """The machine. `term` is unused by earlier schedulers, and durable."""

    def __init__(self, config: SchedulerConfig, term: int) -> None:
        self.config = config
        self.state = State(config, term)  # for checks and metrics: to be read only

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Return what follows from an event. Times never go back. Effects are to be performed in order."""
        state = self.state
        state.advance_to(now)
        if isinstance(event, Received):
            peer, message = event.peer, event.message
            sender, on_message = self._sender(peer), MESSAGES.get((peer.kind, type(message)))
            if sender is not None and on_message is not None:
                on_message(state, sender, message)
            else:
                why = f"not for a stream of that {peer.kind.value}"
                state.emit(Stale(type(message).__name__, peer.name, why))
        elif isinstance(event, Connected):
            CONNECTED[event.peer.kind](state, event.peer, event.hello)
        elif isinstance(event, Closed):
            CLOSED[event.peer.kind](state, event.peer.name)
        else:
            assert event is TICK, event
            while (timer := state.timers.take_due(state.now)) is not None:
                TIMERS[timer.kind](state, timer)
        registry.publish_desired(state)
        schedule_pools(state)
        return state.take_effects()

    def next_deadline(self) -> float | None:
        """Return when `handle(TICK)` has something to do, if nothing happens before."""
        return self.state.timers.next()

    def check(self) -> None:
        """Check every invariant; O(state). Raises AssertionError."""
        check.check_all(self.state)

    def _sender(self, peer: Peer) -> GatewayStream | Peer | None:
        """Return the peer as its handlers know it; None: it has no open stream."""
        if peer.kind is Kind.GATEWAY:
            return self.state.gateways.get(peer.name)
        return peer if peer.kind is Kind.REGISTRY else self.state.supervisors.get(peer.name)
