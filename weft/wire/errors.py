"""A peer that breaks its contract loses its stream, with a status that says why. The process and its others go on."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
import grpc.aio
from prometheus_client import Counter

from weft.telemetry.logs import kv

log = logging.getLogger(__name__)
MAX_REASON_CHARS = 500  # of a reason: it travels in the stream's trailers
PEER_ERRORS = Counter("weft_peer_errors", "Streams ended, and states dropped, for what a peer said", ["peer", "code"])


class PeerError(Exception):
    """A peer sent what its contract does not allow. Raised where messages are decoded, before they change anything."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INVALID_ARGUMENT


def report_peer_error(peer: str, error: PeerError, **fields: object) -> None:
    """Log and count what a peer (its kind) was refused for."""
    PEER_ERRORS.labels(peer, error.code.name).inc()
    reason = str(error)[:MAX_REASON_CHARS]
    log.warning("peer refused", extra=kv(peer=peer, code=error.code.name, reason=reason, **fields))


@asynccontextmanager
async def peer_errors(peer: str, context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncGenerator[None]:
    """Guard a server's end of a stream: a PeerError ends the call with its status."""
    address = context.peer()  # now: asking a call that is over crashes the interpreter (grpcio 1.85)
    try:
        yield
    except PeerError as error:
        report_peer_error(peer, error, address=address)
        await context.abort(error.code, str(error)[:MAX_REASON_CHARS])
