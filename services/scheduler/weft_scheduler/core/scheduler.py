"""The machine: `handle(event, now)` and `tick(now)` give the effects, `next_deadline()` says when to tick.

Deterministic: the same events at the same times give the same effects. One owner calls it; nothing in it blocks.
"""

from weft_scheduler.core import admission, cluster, moves, registry, requests, scaling, status
from weft_scheduler.core import events as ev
from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.context import Context
from weft_scheduler.core.effects import Effect, RaiseTerm
from weft_scheduler.core.state import State
from weft_scheduler.core.values import Config, Epoch


class Scheduler:
    """Who runs where. `term` is one that nobody has used: the caller has made it durable."""

    def __init__(self, config: Config, term: int) -> None:
        self.config = config
        self._ctx = Context(config, term)

    @property
    def state(self) -> State:
        """For checks and metrics: to be read only."""
        return self._ctx.state

    @property
    def context(self) -> Context:
        """For checks and metrics: to be read only."""
        return self._ctx

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """What follows from an event. Times never go back. Effects are to be executed in order."""
        self._ctx.now = max(now, self._ctx.now)
        self._dispatch(event)
        return self._finish()

    def tick(self, now: float) -> list[Effect]:
        """What follows from time alone."""
        self._ctx.now = max(now, self._ctx.now)
        while (alarm := self._ctx.alarms.take_due(self._ctx.now)) is not None:
            self._ring(alarm)
        return self._finish()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        return self._ctx.alarms.next()

    def _dispatch(self, event: ev.Event) -> None:
        ctx = self._ctx
        match event:
            case ev.Submit():
                requests.submit(ctx, event)
            case ev.ClusterReport():
                cluster.report(ctx, event)
            case ev.Started():
                requests.started(ctx, event)
            case ev.OutcomeReported():
                requests.outcome(ctx, event)
            case ev.Failed():
                moves.failed(ctx, event)
            case ev.Cancel():
                requests.cancel(ctx, event)
            case ev.OutcomesStored():
                requests.stored(ctx, event)
            case ev.GatewayUp():
                requests.gateway_up(ctx, event)
            case ev.ResubmitComplete():
                requests.resubmit_complete(ctx, event)
            case ev.GatewayDown():
                requests.gateway_down(ctx, event)
            case ev.SupervisorUp():
                cluster.supervisor_up(ctx, event)
            case ev.SupervisorDown():
                cluster.supervisor_down(ctx, event)
            case ev.KeysTold():
                cluster.keys_told(ctx, event)
            case ev.RegistryUp():
                registry.registry_up(ctx)
            case ev.RegistryChange():
                registry.change(ctx, event)

    def _ring(self, alarm: Alarm) -> None:
        ctx, state = self._ctx, self._ctx.state
        match alarm.kind:
            case Kind.ASSIGN:
                moves.overdue(ctx, state.requests[alarm.name])
            case Kind.RETRY:
                moves.retry(ctx, state.requests[alarm.name])
            case Kind.CLASS:
                ctx.look_at(state.requests[alarm.name].pool)
            case Kind.FORGIVE:
                moves.forgive(ctx, alarm.name)
            case Kind.RESUBMIT:
                requests.resubmit_complete(ctx, ev.ResubmitComplete(alarm.name))
            case Kind.ABSENT:
                self._absent(alarm.name)
            case Kind.RETIRE if alarm.name in state.pools:
                registry.retire_due(ctx, state.pools[alarm.name])
            case Kind.SETTLED:
                state.settled = True
                for pool in state.pools.values():
                    pool.sweep = True
                    ctx.look_at(pool.name)
            case Kind.FIRST_TABLE:
                status.reroute(ctx, without_keys=True)
            case Kind.STATUS:
                status.flush(ctx)
            case _:
                ctx.touch(alarm.name)

    def _absent(self, uuid: str) -> None:
        """While there is nobody to report it, silence says nothing of a runner."""
        runner = self._ctx.state.runners[uuid]
        if self._ctx.state.supervisors and not runner.confirmed:
            cluster.lost(self._ctx, runner.id, "no supervisor reports it")

    def _finish(self) -> list[Effect]:
        """Let the queues move where something changed, then tell what has to be told at once."""
        ctx, state = self._ctx, self._ctx.state
        while state.look:
            name = next(iter(state.look))
            del state.look[name]
            pool = state.pools.get(name)
            if pool is not None:
                admission.sweep(ctx, pool)
                admission.look(ctx, pool)
                if pool.victims and len(pool.queue):
                    scaling.review(ctx, pool, at_once=True)  # who is cordoned may be needed again
                self._forget_pool(name)
        if state.reroute:
            state.reroute = False
            status.reroute(ctx)
        status.arm(ctx)
        return ctx.take()

    def _forget_pool(self, name: str) -> None:
        """A pool nobody speaks of any more."""
        if not self.state.pools[name].in_use:
            del self.state.pools[name]
            self._ctx.alarms.clear(Alarm(Kind.RETIRE, name))


__all__ = ["Config", "Epoch", "RaiseTerm", "Scheduler"]
