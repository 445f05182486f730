"""A supervisor whose leases are in doubt ends once nothing happens: runners tell the next one theirs."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from harness.waiting import soon
from tests.integration.supervisor.conftest import spec_of
from weft.domain.ids import RunnerId
from weft.domain.machine import TICK, Connected, Received
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


async def test_a_machine_that_fails_at_a_deadline_ends_the_process(
    store: Any, config: SupervisorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Supervisor(replace(config, lease_s=0.01))
    handle = core.handle

    def broken(event: Any, now: float) -> Any:
        if event is TICK:
            raise KeyError("a mistake of ours")
        return handle(event, now)

    monkeypatch.setattr(core, "handle", broken)
    async with channel("127.0.0.1:1") as nobody:
        server = SupervisorServer(core, store, nobody, nobody)
        server.handle(Connected(runner_peer(RUNNER), spec_of(RUNNER)))
        with pytest.raises(ExceptionGroup) as ended:
            await soon(server.run())
    assert ended.group_contains(KeyError, match="a mistake of ours")


async def test_heartbeats_alone_are_no_activity(store: Any, config: SupervisorConfig) -> None:
    before, core = violations("check_runners"), Supervisor(config)
    async with channel("127.0.0.1:1") as nobody:
        server = SupervisorServer(core, store, nobody, nobody)
        check_idle = server._shell.check_idle  # pyright: ignore[reportPrivateUsage]
        server.handle(Connected(runner_peer(RUNNER), spec_of(RUNNER)))
        assert check_idle() is None
        core.leases.expire(1e9)
        server.handle(Received(runner_peer(RUNNER), Heartbeat()))
        server.handle(TICK)
        assert check_idle() == "check_runners"
    assert violations("check_runners") == before + 1
