"""Requests to the depot: sources to resolve (a bounded number at once), changed sources, digests to keep.

A request lasts as long as its source takes: hours for a large or slow source. Each namespace may have only a few
requests under way, so slow sources of one namespace delay no other. Resolved sources get half of these requests: a new
source then does not wait until a new leader has resolved all known sources.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from weft.artifacts.depot_api import OperationStatus
from weft.telemetry.logs import kv
from weft_operator.controller.interfaces import DepotApi
from weft_operator.core.actions import Resolve, RetainBlobs
from weft_operator.core.artifacts import source_changed, unreachable, updated
from weft_operator.core.canary import canary_uid, owner_uid
from weft_operator.core.chat_templates import template_uid
from weft_operator.core.expectations import expect
from weft_operator.core.reconcile import longest_drain_s, plan_retention, resolve_period_s
from weft_operator.core.resources import AdapterObject, Ref
from weft_operator.core.state import ClusterState
from weft_operator.errors import DepotUnavailable

log = logging.getLogger(__name__)

RESOLVES_AT_ONCE = 64  # fewer than the depot client has connections
RESOLVES_OF_NAMESPACE = 8
RESOLVES_AGAIN = 4  # at most, for sources with a known answer
# The depot itself watches a few sources for WATCH_S, every 2 s. One question of the controller costs ten looks.
WATCH_S, FEW_S = 20.0, 2.0
PAUSE_S = 10.0  # between two lists, and before an unanswered question is repeated


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Turns:
    """The permits of one namespace."""

    all: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RESOLVES_OF_NAMESPACE))
    again: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RESOLVES_AGAIN))


class SourceResolver:
    """The owner of the requests under way. `mark` is called with objects to plan again."""

    def __init__(
        self, depot: DepotApi, state: ClusterState, *, clock: Callable[[], float], mark: Callable[[Iterable[Ref]], None]
    ) -> None:
        self._depot, self._state = depot, state
        self._clock, self._mark = clock, mark
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._permits = asyncio.Semaphore(RESOLVES_AT_ONCE)
        self._turns = WeakValueDictionary[str, _Turns]()  # by namespace, while the namespace has requests
        self._drains, self._news = asyncio.Event(), asyncio.Event()

    def resolve(self, action: Resolve) -> None:
        """Start a request. A running request about the same object is dropped."""
        self._cancel(action.uid)
        self._resolving[action.uid] = asyncio.create_task(self._resolution(action))

    def forget(self, uid: str) -> None:
        """Forget a deleted object with its canary and chat template, or only its canary or template."""
        self._cancel(uid)
        self._cancel(canary_uid(uid))
        self._cancel(template_uid(uid))

    def _cancel(self, uid: str) -> None:
        if task := self._resolving.pop(uid, None):
            task.cancel()

    def schedule_gc(self) -> None:
        """Send the list of kept digests soon: an object was published or unpublished, so digests may drain."""
        self._drains.set()

    def close(self) -> None:
        for task in self._resolving.values():
            task.cancel()

    async def watch(self) -> None:
        """Ask for changed sources in one request, and resolve them again. Runs until cancelled."""
        while True:
            await asyncio.sleep(period_s := resolve_period_s(self._state.desired))
            self._news.clear()
            resolutions = self._state.observed.resolutions
            watches = {uid: r.answer.watch for uid, r in resolutions.items() if r.answer.watch and not r.running}
            try:
                changed = await self._changed(set(watches.values()), WATCH_S if period_s <= FEW_S else 0.0)
            except DepotUnavailable as error:
                log.warning("depot does not answer", extra=kv(error=str(error)))
                await asyncio.sleep(PAUSE_S)
                continue
            for uid, watch in watches.items():
                # Either may be gone by now.
                resolution, ref = resolutions.get(uid), self._state.desired.by_uid.get(owner_uid(uid))
                if watch in changed and resolution is not None and ref is not None and resolution.answer.watch == watch:
                    resolutions[uid] = source_changed(resolution)
                    self._mark([ref])

    async def _changed(self, watches: set[str], wait_s: float) -> frozenset[str]:
        """Ask about these watches, until a source outside them is resolved. Raises DepotUnavailable."""
        if not watches:
            return frozenset()
        asking = asyncio.create_task(self._depot.changed(watches, wait_s))
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait([asking, news], return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else frozenset()
        finally:
            asking.cancel()
            news.cancel()

    async def run_gc(self) -> None:
        """Send the depot the list to keep whenever something has drained. Until cancelled."""
        not_before = 0.0
        while True:
            due = self._state.expectations.retention.due_at(longest_drain_s(self._state.desired))
            self._drains.clear()
            pause_s = None if due is None else max(due, not_before) - self._clock()
            try:
                async with asyncio.timeout(None if pause_s is None else max(pause_s, 0.0)):
                    await self._drains.wait()
            except TimeoutError:
                await self._retain()
                not_before = self._clock() + PAUSE_S

    async def _resolution(self, action: Resolve) -> None:
        def on_step(answer: OperationStatus) -> None:
            self._updated(action, answer)

        turns = self._turns.setdefault(action.ref.namespace, _Turns())
        finished = self._state.observed.resolutions[action.uid].answer.finished
        async with turns.again if finished else contextlib.nullcontext(), turns.all, self._permits:
            try:
                self._updated(action, await self._depot.resolve(action.request, on_step))
            except DepotUnavailable as error:
                log.warning("depot does not answer", extra=kv(object=str(action.ref), error=str(error)))
                self._unreachable(action)
            except Exception:
                log.exception("resolution failed", extra=kv(object=str(action.ref)))
                self._unreachable(action)
            del self._resolving[action.uid]

    def _updated(self, action: Resolve, answer: OperationStatus) -> None:
        resource, resolutions = self._state.desired.get(action.ref), self._state.observed.resolutions
        resolution = resolutions[action.uid]
        pool = resource.pool if isinstance(resource, AdapterObject) else None
        resolution_after = resolutions[action.uid] = updated(resolution, answer, self._clock(), pool)
        self._mark([action.ref])
        if answer.finished:
            self._news.set()
        if action.request.kind == "model" and resolution_after.verified != resolution.verified:
            self._mark(adapter.meta.ref for adapter in self._state.desired.adapters_of(action.ref))

    def _unreachable(self, action: Resolve) -> None:
        resolutions = self._state.observed.resolutions
        resolutions[action.uid] = unreachable(resolutions[action.uid], self._clock())
        self._mark([action.ref])

    async def _retain(self) -> None:
        """Send the list of kept digests. The depot's leases keep blobs that running resolutions have fetched."""
        now = self._clock()
        try:
            for action in plan_retention(self._state, now):
                assert isinstance(action, RetainBlobs)
                await self._depot.retain(action.digests)
                expect(action, self._state, now)
        except DepotUnavailable as error:
            log.warning("depot does not answer", extra=kv(error=str(error)))
        else:
            self._state.expectations.retention.forget(now)
