"""APIKeys: `next_step(view, now)` decides the next step for an APIKey, or nothing. Pure, level-based.

It looks at the object, at its Secret and at the supervisor's keys of the object's uid, never at past events. So a
process may end after any step, and a new process continues. The key itself is stored only in the Secret. Its hash is
declared to the supervisor and replaces an earlier hash. If the Secret has no valid key, the declared key is withdrawn
first. An object keeps a finalizer until its key is withdrawn, so a deleted object leaves no key behind. If somebody
removes the finalizer by hand, `orphans` lists the keys without an object, and they are withdrawn, too. While supervisor
or Secret are out of reach, nothing is decided.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from weft.api.fields import duration_s
from weft.api.meta import sanitize_message
from weft.domain.limits import LimitRule
from weft_operator.core.actions import AddFinalizer, RecordEvent, RemoveFinalizer, SetStatus
from weft_operator.core.children import MANAGED_BY, MANAGER
from weft_operator.core.resources import API_VERSION, UNREADABLE, Malformed, Meta, Object, parse_meta
from weft_operator.core.status import UndatedCondition, merged, timestamp

FINALIZER = "serving.weft.dev/revoke-key"
ENTRY = "key"  # of a new Secret
MIN_CHARS, MAX_CHARS = 32, 512  # of a key
TOKEN_DOTS = 2  # a gateway may take a text with this many dots for a token of an issuer
NAME_LABEL = "serving.weft.dev/apikey"
_KEY = re.compile(rf"[!-~]{{{MIN_CHARS},{MAX_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Key:
    """An APIKey. `expires_after_s` counts from the making of the Secret; `brought`: the Secret is somebody else's."""

    meta: Meta
    scope: str  # Inference, ReadOnly, Metrics
    models: tuple[str, ...]
    expires_at: float | None
    expires_after_s: float | None
    limits: LimitRule  # its numbers count
    secret: str
    entry: str
    brought: bool
    status: Object


@dataclass(frozen=True, slots=True)
class KeyDeclaration:
    """A key as it is declared to the supervisor."""

    owner: str  # uid of the APIKey
    namespace: str
    note: str
    key_hash: str
    scope: str
    models: tuple[str, ...]
    expires_unix_ms: int  # 0: never
    limits: LimitRule = field(default=LimitRule(""))


@dataclass(frozen=True, slots=True)
class SupervisorKey:
    """A key at the supervisor: in force, or revoked by a person for good."""

    key_id: str
    declaration: KeyDeclaration
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A Secret with a key. Only the hash of the key is known here."""

    key_hash: str
    created: float


@dataclass(frozen=True, slots=True)
class NoSecret:
    """No Secret has that name."""


@dataclass(frozen=True, slots=True)
class BadSecret:
    """The Secret has no key of this APIKey."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class UnreadSecret:
    """The Secret is not known: the API server did not show it."""

    reason: str
    message: str


NOT_READ = UnreadSecret("", "nobody has looked")
Secret = SecretKey | NoSecret | BadSecret | UnreadSecret


@dataclass(frozen=True, slots=True)
class KeyView:
    """The facts for the plan of a step. `is_known`: the supervisor has listed the declared keys."""

    key: Key
    served: bool  # APIKeys of its namespace are served
    secret: Secret
    is_known: bool
    declared: SupervisorKey | None = None  # in force
    revoked: frozenset[str] = frozenset()  # hashes of keys of this object revoked by a person
    refused_hash: str = ""  # the hash refused by the supervisor because it belongs to somebody else
    refused: str = ""  # why the API server refused the Secret


@dataclass(frozen=True, slots=True)
class CreateSecret:
    """Make a Secret with a fresh key."""

    key: Key


@dataclass(frozen=True, slots=True)
class Declare:
    """Declare this key to the supervisor, in place of the object's earlier key."""

    declaration: KeyDeclaration


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Withdraw this object's key at the supervisor."""

    owner: str


Step = AddFinalizer | RemoveFinalizer | CreateSecret | Declare | Withdraw | SetStatus


def next_step(view: KeyView, now: float) -> Step | None:
    """Decide the next step; None: everything is in order, or nothing can be done now."""
    key, meta = view.key, view.key.meta
    if meta.deleting or not view.served:
        return _let_go(view, now)
    if FINALIZER not in meta.finalizers:
        return AddFinalizer(meta.ref, meta.uid, meta.resource_version, FINALIZER)
    if isinstance(view.secret, UnreadSecret):
        return _status_step(view, view.secret.reason, view.secret.message, now)
    if not view.is_known:
        return None if _holds(key) else _status_step(view, "Registering", "the supervisor has not answered yet", now)
    declaration = _declaration(view, now)
    if isinstance(declaration, KeyDeclaration):
        if view.declared is not None and view.declared.declaration == declaration:
            return _status_step(view, "Registered", f"gateways take the key in Secret {key.secret}", now)
        return Declare(declaration)
    if view.declared is not None:
        return Withdraw(meta.uid)
    if isinstance(view.secret, NoSecret) and not key.brought and not view.refused:
        return CreateSecret(key)
    return _status_step(view, declaration.reason, declaration.message, now)


def orphans(declared: Iterable[SupervisorKey], uids: Collection[str]) -> list[str]:
    """Return the owners of keys in force without an object."""
    return sorted({key.declaration.owner for key in declared if not key.revoked} - set(uids))


def key_events_for(key: Key, status: Object) -> list[RecordEvent]:
    """Make the Events of a written status."""
    current, previous = _ready(status), _ready(key.status)
    if (current["reason"], status.get("keyID")) == (previous.get("reason"), key.status.get("keyID")):
        return []
    kind = "Normal" if current["status"] == "True" or current["reason"] == "Registering" else "Warning"
    return [RecordEvent(key.meta.ref, key.meta.uid, kind, current["reason"], current["message"])]


def _declaration(view: KeyView, now: float) -> KeyDeclaration | BadSecret:
    """Decide the key to declare, or the reason to declare none."""
    key, secret = view.key, view.secret
    if isinstance(secret, BadSecret):
        return secret
    if not isinstance(secret, SecretKey):
        if view.refused:
            return BadSecret("SecretRefused", view.refused)
        return BadSecret("SecretMissing", f"Secret {key.secret} does not exist in namespace {key.meta.ref.namespace}")
    if secret.key_hash in view.revoked:
        return BadSecret("KeyRevoked", "this key was revoked by hand, for good")
    if secret.key_hash == view.refused_hash:
        return BadSecret("KeyTaken", "this key is somebody else's")
    expires = expiry(key, secret)
    if expires is not None and expires <= now:
        return BadSecret("KeyExpired", f"the key has expired at {timestamp(expires)}")
    return KeyDeclaration(
        owner=key.meta.uid,
        namespace=key.meta.ref.namespace,
        note=f"APIKey {key.meta.ref}",
        key_hash=secret.key_hash,
        scope=key.scope,
        models=key.models,
        expires_unix_ms=round(expires * 1000) if expires is not None else 0,
        limits=key.limits,
    )


def expiry(key: Key, secret: SecretKey) -> float | None:
    """Return the time at which the key ends, in unix seconds; None: never."""
    return key.expires_at if key.expires_after_s is None else secret.created + key.expires_after_s


def _let_go(view: KeyView, now: float) -> Step | None:
    """Plan the end of a deleted or unserved object: the key first, then the finalizer."""
    meta = view.key.meta
    has_finalizer = FINALIZER in meta.finalizers
    if has_finalizer and not view.is_known:
        return None
    if view.declared is not None:
        return Withdraw(meta.uid)
    if has_finalizer:
        return RemoveFinalizer(meta.ref, meta.uid, meta.resource_version, FINALIZER)
    if meta.deleting:
        return None
    message = f"APIKeys of namespace {meta.ref.namespace} are not served"
    return _status_step(view, "NamespaceNotServed", message, now)


def _status_step(view: KeyView, reason: str, message: str, now: float) -> SetStatus | None:
    """Plan to write the status, if it differs."""
    key, meta, declared, ready = view.key, view.key.meta, view.declared, reason == "Registered"
    condition = UndatedCondition("Ready", "True" if ready else "False", reason, message)
    expires = expiry(key, view.secret) if isinstance(view.secret, SecretKey) else None
    key_id = declared.key_id if declared else None
    rotated = key.status.get("lastRotated") if key_id == key.status.get("keyID") else timestamp(now)
    status: dict[str, Any] = {
        "observedGeneration": meta.generation,
        "keyID": key_id,
        "secretName": key.secret if declared else None,
        "expiresAt": timestamp(expires) if expires is not None else None,
        "lastRotated": rotated if key_id else None,
        "conditions": merged(key.status.get("conditions", ()), [condition], meta.generation, now),
    }
    status = {name: value for name, value in status.items() if value is not None}
    return None if status == key.status else SetStatus(meta.ref, meta.uid, meta.resource_version, status)


def _holds(key: Key) -> bool:
    """Whether the stored status is of this spec, and reports an accepted key."""
    return _ready(key.status).get("status") == "True" and key.status.get("observedGeneration") == key.meta.generation


def _ready(status: Object) -> Mapping[str, Any]:
    return next((condition for condition in status.get("conditions", ()) if condition["type"] == "Ready"), {})


# ------------------------------------------------------------------------------------------- from and to objects


def parse_key(obj: Object) -> Key | Malformed:
    """Read an admitted APIKey."""
    meta, spec, status = parse_meta(obj), obj["spec"], obj.get("status") or {}
    try:
        reference, lifetime, at = spec.get("secretRef"), spec.get("expiresAfter"), spec.get("expiresAt")
        limits = spec.get("limits") or {}
        return Key(
            meta=meta,
            scope=spec.get("scope") or "Inference",
            models=tuple(spec.get("models") or ()),
            expires_at=datetime.fromisoformat(at).timestamp() if at else None,
            expires_after_s=float(duration_s(lifetime)) if lifetime else None,
            limits=LimitRule(
                "",
                requests_per_minute=limits.get("requestsPerMinute", 0),
                tokens_per_minute=limits.get("tokensPerMinute", 0),
                concurrent=limits.get("concurrent", 0),
                tokens_per_day=limits.get("tokensPerDay", 0),
            ),
            secret=reference["name"] if reference else spec.get("secretName") or meta.ref.name,
            entry=(reference.get("key") or ENTRY) if reference else ENTRY,
            brought=reference is not None,
            status=status,
        )
    except UNREADABLE as error:
        return Malformed(meta, sanitize_message(str(error) or repr(error)), status)


def seen_secret(key: Key, obj: Object | None) -> Secret:
    """Read an APIKey's Secret, as the API server gives it."""
    if obj is None or (obj["metadata"].get("deletionTimestamp") and not key.brought):
        return NoSecret()
    owners = {owner.get("uid") for owner in obj["metadata"].get("ownerReferences") or ()}
    if not key.brought and key.meta.uid not in owners:
        return BadSecret("SecretConflict", f"Secret {key.secret} is not of this APIKey")
    try:
        text = base64.b64decode((obj.get("data") or {})[key.entry], validate=True).decode("ascii").strip()
    except KeyError:
        return BadSecret("SecretInvalid", f"Secret {key.secret} has no entry {key.entry!r}")
    except (binascii.Error, UnicodeDecodeError):
        return BadSecret("SecretInvalid", f"the entry {key.entry!r} of Secret {key.secret} is not printable ASCII text")
    if not _KEY.fullmatch(text) or text.count(".") == TOKEN_DOTS:
        message = f"no key: {MIN_CHARS} to {MAX_CHARS} printable ASCII characters without spaces, and not two dots"
        return BadSecret("SecretInvalid", f"the entry {key.entry!r} of Secret {key.secret} is {message}")
    created = datetime.fromisoformat(obj["metadata"]["creationTimestamp"]).timestamp()
    return SecretKey(hashlib.sha256(text.encode()).hexdigest(), created)


def secret_manifest(key: Key, text: str) -> dict[str, Any]:
    """Make the Secret of a fresh key. It is never changed, and goes with its APIKey."""
    ref = key.meta.ref
    owner = {"apiVersion": API_VERSION, "kind": ref.kind, "name": ref.name, "uid": key.meta.uid}
    labels = {"app.kubernetes.io/part-of": "weft", MANAGED_BY: MANAGER}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": key.secret,
            "namespace": ref.namespace,
            "labels": {**labels, NAME_LABEL: ref.name},
            "ownerReferences": [{**owner, "controller": True}],
        },
        "type": "Opaque",
        "immutable": True,
        "data": {ENTRY: base64.b64encode(text.encode()).decode()},
    }
