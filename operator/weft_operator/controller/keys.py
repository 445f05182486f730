"""APIKeys in the loop: each is reconciled periodically, step by step, as `core/api_keys.py` plans it.

Secrets are read by name and never listed or watched. Only a reconcile notices a changed or deleted Secret: after
`POLL_S`, or later if there are many keys. An edited APIKey is reconciled at once. The supervisor's list is read at the
start and every `LIST_S`; in between, this process knows its own declarations. Plaintext keys are drawn here, go into a
Secret, and are neither kept nor logged.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Protocol

from weft.telemetry.logs import kv
from weft_operator.controller.clock import Clock
from weft_operator.controller.interfaces import Backend, ReconcileMetrics
from weft_operator.controller.key_registry import KeyRegistry
from weft_operator.controller.loop import Loop
from weft_operator.core.actions import SetStatus
from weft_operator.core.api_keys import (
    NOT_READ,
    CreateSecret,
    Declare,
    Key,
    KeyView,
    Secret,
    Step,
    SupervisorKey,
    Withdraw,
    key_events_for,
    next_step,
    orphans,
    parse_key,
)
from weft_operator.core.resources import Malformed, Object, Ref
from weft_operator.errors import ApiFailed, OperatorError

log = logging.getLogger(__name__)

KIND = "APIKey"
POLL_S, RECONCILES_PER_S = 5.0, 20.0
LIST_S = 30.0
AGAIN_S = 2.0  # while the supervisor does not answer
MAX_STEPS = 12  # per reconcile; five lead from nothing to Ready


class SecretReader(Protocol):
    """Secrets of the served namespaces, read by reference."""

    async def read(self, key: Key) -> Secret: ...

    async def create(self, key: Key, text: str) -> None:
        """Make a Secret. Raises StaleWrite if it exists, ApiFailed if it is refused."""
        ...


class KeyController(Loop):
    """The controller of APIKeys. Feed it with `on_object` (complete before `run()`). It belongs to one event loop."""

    def __init__(
        self,
        backend: Backend,
        secret_store: SecretReader,
        registry: KeyRegistry,
        *,
        namespaces: Collection[str],
        clock: Clock | None = None,
        metrics: ReconcileMetrics | None = None,
        draw: Callable[[], str] = lambda: f"weft-key-{secrets.token_urlsafe(32)}",
    ) -> None:
        super().__init__(backend, clock, metrics)
        self._secrets, self._registry, self._draw = secret_store, registry, draw
        self._namespaces = frozenset(namespaces)
        self._keys: dict[Ref, Key | Malformed] = {}
        self._has_list = False
        self._unsure: set[str] = set()  # owners with a failed call: the supervisor's state is unknown
        self._called: set[str] = set()  # owners with a call while the list was on its way
        self._declared: dict[str, list[SupervisorKey]] = {}  # by owner: in force, or revoked by a person
        self._refused_hash: dict[str, str] = {}  # the refused hash, by owner
        self._refused: dict[Ref, str] = {}  # why its Secret was refused at this reconcile

    def on_object(self, obj: Object, deleted: bool) -> None:
        """Take in a new, changed or deleted object of the cluster; only APIKeys are of interest."""
        if obj["kind"] != KIND:
            return
        key = parse_key(obj)
        ref = key.meta.ref
        if deleted:
            self._keys.pop(ref, None)
            self._refused_hash.pop(key.meta.uid, None)
            self._forget(ref)
        else:
            self._keys[ref] = key
            if isinstance(key, Malformed):  # the declared key stays until its spec can be read
                log.warning("spec cannot be read", extra=kv(kind=KIND, object=str(ref), error=key.message))
        self._queue.add([ref])

    async def run(self) -> None:
        """Reconcile APIKeys until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._work())

    async def _follow(self) -> None:
        while True:
            try:
                await self.compare()
            except OperatorError as error:
                log.warning("the supervisor's keys are not known", extra=kv(error=str(error)))
            await asyncio.sleep(LIST_S if self._has_list and not self._unsure else AGAIN_S)

    async def compare(self) -> None:
        """List the declared keys of the supervisor, and withdraw keys without an object.

        The list may be older than a call made while it was on its way. The owners of these calls keep their known keys.
        Raises SupervisorUnavailable.
        """
        unsure, self._called = set(self._unsure), set()
        entry = await self._registry.declared()
        called = self._called
        self._unsure -= unsure - called
        listed: dict[str, list[SupervisorKey]] = {owner: self._declared.get(owner, []) for owner in called}
        for key in entry:
            if (owner := key.declaration.owner) not in called:
                listed.setdefault(owner, []).append(key)
        self._declared, self._has_list = listed, True
        self._queue.add(list(self._keys))
        for owner in orphans(entry, {key.meta.uid for key in self._keys.values()}):
            await self._registry.withdraw(owner)
            self._declared.pop(owner, None)
            log.warning("a key of no APIKey is revoked", extra=kv(owner=owner))

    async def reconcile(self, ref: Ref) -> float | None:
        self._refused.pop(ref, None)  # it is tried again each time
        for _ in range(MAX_STEPS):
            key = self._keys.get(ref)
            if not isinstance(key, Key):
                return None
            step = next_step(await self._view(key), self._clock())
            if step is None:
                break
            await self._carry_out(step, key)
        return self._clock() + max(POLL_S, len(self._keys) / RECONCILES_PER_S)

    async def _view(self, key: Key) -> KeyView:
        meta, uid = key.meta, key.meta.uid
        served = meta.ref.namespace in self._namespaces
        declared = self._declared.get(uid, [])
        return KeyView(
            key=key,
            served=served,
            secret=await self._secrets.read(key) if served and not meta.deleting else NOT_READ,
            is_known=self._has_list and uid not in self._unsure,
            declared=next((entry for entry in declared if not entry.revoked), None),
            revoked=frozenset(entry.declaration.key_hash for entry in declared if entry.revoked),
            refused_hash=self._refused_hash.get(uid, ""),
            refused=self._refused.get(meta.ref, ""),
        )

    async def _carry_out(self, step: Step, key: Key) -> None:
        ref, uid = key.meta.ref, key.meta.uid
        match step:
            case CreateSecret():
                try:
                    await self._secrets.create(key, self._draw())
                except ApiFailed as error:
                    self._refused[ref] = error.message or f"the API server answers {error.status}"
            case Declare(declaration=new):
                with self._calling(uid):
                    there = await self._registry.declare(new)
                self._replace(uid, there)
                if there is None:
                    self._refused_hash[uid] = new.key_hash
            case Withdraw():
                with self._calling(uid):
                    await self._registry.withdraw(uid)
                self._replace(uid, None)
            case SetStatus():
                for action in (step, *key_events_for(key, step.status)):
                    await self._order(ref, action)
            case _:
                await self._order(ref, step)

    @contextmanager
    def _calling(self, owner: str) -> Generator[None]:
        """Forget the owner's key until the call has succeeded."""
        self._unsure.add(owner)
        self._called.add(owner)
        yield
        self._called.add(owner)
        self._unsure.discard(owner)

    def _replace(self, owner: str, key: SupervisorKey | None) -> None:
        """Record the owner's key in force, if any. Keys revoked by a person stay recorded."""
        revoked = [entry for entry in self._declared.get(owner, []) if entry.revoked]
        self._declared[owner] = [*revoked, key] if key else revoked
