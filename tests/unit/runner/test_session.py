"""A gateway's session over a real socket, with the real engine in its own thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from harness.waiting import PATIENCE_S
from weft.domain.ids import RunnerId
from weft.wire.streams import SendQueue
from weft.wire.v1 import common_pb2, runner_pb2, runner_pb2_grpc
from weft.wire.v1.runner_pb2 import GatewayToRunner
from weft_runner.shell import EngineThread
from weft_runner.shell.metrics import RunnerMetrics
from weft_runner.shell.server import RunnerServer

Open = Callable[..., Awaitable[tuple[SendQueue[GatewayToRunner], Any]]]


@asynccontextmanager
async def session_with(driver: Any) -> AsyncIterator[tuple[SendQueue[GatewayToRunner], Any, Open]]:
    """A gateway's outbox and its call, on a server over this driver's engine, and what opens another's."""
    loop = asyncio.get_running_loop()
    runner = RunnerServer(driver.engine, RunnerId("u", "i"), RunnerMetrics(CollectorRegistry(), "m"))
    driver.engine._on_output = lambda output: loop.call_soon_threadsafe(runner.deliver, output)
    thread = EngineThread(driver.engine, 1, lambda _: None)
    server = grpc.aio.server()
    runner_pb2_grpc.add_RunnerServicer_to_server(runner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    thread.start()

    async def opened(gateway_id: str, incarnation: str = "i") -> tuple[SendQueue[GatewayToRunner], Any]:
        outbox: SendQueue[GatewayToRunner] = SendQueue()
        outbox.put(GatewayToRunner(hello=runner_pb2.SessionHello(gateway=gateway_id, incarnation=incarnation)))
        call: Any = runner_pb2_grpc.RunnerStub(channel).Session(aiter(outbox))
        assert (await call.read()).WhichOneof("message") == "ready"
        return outbox, call

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE_S):
        outbox, call = await opened("g")
        yield outbox, call, opened
        call.cancel()
    await server.stop(0)
    assert await asyncio.to_thread(thread.stop, PATIENCE_S)


def start(key: str, counter: int, max_tokens: int) -> GatewayToRunner:
    return GatewayToRunner(
        start=runner_pb2.Start(
            request_id=key,
            epoch=common_pb2.Epoch(term=1, counter=counter),
            prompt=[3, 4],
            max_tokens=max_tokens,
            reservation_tokens=max_tokens,
            sampling=runner_pb2.Sampling(top_p=1.0, ignore_eos=True),
        )
    )


async def test_a_gateways_lies_cost_its_own_session_and_no_other(drive):
    driver = drive()
    async with session_with(driver) as (outbox, call, opened):
        outbox.put(start("mine", 1, 100))
        assert (await call.read()).step.request_ids == ["mine"]
        theirs, their_call = await opened("h")
        epoch = common_pb2.Epoch(term=1, counter=2**60)
        theirs.put(GatewayToRunner(stop=runner_pb2.Stop(request_id="mine", epoch=epoch)))
        theirs.put(start("mine", 2**60, 5))
        refused = (await their_call.read()).ended
        assert (refused.request_id, refused.reason) == ("mine", runner_pb2.Ended.INTERNAL)
        for bad in (start("", 3, 5), start("r", 3, 5)):
            bad.start.epoch.term = 2**64 - 1
            liar, call_of_liar = await opened("h")
            liar.put(bad)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call_of_liar.read()
            assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        their_call.cancel()
        seen = 1
        while seen < 100:
            step = (await call.read()).step
            assert step.request_ids == ["mine"]
            seen += len(step.tokens)


async def test_a_gateway_that_posts_more_than_the_engine_takes_loses_its_stream(drive, monkeypatch):
    monkeypatch.setattr("weft_runner.shell.server.MAX_BACKLOG", 10)
    driver, begun, go_on = drive(), threading.Event(), threading.Event()
    run = driver.engine.executor.run

    def held(step: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return run(step)

    driver.engine.executor.run = held
    async with session_with(driver) as (outbox, call, _):
        outbox.put(start("runs", 1, 4))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        for number in range(11):
            outbox.put(start(f"r{number}", number + 2, 4))
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, await call.details()
        assert driver.engine.backlog <= 10 + 1, "and that the stream is over"
        go_on.set()
    assert not driver.pool.sequences, "what it had posted is cancelled"


async def test_a_session_for_another_incarnation_is_refused(drive):
    async with session_with(drive()) as (_, _, opened):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await opened("g", "another")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
