"""One stream to one incarnation of a runner. Whether it is opened again is the scheduler's decision."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from weft.domain.machine import Closed, Connected, Received
from weft.domain.request import Draining, Freeze, SessionReady, Start, Stop
from weft.telemetry.logs import kv
from weft.wire.codec.session import GATEWAY_TO_RUNNER, RUNNER_TO_GATEWAY
from weft.wire.errors import PeerError, report_peer_error
from weft.wire.streams import CALLED, TAKES_FOLLOWING, SendQueue, accepted_by, channel, unjoined
from weft.wire.tls import Tls
from weft.wire.v1 import runner_pb2, runner_pb2_grpc
from weft_gateway.core.events import OpenSession, SessionAlive
from weft_gateway.core.stream import runner_peer

log = logging.getLogger(__name__)
CHECK_S = 1.0  # for the answer of a runner whose lease has run out
Call = grpc.aio.StreamStreamCall[runner_pb2.GatewayToRunner, runner_pb2.RunnerToGateway]


class RunnerSession:
    """Feeds Connected when the runner has answered the hello, then its messages; nothing once it is closed.

    `on_end` gets why the stream has ended, unless `close` ended it.
    """

    def __init__(
        self,
        opened: OpenSession,
        feed: Callable[[Connected | Received | SessionAlive], None],
        on_end: Callable[[Closed], None],
        tls: Tls | None,
    ) -> None:
        self.peer, self._feed, self._on_end = opened.peer, feed, on_end
        self._address = opened.address
        self._connect = partial(channel, opened.address, tls, "runner", namespace=opened.pool.partition("/")[0])
        self._outbox: SendQueue[runner_pb2.GatewayToRunner] = SendQueue()
        self._outbox.put(GATEWAY_TO_RUNNER.encode(opened.hello))
        self._ready = self._closed = False
        self._connection: grpc.aio.Channel | None = None
        self._check: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(), name=f"session {opened.peer.name}")

    def send(self, message: Start | Stop | Freeze) -> None:
        """Queue a message, in order. An overflow ends the session: the runner does not read."""
        if not self._outbox.put(GATEWAY_TO_RUNNER.encode(message)) and self._outbox.overflowed:
            self._task.cancel("the runner does not read fast enough")

    def check(self) -> None:
        """Ask the runner whether it is there: SessionAlive, or the session's end, follows."""
        self._check = asyncio.create_task(self._ask(), name=f"check {self.peer.name}")

    def close(self) -> None:
        """End the stream: the runner cancels what it held. Harmless when it has ended."""
        self._closed = True
        self._outbox.close()
        self._task.cancel("closed")

    async def closed(self) -> None:
        await asyncio.wait([self._task])

    async def _ask(self) -> None:
        stub: Any = HealthStub(self._connection)  # (its methods are not in the stubs)
        try:
            await stub.Check(HealthCheckRequest(), timeout=CHECK_S)
        except grpc.aio.AioRpcError as error:
            self._task.cancel(f"its lease ran out, and it does not answer: {error.code().name}")
        else:
            if not self._closed:
                self._feed(SessionAlive(self.peer))

    async def _run(self) -> None:
        detail = "closed by the runner"
        try:
            async with self._connect() as connection:
                self._connection = connection
                call: Call = runner_pb2_grpc.RunnerStub(connection).Session(aiter(self._outbox), metadata=(CALLED,))
                try:
                    self._outbox.joins = await accepted_by(call) == TAKES_FOLLOWING
                    async for message in call:
                        for part in unjoined(message):
                            self._receive(part)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            detail = f"{error.code().name}: {error.details()}"
        except PeerError as error:
            report_peer_error("runner", error, runner=self.peer.name)
            detail = f"it broke the contract: {error}"
        except asyncio.CancelledError as error:
            detail = str(error)
        except Exception as error:
            log.exception("session failed", extra=kv(runner=self.peer.name))
            detail = repr(error)
        finally:
            self._outbox.close()
            if not self._closed:
                self._on_end(Closed(self.peer, detail))

    def _receive(self, envelope: runner_pb2.RunnerToGateway) -> None:
        """Raises PeerError."""
        if self._closed:  # while it read what had come already
            return
        match RUNNER_TO_GATEWAY.decode(envelope):
            case SessionReady(runner):
                if runner_peer(runner) != self.peer:
                    self._task.cancel(f"another runner answered: {runner.uuid} {runner.incarnation}")
                    return
                self._ready = True
                log.info("session up", extra=kv(runner=self.peer.name, address=self._address))
                self._feed(Connected(self.peer))
            case _ if not self._ready:
                raise PeerError("a message before SessionReady")
            case Draining():
                log.info("runner drains", extra=kv(runner=self.peer.name))
            case message:
                self._feed(Received(self.peer, message))
