"""A part of the process that dies takes the process with it: at once, with its streams and its lease, exit code 1."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

import weft_runner.shell.process as process
import weft_runner.shell.supervisor_link as supervisor_link
from harness.ports import free_port
from harness.ranks import settings_of as runner_settings
from harness.runner_peers import Gateway, Supervisor, supervised
from harness.waiting import PATIENCE_S, soon
from weft.telemetry.probes import Shortages
from weft_runner.core.request_pool import RequestPool

NEVER_S = 1e6


@pytest.fixture(autouse=True)
def no_drain_ends(monkeypatch: Any) -> None:
    """Whoever waits for the drain that a dead engine cannot answer waits for ever."""
    monkeypatch.setattr("weft_runner.shell.server.DRAIN_S", NEVER_S)


class Beats:
    """The probes' place."""

    def __init__(self) -> None:
        self.shortages = Shortages()

    def beat(self) -> None:
        return None


@pytest.fixture
def settings_of(world: Any, depot: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """Settings of a runner under a supervisor; its metrics have a registry of their own."""
    monkeypatch.setattr(process, "REGISTRY", CollectorRegistry())
    base = depot.publish("model", world.base)
    (tmp_path / "data").mkdir()

    def settings(supervisor: str) -> Any:
        flags = {"listen": f"127.0.0.1:{free_port()}", "supervisor": supervisor, "depot": depot.url}
        return runner_settings(**flags, data_dir=tmp_path / "data", base_digest=base, executor="auto")

    return settings


async def exit_code_after(settings_of: Any, fail: Callable[[Supervisor, Gateway], Any]) -> int:
    """Serve until a gateway's stream runs, let a part fail, and await the end of streams and process."""
    async with supervised() as (supervisor, where), asyncio.timeout(PATIENCE_S):
        settings = settings_of(where)
        serving = asyncio.create_task(process.serve_runner(settings, Beats(), lambda _: None))  # type: ignore[arg-type]
        await supervisor.until(lambda: bool(supervisor.states))
        async with Gateway(settings.listen, supervisor.hellos[0].runner.incarnation) as gateway:
            await gateway.next("ready")
            fail(supervisor, gateway)
            while await gateway.call.read() is not grpc.aio.EOF:
                pass
            await supervisor.over.wait()
            return await serving


def some_start(_: Supervisor, gateway: Gateway) -> None:
    gateway.start("r", [3])


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


async def test_a_dead_engine_lets_go_of_streams_and_lease_at_once(settings_of, monkeypatch):
    monkeypatch.setattr(RequestPool, "account", raising)
    assert await exit_code_after(settings_of, some_start) == 1


async def test_books_that_do_not_balance_end_the_process_and_are_counted(settings_of, monkeypatch):
    def check_pages(*_: Any) -> None:
        raise AssertionError("3 free + 2 held are not 6 pages")

    counted = ("weft_invariant_violations_total", {"check": "check_pages"})
    before = REGISTRY.get_sample_value(*counted) or 0.0

    def fail(supervisor: Supervisor, gateway: Gateway) -> None:
        monkeypatch.setattr("weft_runner.core.runner.check_pool", check_pages)
        supervisor.order()  # the next beat has no batch

    assert await exit_code_after(settings_of, fail) == 1
    assert REGISTRY.get_sample_value(*counted) == before + 1


async def test_a_dead_link_to_the_supervisor_ends_the_process(settings_of, monkeypatch):
    def fail(supervisor: Supervisor, gateway: Gateway) -> None:
        monkeypatch.setattr(supervisor_link, "SUPERVISOR_TO_RUNNER", SimpleNamespace(decode=raising))
        supervisor.order()

    assert await exit_code_after(settings_of, fail) == 1


async def test_what_cannot_be_delivered_ends_the_process(settings_of, monkeypatch):
    def fail(supervisor: Supervisor, gateway: Gateway) -> None:
        monkeypatch.setattr("weft_runner.shell.server.RUNNER_TO_GATEWAY", SimpleNamespace(encode=raising))
        some_start(supervisor, gateway)

    assert await exit_code_after(settings_of, fail) == 1


async def test_an_engine_that_fails_in_its_first_beat_ends_the_process(settings_of, monkeypatch):
    monkeypatch.setattr(RequestPool, "schedule", raising)
    settings = settings_of("127.0.0.1:1")
    assert await soon(process.serve_runner(settings, Beats(), lambda _: None)) == 1  # type: ignore[arg-type]
