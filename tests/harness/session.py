"""A gateway's session to one runner, opened by a test: what this very runner answers, whoever else there is."""

import asyncio
from collections.abc import AsyncIterator

from harness.quickstart import Case, tokenizer
from harness.waiting import PATIENCE_S
from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Ended, NoCapacity, SessionHello, Start, Step
from weft.wire.codec.session import GATEWAY_TO_RUNNER, RUNNER_TO_GATEWAY
from weft.wire.streams import channel
from weft.wire.tls import Tls
from weft.wire.v1 import runner_pb2, runner_pb2_grpc


async def answer_of(runner: RunnerId, address: str, tls: Tls, case: Case, digest: str, epoch: int) -> str:
    """The greedy answer of that runner to a case, with the adapter of this digest ("" for the base)."""
    start = Start(
        request_id=f"test-{case.model}-{epoch}",
        epoch=Epoch(1, epoch),
        prompt=tuple(tokenizer().encode(case.prompt).ids),
        emitted=(),
        max_tokens=256,
        reservation_tokens=64,
        adapter=digest,
    )
    over = asyncio.Event()

    async def requests() -> AsyncIterator[runner_pb2.GatewayToRunner]:
        yield GATEWAY_TO_RUNNER.encode(SessionHello("test", runner.incarnation))
        yield GATEWAY_TO_RUNNER.encode(start)
        await over.wait()

    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S), channel(address, tls, "runner") as opened:
        async for envelope in runner_pb2_grpc.RunnerStub(opened).Session(requests()):
            message = RUNNER_TO_GATEWAY.decode(envelope)
            assert not isinstance(message, NoCapacity | Ended), message
            for sequence in message.sequences if isinstance(message, Step) else ():
                tokens += sequence.tokens
                if sequence.finish:
                    over.set()
                    return tokenizer().decode(tokens)
    raise AssertionError("the runner ended the session")
