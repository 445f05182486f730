"""The gRPC shell: Predict, Observe, and the model's file.

The model belongs to one thread, the inference thread: what predicts, learns or copies it waits there for its turn,
while the event loop goes on.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from weft.wire.channels import Outbox, both_ways
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer
from weft_predictor import metrics, wire
from weft_predictor.core.predictor import LengthPredictor

T = TypeVar("T")
MAX_ITEMS = 1_024
MAX_CALLS = 256  # Predict calls that wait or run; a gateway has one at a time
MAX_SEEN = 20_000  # request ids remembered: an outcome that is told again does not teach twice


class PredictorServer(PredictorServicer):
    """Answers from one model and teaches it. One event loop, and the inference thread."""

    def __init__(self, model: LengthPredictor, *, max_context_tokens: int, scale: float = 1.0) -> None:
        self.model = model
        self._max_context_tokens, self._scale = max_context_tokens, scale
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._streams: set[Outbox[pb.ObserveAck]] = set()
        self._inference = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._calls = 0
        self.learned_some = asyncio.Event()

    @property
    def version(self) -> str:
        """What produced an answer: the model, and the scale where there is one."""
        return self.model.version if self._scale == 1.0 else f"{self.model.version}x{self._scale:g}"

    async def in_turn(self, work: Callable[[], T]) -> T:
        """Something with the model, in its thread, after what waits there already."""
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
            async for ack in both_ways(self._learned(request_iterator), context, outbox, acknowledge):
                yield ack
        finally:
            self._streams.discard(outbox)

    def close_streams(self) -> None:
        """End every Observe stream, so that a drain need not wait for its peers."""
        for outbox in self._streams:
            outbox.close()

    def close(self) -> None:
        """Nobody comes any more: the inference thread ends after what waits there."""
        self._inference.shutdown()

    async def _learned(self, requests: AsyncIterator[pb.ObserveRequest]) -> AsyncIterator[pb.ObserveAck]:
        """The acknowledgement of each message, learned; the next one is read after it."""
        async for message in requests:
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
        for outcome in message.outcomes:
            metrics.OUTCOMES.labels(self._learn(wire.observed(outcome), outcome.request_id)).inc()
        if self.model.coverage is not None:
            metrics.COVERAGE.set(self.model.coverage)
        metrics.ADAPTERS.set(len(self.model.offsets))

    def _learn(self, observed: wire.Observed, request_id: str) -> str:
        if request_id in self._seen:
            return "duplicate"
        self._seen[request_id] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return "censored" if self.model.observe(observed).covered is None else "learned"
