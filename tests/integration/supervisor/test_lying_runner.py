"""A runner that lies, with a real certificate of its own namespace: whatever it says ends its own stream at most.

Scheduler, supervisor, gateway and the runner of another namespace are processes as they ship, under mutual TLS.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.certificates import Authority
from harness.fleet import POOL, ROLES, Fleet
from harness.quickstart import sure_cases
from harness.waiting import soon
from tests.integration.supervisor.conftest import spec_of
from weft.domain.bounds import MAX_PAGES, MAX_RANK, MAX_REQUEST_TOKENS
from weft.domain.ids import MAX_TERM, RunnerId
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR
from weft.wire.streams import channel
from weft.wire.tls import Tls
from weft.wire.v1 import common_pb2
from weft.wire.v1.supervisor_pb2 import (
    AdapterState,
    Overrun,
    RunnerHello,
    RunnerReport,
    RunnerToSupervisor,
    SequenceState,
    SupervisorToRunner,
)

EVIL = "evil/pool"
MAX_UINT64 = 2**64 - 1
INVALID, DENIED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED


def hello_of(uuid: str, incarnation: str) -> RunnerHello:
    return RUNNER_TO_SUPERVISOR.encode(spec_of(RunnerId(uuid, incarnation), pool=EVIL)).hello


class Liar:
    """Streams to the supervisor under the certificate of namespace `evil`."""

    def __init__(self, fleet: Fleet, tls: Tls) -> None:
        self._opened = channel(fleet.at["supervisor"], tls, "supervisor")
        self._incarnations = itertools.count()

    def hello(self, *, uuid: str = "evil.u", **fields: Any) -> RunnerHello:
        said = hello_of(uuid, f"i{next(self._incarnations)}")
        said.MergeFrom(RunnerHello(**fields))
        for name in [name for name, value in fields.items() if not value]:
            said.ClearField(name)  # pyright: ignore[reportArgumentType]
        return said

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Any]:
        """Bytes, so that anything can be said."""
        call: Any = self._opened.stream_stream(
            "/weft.v1.Supervisor/Runner", lambda message: message, SupervisorToRunner.FromString
        )()
        yield call
        call.cancel()

    async def refused(self, code: grpc.StatusCode, *messages: RunnerToSupervisor | bytes) -> None:
        """The last message ends the stream with that status, and a reason."""
        async with self.stream() as call:
            for message in messages:
                await call.write(message if isinstance(message, bytes) else message.SerializeToString())
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await _hears(call, "the end")
        assert ended.value.code() is code, (messages, ended.value.details())
        assert ended.value.details()

    async def close(self) -> None:
        await self._opened.close(None)


def said(hello: RunnerHello) -> RunnerToSupervisor:
    return RunnerToSupervisor(hello=hello)


def report(**fields: Any) -> RunnerToSupervisor:
    plain = {"version": 1, "full": True, "free_pages": 4, "ready": True}
    return RunnerToSupervisor(report=RunnerReport(**plain | fields))


LAST = common_pb2.Epoch(term=MAX_TERM - 1, counter=MAX_UINT64)


def sequence(request_id: str, **fields: Any) -> SequenceState:
    return SequenceState(request_id=request_id, epoch=LAST, **fields)


HUGE = 2**32 - 1
BAD_REPORTS = {  # more of them, each by itself, in the unit tests of the codec and of the supervisor
    "more free pages than there are": report(free_pages=HUGE),
    "more used pages than there are": report(used_pages=HUGE),
    "an overrun of more pages than any runner has": report(overruns=[Overrun(request_id="r", wanted_pages=HUGE)]),
    "a crowd": report(sequences=[sequence(f"r{i}") for i in range(1000)]),
    "an adapter used by more than there can be": report(adapters=[AdapterState(digest="sha256:x", running=HUGE)]),
    "garbage": b"\xff\xff\xff\xff garbage",
    "garbage in a report": b"\x22\x04\xff\xff\xff\xff",
    "a second hello": said(hello_of("evil.v", "i")),
}
# Allowed, and lies all the same: they are its own, whatever they are.
OWN_LIES = {
    "no end of work": [
        report(tokens=1), report(version=2, full=False, tokens=MAX_UINT64), report(version=3, full=False),
    ],
    "the last report for ever": [
        report(version=MAX_UINT64, desired_version=MAX_UINT64, grown_pages=MAX_UINT64, doublings=MAX_UINT64)
    ],
    "full of what no gateway sent": [
        report(
            free_pages=0,
            used_pages=4,
            adapter_pages=4,
            sequences=[
                sequence(f"r{i}", arrived_ms=-(2**63), reserved_pages=MAX_PAGES, reservation_tokens=MAX_REQUEST_TOKENS)
                for i in "ab"
            ],
            overruns=[
                Overrun(request_id="ra", epoch=LAST, wanted_pages=MAX_PAGES, reservation_tokens=MAX_REQUEST_TOKENS)
            ],
            adapters=[AdapterState(digest="sha256:x", error="e" * 100_000, bytes=MAX_UINT64, rank=MAX_RANK)],
        )
    ],
    "ends and removals of what was never there": [
        report(),
        report(version=2, full=False, ended=["r"] * 1000, removed_adapters=["sha256:x"] * 1000, progress=[HUGE] * 1000),
    ],
}  # fmt: skip


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    authority = Authority()
    tls = authority.folders(tmp_path / "tls", ROLES)
    authority.folder(tmp_path / "evil", "runner", "evil.runner")
    with Fleet(tmp_path, tls).running() as fleet:
        fleet.control_plane()
        yield fleet


async def lie(fleet: Fleet, liar: Liar) -> None:
    """Everything once, each lie on a stream of its own."""
    victim = "weft-system." + (fleet.folder / "data" / "runner" / "uuid").read_text().strip()
    for pages in (0, MAX_PAGES + 1, HUGE):
        await liar.refused(INVALID, said(liar.hello(total_pages=pages)))
    await liar.refused(INVALID, report())
    await liar.refused(INVALID, said(liar.hello(address="h" * 1000)))
    await liar.refused(DENIED, said(liar.hello(uuid=victim)))
    await liar.refused(DENIED, said(liar.hello(uuid=victim, pool=POOL)))
    await liar.refused(DENIED, said(liar.hello(pool=POOL)))
    for bad in BAD_REPORTS.values():
        await liar.refused(INVALID, said(liar.hello()), report(), bad)
    for words in OWN_LIES.values():
        async with liar.stream() as call:
            for message in (said(liar.hello()), *words):
                await call.write(message.SerializeToString())
            await _hears(call, "order")  # the scheduler has taken its report in


async def _hears(call: Any, kind: str) -> None:
    while (await soon(call.read())).WhichOneof("message") != kind:
        pass


@pytest.mark.slow
async def test_a_lying_runner_ends_nothing_but_its_own_streams(fleet: Fleet) -> None:
    adapters = await fleet.resolved()
    fleet.runner("runner")
    liar, term = Liar(fleet, Tls(fleet.folder / "evil", "runner")), fleet.folder / "data" / "scheduler" / "term"
    cases = sure_cases(("acme/upper",), 12, seed=7)
    async with fleet.registry(adapters, others=(EVIL,)) as registry:
        await registry.until_ready(1)
        await fleet.ready("gateway")
        before = {name: process.pid for name, process in fleet.processes.items()}, term.read_text()
        answers, lies = asyncio.gather(*map(fleet.completion, cases)), asyncio.create_task(lie(fleet, liar))
        assert await answers == [case.expect for case in cases]
        await lies
        assert registry.pools[POOL].ready_runners == 1
        assert ({name: process.pid for name, process in fleet.processes.items()}, term.read_text()) == before
        fleet.check()
        fleet.kill("scheduler")  # the next one starts from what the liar has left
        fleet.start_again("scheduler")
        registry.pools.clear()
        await registry.until_ready(1)
        assert int(term.read_text()) <= int(before[1]) + 2
        await fleet.ready("gateway")
        assert await fleet.completion(cases[0]) == cases[0].expect
    await liar.close()
    log = fleet.log("scheduler").read_text()
    assert "fatal" not in log
    assert not [line for line in log.splitlines() if "runner ended" in line and "weft-system." in line]
