"""The scheduler's machine: which runner serves which request (`weft.domain.machine` is the contract).

Deterministic: equal events at equal times give equal effects. One owner calls it; nothing in it blocks.
"""

from collections.abc import Callable
from typing import Any

from weft.domain.fleet import FleetQuery
from weft.domain.limits import LimitReport
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received
from weft.domain.request import Cancel, Failed, GatewayHello, OutcomeReport, ResubmitComplete, Started, Submit
from weft.domain.routes import RegistryChange, RegistryHello, ResyncRoutes, RoutesApplied
from weft.domain.runner import SupervisorHello
from weft_scheduler.core import (
    check,
    consolidation,
    fleet,
    keys,
    migration,
    phases,
    registry,
    requests,
    rescheduling,
    runner_reports,
)
from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.effects import Effect, Event, Stale
from weft_scheduler.core.model.gateway import GatewayStream
from weft_scheduler.core.model.request import Phase
from weft_scheduler.core.scaling import scale
from weft_scheduler.core.scheduling import reject_infeasible, schedule_pool
from weft_scheduler.core.state import State
from weft_scheduler.core.status import publish, publish_routes
from weft_scheduler.core.timers import Timer, TimerKind

FROM_GATEWAY: dict[type, Callable[[State, GatewayStream, Any], None]] = {
    Submit: requests.on_submit,
    Started: requests.on_started,
    Cancel: requests.on_cancel,
    OutcomeReport: requests.on_outcome,
    ResubmitComplete: requests.on_resubmit_complete,
    ResyncRoutes: requests.on_resync_routes,
    RoutesApplied: requests.on_routes_applied,
    LimitReport: requests.on_limit_report,
    Failed: rescheduling.on_failed,
    FleetQuery: fleet.on_fleet_query,
}


class Scheduler:
    """`term` is one that no scheduler has used: the caller has made it durable."""

    def __init__(self, config: SchedulerConfig, term: int) -> None:
        self.config = config
        self.state = State(config, term)  # for checks and metrics: to be read only

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What follows from an event. Times never go back. Effects are to be performed in order."""
        state = self.state
        state.now = max(now, state.now)
        if isinstance(event, Received):
            self._on_message(event.peer, event.message)
        elif isinstance(event, Connected):
            self._on_connected(event.peer, event.hello)
        elif isinstance(event, Closed):
            self._on_closed(event.peer)
        else:
            assert event is TICK, event
            while (timer := state.timers.take_due(state.now)) is not None:
                self._on_timer(timer)
        self._finish()
        return state.take_effects()

    def next_deadline(self) -> float | None:
        """When `handle(TICK)` has something to do, if nothing happens before."""
        return self.state.timers.next()

    def check(self) -> None:
        """Every invariant; O(state). Raises AssertionError."""
        check.check_all(self.state)

    def _on_connected(self, peer: Peer, hello: object) -> None:
        match peer.kind:
            case Kind.GATEWAY:
                known = hello if isinstance(hello, GatewayHello) else GatewayHello(peer.name)
                requests.on_connected(self.state, known)
            case Kind.SUPERVISOR:
                known = hello if isinstance(hello, SupervisorHello) else SupervisorHello(peer.name)
                runner_reports.on_connected(self.state, peer, known)
            case _:
                registry.on_connected(self.state, peer, hello.term if isinstance(hello, RegistryHello) else None)

    def _on_message(self, peer: Peer, message: object) -> None:
        state = self.state
        gateway = state.gateways.get(peer.name) if peer.kind is Kind.GATEWAY else None
        if gateway is not None and (on_message := FROM_GATEWAY.get(type(message))) is not None:
            on_message(state, gateway, message)
        elif peer.kind is Kind.SUPERVISOR and peer.name in state.supervisors:
            runner_reports.on_message(state, peer, message)
        elif peer.kind is Kind.REGISTRY and isinstance(message, RegistryChange):
            registry.on_change(state, peer, message)
        else:
            state.emit(Stale(type(message).__name__, peer.name, f"not for a stream of that {peer.kind.value}"))

    def _on_closed(self, peer: Peer) -> None:
        match peer.kind:
            case Kind.GATEWAY:
                requests.on_closed(self.state, peer.name)
            case Kind.SUPERVISOR:
                runner_reports.on_closed(self.state, peer.name)
            case _:
                registry.on_closed(self.state, peer.name)

    def _on_timer(self, timer: Timer) -> None:
        state = self.state
        match timer.kind:
            case TimerKind.ASSIGN_TIMEOUT:
                rescheduling.on_assign_timeout(state, state.requests[timer.name])
            case TimerKind.AVOIDANCE:
                request = state.requests[timer.name]
                rescheduling.on_avoid_expired(state, timer, request.avoidance, (request.pool,))
            case TimerKind.BATCH_HEADROOM if timer.name in state.pools:
                state.mark_schedulable(timer.name, ())
            case TimerKind.CLASS_WAIT:
                request = state.requests[timer.name]
                if request.phase is Phase.WAITING and request.awaited_class:
                    state.pool(request.pool).stop_awaiting_class(request)
                state.mark_schedulable(request.pool)
            case TimerKind.GATEWAY_AVOIDANCE:
                gateway = state.gateways[timer.name]
                rescheduling.on_avoid_expired(state, timer, gateway.avoidance, gateway.pools)
            case TimerKind.RESUBMIT:
                requests.on_resubmit_complete(state, state.gateways[timer.name])
            case TimerKind.KEYS_UNCONFIRMED:
                keys.on_unconfirmed(state)
            case TimerKind.RUNNER_UNREPORTED:
                runner_reports.on_unreported(state, timer.name)
            case TimerKind.ADAPTER_DRAIN if timer.name in state.pools:
                registry.on_adapter_drain(state, state.pools[timer.name], timer.adapter)
            case TimerKind.STARTUP_GRACE:
                state.settled = True
                for pool in state.pools.values():
                    pool.recheck()
                    state.mark_schedulable(pool.name)
            case TimerKind.CONSOLIDATION if timer.name in state.pools:
                consolidation.consolidate(state, state.pools[timer.name])
            case TimerKind.ROLES if timer.name in state.pools:
                phases.review(state, state.pools[timer.name])
            case TimerKind.MIGRATION if timer.name in state.pools:
                migration.empty_runners(state, state.pools[timer.name])
            case TimerKind.FIRST_ROUTES:
                publish_routes(state, without_keys=True)
            case TimerKind.STATUS:
                publish(state)
            case TimerKind.CANARY_STATUS:
                state.published.mark_adapters((timer.name,))
                state.schedule_publish()
            case _:
                state.mark_dirty(timer.name)

    def _finish(self) -> None:
        """Publish and schedule what has changed, and forget pools that are not in use."""
        state = self.state
        registry.publish_desired(state)
        while state.schedulable:
            name = next(iter(state.schedulable))
            changed = state.schedulable.pop(name)
            pool = state.pools.get(name)
            if pool is not None:
                if pool.roles_stale:
                    phases.plan(state, pool)
                reject_infeasible(state, pool)
                schedule_pool(state, pool, changed)
                if pool.autoscaler.victims and len(pool.queue):
                    scale(state, pool, at_once=True)  # a victim may be needed again
                if not pool.in_use:
                    del state.pools[name]
