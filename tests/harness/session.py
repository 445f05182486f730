"""A gateway's session to one runner, spoken by a test: what this very runner answers, whoever else there is."""

import asyncio
from collections.abc import AsyncIterator

from harness.quickstart import Case, tokenizer
from harness.waiting import PATIENCE_S
from weft.wire.channels import channel
from weft.wire.tls import Tls
from weft.wire.v1 import common_pb2, runner_pb2, runner_pb2_grpc


async def answer_of(runner: common_pb2.RunnerId, address: str, tls: Tls, case: Case, digest: str, epoch: int) -> str:
    """The greedy answer of that runner to a case, with the adapter of this digest ("" for the base)."""
    start = runner_pb2.Start(
        request_id=f"test-{case.model}-{epoch}",
        epoch=common_pb2.Epoch(term=1, counter=epoch),
        adapter_digest=digest,
        prompt_tokens=tokenizer().encode(case.prompt).ids,
        max_tokens=256,
        reservation_tokens=64,
        sampling=runner_pb2.Sampling(top_p=1.0),
    )
    over = asyncio.Event()

    async def said() -> AsyncIterator[runner_pb2.GatewayToRunner]:
        hello = runner_pb2.SessionHello(gateway_id="test", incarnation=runner.incarnation)
        yield runner_pb2.GatewayToRunner(hello=hello)
        yield runner_pb2.GatewayToRunner(start=start)
        await over.wait()

    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S), channel(address, tls, "runner") as opened:
        async for message in runner_pb2_grpc.RunnerStub(opened).Session(said()):
            assert message.WhichOneof("message") not in ("no_room", "ended"), message
            for sequence in message.step.sequences:
                tokens += sequence.tokens
                if sequence.finish_reason:
                    over.set()
                    return tokenizer().decode(tokens)
    raise AssertionError("the runner ended the session")
