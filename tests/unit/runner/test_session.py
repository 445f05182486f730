"""A gateway's session over a real socket, with the real engine in its own thread."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from harness.waiting import PATIENCE_S
from weft.wire.channels import Outbox
from weft.wire.v1 import common_pb2, runner_pb2, runner_pb2_grpc
from weft.wire.v1.runner_pb2 import GatewayToRunner
from weft_runner.engine import EngineThread
from weft_runner.identity import Identity
from weft_runner.metrics import Metrics
from weft_runner.server import RunnerServer


@asynccontextmanager
async def session_with(driver: Any) -> AsyncIterator[tuple[Outbox[GatewayToRunner], Any]]:
    """A gateway's outbox and its call, on a server over this driver's engine."""
    loop = asyncio.get_running_loop()
    runner = RunnerServer(driver.engine, Identity("u", "i"), Metrics(CollectorRegistry(), "m"))
    driver.engine._on_iteration = lambda iteration: loop.call_soon_threadsafe(runner.deliver, iteration)
    thread = EngineThread(driver.engine, 1, lambda _: None)
    server = grpc.aio.server()
    runner_pb2_grpc.add_RunnerServicer_to_server(runner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    thread.start()
    outbox: Outbox[GatewayToRunner] = Outbox()
    outbox.put(GatewayToRunner(hello=runner_pb2.SessionHello(gateway_id="g", incarnation="i")))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE_S):
        call = runner_pb2_grpc.RunnerStub(channel).Session(aiter(outbox))
        assert (await call.read()).WhichOneof("message") == "ready"
        yield outbox, call
        call.cancel()
    await server.stop(0)
    assert await asyncio.to_thread(thread.stop, PATIENCE_S)


def start(key: str, counter: int, max_tokens: int) -> GatewayToRunner:
    return GatewayToRunner(
        start=runner_pb2.Start(
            request_id=key,
            epoch=common_pb2.Epoch(term=1, counter=counter),
            prompt_tokens=[3, 4],
            max_tokens=max_tokens,
            reservation_tokens=max_tokens,
            sampling=runner_pb2.Sampling(top_p=1.0, ignore_eos=True),
        )
    )


async def test_a_stop_frees_the_pages_within_one_iteration_while_others_run_on(drive):
    """Counted from the moment the server has the Stop: at most the iteration under way is ended first."""
    driver = drive()
    pool, post = driver.pool, driver.engine.post
    run = driver.engine.executor.run
    posted = threading.Event()
    posted_at: list[int] = []
    freed_at: list[tuple[int, int]] = []
    stop = pool.stop

    def posting(command: Any) -> None:
        post(command)
        if type(command).__name__ == "Stop":
            posted_at.append(pool.iterations)
            posted.set()

    def running(step: Any) -> Any:
        assert pool.iterations < 8 or posted.wait(PATIENCE_S), "the engine must not finish before the Stop is there"
        return run(step)

    def stopping(request_id: str, epoch: Any) -> None:
        before = pool.pages.free_pages
        stop(request_id, epoch)
        freed_at.append((pool.iterations, pool.pages.free_pages - before))

    driver.engine.post, driver.engine.executor.run, pool.stop = posting, running, stopping
    async with session_with(driver) as (outbox, call):
        outbox.put(start("gone", 1, 100))
        outbox.put(start("stays", 2, 120))
        seen: dict[str, int] = {}
        finished = stopped = False
        while not finished:
            for sequence in (await call.read()).step.sequences:
                seen[sequence.request_id] = seen.get(sequence.request_id, 0) + len(sequence.tokens)
                finished = finished or bool(sequence.finish_reason)
            if seen.get("gone") == 2 and not stopped:
                stopped = True
                epoch = common_pb2.Epoch(term=1, counter=1)
                outbox.put(GatewayToRunner(stop=runner_pb2.Stop(request_id="gone", epoch=epoch)))
    ((number, freed),) = freed_at
    assert number - posted_at[0] <= 1
    assert freed == 26, "ceil((2 + 100) / 4) pages"
    assert seen["stays"] == 120
    assert seen["gone"] < 100
