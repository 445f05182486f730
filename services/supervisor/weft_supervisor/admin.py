"""The Admin service: keys and runners, for the command."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.routes import KeyRoute, KeyScope
from weft.domain.runner import ReportedRunner
from weft.store import keys
from weft.store.errors import StoreError
from weft.telemetry.logs import kv
from weft.wire.codec.cluster import fill_reported
from weft.wire.codec.scheduling import KEY_SCOPE, KEY_SCOPES
from weft.wire.codec.values import MAX_MODEL
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminServicer
from weft_supervisor.server import SupervisorServer

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)
MAX_LISTED_BYTES = 16 << 20  # of runners in an answer; a gRPC message takes 64 MiB
MAX_MODELS = 64  # of one key
LAST_EXPIRY = 1 << 53  # of Unix milliseconds: what JSON readers hold exactly
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a Kubernetes namespace: an RFC 1123 label


class AdminServer(AdminServicer):
    """Answers from the store and from the core; the scheduler is sent a changed key before the answer goes out."""

    def __init__(self, engine: AsyncEngine, supervisor: SupervisorServer) -> None:
        self._engine, self._supervisor = engine, supervisor
        self._sending = asyncio.Lock()  # a list that was read first must not be sent last
        self._sent: tuple[int, int] | None = None

    async def CreateKey(  # noqa: N802 (the contract's name)
        self, request: pb.CreateKeyRequest, context: "Context"
    ) -> pb.CreateKeyResponse:
        try:
            grant = _grant(request, _now())
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        async with _available(context):
            new = await keys.create(self._engine, grant, request.note, now_unix_ms=_now())
            await self.send_keys()
        return pb.CreateKeyResponse(key=new.key, key_id=new.key_id)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: "Context") -> pb.RevokeKeyResponse:  # noqa: N802
        async with _available(context):
            existed = await keys.revoke(self._engine, request.key_id, now_unix_ms=_now())
            await self.send_keys()
        return pb.RevokeKeyResponse(existed=existed)

    async def ListKeys(  # noqa: N802
        self,
        request: pb.ListKeysRequest,  # noqa: ARG002
        context: "Context",
    ) -> pb.ListKeysResponse:
        async with _available(context):
            known = await keys.all_keys(self._engine)
        response = pb.ListKeysResponse()
        for key in known:
            response.keys.add(
                key_id=key.key_id,
                namespace=key.grant.namespace,
                note=key.note,
                created_unix_s=key.created_unix_ms // 1000,
                revoked=key.revoked_unix_ms is not None,
                scope=KEY_SCOPE[key.grant.scope],
                models=key.grant.models,
                expires_unix_ms=key.grant.expires_unix_ms,
            )
        return response

    async def ListRunners(  # noqa: N802
        self,
        request: pb.ListRunnersRequest,  # noqa: ARG002
        context: "Context",  # noqa: ARG002
    ) -> pb.ListRunnersResponse:
        """Runners whose full reports fit in a message, by id."""
        core, size = self._supervisor.core, 0
        grown, preempts, doublings, _ = core.counters()
        response = pb.ListRunnersResponse(grows=grown, preempts=preempts, doublings=doublings)
        for book in core.live():
            fill_reported(ReportedRunner(book.spec.runner, book.full(), book.spec), response.runners.add())
            if (size := size + response.runners[-1].ByteSize()) > MAX_LISTED_BYTES:
                del response.runners[-1]
                log.warning("runners do not fit in a list", extra=kv(listed=len(response.runners)))
                break
        return response

    async def send_keys(self) -> None:
        """Send the scheduler all keys in force."""
        async with self._sending:
            mark = await keys.mark(self._engine)  # first: what changes meanwhile is sent again
            in_force = [key for key in await keys.all_keys(self._engine) if key.in_force(_now())]
            self._supervisor.set_keys(tuple(_route(key) for key in in_force))
            self._sent = mark

    async def follow_keys(self, every_s: float) -> None:
        """Send the scheduler what other supervisors change, until cancelled. A store out of reach is asked again."""
        reached = True
        while True:
            await asyncio.sleep(every_s)
            try:
                if await keys.mark(self._engine) != self._sent:
                    await self.send_keys()
                reached = True
            except (StoreError, SQLAlchemyError) as error:
                if reached:
                    log.warning("keys of other supervisors are not known now", extra=kv(error=error))
                reached = False


def _grant(request: pb.CreateKeyRequest, now_unix_ms: int) -> keys.Grant:
    """Raises ValueError with a sentence for who asks."""
    scope = KEY_SCOPES.get(request.scope)
    if scope is None:
        raise ValueError(f"scope {request.scope} is not known to this supervisor")
    platform = scope is KeyScope.PLATFORM
    if platform and (request.namespace or request.models):
        raise ValueError("a platform key has neither a namespace nor models")
    if not platform and not NAMESPACE.fullmatch(request.namespace):
        raise ValueError(f"namespace {request.namespace!r} is not a DNS label")
    models = tuple(request.models)
    if len(models) > MAX_MODELS or not all(0 < len(model) <= MAX_MODEL for model in models):
        raise ValueError(f"a key has at most {MAX_MODELS} models, each of 1 to {MAX_MODEL} characters")
    if request.expires_unix_ms and not now_unix_ms < request.expires_unix_ms < LAST_EXPIRY:
        raise ValueError("a key expires in the future, or never")
    return keys.Grant(request.namespace, scope, models, request.expires_unix_ms)


def _route(key: keys.ApiKey) -> KeyRoute:
    grant = key.grant
    return KeyRoute(key.key_hash, grant.namespace, key.key_id, grant.scope, grant.models, grant.expires_unix_ms)


@asynccontextmanager
async def _available(context: "Context") -> AsyncGenerator[None, None]:
    """A store out of reach answers UNAVAILABLE with its reason."""
    try:
        yield
    except (StoreError, SQLAlchemyError) as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"store: {error}")


def _now() -> int:
    return time.time_ns() // 1_000_000
