"""The loop around `core/api_keys.py`: each APIKey is reconciled periodically, step by step.

Secrets are read by name and never listed or watched, so a reconcile is what notices that one has changed or gone: after
`POLL_S`, longer where keys are many. An APIKey that changes is reconciled at once. The supervisor's list is asked for
at the start and each `LIST_S`; in between what this process has declared itself is known. Plaintext keys are drawn
here, go into a Secret, and are neither kept nor logged.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Protocol

from weft.telemetry.logs import kv
from weft_operator.controller.clock import Clock, unix_clock
from weft_operator.controller.interfaces import NoMetrics, ReconcileMetrics
from weft_operator.controller.workqueue import WorkQueue
from weft_operator.core.actions import AddFinalizer, RecordEvent, RemoveFinalizer, SetStatus
from weft_operator.core.api_keys import (
    NOT_READ,
    CreateSecret,
    Declare,
    DeclaredKey,
    Key,
    KeyDeclaration,
    KeyView,
    Secret,
    Step,
    Withdraw,
    events_for,
    next_step,
    orphans,
    parse_key,
)
from weft_operator.core.resources import Malformed, Object, Ref
from weft_operator.errors import ApiFailed, OperatorError, StaleWrite

log = logging.getLogger(__name__)

KIND = "APIKey"
POLL_S, RECONCILES_PER_S = 5.0, 20.0
LIST_S = 30.0
AGAIN_S = 2.0  # after a failure, or while the supervisor does not answer
STEPS_MAX = 12  # of one reconcile: from nothing to Ready are five
WORKERS = 4


class Secrets(Protocol):
    """Secrets of the namespaces that are served."""

    async def read(self, key: Key) -> Secret: ...

    async def create(self, key: Key, text: str) -> None:
        """Raises StaleWrite where there is one, ApiFailed where it is refused."""
        ...


class Backend(Protocol):
    """Writes to APIKeys; all raise StaleWrite."""

    async def set_status(self, action: SetStatus) -> None: ...

    async def add_finalizer(self, action: AddFinalizer) -> None: ...

    async def remove_finalizer(self, action: RemoveFinalizer) -> None: ...

    async def record_event(self, action: RecordEvent) -> None: ...


class Registry(Protocol):
    """The supervisor; all raise SupervisorUnavailable."""

    async def declare(self, new: KeyDeclaration) -> DeclaredKey | str: ...

    async def withdraw(self, owner: str) -> None: ...

    async def declared(self) -> list[DeclaredKey]: ...


class KeyLoop:
    """Feed it with `on_object` (complete before `run()`); run it until cancelled. One event loop owns it."""

    def __init__(
        self,
        backend: Backend,
        secret_store: Secrets,
        registry: Registry,
        *,
        namespaces: Collection[str],
        clock: Clock | None = None,
        metrics: ReconcileMetrics | None = None,
        draw: Callable[[], str] = lambda: f"weft-key-{secrets.token_urlsafe(32)}",
    ) -> None:
        self._backend, self._secrets, self._registry, self._draw = backend, secret_store, registry, draw
        self._namespaces, self._metrics = frozenset(namespaces), metrics or NoMetrics()
        self._clock = clock = clock or unix_clock()
        self._queue = WorkQueue(clock)
        self._keys: dict[Ref, Key] = {}
        self._uids: dict[Ref, str] = {}  # of every object, readable or not
        self._known = False
        self._unsure: set[str] = set()  # owners of whom a call has failed: what the supervisor did is not known
        self._called: set[str] = set()  # owners that a call was about while the list was on its way
        self._declared: dict[str, DeclaredKey] = {}  # in force, by owner
        self._revoked: dict[str, frozenset[str]] = {}  # by owner
        self._taken: dict[str, str] = {}  # by owner: the hash that was refused
        self._refused: dict[str, str] = {}  # by owner: why its Secret was refused at the last reconcile

    def on_object(self, obj: Object, gone: bool) -> None:
        """An object of the cluster is new, changed or gone; only APIKeys are of interest."""
        if obj["kind"] != KIND:
            return
        meta = obj["metadata"]
        ref = Ref(KIND, meta["namespace"], meta["name"])
        if gone:
            self._keys.pop(ref, None)
            uid = self._uids.pop(ref, "")
            self._taken.pop(uid, None)
        else:
            self._uids[ref] = meta["uid"]
            key = parse_key(obj)
            if isinstance(key, Malformed):
                self._keys.pop(ref, None)  # what is declared stays until its spec can be read
                log.warning("spec cannot be read", extra=kv(kind=KIND, object=str(ref), error=key.message))
            else:
                self._keys[ref] = key
        self._queue.add([ref])

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            for _ in range(WORKERS):
                tasks.create_task(self._worker())

    async def _follow(self) -> None:
        while True:
            try:
                await self.compare()
            except OperatorError as error:
                log.warning("the supervisor's keys are not known", extra=kv(error=str(error)))
            await asyncio.sleep(LIST_S if self._known and not self._unsure else AGAIN_S)

    async def compare(self) -> None:
        """Ask the supervisor what is declared, and withdraw what is of no object. Raises SupervisorUnavailable.

        Of an owner that a call was about while the list was on its way, the list may say what was before: it is passed
        over.
        """
        unsure, self._called = set(self._unsure), set()
        found = await self._registry.declared()
        called = self._called
        self._unsure -= unsure - called
        listed = {key.declaration.owner: key for key in found if not key.revoked}
        own = {owner: key for owner, key in self._declared.items() if owner in called}
        self._declared = {owner: key for owner, key in listed.items() if owner not in called} | own
        revoked = dict[str, frozenset[str]]()
        for key in found:
            if key.revoked:
                owner = key.declaration.owner
                revoked[owner] = revoked.get(owner, frozenset()) | {key.declaration.key_hash}
        self._revoked, self._known = revoked, True
        self._queue.add(list(self._keys))
        for owner in orphans(found, set(self._uids.values())):
            await self._registry.withdraw(owner)
            self._declared.pop(owner, None)
            log.warning("a key of no APIKey is revoked", extra=kv(owner=owner))

    async def _worker(self) -> None:
        while True:
            ref = await self._queue.get()
            try:
                await self._work(ref)
            finally:
                self._queue.done(ref)

    async def _work(self, ref: Ref) -> None:
        began, failed = self._clock(), False
        again_s = max(POLL_S, len(self._keys) / RECONCILES_PER_S)
        try:
            await self.reconcile(ref)
        except Exception as error:  # one bad object must not stop the others
            again_s, failed = AGAIN_S, not isinstance(error, StaleWrite)
            level = logging.WARNING if failed else logging.DEBUG
            known = isinstance(error, OperatorError)
            log.log(level, "reconciled again later", extra=kv(object=str(ref), error=str(error)), exc_info=not known)
        if ref in self._keys:
            self._queue.add_at(ref, self._clock() + again_s)
        self._metrics.reconciled(KIND, self._clock() - began, failed=failed)

    async def reconcile(self, ref: Ref) -> None:
        """Bring one object to where nothing is left to do."""
        for _ in range(STEPS_MAX):
            key = self._keys.get(ref)
            if key is None:
                break
            step = next_step(await self._view(key), self._clock())
            if step is None:
                break
            await self._carry_out(step, key)
        self._refused.pop(self._uids.get(ref, ""), None)  # it is tried again at the next reconcile

    async def _view(self, key: Key) -> KeyView:
        meta, uid = key.meta, key.meta.uid
        served = meta.ref.namespace in self._namespaces
        return KeyView(
            key=key,
            served=served,
            secret=await self._secrets.read(key) if served and not meta.deleting else NOT_READ,
            known=self._known and uid not in self._unsure,
            declared=self._declared.get(uid),
            revoked=self._revoked.get(uid, frozenset()),
            taken=self._taken.get(uid, ""),
            refused=self._refused.get(uid, ""),
        )

    async def _carry_out(self, step: Step, key: Key) -> None:
        uid = key.meta.uid
        match step:
            case AddFinalizer():
                await self._backend.add_finalizer(step)
            case RemoveFinalizer():
                await self._backend.remove_finalizer(step)
            case CreateSecret():
                try:
                    await self._secrets.create(key, self._draw())
                except ApiFailed as error:
                    self._refused[uid] = error.message or f"the API server answers {error.status}"
            case Declare():
                with self._calling(uid):
                    outcome = await self._registry.declare(step.declaration)
                    self._declare(uid, step.declaration, outcome)
            case Withdraw():
                with self._calling(uid):
                    await self._registry.withdraw(step.owner)
                    self._declared.pop(step.owner, None)
            case SetStatus():
                await self._backend.set_status(step)
                for event in events_for(key, step.status):
                    await self._backend.record_event(event)

    @contextmanager
    def _calling(self, owner: str) -> Generator[None]:
        """Until the call has ended well, nothing is known of that owner's key."""
        self._unsure.add(owner)
        self._called.add(owner)
        yield
        self._called.add(owner)
        self._unsure.discard(owner)

    def _declare(self, uid: str, new: KeyDeclaration, outcome: DeclaredKey | str) -> None:
        if isinstance(outcome, DeclaredKey):
            self._declared[uid] = outcome
            return
        self._declared.pop(uid, None)
        if outcome == "REVOKED":
            self._revoked[uid] = self._revoked.get(uid, frozenset()) | {new.key_hash}
        else:
            self._taken[uid] = new.key_hash
