"""Predictions in batches: one request at a time, with everything that gathered while the last one was in flight.

They go over one stream, which costs gRPC half of what a call for each does; a predictor of a version before is called.
"""

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from weft.domain.machine import Received
from weft.domain.prediction import Prediction, PredictItem
from weft.telemetry.logs import kv
from weft.wire.codec.prediction import MAX_ITEMS, predict_request, predictions
from weft.wire.errors import PeerError
from weft.wire.streams import channel
from weft.wire.tls import Tls
from weft.wire.v1 import predictor_pb2, predictor_pb2_grpc
from weft_gateway.core.events import PREDICTOR

log = logging.getLogger(__name__)
Stream = grpc.aio.StreamStreamCall[predictor_pb2.PredictRequest, predictor_pb2.PredictResponse]


class PredictorClient:
    """Feeds each prediction to the machine: without tokens when the call fails, never when it is too late for one."""

    def __init__(
        self, address: str, deadline_s: float, feed: Callable[[Received], None], tls: Tls | None = None
    ) -> None:
        self._channel = channel(address, tls, "predictor", hurried=False)
        self._stub = predictor_pb2_grpc.PredictorStub(self._channel)
        self._deadline_s, self._feed = deadline_s, feed
        self._waiting: list[tuple[PredictItem, float]] = []  # with the loop's time of the deadline
        self._task: asyncio.Task[None] | None = None
        self._stream: Stream | None = None
        self._calls = False  # the predictor has no streams
        self._refusal: grpc.StatusCode | None = None

    def ask(self, item: PredictItem) -> None:
        late = 2 * self._deadline_s  # the machine postpones its deadline once at most
        self._waiting.append((item, asyncio.get_running_loop().time() + late))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="predict")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
        self._drop_stream()
        await self._channel.close(None)

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_ITEMS], self._waiting[MAX_ITEMS:]
            now = asyncio.get_running_loop().time()
            items = [item for item, deadline in batch if deadline > now]
            if items:
                for prediction in await self._call(items):
                    self._feed(Received(PREDICTOR, prediction))

    async def _call(self, items: list[PredictItem]) -> list[Prediction]:
        try:
            answers = predictions(items, await self._answered(items))
            self._refusal = None
            return answers
        except (grpc.aio.AioRpcError, PeerError, TimeoutError) as error:
            self._drop_stream()  # what it may still bring belongs to other items
            code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
            if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED) and code != self._refusal:
                self._refusal = code  # logged once: unlike a predictor that is away it does not end by itself
                log.warning("the predictor refuses this gateway", extra=kv(error=error))
            log.debug("no prediction", extra=kv(requests=len(items), error=repr(error)))
            return [Prediction(item.request_id) for item in items]

    async def _answered(self, items: list[PredictItem]) -> predictor_pb2.PredictResponse:
        """Raises AioRpcError, PeerError, TimeoutError."""
        request = predict_request(items)
        if self._calls:
            return await self._stub.Predict(request, timeout=self._deadline_s)
        if (stream := self._stream) is None or stream.done():  # the predictor ended it
            stream = self._stream = self._stub.Predictions()
        try:
            async with asyncio.timeout(self._deadline_s):
                await stream.write(request)
                response = await stream.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            self._calls = True
            return await self._answered(items)
        except asyncio.InvalidStateError as error:
            raise PeerError("the predictor ended its stream") from error
        if not isinstance(response, predictor_pb2.PredictResponse):  # the end of the stream
            raise PeerError("the predictor ended its stream")
        return response

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
