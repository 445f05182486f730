"""A supervisor whose leases are in doubt ends once nothing happens: runners tell the next one theirs."""

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY

from harness.waiting import soon
from tests.integration.supervisor.conftest import spec_of
from weft.domain.ids import RunnerId
from weft.domain.machine import Connected, Received
from weft.domain.runner import Heartbeat
from weft.telemetry.invariants import InvariantViolated
from weft.wire.streams import channel
from weft_supervisor import server as shell
from weft_supervisor.core import Supervisor, SupervisorConfig, runner_peer
from weft_supervisor.server import SupervisorServer

RUNNER = RunnerId("a", "1")


def violations(check: str) -> float:
    return REGISTRY.get_sample_value("weft_invariant_violations_total", {"check": check}) or 0.0


async def test_a_runner_without_a_lease_ends_the_process(
    store: Any, config: SupervisorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "UPDATE_EVERY_S", 0.001)
    before, core = violations("check_runners"), Supervisor(config)
    async with channel("127.0.0.1:1") as nobody:
        server = SupervisorServer(core, store, nobody, nobody)
        server.handle(Connected(runner_peer(RUNNER), spec_of(RUNNER)))
        core.leases.expire(1e9)
        running = asyncio.create_task(server.run())
        with pytest.raises(ExceptionGroup) as ended:
            await soon(running)
    assert ended.group_contains(InvariantViolated, match="check_runners")
    assert violations("check_runners") == before + 1


async def test_heartbeats_alone_are_no_activity(store: Any, config: SupervisorConfig) -> None:
    async with channel("127.0.0.1:1") as nobody:
        server = SupervisorServer(Supervisor(config), store, nobody, nobody)
        idle = server._idle  # pyright: ignore[reportPrivateUsage]
        server.handle(Connected(runner_peer(RUNNER), spec_of(RUNNER)))
        assert not idle.due()
        server.handle(Received(runner_peer(RUNNER), Heartbeat()))
        assert idle.due()
