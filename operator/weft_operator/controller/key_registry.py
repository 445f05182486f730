"""The keys of this cluster's APIKeys at the supervisor: declared, withdrawn, listed.

Only the leader makes calls. Each call ends before another replica may lead.
"""

from collections.abc import Callable
from typing import Any

import grpc.aio

from weft.domain.limits import LimitRule
from weft.domain.routes import KeyScope
from weft.domain.text import sanitize
from weft.wire.codec.scheduling import KEY_SCOPE, KEY_SCOPES, LIMIT_RULE
from weft.wire.streams import channel
from weft.wire.tls import Tls
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminStub
from weft_operator.core.api_keys import KeyDeclaration, SupervisorKey
from weft_operator.errors import SupervisorUnavailable

SCOPES = {"Inference": KeyScope.INFERENCE, "ReadOnly": KeyScope.READ_ONLY, "Metrics": KeyScope.METRICS}
NAMES = {scope: name for name, scope in SCOPES.items()}


class KeyRegistry:
    """A channel to the supervisor. `lead()` raises if this process does not lead."""

    def __init__(self, address: str, tls: Tls | None, *, lead: Callable[[], None], call_s: float) -> None:
        self._channel = channel(address, tls, "supervisor")
        self._admin, self._lead, self._call_s = AdminStub(self._channel), lead, call_s

    async def aclose(self) -> None:
        await self._channel.close(None)

    async def declare(self, new: KeyDeclaration) -> SupervisorKey | None:
        """Declare a key. Returns it, in force or revoked for good by a person; None: it is somebody else's.

        Raises SupervisorUnavailable.
        """
        m = pb.KeyDeclaration(
            owner=new.owner,
            namespace=new.namespace,
            note=new.note,
            key_hash=new.key_hash,
            scope=KEY_SCOPE[SCOPES[new.scope]],
            models=new.models,
            expires_unix_ms=new.expires_unix_ms,
        )
        LIMIT_RULE.fill(new.limits, m.limits)
        answer = await self._call(self._admin.DeclareKey, m)
        revoked = answer.outcome == pb.DeclareKeyResponse.REVOKED
        there = revoked or answer.outcome == pb.DeclareKeyResponse.DECLARED
        return SupervisorKey(answer.key_id, new, revoked) if there else None

    async def withdraw(self, owner: str) -> None:
        """Withdraw an owner's key. Raises SupervisorUnavailable."""
        await self._call(self._admin.WithdrawKey, pb.WithdrawKeyRequest(owner=owner))

    async def declared(self) -> list[SupervisorKey]:
        """List keys in force, and keys revoked by a person. Raises SupervisorUnavailable."""
        answer = await self._call(self._admin.ListDeclaredKeys, pb.ListDeclaredKeysRequest())
        return [_declared(m) for m in answer.keys]

    async def _call(self, method: Any, request: Any) -> Any:
        self._lead()
        try:
            return await method(request, timeout=self._call_s)
        except grpc.aio.AioRpcError as error:
            raise SupervisorUnavailable(sanitize(f"{error.code().name}: {error.details()}")) from error


def _declared(m: pb.DeclaredKey) -> SupervisorKey:
    declaration = m.declaration
    rule = LimitRule(
        "",
        requests_per_minute=declaration.limits.requests_per_minute,
        tokens_per_minute=declaration.limits.tokens_per_minute,
        concurrent=declaration.limits.concurrent,
        tokens_per_day=declaration.limits.tokens_per_day,
    )
    scope = NAMES.get(KEY_SCOPES[declaration.scope], "")
    return SupervisorKey(
        m.key_id,
        KeyDeclaration(
            owner=declaration.owner,
            namespace=declaration.namespace,
            note=declaration.note,
            key_hash=declaration.key_hash,
            scope=scope,
            models=tuple(declaration.models),
            expires_unix_ms=declaration.expires_unix_ms,
            limits=rule,
        ),
        revoked=m.revoked,
    )
