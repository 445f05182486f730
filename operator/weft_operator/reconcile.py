"""The loop around the planner: events mark objects, marked objects are planned, actions are carried out.

One worker on one event loop owns `Desired` and `Observed`. An object that is marked ten times while it waits is
planned once. An action that fails is not repeated by itself: its object is planned again after a pause (doubling,
bounded), from what is true then. A slow resync plans everything, so a lost event costs seconds, not correctness.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from weft.telemetry.logs import kv
from weft_operator.actions import (
    Action,
    EnsureRunner,
    PublishAdapter,
    PublishPool,
    RemoveFinalizer,
    RemoveRunner,
    Resolve,
    Retain,
    SetStatus,
    WithdrawAdapter,
    WithdrawPool,
)
from weft_operator.errors import DepotUnavailable, NoEffect
from weft_operator.judge import recall
from weft_operator.observe import AdapterReport, Desired, Observed, PoolReport, RunnerProcess
from weft_operator.plan import Policy, longest_drain_s, plan_one, plan_retention, wake_at
from weft_operator.queue import Queue
from weft_operator.record import forget, record
from weft_operator.resolution import Answer, Request, heard, unheard
from weft_operator.resources import Adapter, Object, Ref, parse

log = logging.getLogger(__name__)

PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 10.0
RESYNC_S = 30.0
RESOLVES_AT_ONCE = 8


class Backend(Protocol):
    """What differs between a cluster and one machine."""

    def set_status(self, action: SetStatus) -> Object:
        """Write a status; the object as it is then. Raises NoEffect when the object is a newer one, or gone."""
        ...

    def remove_finalizer(self, action: RemoveFinalizer) -> None: ...

    def ensure_runner(self, action: EnsureRunner) -> None: ...

    def remove_runner(self, action: RemoveRunner) -> None: ...


class Depot(Protocol):
    """The depot, as a client sees it. Raises DepotUnavailable."""

    async def resolve(self, request: Request, on_step: Callable[[Answer], None]) -> Answer: ...

    async def retain(self, digests: frozenset[str]) -> None: ...


class Registry(Protocol):
    """The scheduler's registry, as a client sees it. Does not fail: what is told is told again on each connection."""

    def tell(self, action: PublishPool | WithdrawPool | PublishAdapter | WithdrawAdapter) -> None: ...

    def start(self) -> None:
        """From now on what was told is a complete snapshot."""
        ...


class Controller:
    """Owns the planner's two sides. Feed it with `on_*`; run it with `run()` until cancelled."""

    def __init__(
        self,
        backend: Backend,
        depot: Depot,
        registry: Registry,
        *,
        policy: Policy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.desired, self.observed = Desired(), Observed()
        self._backend, self._depot, self._registry = backend, depot, registry
        self._policy, self._clock = policy, clock
        self._queue = Queue(clock)
        self._failures: dict[Ref, int] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._permits = asyncio.Semaphore(RESOLVES_AT_ONCE)
        self._drains = asyncio.Event()
        self.observed.retention.started_at = clock()

    def load(self, objects: Iterable[Object], *, nothing_runs: bool) -> None:
        """Take in the complete list, before `run()`.

        `nothing_runs`: runners and scheduler start together with this controller, so no stored readiness holds.
        """
        resources = [parse(obj) for obj in objects]
        for resource in resources:
            self.desired.put(resource)
        for resource in (*self.desired.pools.values(), *self.desired.adapters.values()):
            if known := recall(resource, self.desired, self.observed):
                self.observed.resolutions[resource.meta.uid] = known
            if nothing_runs:
                self.observed.pool_reports[str(resource.meta.ref)] = PoolReport(0)
                self.observed.adapter_reports[resource.meta.uid] = AdapterReport("", False, 0)

    async def run(self) -> None:
        """Plan until cancelled."""
        for ref in self.desired.refs():
            self._work(ref)
        self._registry.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._worker())
                tasks.create_task(self._resync())
                tasks.create_task(self._retention())
        finally:
            for task in self._resolving.values():
                task.cancel()

    # ------------------------------------------------------------------------------------------- events

    def on_object(self, obj: Object, *, gone: bool = False) -> None:
        """An object is new, changed, or gone."""
        resource = parse(obj)
        ref = resource.meta.ref
        known = self.desired.get(ref)
        if known is not None and (gone or known.meta.uid != resource.meta.uid):
            self._forget(known.meta.uid, ref)
        self._queue.add(self.desired.drop(ref) if gone else self.desired.put(resource))

    def on_runner(self, pool: Ref, index: int, runner: RunnerProcess | None) -> None:
        """A runner has changed its state; None: it is gone."""
        present = self.observed.runners.setdefault(pool, {})
        if runner is not None:
            present[index] = runner
        else:
            present.pop(index, None)
        if not present:
            del self.observed.runners[pool]
        self._queue.add([pool])

    def on_pool_report(self, pool: str, report: PoolReport) -> None:
        """The scheduler's word on a pool."""
        namespace, _, name = pool.partition("/")
        self.observed.pool_reports[pool] = report
        self._queue.add([Ref("ServingPool", namespace, name)])

    def on_adapter_report(self, uid: str, report: AdapterReport) -> None:
        """The scheduler's word on an adapter."""
        ref = self.desired.by_uid.get(uid)
        if ref in self.observed.adapters:  # else it was withdrawn meanwhile
            self.observed.adapter_reports[uid] = report
            self._queue.add([ref])

    # --------------------------------------------------------------------------------------------- work

    async def _worker(self) -> None:
        while True:
            self._work(await self._queue.get())
            await asyncio.sleep(0)

    def _work(self, ref: Ref) -> None:
        try:
            for action in plan_one(ref, self.desired, self.observed, self._clock(), self._policy):
                self._carry_out(action)
        except Exception as error:  # noqa: BLE001 (one bad object must not stop the others; it is logged)
            self._again(ref, error)
        else:
            self._failures.pop(ref, None)
            if (when := wake_at(ref, self.desired, self.observed, self._clock(), self._policy)) is not None:
                self._queue.add_at(ref, when)

    def _again(self, ref: Ref, error: Exception) -> None:
        failures = self._failures[ref] = self._failures.get(ref, 0) + 1
        pause_s = min(PAUSE_MIN_S * 2 ** min(failures - 1, 10), PAUSE_MAX_S)
        expected = isinstance(error, NoEffect)
        fields = kv(kind=ref.kind, object=str(ref), failures=failures, pause_s=pause_s, error=repr(error))
        log.log(
            logging.DEBUG if expected else logging.ERROR, "planned again later", extra=fields, exc_info=not expected
        )
        self._queue.add_at(ref, self._clock() + pause_s)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Resolve():
                self._resolve(action)
            case PublishPool() | WithdrawPool() | PublishAdapter() | WithdrawAdapter():
                self._registry.tell(action)
                self._drains.set()
            case EnsureRunner():
                self._backend.ensure_runner(action)
            case RemoveRunner():
                self._backend.remove_runner(action)
            case SetStatus():
                self.on_object(self._backend.set_status(action))
            case RemoveFinalizer():
                self._backend.remove_finalizer(action)
            case Retain():
                raise AssertionError("a digest list is no object's own business")
        record(action, self.observed, self._clock())

    # -------------------------------------------------------------------------------------------- depot

    def _resolve(self, action: Resolve) -> None:
        if before := self._resolving.get(action.uid):
            before.cancel()
        self._resolving[action.uid] = asyncio.create_task(self._resolution(action))

    async def _resolution(self, action: Resolve) -> None:
        def on_step(answer: Answer) -> None:
            self._heard(action, answer)

        async with self._permits:
            try:
                self._heard(action, await self._depot.resolve(action.request, on_step))
            except DepotUnavailable as error:
                log.warning("depot does not answer", extra=kv(object=str(action.ref), error=str(error)))
                self._unheard(action)
            except Exception:
                log.exception("resolution failed", extra=kv(object=str(action.ref)))
                self._unheard(action)
            del self._resolving[action.uid]

    def _heard(self, action: Resolve, answer: Answer) -> None:
        resource = self.desired.get(action.ref)
        known = self.observed.resolutions[action.uid]
        pool = resource.pool if isinstance(resource, Adapter) else None
        after = self.observed.resolutions[action.uid] = heard(known, answer, self._clock(), pool)
        self._queue.add([action.ref])
        if action.ref.kind == "ServingPool" and after.good != known.good:
            self._queue.add(adapter.meta.ref for adapter in self.desired.adapters_of(action.ref))

    def _unheard(self, action: Resolve) -> None:
        known = self.observed.resolutions[action.uid]
        self.observed.resolutions[action.uid] = unheard(known, self._clock())
        self._queue.add([action.ref])

    def _forget(self, uid: str, ref: Ref) -> None:
        if task := self._resolving.pop(uid, None):
            task.cancel()
        forget(uid, ref, self.observed)

    # ------------------------------------------------------------------------------------- slow rhythms

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_S)
            observed = self.observed
            self._queue.add([*self.desired.refs(), *observed.pools, *observed.adapters, *observed.runners])

    async def _retention(self) -> None:
        """Tell the depot what to keep whenever something has drained."""
        not_before = 0.0
        while True:
            due = self.observed.retention.due_at(longest_drain_s(self.desired, self._policy))
            self._drains.clear()
            pause_s = None if due is None else max(due, not_before) - self._clock()
            try:
                async with asyncio.timeout(None if pause_s is None else max(pause_s, 0.0)):
                    await self._drains.wait()
            except TimeoutError:
                not_before = 0.0 if await self._retain() else self._clock() + PAUSE_MAX_S

    async def _retain(self) -> bool:
        """With no resolution under way: a content that was just fetched, and that no list names yet, must not go."""
        for _ in range(RESOLVES_AT_ONCE):
            await self._permits.acquire()
        try:
            now = self._clock()
            for action in plan_retention(self.desired, self.observed, now, self._policy):
                assert isinstance(action, Retain)
                await self._depot.retain(action.digests)
                record(action, self.observed, now)
            self.observed.retention.forget(now)
        except DepotUnavailable as error:
            log.warning("depot does not answer", extra=kv(error=str(error)))
            return False
        else:
            return True
        finally:
            for _ in range(RESOLVES_AT_ONCE):
                self._permits.release()
