"""The real servicer behind a real gRPC server on loopback, with a model that only counts."""

import asyncio
import threading

import grpc
import grpc.aio
import pytest
from prometheus_client import REGISTRY

from harness.grpc_server import listening
from harness.waiting import PATIENCE_S, soon
from tests.unit.predictor.conftest import CountingModel
from weft.wire.codec.prediction import MAX_ITEMS
from weft.wire.streams import channel
from weft.wire.v1 import common_pb2
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorStub, add_PredictorServicer_to_server
from weft_predictor import checkpoint, metrics
from weft_predictor.checkpoint import Checkpointer, load
from weft_predictor.server import PredictorServer


@pytest.fixture
async def server():
    server = PredictorServer(CountingModel())
    yield server
    server.close()


@pytest.fixture
async def stub(server):
    async with listening(lambda s: add_PredictorServicer_to_server(server, s)) as at, channel(at) as opened:
        stub = PredictorStub(opened)
        stub.address = at
        yield stub


class WatchedCheckpointer(Checkpointer):
    """Sets an event when a model has been written."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.saved = asyncio.Event()

    async def save(self) -> None:
        await super().save()
        if self._path.exists():
            self.saved.set()


def outcome(request_id: str, tokens: int = 10, **fields) -> common_pb2.Outcome:
    eos = common_pb2.FINISH_REASON_EOS
    fields = {"model_name": "acme/upper", "completion_tokens": tokens, "finish": eos} | fields
    return common_pb2.Outcome(request_id=request_id, **fields)


async def ask(stub, *request_ids: str) -> pb.PredictResponse:
    items = [pb.PredictItem(request_id=r, prompt_text="hello there", model_name="acme/upper") for r in request_ids]
    return await stub.Predict(pb.PredictRequest(items=items))


async def observe(stub, *outcomes: common_pb2.Outcome) -> list[str]:
    call = stub.Observe()
    await call.write(pb.ObserveRequest(outcomes=outcomes))
    ack = await call.read()
    await call.done_writing()
    return list(ack.request_ids)


async def test_a_batch_is_answered_in_its_order(stub):
    answer = await ask(stub, "b", "a", "c")
    assert [item.request_id for item in answer.items] == ["b", "a", "c"]
    assert answer.model_version == "counting+0"
    assert (await stub.Predict(pb.PredictRequest())).items == []


async def test_a_stream_answers_each_request_in_order_until_the_server_drains(server, stub):
    call = stub.Predictions()
    for names in (["b", "a"], [], ["c"]):
        await call.write(pb.PredictRequest(items=[pb.PredictItem(request_id=name) for name in names]))
    answers = [await soon(call.read()) for _ in range(3)]
    assert [[item.request_id for item in answer.items] for answer in answers] == [["b", "a"], [], ["c"]]
    server.close_streams()
    assert await soon(call.read()) is grpc.aio.EOF


async def test_a_stream_with_more_items_than_one_request_has_is_refused(stub):
    call = stub.Predictions()
    await call.write(pb.PredictRequest(items=[pb.PredictItem()] * (MAX_ITEMS + 1)))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await soon(call.read())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_outcomes_are_acknowledged_one_by_one_and_change_the_answer_and_the_version(stub):
    assert await observe(stub, *(outcome(str(i)) for i in range(30))) == [str(i) for i in range(30)]
    after = await ask(stub, "x")
    first = after.items[0]
    assert (first.p10_tokens, first.p50_tokens, first.p90_tokens, first.p99_tokens) == (5, 40, 50, 60)
    assert after.model_version == "counting+30"


async def test_each_outcome_is_counted_by_what_it_taught_and_what_the_model_says_of_itself_is_a_metric(stub):
    def counted() -> list[float]:
        return [metrics.OUTCOMES.labels(lesson)._value.get() for lesson in ("learned", "censored")]

    before = counted()
    await observe(stub, outcome("a"), outcome("b", 0), outcome("c"))
    assert [value - earlier for value, earlier in zip(counted(), before, strict=True)] == [2, 1]
    assert (metrics.COVERAGE._value.get(), metrics.ADAPTERS._value.get()) == (0.5, 3)


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff no message",
        pb.ObserveRequest(outcomes=[outcome("")]),
        pb.ObserveRequest(outcomes=[outcome("x" * 1_001)]),
        pb.ObserveRequest(outcomes=[outcome("ok"), outcome("r", model_name="m" * 1_001)]),
        pb.ObserveRequest(outcomes=[outcome("r")] * 1_025),
    ],
)
async def test_a_peer_that_breaks_the_contract_loses_its_stream_and_teaches_nothing(stub, server, message):
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    labels = {"peer": "supervisor", "code": "INVALID_ARGUMENT"}
    before = REGISTRY.get_sample_value("weft_peer_errors_total", labels) or 0.0
    async with channel(stub.address) as opened:
        call = opened.stream_stream("/weft.v1.Predictor/Observe", lambda raw: raw, pb.ObserveAck.FromString)()
        await call.write(raw)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert REGISTRY.get_sample_value("weft_peer_errors_total", labels) == before + 1
    assert server.model.learned == 0
    assert await observe(stub, outcome("next")) == ["next"], "the process and its other streams go on"


async def test_a_batch_over_the_bound_is_refused(stub):
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await ask(stub, *map(str, range(MAX_ITEMS + 1)))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_loop_goes_on_while_the_model_works_and_others_wait_their_turn(stub, server, monkeypatch):
    begun, go_on, threads = threading.Event(), threading.Event(), set()
    really = server.model.predict_batch

    def held(*what, **options):
        threads.add(threading.current_thread().name)
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return really(*what, **options)

    monkeypatch.setattr(server.model, "predict_batch", held)
    first = asyncio.create_task(ask(stub, "first"))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    taught, second = asyncio.create_task(observe(stub, outcome("o"))), asyncio.create_task(ask(stub, "second"))
    with pytest.raises(grpc.aio.AioRpcError):  # answered by the loop alone
        await ask(stub, *map(str, range(MAX_ITEMS + 1)))
    go_on.set()
    assert (await first).model_version == "counting+0"
    assert await taught == ["o"]
    assert [item.request_id for item in (await second).items] == ["second"]
    assert threads == {"inference_0"}


async def test_calls_beyond_the_bound_are_refused(stub, monkeypatch):
    monkeypatch.setattr("weft_predictor.server.MAX_CALLS", 0)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await ask(stub, "x")
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_model_is_saved_after_enough_outcomes_and_at_the_end(stub, server, tmp_path):
    path = tmp_path / "model.npz"
    checkpointer = WatchedCheckpointer(server, path, outcomes=5, seconds=3_600)
    running = asyncio.create_task(checkpointer.run())
    await observe(stub, *(outcome(str(i)) for i in range(5)))
    await soon(checkpointer.saved.wait())
    assert load(path, CountingModel.load).learned == 5
    await observe(stub, outcome("last"))
    checkpointer.close()
    await running
    assert load(path, CountingModel.load).learned == 6


async def test_what_is_learned_while_the_last_save_runs_is_saved_too(stub, server, tmp_path, monkeypatch):
    path, begun, go_on = tmp_path / "model.npz", threading.Event(), threading.Event()
    write = checkpoint.save

    def held(*what) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        write(*what)

    monkeypatch.setattr(checkpoint, "save", held)
    checkpointer = Checkpointer(server, path, outcomes=1, seconds=3_600)
    running = asyncio.create_task(checkpointer.run())
    await observe(stub, outcome("first"))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    await observe(stub, outcome("meanwhile"))
    checkpointer.close()
    go_on.set()
    await running
    assert load(path, CountingModel.load).learned == 2


async def test_the_model_is_saved_after_a_while_also_with_few_outcomes(stub, server, tmp_path):
    checkpointer = WatchedCheckpointer(server, tmp_path / "model.npz", outcomes=1_000, seconds=0.01)
    running = asyncio.create_task(checkpointer.run())
    await observe(stub, outcome("only"))
    await soon(checkpointer.saved.wait())
    checkpointer.close()
    await running
    assert load(tmp_path / "model.npz", CountingModel.load).learned == 1


async def test_a_model_that_cannot_be_saved_is_logged_and_service_goes_on(stub, server, tmp_path, caplog):
    (tmp_path / "model.npz").mkdir()
    checkpointer = Checkpointer(server, tmp_path / "model.npz", outcomes=1, seconds=3_600)
    await observe(stub, outcome("one"))
    await checkpointer.save()
    assert "model not saved" in caplog.text
    assert len((await ask(stub, "x")).items) == 1
