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

from weft.store import keys
from weft.store.errors import StoreError
from weft.telemetry.logs import kv
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminServicer
from weft_supervisor import wire
from weft_supervisor.server import SupervisorServer

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a Kubernetes namespace: an RFC 1123 label


class AdminServer(AdminServicer):
    """Answers from the store and from the core; a changed key is told to the scheduler before the answer goes out."""

    def __init__(self, engine: AsyncEngine, supervisor: SupervisorServer) -> None:
        self._engine, self._supervisor = engine, supervisor
        self._telling = asyncio.Lock()  # a list that was read first must not be told last
        self._told: tuple[int, int] | None = None

    async def CreateKey(  # noqa: N802 (the contract's name)
        self, request: pb.CreateKeyRequest, context: "Context"
    ) -> pb.CreateKeyResponse:
        if not NAMESPACE.fullmatch(request.namespace):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"namespace {request.namespace!r} is not a DNS label")
        async with _available(context):
            new = await keys.create(self._engine, request.namespace, request.note, now_unix_ms=_now())
            await self.tell_keys()
        return pb.CreateKeyResponse(key=new.key, key_id=new.key_id)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: "Context") -> pb.RevokeKeyResponse:  # noqa: N802
        async with _available(context):
            existed = await keys.revoke(self._engine, request.key_id, now_unix_ms=_now())
            await self.tell_keys()
        return pb.RevokeKeyResponse(existed=existed)

    async def ListKeys(  # noqa: N802
        self,
        request: pb.ListKeysRequest,  # noqa: ARG002
        context: "Context",
    ) -> pb.ListKeysResponse:
        async with _available(context):
            known = await keys.all_keys(self._engine)
        return pb.ListKeysResponse(keys=map(wire.key_info, known))

    async def ListRunners(  # noqa: N802
        self,
        request: pb.ListRunnersRequest,  # noqa: ARG002
        context: "Context",  # noqa: ARG002
    ) -> pb.ListRunnersResponse:
        core = self._supervisor.core
        counters = core.counters()
        return pb.ListRunnersResponse(
            runners=[wire.state(runner.report) for runner in core.live() if runner.report],
            grows=counters.grows,
            preempts=counters.preempts,
            doublings=counters.doublings,
        )

    async def tell_keys(self) -> None:
        """Tell the scheduler all keys in force."""
        async with self._telling:
            mark = await keys.mark(self._engine)  # first: what changes meanwhile is told again
            in_force = [key for key in await keys.all_keys(self._engine) if key.revoked_unix_ms is None]
            self._supervisor.set_keys(map(wire.key_route, in_force))
            self._told = mark

    async def follow_keys(self, every_s: float) -> None:
        """Tell the scheduler what other supervisors change, until cancelled. A store out of reach is asked again."""
        reached = True
        while True:
            await asyncio.sleep(every_s)
            try:
                if await keys.mark(self._engine) != self._told:
                    await self.tell_keys()
                reached = True
            except (StoreError, SQLAlchemyError) as error:
                if reached:
                    log.warning("keys of other supervisors are not known now", extra=kv(error=error))
                reached = False


@asynccontextmanager
async def _available(context: "Context") -> AsyncGenerator[None, None]:
    """A store out of reach answers UNAVAILABLE with its reason."""
    try:
        yield
    except (StoreError, SQLAlchemyError) as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"store: {error}")


def _now() -> int:
    return time.time_ns() // 1_000_000
