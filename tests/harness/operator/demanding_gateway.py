"""A gateway that asks a real scheduler for many streams and starts none: demand, and nothing else.

On a loop in a thread of its own.
"""

import asyncio
import itertools
import threading
from typing import Self

from harness.waiting import PATIENCE_S
from weft.domain.ids import BASE
from weft.domain.request import Cancel, GatewayHello, Reject, ResubmitComplete, Submit
from weft.wire.codec.scheduling import GATEWAY_TO_SCHEDULER, SCHEDULER_TO_GATEWAY
from weft.wire.streams import ClientStream, channel
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1.scheduler_pb2_grpc import SchedulerStub


class DemandingGateway:
    """Holds `wanted(n)` requests for a pool's base model at the scheduler."""

    def __init__(self, scheduler: str, pool: str, model: str, namespace: str) -> None:
        self._scheduler, self._pool, self._model, self._namespace = scheduler, pool, model, namespace
        self._held: dict[str, Submit] = {}
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="gateway", daemon=True)
        self._up = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(PATIENCE_S), "the gateway is not let in"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._link.close)
        self._thread.join(PATIENCE_S)

    def wanted(self, count: int) -> None:
        """Hold `count` requests from now on."""
        self._loop.call_soon_threadsafe(self._hold, count)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        opened = channel(self._scheduler)
        self._link: ClientStream[pb.GatewayToScheduler, pb.SchedulerToGateway] = ClientStream(
            "demanding gateway",
            SchedulerStub(opened).Gateway,
            hello=self._hello,
            on_message=self._heard,
            on_up=self._up.set,
        )
        await self._link.run()
        await opened.close(None)

    def _hello(self) -> list[pb.GatewayToScheduler]:
        messages = [GatewayHello("demanding"), *self._held.values(), ResubmitComplete()]
        return [GATEWAY_TO_SCHEDULER.encode(message) for message in messages]

    def _hold(self, count: int) -> None:
        while len(self._held) < count:
            self._submit()
        while len(self._held) > count:
            request_id, _ = self._held.popitem()
            self._link.send(GATEWAY_TO_SCHEDULER.encode(Cancel(request_id)))

    def _submit(self) -> None:
        submit = Submit(
            request_id=f"r{next(self._numbers)}",
            pool=self._pool,
            namespace=self._namespace,
            model_name=self._model,
            adapter=BASE,
            prompt_tokens=16,
            max_tokens=64,
            p50_tokens=48,
            p90_tokens=64,
        )
        self._held[submit.request_id] = submit
        self._link.send(GATEWAY_TO_SCHEDULER.encode(submit))

    def _heard(self, message: pb.SchedulerToGateway) -> None:
        """Submit a rejected request again: the demand stays what it is."""
        match SCHEDULER_TO_GATEWAY.decode(message):
            case Reject(request_id=request_id) if self._held.pop(request_id, None):
                self._loop.call_later(0.1, self._submit)
            case _:
                pass
