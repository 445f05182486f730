"""Predictions over real gRPC: one stream for all, and each to whom it belongs, whatever becomes of the stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from harness.grpc_server import listening
from harness.waiting import PATIENCE_S, soon
from weft.domain.machine import Received
from weft.domain.prediction import Prediction, PredictItem
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer, add_PredictorServicer_to_server
from weft_gateway.shell import PredictorClient


class Predictor(PredictorServicer):
    """Predicts a length that the request's id says, once it may `go`; ends a stream behind an id that `end`s it."""

    def __init__(self) -> None:
        self.streams, self.go = 0, asyncio.Event()
        self.go.set()

    async def Predictions(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        async for request in request_iterator:
            if request.items[0].request_id.startswith("end"):
                return
            await self.go.wait()
            yield answered(request)


class Older(PredictorServicer):
    """A predictor of a version without streams."""

    calls = 0

    async def Predict(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls += 1
        return answered(request)


def answered(request: pb.PredictRequest) -> pb.PredictResponse:
    lengths = [(item.request_id, len(item.request_id)) for item in request.items]
    items = [pb.Prediction(request_id=i, p10_tokens=n, p50_tokens=n, p90_tokens=n, p99_tokens=n) for i, n in lengths]
    return pb.PredictResponse(items=items, model_version="v")


class Asker:
    """A client, and what it is told."""

    def __init__(self, address: str, deadline_s: float) -> None:
        self.told = asyncio.Queue[Prediction]()
        self.client = PredictorClient(address, deadline_s, self._feed)

    def _feed(self, event: Received) -> None:
        assert isinstance(event.message, Prediction)
        self.told.put_nowait(event.message)

    async def ask(self, *names: str) -> list[tuple[str, int]]:
        for name in names:
            self.client.ask(PredictItem(name, "text", "n/p", "m", 1, 1, ""))
        told = [await soon(self.told.get()) for _ in names]
        return [(one.request_id, one.p50_tokens) for one in told]


@asynccontextmanager
async def asking(predictor: Any, deadline_s: float = PATIENCE_S) -> AsyncGenerator[Asker]:
    async with listening(lambda server: add_PredictorServicer_to_server(predictor, server)) as address:
        asker = Asker(address, deadline_s)
        try:
            yield asker
        finally:
            await asker.client.close()


async def test_one_stream_carries_every_prediction() -> None:
    async with asking(predictor := Predictor()) as asker:
        for name in ("a", "bb", "ccc"):
            assert await asker.ask(name) == [(name, len(name))]
        assert await asker.ask("x", "yy", "zzz") == [("x", 1), ("yy", 2), ("zzz", 3)]
        assert predictor.streams == 1


async def test_a_stream_that_ends_costs_its_items_their_prediction_and_the_next_have_another() -> None:
    async with asking(predictor := Predictor()) as asker:
        assert await asker.ask("a") == [("a", 1)]
        assert await asker.ask("end") == [("end", 0)]
        assert await asker.ask("bb") == [("bb", 2)]
        assert predictor.streams == 2


async def test_an_answer_that_is_late_is_nobody_elses() -> None:
    async with asking(predictor := Predictor(), deadline_s=1.0) as asker:
        predictor.go.clear()
        assert await asker.ask("late") == [("late", 0)]
        asker.client._deadline_s = PATIENCE_S  # pyright: ignore[reportPrivateUsage]
        predictor.go.set()
        assert await asker.ask("bb") == [("bb", 2)]


async def test_a_predictor_without_streams_is_called() -> None:
    async with asking(predictor := Older()) as asker:
        for name in ("a", "bb"):
            assert await asker.ask(name) == [(name, len(name))]
        assert predictor.calls == 2


async def test_a_predictor_that_is_away_costs_a_prediction_and_nothing_else() -> None:
    asker = Asker("127.0.0.1:1", PATIENCE_S)  # nothing listens there
    assert await asker.ask("a", "b") == [("a", 0), ("b", 0)]
    await asker.client.close()
