"""Whose runner a runner may be: what its certificate says, over real gRPC with mutual TLS."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from harness.certificates import Authority
from harness.grpc_server import listening
from harness.waiting import PATIENCE_S
from tests.integration.supervisor.conftest import RunnerClient, World
from weft.domain.ids import RunnerId
from weft.wire.serving import server_credentials
from weft.wire.streams import channel
from weft.wire.tls import Tls
from weft.wire.v1.supervisor_pb2_grpc import SupervisorStub, add_SupervisorServicer_to_server
from weft_supervisor import server as shell


class Secured:
    """The supervisor of a world behind TLS; runners with certificates for namespaces."""

    def __init__(self, at: str, authority: Authority, folder: Path) -> None:
        self._at, self._authority, self._folder = at, authority, folder
        self.opened: list[grpc.aio.Channel] = []

    def runner(self, *namespaces: str, uuid: str = "ns.a") -> RunnerClient:
        names = ("runner", *(f"{namespace}.runner" for namespace in namespaces))
        folder = self._authority.folder(self._folder / "-".join(names), *names)
        self.opened.append(channel(self._at, Tls(folder, "runner"), "supervisor"))
        stub = SupervisorStub(self.opened[-1])
        return RunnerClient(stub.Runner(), id=RunnerId(uuid, "1"))


@pytest.fixture
async def secured(world: World, tmp_path: Path) -> AsyncIterator[Secured]:
    authority = Authority()
    own = server_credentials(Tls(authority.folder(tmp_path / "supervisor", "supervisor"), "supervisor"))
    async with listening(lambda s: add_SupervisorServicer_to_server(world.server, s), own, grace_s=PATIENCE_S) as at:
        yield (secured := Secured(at, authority, tmp_path))
        for opened in secured.opened:
            await opened.close(None)


async def test_a_runner_of_its_own_namespace_is_registered(secured: Secured) -> None:
    assert (await secured.runner("ns").hello()).lease_ms  # it says it is of ns/pool


async def test_a_runner_does_not_pass_for_one_of_another_namespace(secured: Secured) -> None:
    runner = secured.runner("evil")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await runner.hello()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "for runners of namespace evil, not of pool 'ns/pool'" in str(refused.value.details())


@pytest.mark.parametrize("uuid", ["other.a", "a", "nsx.a", "ns"])
async def test_a_runner_does_not_take_the_uuid_of_another_namespace(secured: Secured, uuid: str) -> None:
    runner = secured.runner("ns", uuid=uuid)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await runner.hello()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert f"uuid '{uuid}' does not begin with 'ns.'" in str(refused.value.details())


async def test_a_certificate_that_names_no_namespace_is_for_all_of_them(secured: Secured) -> None:
    assert (await secured.runner().hello()).lease_ms


async def test_one_certificate_has_so_many_streams_and_hellos_a_second(
    secured: Secured, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "MAX_STREAMS", 1)
    first = secured.runner("ns")
    await first.hello()
    with pytest.raises(grpc.aio.AioRpcError) as refused:  # it is refused unread: of a call that is written to
        await secured.runner("ns", uuid="ns.b").read()  # as it ends, gRPC loses the status
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await secured.runner("ns2", uuid="ns2.b").hello()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED, "it gets as far as its pool"
    monkeypatch.setattr(shell, "MAX_STREAMS", 100)
    monkeypatch.setattr(shell, "HELLO_BURST", 2.0)
    monkeypatch.setattr(shell, "HELLOS_PER_S", 1e-6)
    world.server._hellos_of.clear()  # pyright: ignore[reportPrivateUsage]
    for uuid in ("ns.b", "ns.c"):
        await secured.runner("ns", uuid=uuid).hello()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await secured.runner("ns", uuid="ns.d").hello()
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "hellos a second" in str(refused.value.details())


async def test_reports_are_read_no_faster_than_one_stream_may_send_them(
    secured: Secured, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "REPORT_BURST", 5.0)
    monkeypatch.setattr(shell, "REPORTS_PER_S", 1e-3)
    fast, other = secured.runner("ns", uuid="ns.fast"), secured.runner("ns", uuid="ns.other")
    await fast.hello()
    for _ in range(20):
        await fast.report(free=4)
    monkeypatch.setattr(shell, "REPORT_BURST", 100.0)
    await other.hello()
    await other.report(free=4)
    await world.scheduler.report_with(lambda report: any(one.runner == other.id for one in report.reports))
    versions = {book.spec.runner: book.version for book in world.server.core.live()}
    assert versions == {fast.id: 4, other.id: 1}, "the hello and four reports of twenty"
