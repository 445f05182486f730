"""The gRPC shell: Predict and Observe.

One thread, the inference thread, owns the model: predictions, outcomes and copies queue for that thread, while the
event loop goes on.
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
from weft.wire.errors import peer_errors
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer
from weft_predictor import metrics
from weft_predictor.core.length_model import LengthModel

T = TypeVar("T")
MAX_CALLS = 256  # Predict calls that wait or run; a gateway has one at a time


class PredictorServer(PredictorServicer):
    """Answers from one model and teaches it. One event loop, and the inference thread."""

    def __init__(self, model: LengthModel, tracer: Tracer | None = None) -> None:
        self.model, self._tracer = model, tracer
        self._streams: set[SendQueue[pb.ObserveAck]] = set()
        self._inference = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._calls = 0
        self.learned_some = asyncio.Event()

    async def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` in the inference thread, after what waits there already."""
        return await asyncio.get_running_loop().run_in_executor(self._inference, work)

    async def Predict(  # noqa: N802 (the contract's name)
        self, request: pb.PredictRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.PredictResponse:
        if self._calls >= MAX_CALLS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_CALLS} calls wait already")
        async with peer_errors("gateway", context):
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
        """Record spans of the items that are sampled: a call's items are predicted together."""
        ended = time.monotonic()
        for item in items:
            if item.traceparent:
                about = {"weft.request_id": item.request_id, "weft.predictor_version": self.model.version}
                tracer.record("predict", item.traceparent, began, ended, about)

    async def Observe(  # noqa: N802 (the contract's name)
        self, request_iterator: AsyncIterator[pb.ObserveRequest], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.ObserveAck]:
        outbox: SendQueue[pb.ObserveAck] = SendQueue()

        def acknowledge(ack: pb.ObserveAck) -> None:
            outbox.put(ack)

        self._streams.add(outbox)
        try:
            async with peer_errors("supervisor", context):
                async for ack in serve_stream(self._learned(request_iterator), context, outbox, acknowledge):
                    yield ack
        finally:
            self._streams.discard(outbox)

    def close_streams(self) -> None:
        """End every Observe stream, so that a drain need not wait for its peers."""
        for outbox in self._streams:
            outbox.close()

    def close(self) -> None:
        """End the inference thread, after the last call and after what waits there."""
        self._inference.shutdown()

    async def _learned(self, requests: AsyncIterator[pb.ObserveRequest]) -> AsyncIterator[pb.ObserveAck]:
        """Yield the acknowledgement of each message, once it is learned; the next message is read after that."""
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
