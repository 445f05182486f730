"""An idle scheduler checks its state: wrong accounts are reported, doubt about who owns a request ends the process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from harness.waiting import soon
from weft.domain.machine import Connected, Kind, Peer, Received
from weft.domain.request import Cancel, ResubmitComplete, Submit
from weft.domain.routes import PoolSpec, RegistryChange, RegistryHello
from weft.telemetry.invariants import InvariantViolated
from weft_scheduler import server as shell
from weft_scheduler.core import SchedulerConfig
from weft_scheduler.metrics import SchedulerMetrics
from weft_scheduler.server import Server
from weft_scheduler.term_file import TermFile

POOL = "acme/p"
OPERATOR, GATEWAY = Peer(Kind.REGISTRY, "r"), Peer(Kind.GATEWAY, "g")


def violations(check: str) -> float:
    return REGISTRY.get_sample_value("weft_invariant_violations_total", {"check": check}) or 0.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """With one request that waits. Looks at its gauges, and at its state, only when a test does."""
    made = Server(SchedulerConfig(), TermFile(tmp_path), asyncio.Event(), metrics=SchedulerMetrics(CollectorRegistry()))
    made.feed(Connected(OPERATOR, RegistryHello()))
    made.feed(Received(OPERATOR, RegistryChange(True, (PoolSpec(POOL, "sha256:base", "base"),))))
    made.feed(Connected(GATEWAY))
    made.feed(Received(GATEWAY, ResubmitComplete()))
    made.feed(Received(GATEWAY, Submit("r", POOL, "acme", "base", "", 16, 100)))
    yield made
    made.close()


def look(server: Server) -> None:
    server._observe()  # pyright: ignore[reportPrivateUsage]


async def test_wrong_accounts_are_reported_once_and_it_goes_on(server: Server) -> None:
    before = violations("check_counts")
    server.core.state.pools[POOL].waiting.running = 7
    for _ in range(3):
        look(server)
    assert violations("check_counts") == before + 1
    assert server.failure is None
    server.feed(Connected(Peer(Kind.GATEWAY, "other")))
    for _ in range(3):
        look(server)
    assert violations("check_counts") == before + 2


async def test_doubt_about_who_owns_a_request_ends_the_process(server: Server) -> None:
    stop = server._stop  # pyright: ignore[reportPrivateUsage]
    server.core.state.gateways["g"].requests.clear()
    for _ in range(2):
        look(server)
    assert stop.is_set()
    assert isinstance(server.failure, InvariantViolated)
    assert str(server.failure) == "check_nothing_lost"


async def test_a_busy_scheduler_or_large_state_is_not_checked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = violations("check_counts")
    server.core.state.pools[POOL].waiting.running = 7
    for _ in range(3):
        server.feed(Received(GATEWAY, Cancel("unknown")))
        look(server)
    monkeypatch.setattr(shell, "MAX_CHECKED", 0)
    look(server)
    assert violations("check_counts") == before


async def test_the_service_looks_by_itself(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "GAUGES_S", 0.001)
    server.core.state.gateways["g"].requests.clear()
    server.register(grpc.aio.server())
    await soon(server._stop.wait())  # pyright: ignore[reportPrivateUsage]
