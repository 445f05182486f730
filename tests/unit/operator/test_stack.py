"""The description of a local stack."""

import asyncio
from pathlib import Path
from random import Random

from harness.waiting import soon
from weft_operator.local import Durable, Options, PortSource, ProcessState, Stack, choose_addresses, open_store


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
