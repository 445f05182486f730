"""The stack of `weft up`: every component as a process of this machine, and the controller that plans for them.

Everything starts at once; each component waits only for its dependencies. A data directory has one controller (a lock),
and all its processes end with it, also after `kill -9`.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import SystemRandom
from typing import Any

from weft.api.conversion import with_defaults
from weft.domain.routes import AdapterStatus, PoolStatus
from weft.files import write_atomically
from weft.process import EXIT_CANNOT_START, DataDirUnusable, lock_data_dir
from weft.telemetry.logs import kv
from weft_operator.controller.depot_client import DepotClient
from weft_operator.controller.loop import Controller
from weft_operator.controller.registry_client import RegistryClient
from weft_operator.core.resources import Object, Ref
from weft_operator.core.state import DesiredState, RunnerProcess
from weft_operator.errors import ComponentFailed
from weft_operator.local.admission import ObjectAdmission
from weft_operator.local.api import LocalApi, serve
from weft_operator.local.backend import LocalBackend, LocalMachine
from weft_operator.local.components import SOCKET, Addresses, Options, Ports, choose_addresses, component_programs
from weft_operator.local.logs import CONTROLLER, LogFile, logging_to
from weft_operator.local.objects import ObjectStore
from weft_operator.local.persistence import RETRY_S, Durable, open_store, settle_file_root
from weft_operator.local.processes import ChildProcess, ProcessState, Program, described
from weft_operator.local.sockets import PortSource, require_free

log = logging.getLogger(__name__)

# After a Ctrl-C a slower program is killed. Acknowledged data is durable already.
INTERRUPTED_STOP_S = 2.0
START_S = 300.0  # of a slow, busy machine: a component unable to start fails much earlier

Progress = Callable[[str, ProcessState], None]


class Stack:
    """The processes and the controller of one data directory. Made by `running()`."""

    def __init__(self, options: Options, addresses: Addresses, store: ObjectStore, durable: Durable, ports: Ports):
        self.options, self.addresses, self.store, self.durable = options, addresses, store, durable
        self.logs: dict[str, LogFile] = {}
        self._processes: dict[str, ChildProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._listeners: list[Progress] = []
        self._changed = asyncio.Event()
        self._written: dict[str, Any] = {}
        self.work: asyncio.Task[None] | None = None
        self.interrupted = False  # by Ctrl-C: `close` cuts streams
        self._planning: asyncio.Task[None] | None = None
        self.registry = RegistryClient(
            addresses.scheduler, on_pool=self._on_pool_report, on_adapter=self._on_adapter_report
        )
        self.backend = LocalBackend(
            store,
            LocalMachine(
                options.data_dir,
                addresses.supervisor,
                addresses.depot_url,
                options.executor,
                options.log_level,
                options.runner,
            ),
            ports=ports,
            open_log=self.open_log,
            on_runner=self._on_runner,
            on_process=self._on_process,
        )
        self._depot = DepotClient(addresses.depot_url)
        self._controller = Controller(self.backend, self._depot, self.registry, desired=DesiredState())

    # ------------------------------------------------------------------------------------------- its life

    def listen(self, progress: Progress) -> None:
        """Call the listener for every change of every component."""
        self._listeners.append(progress)

    async def run(self) -> None:
        """Run all parts of the stack. It ends with the first failing part."""
        for program in component_programs(self.options, self.addresses):
            self._start(program)
        api = LocalApi(
            self.store, self.durable, admit=ObjectAdmission(self.store), logs=self.logs, describe=self.describe
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.durable.run(), name="durable")
            tasks.create_task(serve(api, self.options.data_dir / SOCKET), name="api")
            self._planning = tasks.create_task(self._control(), name="control")
            tasks.create_task(self._keep_description(), name="description")

    async def until_ready(self) -> None:
        """Wait until every component is ready and every object was planned once. Raises ComponentFailed."""
        async with asyncio.timeout(START_S):
            while waiting := [name for name, process in self._processes.items() if process.state.phase != "Ready"]:
                self._changed.clear()
                for name in waiting:
                    self._require_alive(name)
                await self._changed.wait()
            await self._controller.planned.wait()
        self._write_description()

    async def failed(self) -> None:
        """Wait until a part of the stack itself fails, and raise its error. A failing component is only restarted."""
        assert self.work is not None
        await asyncio.wait([self.work])
        self.work.result()

    async def close(self) -> None:
        """Stop everything: the gateway finishes its streams while runners still run, the rest follows."""
        if self._planning:
            self._planning.cancel()  # the ending processes must not be planned for
        within_s = INTERRUPTED_STOP_S if self.interrupted else None
        if gateway := self._processes.get("gateway"):
            gateway.stop(signal.SIGINT if self.interrupted else signal.SIGTERM, within_s)
            await self._ended(["gateway"])
        await self.backend.close(within_s)
        for process in self._processes.values():
            process.stop(within_s=within_s)
        await self._ended(self._processes)
        for logfile in self.logs.values():
            logfile.close()
        self.durable.flush()
        self._write_description(stopped=True)

    def kill(self) -> None:
        """End every process at once."""
        for task in self._tasks.values():
            task.cancel()
        self.backend.kill()

    def describe(self) -> dict[str, Any]:
        """Describe addresses and states: `stack.json`."""
        processes = self._processes | self.backend.processes
        return {
            "pid": os.getpid(),
            "dataDir": str(self.options.data_dir),
            "gateway": self.addresses.gateway_url,
            "supervisor": self.addresses.supervisor,
            "scheduler": self.addresses.scheduler,
            "predictor": self.addresses.predictor,
            "depot": self.addresses.depot_url,
            "batch": self.addresses.batch,
            "auth": self.options.auth,
            "registryUp": self.registry.up,
            "components": {name: described(process) for name, process in processes.items()},
        }

    # -------------------------------------------------------------------------------------------- parts

    async def _control(self) -> None:
        """Run the controller, as soon as there is a depot to ask."""
        await self._ready("depot")
        controller = self._controller
        controller.load(self.store.objects())
        self.store.listen(lambda event: controller.on_object(event.object, deleted=event.type == "DELETED"))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(controller.run(), name="controller")
                tasks.create_task(self.registry.run(), name="registry")
        finally:
            await self._depot.aclose()

    # The controller needs the next three methods, and they need the controller.

    def _on_runner(self, pool: Ref, index: int, runner: RunnerProcess | None) -> None:
        self._controller.on_runner(pool, index, runner)

    def _on_pool_report(self, pool: str, report: PoolStatus) -> None:
        self._controller.on_pool_report(pool, report)

    def _on_adapter_report(self, uid: str, report: AdapterStatus) -> None:
        self._controller.on_adapter_report(uid, report)

    def _start(self, program: Program) -> None:
        name = program.name
        process = ChildProcess(program, self.open_log(name), lambda state: self._on_process(name, state))
        self._processes[name] = process
        self._tasks[name] = asyncio.create_task(process.run(), name=name)

    def open_log(self, name: str) -> LogFile:
        """Open the log of a component, once."""
        if name not in self.logs:
            self.logs[name] = LogFile(self.options.data_dir / "logs" / f"{name}.log")
        return self.logs[name]

    def _on_process(self, name: str, state: ProcessState) -> None:
        self._changed.set()
        for listener in self._listeners:
            listener(name, state)

    async def _ready(self, name: str) -> None:
        while self._processes[name].state.phase != "Ready":
            self._changed.clear()
            await self._changed.wait()

    def _require_alive(self, name: str) -> None:
        state = self._processes[name].state
        if state.phase == "Backoff" and (state.exit_code == EXIT_CANNOT_START or state.crash_loop):
            path = self.logs[name].path
            raise ComponentFailed(f"{name} does not start: {state.detail} (its log: {path})")

    async def _ended(self, names: Iterable[str]) -> None:
        await asyncio.gather(*(self._tasks[name] for name in names), return_exceptions=True)

    async def _keep_description(self) -> None:
        """Write `stack.json` again whenever a process changes."""
        while True:
            self._changed.clear()  # every waiter checks its condition after clearing, so it misses nothing
            try:
                self._write_description()
            except OSError as error:
                log.error("stack.json is not written", extra=kv(error=error))
                await asyncio.sleep(RETRY_S)
                continue
            await self._changed.wait()
            await asyncio.sleep(0.05)  # many changes come together at the start

    def _write_description(self, *, stopped: bool = False) -> None:
        path = self.options.data_dir / "stack.json"
        if stopped:
            path.unlink(missing_ok=True)
            return
        description = self.describe()
        if description != self._written:
            write_atomically(path, json.dumps(description, indent=1).encode() + b"\n")
            self._written = description


@asynccontextmanager
async def running(
    options: Options, objects: Iterable[Object], progress: Progress, *, keep: bool = True
) -> AsyncGenerator[Stack]:
    """Start a stack, and yield it once every component is ready; always stop it on the way out.

    `objects` are applied and on disk before anything starts. `keep`: they are added to the objects of earlier runs;
    otherwise they replace them. After an error nothing is left running. Raises Invalid, DataDirInUse, DataDirUnusable,
    FileRootGone, PortInUse, StoreDamaged, ComponentFailed.
    """
    async with AsyncExitStack() as exits:
        exits.enter_context(lock_data_dir(options.data_dir, "`weft up`"))
        require_free(options.host, options.port, "--port")
        path = options.data_dir / "objects.json"
        if not keep:
            path.unlink(missing_ok=True)
        store = open_store(path, time.time, with_defaults)
        durable = Durable(store, path)
        admit = ObjectAdmission(store)
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
    """Wait for `ready`. Raises the error of the work if the work fails first."""
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
