"""A stack from its start to its end: what `weft up` does before and after it serves."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import SystemRandom
from typing import Any

from weft.api.conversion import with_defaults
from weft.process import DataDirUnusable, lock_data_dir
from weft_operator.core.resources import Object
from weft_operator.errors import ComponentFailed
from weft_operator.local.admission import Admission
from weft_operator.local.components import Options, choose_addresses
from weft_operator.local.controller_log import CONTROLLER, logging_to
from weft_operator.local.file_root import settle_file_root
from weft_operator.local.persistence import Durable, open_store
from weft_operator.local.ports import PortSource, require_free
from weft_operator.local.stack import START_S, Progress, Stack


@asynccontextmanager
async def running(
    options: Options, objects: Iterable[Object], progress: Progress, *, keep: bool = True
) -> AsyncGenerator[Stack]:
    """A stack with every component ready; stopped again, whatever happens, on the way out.

    `objects` are applied, and on disk, before anything starts; beside those of earlier runs (`keep`), or instead.
    Raises Invalid, DataDirInUse, DataDirUnusable, FileRootGone, PortInUse, StoreDamaged, ComponentFailed: then nothing
    is left running.
    """
    async with AsyncExitStack() as exits:
        exits.enter_context(lock_data_dir(options.data_dir, "`weft up`"))
        require_free(options.host, options.port, "--port")
        path = options.data_dir / "objects.json"
        if not keep:
            path.unlink(missing_ok=True)
        store = open_store(path, time.time, with_defaults)
        durable = Durable(store, path)
        admit = Admission(store)
        for obj in objects:
            store.apply(admit(obj, store.find))
        options = replace(options, file_root=settle_file_root(options.data_dir, options.file_root))
        try:
            durable.flush()
        except OSError as error:
            raise DataDirUnusable(f"{path} cannot be written: {error.strerror}") from error
        ports = PortSource(SystemRandom())
        stack = Stack(options, choose_addresses(options, ports), store, durable, ports)
        stack.listen(progress)
        exits.enter_context(logging_to(stack.open_log(CONTROLLER), options.log_level))
        work = stack.work = asyncio.create_task(stack.run(), name="stack")
        try:
            await _first(work, stack.until_ready())
            yield stack
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                stack.kill()
            raise
        finally:
            await stack.close()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


async def _first(work: asyncio.Task[None], ready: Coroutine[Any, Any, None]) -> None:
    """Wait for `ready`, unless the work ends before (which it only does by failing)."""
    waiting = asyncio.create_task(ready)
    try:
        await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        await waiting
    except TimeoutError as error:
        raise ComponentFailed(f"not every component was ready within {START_S:.0f} s") from error
    finally:
        waiting.cancel()
