"""The gRPC shell: Predict, Observe, and the model's file."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from weft.wire.channels import Outbox, both_ways
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer
from weft_predictor import metrics, wire
from weft_predictor.core.predictor import LengthPredictor

MAX_ITEMS = 1_024
MAX_SEEN = 20_000  # request ids remembered: an outcome that is told again does not teach twice


class PredictorServer(PredictorServicer):
    """Answers from one model and teaches it. One event loop; the model is touched nowhere else."""

    def __init__(self, model: LengthPredictor, *, max_context_tokens: int, scale: float = 1.0) -> None:
        self.model = model
        self._max_context_tokens, self._scale = max_context_tokens, scale
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._streams: set[Outbox[pb.ObserveAck]] = set()
        self.learned_some = asyncio.Event()

    @property
    def version(self) -> str:
        """What produced an answer: the model, and the scale where there is one."""
        return self.model.version if self._scale == 1.0 else f"{self.model.version}x{self._scale:g}"

    async def Predict(  # noqa: N802 (the contract's name)
        self, request: pb.PredictRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.PredictResponse:
        if len(request.items) > MAX_ITEMS:
            text = f"{len(request.items)} items in one call, at most {MAX_ITEMS}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        with metrics.PREDICT_SECONDS.time():
            items = [self._predict(item) for item in request.items]
        metrics.PREDICTIONS.inc(len(items))
        return pb.PredictResponse(items=items, model_version=self.version)

    async def Observe(  # noqa: N802 (the contract's name)
        self, request_iterator: AsyncIterator[pb.ObserveRequest], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.ObserveAck]:
        outbox: Outbox[pb.ObserveAck] = Outbox()
        self._streams.add(outbox)
        try:
            async for ack in both_ways(request_iterator, context, outbox, lambda m: self._observe(m, outbox)):
                yield ack
        finally:
            self._streams.discard(outbox)

    def close_streams(self) -> None:
        """End every Observe stream, so that a drain need not wait for its peers."""
        for outbox in self._streams:
            outbox.close()

    def _predict(self, item: pb.PredictItem) -> pb.Prediction:
        predicted = self.model.predict(wire.query(item), max_context_tokens=self._max_context_tokens, scale=self._scale)
        return wire.prediction(item.request_id, predicted)

    def _observe(self, message: pb.ObserveRequest, outbox: Outbox[pb.ObserveAck]) -> None:
        for outcome in message.outcomes:
            metrics.OUTCOMES.labels(self._learn(wire.observed(outcome), outcome.request_id)).inc()
        if self.model.coverage is not None:
            metrics.COVERAGE.set(self.model.coverage)
        metrics.ADAPTERS.set(len(self.model.offsets))
        outbox.put(pb.ObserveAck(request_ids=[outcome.request_id for outcome in message.outcomes]))
        self.learned_some.set()

    def _learn(self, observed: wire.Observed, request_id: str) -> str:
        if request_id in self._seen:
            return "duplicate"
        self._seen[request_id] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return "censored" if self.model.observe(observed).covered is None else "learned"
