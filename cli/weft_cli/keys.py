"""API keys: made, revoked and listed at the supervisor; a key itself is shown once and stored nowhere."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft_cli.errors import BadInput, CommandError
from weft_cli.output import age, dump, note, say, table
from weft_cli.runners import TIMEOUT_S, SupervisorClient, ask

if TYPE_CHECKING:
    from weft.wire.v1.supervisor_pb2 import KeyInfo


SCOPES = ("inference", "read-only", "metrics", "platform")  # in the order of the contract's KeyScope
UNITS = {"h": 3_600, "d": 86_400, "w": 7 * 86_400}


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """The purpose of a new key."""

    namespace: str
    note: str
    scope: str
    models: Sequence[str]
    expires: str | None  # as typed


def create(supervisor: SupervisorClient, new: CreatedKey, output: str) -> None:
    """Make a key. The key, or a Secret with it, goes to standard output alone, so that a script can keep it."""
    from weft.wire.v1 import supervisor_pb2 as pb

    if new.scope not in SCOPES:
        raise BadInput(f"there is no scope {new.scope!r}", f"there are: {', '.join(SCOPES)}")
    if output not in ("key", "secret"):
        raise BadInput(f"there is no output {output!r}", "there are: key, secret")
    request = pb.CreateKeyRequest(
        namespace=new.namespace,
        note=new.note,
        scope=pb.KeyScope.Name(SCOPES.index(new.scope)),
        models=new.models,
        expires_unix_ms=expiry_unix_ms(new.expires, time.time()) if new.expires else 0,
    )
    made = _made(supervisor, request)
    owner = f"namespace {new.namespace}" if new.namespace else "the platform"
    note(f"key {made.key_id} for {owner}; it is shown this once:")
    say(dump(_secret(new.namespace, made.key_id, made.key), "yaml") if output == "secret" else made.key)


def replace_keys(supervisor: SupervisorClient, namespaces: Sequence[str], note: str) -> dict[str, str]:
    """Make a new key for each namespace, and revoke earlier keys with this note. Raises CommandError."""
    from weft.wire.v1 import supervisor_pb2 as pb

    for key in ask(supervisor, lambda admin: admin.ListKeys(pb.ListKeysRequest(), timeout=TIMEOUT_S)).keys:
        if key.note == note and not key.revoked:
            request = pb.RevokeKeyRequest(key_id=key.key_id)
            ask(supervisor, lambda admin, request=request: admin.RevokeKey(request, timeout=TIMEOUT_S))
    return {name: _made(supervisor, pb.CreateKeyRequest(namespace=name, note=note)).key for name in namespaces}


def _made(supervisor: SupervisorClient, request: Any) -> Any:
    return ask(supervisor, lambda admin: admin.CreateKey(request, timeout=TIMEOUT_S))


def expiry_unix_ms(text: str, now: float) -> int:
    """Compute the end of a time from now on (12h, 30d, 4w). Raises BadInput."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not number.isascii() or not number.isdigit() or not 0 < int(number) < 100_000:
        raise BadInput(f"--expires {text!r} is no time", "12h, 30d or 4w")
    return round(1000 * (now + int(number) * UNITS[unit]))


def _secret(namespace: str, key_id: str, key: str) -> dict[str, Any]:
    """Make a Kubernetes Secret of the key, for the tenant's pods. Without a namespace: that of `kubectl`."""
    filters = {"namespace": namespace} if namespace else {}
    metadata = {"name": f"weft-key-{key_id}", **filters, "labels": {"app.kubernetes.io/part-of": "weft"}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": {"key": key}}


def revoke(supervisor: SupervisorClient, key_id: str) -> None:
    from weft.wire.v1 import supervisor_pb2 as pb

    request = pb.RevokeKeyRequest(key_id=key_id)
    if not ask(supervisor, lambda admin: admin.RevokeKey(request, timeout=TIMEOUT_S)).existed:
        raise CommandError(f"there is no key {key_id}", "`weft key list` lists them")
    say(f"key/{key_id} revoked")


def list_keys(supervisor: SupervisorClient) -> None:
    from weft.wire.v1 import supervisor_pb2 as pb

    keys = ask(supervisor, lambda admin: admin.ListKeys(pb.ListKeysRequest(), timeout=TIMEOUT_S)).keys
    if not keys:
        note("No keys found. Make one with `weft key create --namespace NAME`.")
        return
    now = time.time()
    rows = [
        (
            key.key_id,
            key.namespace or "*",
            _state(key, now),
            SCOPES[key.scope],
            ",".join(key.models) or "*",
            age(_iso(key.created_unix_s), now),
            _iso(key.expires_unix_ms // 1000) if key.expires_unix_ms else "never",
            key.note,
        )
        for key in keys
    ]
    say("\n".join(table(("ID", "NAMESPACE", "STATE", "SCOPE", "MODELS", "AGE", "EXPIRES", "NOTE"), rows)))


def _state(key: "KeyInfo", now: float) -> str:
    if key.revoked:
        return "Revoked"
    return "Expired" if key.expires_unix_ms and key.expires_unix_ms <= 1000 * now else "Active"


def _iso(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(unix_s))
