"""A supervisor whose leases are in doubt ends once nothing happens: runners tell the next one theirs."""

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY

from harness.waiting import soon
from weft.telemetry.invariants import InvariantViolated
from weft.wire.channels import channel
from weft_supervisor import server as shell
from weft_supervisor.core.events import Beat, RunnerId, RunnerUp
from weft_supervisor.core.supervisor import Config, Supervisor
from weft_supervisor.server import SupervisorServer


def violations(check: str) -> float:
    return REGISTRY.get_sample_value("weft_invariant_violations_total", {"check": check}) or 0.0


async def test_a_runner_without_a_lease_ends_the_process(
    store: Any, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "SHOW_EVERY_S", 0.001)
    before, core = violations("check_supervisor"), Supervisor(config)
    async with channel("127.0.0.1:1") as nobody:
        server = SupervisorServer(core, store, nobody, nobody)
        server.handle(RunnerUp(RunnerId("a", "1"), "ns/pool", 4))
        core.leases.expire(1e9)
        running = asyncio.create_task(server.run(keep_days=30))
        with pytest.raises(ExceptionGroup) as ended:
            await soon(running)
    assert ended.group_contains(InvariantViolated, match="check_supervisor")
    assert violations("check_supervisor") == before + 1


async def test_heartbeats_alone_are_no_activity(store: Any, config: Config) -> None:
    async with channel("127.0.0.1:1") as nobody:
        server = SupervisorServer(Supervisor(config), store, nobody, nobody)
        idle = server._idle  # pyright: ignore[reportPrivateUsage]
        server.handle(RunnerUp(RunnerId("a", "1"), "ns/pool", 4))
        assert not idle.due()
        server.handle(Beat(RunnerId("a", "1")))
        assert idle.due()
