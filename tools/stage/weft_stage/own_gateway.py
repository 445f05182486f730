"""A gateway of a benchmark's own, beside that of a stack and with the stack's peers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from weft_stage.process import Process
from weft_stage.stack import Stack


@contextlib.asynccontextmanager
async def own_gateway(
    stack: Stack, folder: Path, auth: str, *, depot_url: str = "", environment: Mapping[str, str] | None = None
) -> AsyncGenerator[Process]:
    """The gateway once it is ready, with its data in `folder/gateway`; clients reach it where its probes are.

    `auth`: `--auth` or `--no-auth`; `depot_url`: where it reaches the depot, if not as the stack does.
    Raises StackFailed.
    """
    address = f"127.0.0.1:{stack.ports(1)[0]}"
    flags = {"http": address, "depot": depot_url or stack.address("depot"), "data-dir": folder / "gateway"}
    flags |= {peer: stack.address(peer) for peer in ("scheduler", "predictor")}
    made = Process("gateway", "weft_gateway", flags, address, folder, words=[auth], environment=environment)
    try:
        await made.until(made.ready, "is ready")
        yield made
    finally:
        await asyncio.to_thread(made.stop)
