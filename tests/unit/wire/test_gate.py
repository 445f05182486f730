"""Calls under mutual TLS over real gRPC: who gets in, what the others are told, what a change of the files changes."""

import asyncio
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness.certificates import Authority
from harness.ports import free_addresses
from harness.waiting import PATIENCE_S, soon
from weft.wire.channels import SecureChannel
from weft.wire.serving import serve
from weft.wire.streams import channel
from weft.wire.tls import Tls
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer, PredictorStub, add_PredictorServicer_to_server


class Predictor(PredictorServicer):
    """Answers; echoes how many outcomes a message had; knows whether a stream of it has ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.calls = 0

    async def Predict(self, request: pb.PredictRequest, context: Any) -> pb.PredictResponse:  # noqa: N802
        self.calls += 1
        return pb.PredictResponse(model_version="m")

    async def Observe(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ObserveAck]:  # noqa: N802
        self.calls += 1
        try:
            async for message in request_iterator:
                yield pb.ObserveAck(request_ids=[outcome.request_id for outcome in message.outcomes])
        finally:
            self.ended.set()


class Served:
    """A predictor under TLS, and channels to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority, self.servicer = folder, Authority(), Predictor()
        names = self.authority.folder(folder / "predictor", "predictor", "acme.runner")
        self.tls = Tls(names, "predictor")
        self.at = free_addresses(1)[0]
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(
            serve(
                lambda server: add_PredictorServicer_to_server(self.servicer, server),
                listen=self.at,
                names=["weft.v1.Predictor"],
                stop=self.stop,
                tls=self.tls,
            )
        )

    def identity(self, role: Any, name: str = "") -> Tls:
        return Tls(self.authority.folder(self.folder / (name or role), role), role)

    def raw(self, certificate: bytes, key: bytes, ca: bytes) -> grpc.aio.Channel:
        """A client without our own checks: it shows what it is given."""
        name = (("grpc.ssl_target_name_override", "predictor.weft.internal"),)
        return grpc.aio.secure_channel(self.at, grpc.ssl_channel_credentials(ca, key, certificate), options=name)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    async with channel(made.at, made.identity("gateway"), "predictor") as opened:
        request = health_pb2.HealthCheckRequest(service="weft.v1.Predictor")
        await health_pb2_grpc.HealthStub(opened).Check(request, timeout=PATIENCE_S, wait_for_ready=True)
    yield made
    made.stop.set()
    await soon(made.task)


async def predict(opened: grpc.aio.Channel) -> str:
    return (await PredictorStub(opened).Predict(pb.PredictRequest(), timeout=PATIENCE_S)).model_version


async def refused(opened: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    """What a call on this channel is told."""
    async with opened:
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await predict(opened)
    return told.value.code(), str(told.value.details())


async def test_the_right_role_gets_in_and_every_role_may_ask_for_health(served: Served) -> None:
    async with channel(served.at, served.identity("gateway"), "predictor") as opened:
        assert await predict(opened) == "m"
    async with channel(served.at, served.identity("runner"), "predictor") as opened:
        health = health_pb2_grpc.HealthStub(opened)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="weft.v1.Predictor"), timeout=PATIENCE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watched = health.Watch(health_pb2.HealthCheckRequest(service="weft.v1.Predictor"), timeout=PATIENCE_S)
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()


async def test_another_role_is_told_which_it_is_and_which_is_needed(served: Served) -> None:
    code, said = await refused(channel(served.at, served.identity("runner"), "predictor"))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert said == "the caller's certificate is of runner; /weft.v1.Predictor/Predict needs gateway"
    async with channel(served.at, served.identity("gateway"), "predictor") as opened:
        with pytest.raises(grpc.aio.AioRpcError, match=r"is of gateway; /weft.v1.Predictor/Observe needs supervisor"):
            await PredictorStub(opened).Observe().read()  # (a message that meets a refusal is told INTERNAL)
    assert served.servicer.calls == 0


async def test_a_runner_of_another_namespace_is_not_connected(served: Served) -> None:
    gateway = served.identity("gateway")
    async with channel(served.at, gateway, "runner", namespace="acme") as opened:
        assert await predict(opened) == "m"
    code, _ = await refused(channel(served.at, gateway, "runner", namespace="rival"))
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_without_a_role_is_nobody(served: Served) -> None:
    certificate, key = served.authority.issue("db.example.org")
    code, said = await refused(served.raw(certificate, key, served.authority.pem))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "no role" in said


async def test_strangers_do_not_get_through_the_handshake(served: Served) -> None:
    stranger, ours = Authority(), served.authority
    expired = ours.issue("gateway.weft.internal", valid=-datetime.timedelta(seconds=1))
    unavailable = grpc.StatusCode.UNAVAILABLE
    assert (await refused(grpc.aio.insecure_channel(served.at)))[0] is unavailable
    assert (await refused(served.raw(*stranger.issue("gateway.weft.internal"), ours.pem)))[0] is unavailable
    assert (await refused(served.raw(*expired, ours.pem)))[0] is unavailable
    without = grpc.ssl_channel_credentials(ours.pem)
    name = (("grpc.ssl_target_name_override", "predictor.weft.internal"),)
    assert (await refused(grpc.aio.secure_channel(served.at, without, options=name)))[0] is unavailable
    assert served.servicer.calls == 0


async def test_a_client_does_not_talk_to_a_server_of_another_role_or_authority(served: Served) -> None:
    gateway = served.identity("gateway")
    code, said = await refused(channel(served.at, gateway, "scheduler"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "scheduler.weft.internal" in said or "ostname" in said
    Authority().folder(gateway.folder, "gateway")
    code, said = await refused(channel(served.at, gateway, "predictor"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "CERTIFICATE_VERIFY_FAILED" in said
    assert served.servicer.calls == 0


async def test_a_stream_lives_through_a_rotation_and_later_calls_use_the_new_files(served: Served) -> None:
    supervisor = served.identity("supervisor")
    outcomes: asyncio.Queue[pb.ObserveRequest] = asyncio.Queue()

    async def told() -> AsyncIterator[pb.ObserveRequest]:
        while True:
            yield await outcomes.get()

    async with SecureChannel(served.at, supervisor, "predictor") as opened:
        served.authority.folder(supervisor.folder, "supervisor")
        opened.get_state()
        assert not opened._retired, "nothing runs on the first channel"
        stream = PredictorStub(opened).Observe(told())
        await say(outcomes, stream, "before")
        fresh = Authority()
        fresh.folder(served.tls.folder, "predictor")
        fresh.folder(supervisor.folder, "supervisor")
        await say(outcomes, stream, "after")  # on the connection that it began with
        second = asyncio.Queue[pb.ObserveRequest]()

        async def told_too() -> AsyncIterator[pb.ObserveRequest]:
            while True:
                yield await second.get()

        stream_too = PredictorStub(opened).Observe(told_too())
        await say(second, stream_too, "anew")
        await say(outcomes, stream, "still")
        assert len(opened._retired) == 1, "each stream has its channel"
        served.servicer.ended.clear()
        stream.cancel()
        await soon(served.servicer.ended.wait())
        await say(second, stream_too, "alone")
        assert not opened._retired, "the old channel is closed, the new one is not"
    old = served.raw(*served.authority.issue("gateway.weft.internal"), fresh.pem)
    assert (await refused(old))[0] is grpc.StatusCode.UNAVAILABLE  # the authority before is not believed any more


async def say(outcomes: "asyncio.Queue[pb.ObserveRequest]", stream: Any, request_id: str) -> None:
    """One outcome there, its acknowledgement back."""
    message = pb.ObserveRequest()
    message.outcomes.add(request_id=request_id)
    outcomes.put_nowait(message)
    assert list((await soon(stream.read())).request_ids) == [request_id]
