"""The planner's orders on one machine: statuses into the object store, runners as processes.

A runner keeps its folder (its uuid, its blobs) and its ports for as long as its pool has that index.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.telemetry.logs import kv
from weft_operator.actions import EnsureRunner, RemoveFinalizer, RemoveRunner, SetStatus
from weft_operator.local.logfile import LogFile
from weft_operator.local.objects import ObjectStore
from weft_operator.local.ports import LOOPBACK
from weft_operator.local.processes import Process, ProcessState, Program
from weft_operator.observe import Launch, RunnerProcess
from weft_operator.resources import Object, Ref

log = logging.getLogger(__name__)

OnRunner = Callable[[Ref, int, RunnerProcess | None], None]


@dataclass(frozen=True, slots=True)
class Site:
    """What runners of this machine have in common."""

    data_dir: Path
    supervisor: str  # host:port
    depot_url: str
    executor: str | None = None
    log_level: str = "INFO"


@dataclass(slots=True)
class Runner:
    """One runner's process. `launch` is what it was started with last."""

    process: Process
    launch: Launch
    ports: tuple[int, int]
    task: asyncio.Task[None]


class LocalBackend:
    """Owns the runners. `on_runner` hears of every change, on the event loop."""

    def __init__(
        self,
        store: ObjectStore,
        site: Site,
        *,
        ports: Callable[[int], list[int]],
        open_log: Callable[[str], LogFile],
        on_runner: OnRunner,
        on_process: Callable[[str, ProcessState], None],
    ) -> None:
        self._store, self._site = store, site
        self._ports, self._open_log = ports, open_log
        self._on_runner, self._on_process = on_runner, on_process
        self._runners: dict[tuple[Ref, int], Runner] = {}

    @property
    def processes(self) -> dict[str, Process]:
        """Every runner's process, by component name."""
        return {runner.process.program.name: runner.process for runner in self._runners.values()}

    def set_status(self, action: SetStatus) -> Object:
        return self._store.set_status(action.ref, action.uid, action.resource_version, action.status)

    def remove_finalizer(self, action: RemoveFinalizer) -> None:
        self._store.remove_finalizer(action.ref, action.uid, action.resource_version, action.finalizer)

    def ensure_runner(self, action: EnsureRunner) -> None:
        key, launch = (action.pool, action.index), action.launch
        runner = self._runners.get(key)
        if runner is None:
            self._runners[key] = self._start(action)
        elif runner.launch != launch:
            runner.launch = launch
            runner.process.replace(runner_program(action, self._site, runner.ports))
        self._changed(key)

    def remove_runner(self, action: RemoveRunner) -> None:
        if runner := self._runners.get((action.pool, action.index)):
            runner.process.stop()

    async def close(self) -> None:
        """Stop every runner and wait for its end."""
        runners = list(self._runners.values())
        for runner in runners:
            runner.process.stop()
        await asyncio.gather(*(runner.task for runner in runners), return_exceptions=True)

    def kill(self) -> None:
        """End every runner at once."""
        for runner in self._runners.values():
            runner.task.cancel()

    def _start(self, action: EnsureRunner) -> Runner:
        first, second = self._ports(2)
        program = runner_program(action, self._site, (first, second))
        key = (action.pool, action.index)

        def on_change(state: ProcessState) -> None:
            self._on_process(program.name, state)
            self._changed(key)

        process = Process(program, self._open_log(program.name), on_change)
        task = asyncio.create_task(process.run(), name=program.name)
        task.add_done_callback(lambda done: self._gone(key, done))
        return Runner(process, action.launch, (first, second), task)

    def _changed(self, key: tuple[Ref, int]) -> None:
        if runner := self._runners.get(key):
            self._on_runner(*key, observed_runner(runner.launch, runner.process.state))

    def _gone(self, key: tuple[Ref, int], task: asyncio.Task[None]) -> None:
        del self._runners[key]
        if not task.cancelled() and (error := task.exception()):
            log.error("runner is not watched any more", extra=kv(pool=str(key[0]), index=key[1]), exc_info=error)
        self._on_runner(*key, None)


def observed_runner(launch: Launch, state: ProcessState) -> RunnerProcess:
    """A process as the planner sees it."""
    if state.phase == "Ready":
        return RunnerProcess(launch, "Ready")
    if state.crash_loop:
        return RunnerProcess(launch, "CrashLoop", f"the runner ends again and again: {state.detail}")
    return RunnerProcess(launch, "Starting")


def runner_name(pool: Ref, index: int) -> str:
    """A namespace has no dot, so this is one to one."""
    return f"{pool.namespace}.{pool.name}-{index}"


def runner_program(action: EnsureRunner, site: Site, ports: tuple[int, int]) -> Program:
    """The command line of a runner."""
    launch, name = action.launch, runner_name(action.pool, action.index)
    flags = {
        "listen": f"{LOOPBACK}:{ports[0]}",
        "probes": f"{LOOPBACK}:{ports[1]}",
        "supervisor": site.supervisor,
        "depot": site.depot_url,
        "data-dir": str(site.data_dir / "runners" / name),
        "pool": str(launch.pool),
        "base-digest": launch.base_digest,
        "page-tokens": launch.page_tokens,
        "kv-pages": launch.kv_pages,
        "max-sequences": launch.max_sequences,
        "max-adapters": launch.max_adapters,
        "max-rank": launch.max_rank,
        "max-batch-tokens": launch.max_batch_tokens,
        "log-level": site.log_level,
        **({"executor": site.executor} if site.executor else {}),
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return Program(f"runner-{name}", (sys.executable, "-m", "weft_runner", *words), probe=(LOOPBACK, ports[1]))
