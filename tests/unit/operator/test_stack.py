"""The description of a local stack."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness.waiting import soon
from weft_gateway.settings import GatewaySettings
from weft_operator.local import (
    Durable,
    Options,
    PortSource,
    ProcessState,
    Stack,
    choose_addresses,
    component_programs,
    open_store,
)


async def test_a_stack_is_described_again_only_when_something_has_changed(tmp_path: Path) -> None:
    options, ports = Options(tmp_path), PortSource(Random(0))
    store = open_store(tmp_path / "objects.json", lambda: 0.0)
    durable = Durable(store, tmp_path / "objects.json")
    stack = Stack(options, choose_addresses(options, ports), store, durable, ports)
    described = asyncio.Event()
    to_describe: list[bool] = []

    def describe() -> dict[str, object]:
        to_describe.append(stack._changed.is_set())  # then it is described once more
        described.set()
        return {}

    stack.describe = describe
    task = asyncio.create_task(stack._keep_description())
    for _ in range(2):
        await soon(described.wait())
        described.clear()
        stack._on_process("gateway", ProcessState())
    task.cancel()
    ports.close()
    assert to_describe == [False, False]


def test_the_gateway_gets_names_and_origins_of_the_command_line_and_no_second_port(tmp_path: Path) -> None:
    ports = PortSource(Random(0))

    def gateway(*names: str, **more: Any) -> GatewaySettings:
        options = Options(tmp_path, allowed_hosts=names, **more)
        programs = component_programs(options, choose_addresses(options, ports))
        (words,) = [program.argv for program in programs if program.name == "gateway"]
        return GatewaySettings.parse(words[3:])

    assert gateway("gpu-box", "*.example.com").allowed_hosts == ["gpu-box", "*.example.com"]
    assert (gateway().allowed_hosts, gateway().probes, gateway().cors_origins) == ([], None, [])
    assert gateway(cors_origins=("http://a:1", "http://b")).cors_origins == ["http://a:1", "http://b"]
    ports.close()


@pytest.mark.parametrize("text", ["gpu-box, *.example.com", '["gpu-box", "*.example.com"]'])
def test_names_of_the_environment_are_a_list_with_commas_or_json(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_GATEWAY__ALLOWED_HOSTS", text)
    assert GatewaySettings.parse([]).allowed_hosts == ["gpu-box", "*.example.com"]
