"""The gRPC shell: Predictions, Predict and Observe.

The inference thread owns the model. Predictions, outcomes and copies queue for it, while the event loop goes on.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from weft.domain.prediction import PredictItem
from weft.domain.request import Outcome
from weft.telemetry.tracing import Tracer
from weft.wire.codec.prediction import observed, predict_items, predict_response
from weft.wire.errors import PeerError, peer_errors
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer
from weft_predictor import metrics
from weft_predictor.core.length_model import LengthModel

T = TypeVar("T")
M = TypeVar("M", pb.PredictResponse, pb.ObserveAck)
MAX_CALLS = 256  # waiting and running requests for predictions; a gateway has a single request at a time


class TooManyCalls(PeerError):
    """The limit of requests waiting for the inference thread is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class PredictorServer(PredictorServicer):
    """The service that predicts with a model and teaches it. It has an event loop and the inference thread."""

    def __init__(self, model: LengthModel, tracer: Tracer | None = None) -> None:
        self.model, self._tracer = model, tracer
        self._streams: set[SendQueue[Any]] = set()
        self._inference = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._calls = 0
        self.learned_some = asyncio.Event()

    async def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` in the inference thread, after the work queued already."""
        return await asyncio.get_running_loop().run_in_executor(self._inference, work)

    async def Predict(  # noqa: N802 (the contract's name)
        self, request: pb.PredictRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.PredictResponse:
        async with peer_errors("gateway", context):
            return await self._predicted(request)

    async def Predictions(  # noqa: N802 (the contract's name)
        self, request_iterator: AsyncIterator[pb.PredictRequest], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.PredictResponse]:
        answers = (await self._predicted(request) async for request in request_iterator)
        async for response in self._stream("gateway", answers, context):
            yield response

    async def _predicted(self, request: pb.PredictRequest) -> pb.PredictResponse:
        """Answer a request. Raises PeerError."""
        if self._calls >= MAX_CALLS:
            raise TooManyCalls(f"{MAX_CALLS} calls wait already")
        items = predict_items(request)
        self._calls += 1
        began = time.monotonic()
        try:
            return await self.in_turn(partial(self._predict, items))
        finally:
            self._calls -= 1
            if self._tracer is not None:
                self._record(self._tracer, items, began)

    def _record(self, tracer: Tracer, items: list[PredictItem], began: float) -> None:
        """Record spans of the sampled items: a call's items are predicted together."""
        ended = time.monotonic()
        for item in items:
            if item.traceparent:
                about = {"weft.request_id": item.request_id, "weft.predictor_version": self.model.version}
                tracer.record("predict", item.traceparent, began, ended, about)

    async def Observe(  # noqa: N802 (the contract's name)
        self, request_iterator: AsyncIterator[pb.ObserveRequest], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.ObserveAck]:
        async for ack in self._stream("supervisor", self._learned(request_iterator), context):
            yield ack

    async def _stream(
        self, peer: str, answers: AsyncIterator[M], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[M]:
        """Yield the answers to a peer's messages. Each message is read after the answer to its predecessor."""
        outbox: SendQueue[M] = SendQueue()

        def take(answer: M) -> None:
            outbox.put(answer)

        self._streams.add(outbox)
        try:
            async with peer_errors(peer, context):
                async for answer in serve_stream(answers, context, outbox, take):
                    yield answer
        finally:
            self._streams.discard(outbox)

    def close_streams(self) -> None:
        """End every stream: a drain then does not wait for peers."""
        for outbox in self._streams:
            outbox.close()

    def close(self) -> None:
        """End the inference thread, after the last call and the queued work."""
        self._inference.shutdown()

    async def _learned(self, requests: AsyncIterator[pb.ObserveRequest]) -> AsyncIterator[pb.ObserveAck]:
        """Yield the acknowledgement of each message after learning it. The next message is read afterwards."""
        async for message in requests:
            outcomes = observed(message)
            await self.in_turn(partial(self._observe, outcomes))
            self.learned_some.set()
            yield pb.ObserveAck(request_ids=[outcome.request_id for outcome in outcomes])

    # ---- the inference thread

    def _predict(self, items: list[PredictItem]) -> pb.PredictResponse:
        with metrics.PREDICT_SECONDS.time():
            response = predict_response(self.model.predict_batch(items), self.model.version)
        metrics.PREDICTIONS.inc(len(items))
        return response

    def _observe(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            metrics.OUTCOMES.labels(self.model.observe(outcome).lesson).inc()
        if self.model.coverage is not None:
            metrics.COVERAGE.set(self.model.coverage)
        metrics.ADAPTERS.set(self.model.adapters)
