"""The real servicer behind a real gRPC server on loopback."""

import asyncio
import threading

import grpc
import grpc.aio
import pytest

from harness.waiting import PATIENCE_S, soon
from weft.wire.channels import channel
from weft.wire.v1 import common_pb2
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorStub, add_PredictorServicer_to_server
from weft_predictor import saver as saver_module
from weft_predictor.core.predictor import LengthPredictor
from weft_predictor.saver import Saver
from weft_predictor.server import MAX_ITEMS, PredictorServer
from weft_predictor.state import load


@pytest.fixture
async def server():
    server = PredictorServer(LengthPredictor.cold("ridge-test", dim=1 << 14), max_context_tokens=1_000)
    yield server
    server.close()


@pytest.fixture
async def stub(server):
    grpc_server = grpc.aio.server()
    add_PredictorServicer_to_server(server, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    async with channel(f"127.0.0.1:{port}") as opened:
        yield PredictorStub(opened)
    await grpc_server.stop(0)


class WatchedSaver(Saver):
    """Tells when a model has been written."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.saved = asyncio.Event()

    async def save(self) -> None:
        await super().save()
        if self._path.exists():
            self.saved.set()


def outcome(request_id: str, tokens: int = 10, **fields) -> common_pb2.Outcome:
    fields = {"prompt_text": "hello there", "model_name": "acme/upper", "completion_tokens": tokens} | fields
    return common_pb2.Outcome(request_id=request_id, **fields)


async def ask(stub, *request_ids: str) -> pb.PredictResponse:
    items = [pb.PredictItem(request_id=r, prompt_text="hello there", adapter="acme/upper") for r in request_ids]
    return await stub.Predict(pb.PredictRequest(items=items))


async def tell(stub, *outcomes: common_pb2.Outcome) -> list[str]:
    call = stub.Observe()
    await call.write(pb.ObserveRequest(outcomes=outcomes))
    ack = await call.read()
    await call.done_writing()
    return list(ack.request_ids)


async def test_a_batch_is_answered_in_its_order(stub):
    answer = await ask(stub, "b", "a", "c")
    assert [item.request_id for item in answer.items] == ["b", "a", "c"]
    assert len({(item.p50_tokens, item.p90_tokens) for item in answer.items}) == 1
    assert answer.model_version == "ridge-test+0"
    assert (await stub.Predict(pb.PredictRequest())).items == []


async def test_outcomes_are_acknowledged_one_by_one_and_change_the_answer_and_the_version(stub):
    before = await ask(stub, "x")
    assert await tell(stub, *(outcome(str(i)) for i in range(30))) == [str(i) for i in range(30)]
    after = await ask(stub, "x")
    assert after.items[0].p50_tokens < before.items[0].p50_tokens
    assert after.model_version == "ridge-test+30"


async def test_an_outcome_told_twice_teaches_once_and_is_acknowledged_twice(stub, server):
    for _ in range(2):
        assert await tell(stub, outcome("same")) == ["same"]
    assert server.model.learned == 1


@pytest.mark.parametrize("reason", ["LENGTH", "CANCELLED", "FAILED"])
async def test_an_answer_that_was_cut_off_is_a_lower_bound_also_without_the_flag(stub, server, reason):
    cut = common_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    await tell(stub, *(outcome(str(i), 1, finish_reason=cut) for i in range(20)))
    assert server.model.learned == 0


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
    taught, second = asyncio.create_task(tell(stub, outcome("o"))), asyncio.create_task(ask(stub, "second"))
    with pytest.raises(grpc.aio.AioRpcError):  # answered by the loop alone
        await ask(stub, *map(str, range(MAX_ITEMS + 1)))
    go_on.set()
    assert (await first).model_version == "ridge-test+0"
    assert await taught == ["o"]
    assert [item.request_id for item in (await second).items] == ["second"]
    assert threads == {"inference_0"}


async def test_calls_beyond_the_bound_are_refused(stub, monkeypatch):
    monkeypatch.setattr("weft_predictor.server.MAX_CALLS", 0)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await ask(stub, "x")
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_scale_stands_in_the_version(server):
    scaled = PredictorServer(server.model, max_context_tokens=1_000, scale=10)
    assert scaled.version == "ridge-test+0x10"


async def test_the_model_is_saved_after_enough_outcomes_and_at_the_end(stub, server, tmp_path):
    path = tmp_path / "model.npz"
    saver = WatchedSaver(server, path, outcomes=5, seconds=3_600)
    running = asyncio.create_task(saver.run())
    await tell(stub, *(outcome(str(i)) for i in range(5)))
    await soon(saver.saved.wait())
    assert load(path).learned == 5
    await tell(stub, outcome("last"))
    saver.close()
    await running
    assert load(path).learned == 6


async def test_what_is_learned_while_the_last_save_runs_is_saved_too(stub, server, tmp_path, monkeypatch):
    path, begun, go_on = tmp_path / "model.npz", threading.Event(), threading.Event()
    write = saver_module.save

    def held(*what) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        write(*what)

    monkeypatch.setattr(saver_module, "save", held)
    saver = Saver(server, path, outcomes=1, seconds=3_600)
    running = asyncio.create_task(saver.run())
    await tell(stub, outcome("first"))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    await tell(stub, outcome("meanwhile"))
    saver.close()
    go_on.set()
    await running
    assert load(path).learned == 2


async def test_the_model_is_saved_after_a_while_also_with_few_outcomes(stub, server, tmp_path):
    saver = WatchedSaver(server, tmp_path / "model.npz", outcomes=1_000, seconds=0.01)
    running = asyncio.create_task(saver.run())
    await tell(stub, outcome("only"))
    await soon(saver.saved.wait())
    saver.close()
    await running
    assert load(tmp_path / "model.npz").learned == 1


async def test_a_model_that_cannot_be_saved_is_logged_and_service_goes_on(stub, server, tmp_path, caplog):
    (tmp_path / "model.npz").mkdir()
    saver = Saver(server, tmp_path / "model.npz", outcomes=1, seconds=3_600)
    await tell(stub, outcome("one"))
    await saver.save()
    assert "model not saved" in caplog.text
    assert len((await ask(stub, "x")).items) == 1
