"""The gateway's ends to the control plane.

- Scheduler: one Link that comes back by itself; its hello tells again everything that counts.
- Predictor: one unary call at a time, carrying whatever gathered while the last was in flight.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
import grpc.aio

from weft.telemetry.logs import kv
from weft.wire.channels import Link, channel
from weft.wire.tls import Tls
from weft.wire.v1 import predictor_pb2, predictor_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

MAX_PREDICT_ITEMS = 1024  # of one call (the contract's bound)
log = logging.getLogger(__name__)

ToScheduler = scheduler_pb2.GatewayToScheduler
FromScheduler = scheduler_pb2.SchedulerToGateway


class SchedulerClient:
    """The stream to the scheduler. `hello()` tells what counts on each new connection, `on_change` of `up`."""

    def __init__(
        self,
        address: str,
        *,
        hello: Callable[[], Iterable[ToScheduler]],
        on_message: Callable[[FromScheduler], None],
        on_change: Callable[[], None],
        tls: Tls | None = None,
    ) -> None:
        self._channel = channel(address, tls, "scheduler")
        stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._link: Link[ToScheduler, FromScheduler] = Link(
            "scheduler",
            stub.Gateway,
            hello=hello,
            on_message=on_message,
            on_up=on_change,
            on_down=lambda _reason: on_change(),
        )

    @property
    def up(self) -> bool:
        return self._link.up

    def send(self, message: ToScheduler) -> None:
        """Send now, or not at all: without a connection the next hello tells it."""
        self._link.send(message)

    async def run(self) -> None:
        try:
            await self._link.run()
        finally:
            await self._channel.close(None)

    def close(self) -> None:
        self._link.close()


@dataclass(frozen=True, slots=True)
class Predicted:
    """How long the answer will be, in tokens; 0 is no prediction."""

    p50_tokens: int = 0
    p90_tokens: int = 0
    model_version: str = ""


class PredictorClient:
    """Predictions in batches. `predict` never raises: without an answer in time there is none (None)."""

    def __init__(self, address: str, deadline_s: float, tls: Tls | None = None) -> None:
        self._channel = channel(address, tls, "predictor")
        self._stub = predictor_pb2_grpc.PredictorStub(self._channel)
        self._deadline_s = deadline_s
        self._waiting: list[tuple[predictor_pb2.PredictItem, asyncio.Future[Predicted]]] = []
        self._task: asyncio.Task[None] | None = None
        self._refusal: grpc.StatusCode | None = None

    async def predict(self, item: predictor_pb2.PredictItem) -> Predicted | None:
        """The prediction for one request, within the deadline."""
        future: asyncio.Future[Predicted] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._pump(), name="predict")
        try:
            return await asyncio.wait_for(future, self._deadline_s)
        except (TimeoutError, grpc.aio.AioRpcError, ValueError) as error:
            log.debug("no prediction", extra=kv(request_id=item.request_id, error=repr(error)))
            return None

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
        await self._channel.close(None)

    async def _pump(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_PREDICT_ITEMS], self._waiting[MAX_PREDICT_ITEMS:]
            batch = [(item, future) for item, future in batch if not future.done()]
            if batch:
                await self._call(batch)

    async def _call(self, batch: list[tuple[predictor_pb2.PredictItem, asyncio.Future[Predicted]]]) -> None:
        request = predictor_pb2.PredictRequest(items=[item for item, _ in batch])
        try:
            response = await self._stub.Predict(request, timeout=self._deadline_s)
            predicted = _predicted(request, response)
            self._refusal = None
        except (grpc.aio.AioRpcError, ValueError) as error:
            self._tell(error)
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), one in zip(batch, predicted, strict=True):
            if not future.done():
                future.set_result(one)

    def _tell(self, error: Exception) -> None:
        """A predictor that refuses us is told, once: unlike one that is away it does not come back by itself."""
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED) and code != self._refusal:
            self._refusal = code
            log.warning("the predictor refuses", extra=kv(error=error))


def _predicted(request: predictor_pb2.PredictRequest, response: predictor_pb2.PredictResponse) -> list[Predicted]:
    """One answer per item, in order. Raises ValueError when the predictor mixes them up."""
    asked = [item.request_id for item in request.items]
    if asked != [item.request_id for item in response.items]:
        raise ValueError("the predictor's answers are not those that were asked for")
    return [Predicted(item.p50_tokens, item.p90_tokens, response.model_version) for item in response.items]
