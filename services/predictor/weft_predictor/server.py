"""The gRPC shell: Predict and Observe.

One thread, the inference thread, owns the model: predictions, outcomes and copies queue for that thread, while the
event loop goes on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from weft.wire.channels import Outbox, both_ways
from weft.wire.errors import PeerError, peer_errors
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer
from weft_predictor import metrics, wire
from weft_predictor.core.length_model import LengthModel

T = TypeVar("T")
MAX_ITEMS = 1_024
MAX_CALLS = 256  # Predict calls that wait or run; a gateway has one at a time


class PredictorServer(PredictorServicer):
    """Answers from one model and teaches it. One event loop, and the inference thread."""

    def __init__(self, model: LengthModel, *, max_context_tokens: int, scale: float = 1.0) -> None:
        self.model = model
        self._max_context_tokens, self._scale = max_context_tokens, scale
        self._streams: set[Outbox[pb.ObserveAck]] = set()
        self._inference = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._calls = 0
        self.learned_some = asyncio.Event()

    @property
    def version(self) -> str:
        """The model's version, and the scale where there is one."""
        return self.model.version + wire.scale_suffix(self._scale)

    async def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` in the inference thread, after what waits there already."""
        return await asyncio.get_running_loop().run_in_executor(self._inference, work)

    async def Predict(  # noqa: N802 (the contract's name)
        self, request: pb.PredictRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.PredictResponse:
        if len(request.items) > MAX_ITEMS:
            text = f"{len(request.items)} items in one call, at most {MAX_ITEMS}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        if self._calls >= MAX_CALLS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_CALLS} calls wait already")
        self._calls += 1
        try:
            return await self.in_turn(partial(self._predict, request))
        finally:
            self._calls -= 1

    async def Observe(  # noqa: N802 (the contract's name)
        self, request_iterator: AsyncIterator[pb.ObserveRequest], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.ObserveAck]:
        outbox: Outbox[pb.ObserveAck] = Outbox()

        def acknowledge(ack: pb.ObserveAck) -> None:
            outbox.put(ack)

        self._streams.add(outbox)
        try:
            async with peer_errors("supervisor", context):
                async for ack in both_ways(self._learned(request_iterator), context, outbox, acknowledge):
                    yield ack
        finally:
            self._streams.discard(outbox)

    def close_streams(self) -> None:
        """End every Observe stream, so that a drain need not wait for its peers."""
        for outbox in self._streams:
            outbox.close()

    def close(self) -> None:
        """After the last call: the inference thread ends after what waits there."""
        self._inference.shutdown()

    async def _learned(self, requests: AsyncIterator[pb.ObserveRequest]) -> AsyncIterator[pb.ObserveAck]:
        """The acknowledgement of each message, once it is learned; the next message is read after that."""
        async for message in requests:
            if len(message.outcomes) > wire.MAX_OUTCOMES:
                raise PeerError(f"{len(message.outcomes)} outcomes in one message, at most {wire.MAX_OUTCOMES}")
            await self.in_turn(partial(self._observe, message))
            self.learned_some.set()
            yield pb.ObserveAck(request_ids=[outcome.request_id for outcome in message.outcomes])

    # ---- the inference thread

    def _predict(self, request: pb.PredictRequest) -> pb.PredictResponse:
        with metrics.PREDICT_SECONDS.time():
            predicted = self.model.predict_batch(
                [wire.query(item) for item in request.items],
                max_context_tokens=self._max_context_tokens,
                scale=self._scale,
            )
            items = [wire.prediction(item.request_id, p) for item, p in zip(request.items, predicted, strict=True)]
        metrics.PREDICTIONS.inc(len(items))
        return pb.PredictResponse(items=items, model_version=self.version)

    def _observe(self, message: pb.ObserveRequest) -> None:
        for outcome in [wire.observed(outcome, self._scale) for outcome in message.outcomes]:
            metrics.OUTCOMES.labels(self.model.observe(outcome).lesson).inc()
        if self.model.coverage is not None:
            metrics.COVERAGE.set(self.model.coverage)
        metrics.ADAPTERS.set(self.model.adapters)
