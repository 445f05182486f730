"""API keys: made, revoked and listed at the supervisor; a key itself is shown once and stored nowhere."""

import time

from weft_cli.errors import CommandError
from weft_cli.output import age, note, say, table
from weft_cli.runners import TIMEOUT_S, Supervisor, ask


def create(supervisor: Supervisor, namespace: str, text: str) -> None:
    """Make a key. The key goes to standard output alone, so that a script can keep it."""
    from weft.wire.v1 import supervisor_pb2 as pb

    request = pb.CreateKeyRequest(namespace=namespace, note=text)
    made = ask(supervisor, lambda admin: admin.CreateKey(request, timeout=TIMEOUT_S))
    note(f"key {made.key_id} for namespace {namespace}; it is shown this once:")
    say(made.key)


def revoke(supervisor: Supervisor, key_id: str) -> None:
    from weft.wire.v1 import supervisor_pb2 as pb

    request = pb.RevokeKeyRequest(key_id=key_id)
    if not ask(supervisor, lambda admin: admin.RevokeKey(request, timeout=TIMEOUT_S)).existed:
        raise CommandError(f"there is no key {key_id}", "`weft key list` lists them")
    say(f"key/{key_id} revoked")


def list_keys(supervisor: Supervisor) -> None:
    from weft.wire.v1 import supervisor_pb2 as pb

    keys = ask(supervisor, lambda admin: admin.ListKeys(pb.ListKeysRequest(), timeout=TIMEOUT_S)).keys
    if not keys:
        note("No keys found. Make one with `weft key create --namespace NAME`.")
        return
    now = time.time()
    created = [time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(key.created_unix_s)) for key in keys]
    rows = [
        (key.key_id, key.namespace, "Revoked" if key.revoked else "Active", age(since, now), key.note)
        for key, since in zip(keys, created, strict=True)
    ]
    say("\n".join(table(("ID", "NAMESPACE", "STATE", "AGE", "NOTE"), rows)))
