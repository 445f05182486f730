"""The planner's orders on one machine: statuses into the object store, runners as processes.

A runner keeps its folder (its uuid, its blobs) and its ports as long as its pool has the runner's index.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from weft.api.servingpool import Memory
from weft.telemetry.logs import kv
from weft_operator.core.actions import (
    AddFinalizer,
    ApplyChild,
    DeleteChild,
    EnsureRunner,
    RecordEvent,
    RemoveFinalizer,
    RemoveRunner,
    ScaleChild,
    SetPodDeletionCost,
    SetStatus,
)
from weft_operator.core.resources import Ref
from weft_operator.core.state import RunnerConfig, RunnerProcess
from weft_operator.local.components import RUNNER
from weft_operator.local.logs import LogFile
from weft_operator.local.objects import ObjectStore
from weft_operator.local.processes import ChildProcess, ProcessState, Program
from weft_operator.local.sockets import LOOPBACK

log = logging.getLogger(__name__)

PAGES = 1024  # of a pool without a KV size

OnRunner = Callable[[Ref, int, RunnerProcess | None], None]


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """The common settings of this machine's runners."""

    data_dir: Path
    supervisor: str  # host:port
    depot_url: str
    executor: str | None = None
    log_level: str = "INFO"
    runner: tuple[str, ...] = RUNNER


@dataclass(slots=True)
class LocalRunner:
    """The process of a runner. `launch` is the configuration of its last start."""

    process: ChildProcess
    launch: RunnerConfig
    ports: tuple[int, ...]
    task: asyncio.Task[None]
    leaving: bool = False


class LocalBackend:
    """The owner of the runners. `on_runner` is called for every change, on the event loop."""

    def __init__(
        self,
        store: ObjectStore,
        machine: LocalMachine,
        *,
        ports: Callable[[int], list[int]],
        open_log: Callable[[str], LogFile],
        on_runner: OnRunner,
        on_process: Callable[[str, ProcessState], None],
    ) -> None:
        self._store, self._machine = store, machine
        self._ports, self._open_log = ports, open_log
        self._on_runner, self._on_process = on_runner, on_process
        self._runners: dict[tuple[Ref, int], LocalRunner] = {}

    @property
    def processes(self) -> dict[str, ChildProcess]:
        """Every runner's process, by component name."""
        return {runner.process.program.name: runner.process for runner in self._runners.values()}

    async def set_status(self, action: SetStatus) -> None:
        self._store.set_status(action.ref, action.uid, action.resource_version, action.status)

    async def remove_finalizer(self, action: RemoveFinalizer) -> None:
        self._store.remove_finalizer(action.ref, action.uid, action.resource_version, action.finalizer)

    async def record_event(self, action: RecordEvent) -> None:
        """Log the Event instead of sending it. The conditions give the same facts."""
        level = logging.WARNING if action.type == "Warning" else logging.INFO
        fields = kv(object=str(action.ref), reason=action.reason, message=action.message)
        log.log(level, "announced", extra=fields)

    async def add_finalizer(self, action: AddFinalizer) -> None:
        raise AssertionError(f"objects here have no finalizer of ours: {action}")

    async def apply_child(self, action: ApplyChild) -> None:
        raise AssertionError(f"runners are processes here: {action}")

    async def delete_child(self, action: DeleteChild) -> None:
        raise AssertionError(f"runners are processes here: {action}")

    async def scale_child(self, action: ScaleChild) -> None:
        raise AssertionError(f"runners are processes here: {action}")

    async def set_pod_deletion_cost(self, action: SetPodDeletionCost) -> None:
        raise AssertionError(f"runners are processes here: {action}")

    async def ensure_runner(self, action: EnsureRunner) -> None:
        key, launch = (action.pool, action.index), action.launch
        runner = self._runners.get(key)
        if runner is None:
            self._runners[key] = self._start(action)
        elif runner.launch != launch:
            runner.launch = launch
            runner.process.replace(runner_program(action, self._machine, runner.ports))
        self._changed(key)

    async def remove_runner(self, action: RemoveRunner) -> None:
        key = (action.pool, action.index)
        if runner := self._runners.get(key):
            runner.leaving = True
            runner.process.stop()
            self._changed(key)

    async def close(self, within_s: float | None = None) -> None:
        """Stop every runner and wait for its end; killed after `within_s`."""
        runners = list(self._runners.values())
        for runner in runners:
            runner.process.stop(within_s=within_s)
        await asyncio.gather(*(runner.task for runner in runners), return_exceptions=True)

    def kill(self) -> None:
        """End every runner at once."""
        for runner in self._runners.values():
            runner.task.cancel()

    def _start(self, action: EnsureRunner) -> LocalRunner:
        ports = tuple(self._ports(3))
        program = runner_program(action, self._machine, ports)
        key = (action.pool, action.index)

        def on_change(state: ProcessState) -> None:
            self._on_process(program.name, state)
            self._changed(key)

        process = ChildProcess(program, self._open_log(program.name), on_change)
        task = asyncio.create_task(process.run(), name=program.name)
        task.add_done_callback(lambda done: self._on_end(key, done))
        return LocalRunner(process, action.launch, ports, task)

    def _changed(self, key: tuple[Ref, int]) -> None:
        if runner := self._runners.get(key):
            seen = observed_runner(component_name(*key), runner.launch, runner.process.state)
            self._on_runner(*key, replace(seen, state="Leaving") if runner.leaving else seen)

    def _on_end(self, key: tuple[Ref, int], task: asyncio.Task[None]) -> None:
        del self._runners[key]
        if not task.cancelled() and (error := task.exception()):
            log.error("runner is not watched any more", extra=kv(pool=str(key[0]), index=key[1]), exc_info=error)
        self._on_runner(*key, None)


def observed_runner(name: str, launch: RunnerConfig, state: ProcessState) -> RunnerProcess:
    """Describe a process as the planner sees it."""
    if state.phase == "Ready":
        return RunnerProcess(launch, "Ready", name=name)
    if state.crash_loop:
        return RunnerProcess(launch, "CrashLoop", f"the runner ends again and again: {state.detail}", name)
    return RunnerProcess(launch, "Starting", name=name)


def component_name(pool: Ref, index: int) -> str:
    """The name of a runner for people and for the scheduler."""
    return f"runner-{runner_name(pool, index)}"


def runner_name(pool: Ref, index: int) -> str:
    """Return the name of a runner's folder. Namespaces have no dot, so names are unique."""
    return f"{pool.namespace}.{pool.name}-{index}"


def _pages_flag(launch: RunnerConfig) -> dict[str, int]:
    """Bound a runner's pages: runners share this machine's memory, and none of them may take nine tenths of it
    unasked."""
    has_size = dict(launch.flags)["kv-pages"] or launch.memory != Memory()
    return {} if has_size else {"kv-pages": PAGES}


def runner_program(action: EnsureRunner, machine: LocalMachine, ports: tuple[int, ...]) -> Program:
    """Make the command line of a runner. `ports`: for gateways, probes, KV."""
    name, cache = component_name(action.pool, action.index), action.launch.model_cache
    data_dir = machine.data_dir / "runners" / runner_name(action.pool, action.index)
    flags = {
        "name": name,
        "listen": f"{LOOPBACK}:{ports[0]}",
        "probes": f"{LOOPBACK}:{ports[1]}",
        "kv-listen": f"{LOOPBACK}:{ports[2]}",
        "supervisor": machine.supervisor,
        "depot": machine.depot_url,
        "data-dir": data_dir,
        **dict(action.launch.flags),
        **_pages_flag(action.launch),
        **({"model-cache": cache.host_path.path} if cache and cache.host_path else {}),
        "log-level": machine.log_level,
        **({"executor": machine.executor} if machine.executor else {}),
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return Program(name, (sys.executable, "-m", *machine.runner, *words), probe=(LOOPBACK, ports[1]))
