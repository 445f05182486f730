"""A gateway's session over a real socket, with the real engine in its own thread."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from harness.runner_peers import Gateway
from harness.waiting import PATIENCE_S
from weft.domain.ids import RunnerId
from weft.wire.v1 import common_pb2, runner_pb2, runner_pb2_grpc
from weft.wire.v1.runner_pb2 import GatewayToRunner
from weft_runner.shell import EngineThread
from weft_runner.shell.metrics import RunnerMetrics
from weft_runner.shell.server import RunnerServer


@asynccontextmanager
async def serving(driver: Any) -> AsyncIterator[str]:
    """A server over this driver's engine, at an address."""
    loop = asyncio.get_running_loop()
    runner = RunnerServer(driver.engine, RunnerId("u", "i"), RunnerMetrics(CollectorRegistry(), "m"))
    driver.engine._on_output = lambda output: loop.call_soon_threadsafe(runner.deliver, output)
    thread = EngineThread(driver.engine, 1, lambda _: None)
    server = grpc.aio.server()
    runner_pb2_grpc.add_RunnerServicer_to_server(runner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    thread.start()
    async with asyncio.timeout(PATIENCE_S):
        yield f"127.0.0.1:{port}"
    await server.stop(0)
    assert await asyncio.to_thread(thread.stop, PATIENCE_S)


async def test_a_gateways_lies_cost_its_own_session_and_no_other(drive):
    async with serving(drive()) as address, Gateway(address, "i") as mine, Gateway(address, "i", "h") as theirs:
        for gateway in (mine, theirs):
            await gateway.next("ready")
        mine.start("mine", [3, 4], max_tokens=100)
        assert (await mine.next("step")).request_ids == ["mine"]
        epoch = common_pb2.Epoch(term=1, counter=2**60)
        theirs.outbox.put(GatewayToRunner(stop=runner_pb2.Stop(request_id="mine", epoch=epoch)))
        theirs.start("mine", [3, 4], 2**60)
        refused = await theirs.next("ended")
        assert (refused.request_id, refused.reason) == ("mine", runner_pb2.Ended.INTERNAL)
        for key in ("", "r"):
            async with Gateway(address, "i", "h") as liar:
                await liar.next("ready")
                liar.start(key, [3, 4], 3, term=2**64 - 1)
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await liar.call.read()
                assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        theirs.call.cancel()
        seen = 1
        while seen < 100:
            step = await mine.next("step")
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
    async with serving(driver) as address, Gateway(address, "i") as gateway:
        await gateway.next("ready")
        gateway.start("runs", [3, 4])
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        for number in range(11):
            gateway.start(f"r{number}", [3, 4], number + 2)
        assert await gateway.call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, await gateway.call.details()
        assert driver.engine.backlog <= 10 + 1, "and that the stream is over"
        go_on.set()
    assert not driver.pool.sequences, "what it had posted is cancelled"


async def test_a_session_for_another_incarnation_is_refused(drive):
    async with serving(drive()) as address, Gateway(address, "another") as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.next("ready")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
