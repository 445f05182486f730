"""The operator in a simulation: the shipped planner and its books, on modelled objects, depot answers and processes.

`Controller` is a machine: what the API server, the depot, the scheduler and the runners' processes say are events, and
after each of them the planner plans until there is nothing left to order. `Fleet` is what outlives the operator: the
objects as the API server keeps them, and the runners, each a process that starts after a delay and drains before it
ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from weft.domain.ids import RunnerId
from weft.domain.machine import Closed, Connected, Peer, Received, Send
from weft.domain.routes import AdapterStatus, PoolStatus, RegistryChange
from weft.domain.runner import RunnerRole
from weft_operator.core import (
    ClusterState,
    DesiredState,
    EnsureRunner,
    Object,
    OperationStatus,
    OperatorPolicy,
    PoolObject,
    PublishAdapter,
    PublishPool,
    RecordEvent,
    Ref,
    RemoveRunner,
    Resolve,
    RetainBlobs,
    RunnerProcess,
    RunnerState,
    SetStatus,
    UnpublishAdapter,
    UnpublishPool,
    expect,
    known_refs,
    parse,
    reconcile_all,
    requeue_at,
    resolution_from_status,
    updated,
)
from weft_runner.core import MIGRATE_S, Runner
from weft_runner.core import events as rn
from weft_sim.clock import Rank
from weft_sim.process import LawBroken, SimulatedProcess
from weft_sim.shells import SCHEDULER, BaseShell, RunnerShell

if TYPE_CHECKING:
    from weft_sim.stack import World

START_S = 2.0  # of a runner's process: the base is loaded
RESOLVE_S = 0.05  # for the depot to answer
ADAPTER_BYTES = 1000
DRAINED_S = 0.1  # between two checks of whether a runner has drained
ROUNDS = 30  # of planning after one event: more is a planner that orders without end
POLICY = OperatorPolicy(longest_drain_s=0.0)


@dataclass(frozen=True, slots=True)
class DepotAnswered:
    """The depot's answer about an object's source."""

    uid: str
    answer: OperationStatus


@dataclass(frozen=True, slots=True)
class RunnerObserved:
    """A runner's process as it is now; None: it has ended."""

    pool: Ref
    index: int
    process: RunnerProcess | None


@dataclass
class Fleet:
    """The API server's objects and the processes of runners."""

    objects: dict[Ref, Object]
    runners: dict[Ref, dict[int, RunnerProcess]] = field(default_factory=dict[Ref, dict[int, RunnerProcess]])
    versions: Iterable[int] = field(default_factory=lambda: count(2))

    @classmethod
    def of_objects(cls, objects: Iterable[Object]) -> "Fleet":
        """Make a fleet of objects with the metadata that a server fills in."""
        latest: dict[Ref, Object] = {}
        for obj in objects:
            meta = obj["metadata"]
            filled = {"uid": f"uid-{meta['name']}", "generation": 1, "resourceVersion": "1"}
            filled |= {"creationTimestamp": "2026-01-01T00:00:00Z"}
            latest[Ref(obj["kind"], meta["namespace"], meta["name"])] = {**obj, "metadata": meta | filled}
        return cls(latest)

    def write_status(self, action: SetStatus) -> Object:
        previous = self.objects[action.ref]
        assert previous["metadata"]["resourceVersion"] == action.resource_version, "a status of an older version"
        metadata = previous["metadata"] | {"resourceVersion": str(next(iter(self.versions)))}
        self.objects[action.ref] = {**previous, "metadata": metadata, "status": action.status}
        return self.objects[action.ref]


class SimulatedController:
    """A process of the operator, from its start."""

    def __init__(self, fleet: Fleet, now: float) -> None:
        self._fleet = fleet
        self.state = ClusterState(DesiredState(POLICY))
        self.state.expectations.retention.started_at = now
        self._scheduler: Peer | None = None
        self._wake_at: float | None = now
        self._versions = count(1)
        for obj in fleet.objects.values():
            self.state.desired.put(parse(obj))
        for resource in (*self.state.desired.pools.values(), *self.state.desired.adapters.values()):
            if resolution := resolution_from_status(resource, self.state, now):
                self.state.observed.resolutions[resource.meta.uid] = resolution
        self.state.observed.runners = {ref: dict(runners) for ref, runners in fleet.runners.items()}

    def handle(self, event: Any, now: float) -> list[Any]:
        observed, expected, effects = self.state.observed, self.state.expectations, list[Any]()
        match event:
            case Connected(peer):
                self._scheduler = peer
                adapters = tuple(expected.adapters.values())
                effects.append(self._change(tuple(expected.pools.values()), adapters, snapshot=True))
            case Closed():
                self._scheduler = None
            case Received(message=PoolStatus() as status):
                observed.pool_reports[status.pool] = status
            case Received(message=AdapterStatus() as status):
                if status.uid in expected.unloading:
                    observed.unloaded |= {status.uid} if status.removed else set[str]()
                else:
                    observed.adapter_reports[status.uid] = status
            case DepotAnswered(uid, answer):
                ref = self.state.desired.by_uid.get(uid)
                if ref is not None and (resolution := observed.resolutions.get(uid)) is not None:
                    resource = self.state.desired.get(ref)
                    pool = None if isinstance(resource, PoolObject) or resource is None else resource.pool
                    observed.resolutions[uid] = updated(resolution, answer, now, pool)
            case RunnerObserved(ref, index, process):
                _put(observed.runners, ref, index, process)
            case _:
                pass
        for _ in range(ROUNDS):
            actions = reconcile_all(self.state, now)
            if not actions:
                break
            for action in actions:
                effects += self._carry_out(action)
                expect(action, self.state, now)
        else:
            raise LawBroken(f"the operator orders without end: {reconcile_all(self.state, now)}")
        refs = known_refs(self.state)
        times = [time for ref in refs if (time := requeue_at(ref, self.state, now)) is not None]
        self._wake_at = min(times, default=None)
        return effects

    def next_deadline(self) -> float | None:
        return self._wake_at

    def check(self) -> None:
        for ref, pool in self.state.desired.pools.items():
            runners = self.state.observed.runners.get(ref, {})
            max_runners = pool.spec.autoscaling.max_replicas if pool.spec.autoscaling else pool.spec.replicas or 1
            assert sum(runner.state != "Leaving" for runner in runners.values()) <= max_runners, (
                "more runners than allowed"
            )

    def _carry_out(self, action: Any) -> list[Any]:
        """Give changes to the scheduler, and to the shell what it does."""
        observed = self.state.observed
        match action:
            case PublishPool():
                return [self._change((action.entry,))]
            case UnpublishPool():
                return [self._change(removed_pools=(str(action.ref),))]
            case PublishAdapter():
                return [self._change(adapters=(action.entry,))]
            case UnpublishAdapter():
                return [self._change(removed_adapters=(action.uid,))]
            case SetStatus():
                self.state.desired.put(parse(self._fleet.write_status(action)))
                return []
            case EnsureRunner(pool, index, launch):
                _put(observed.runners, pool, index, RunnerProcess(launch, "Starting", name=f"{pool.name}-{index}"))
                return [action]
            case RemoveRunner(pool, index):
                _put(observed.runners, pool, index, replace(observed.runners[pool][index], state="Leaving"))
                return [action]
            case Resolve():
                return [action]
            case _:
                assert isinstance(action, RecordEvent | RetainBlobs), action
                return []

    def _change(
        self, pools: Any = (), adapters: Any = (), removed_pools: Any = (), removed_adapters: Any = (), *,
        snapshot: bool = False,
    ) -> Send:  # fmt: skip
        change = RegistryChange(
            snapshot, pools, adapters, removed_pools, removed_adapters, version=next(self._versions)
        )  # fmt: skip
        return Send(self._scheduler or SCHEDULER, change)


def _put(runners: dict[Ref, dict[int, RunnerProcess]], pool: Ref, index: int, process: RunnerProcess | None) -> None:
    if process is not None:
        runners.setdefault(pool, {})[index] = process
    elif pool in runners:
        runners[pool].pop(index, None)
        if not runners[pool]:
            del runners[pool]


class ControllerShell(BaseShell):
    """Depot and processes: the operator's orders take time."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.fleet = Fleet.of_objects(world.deployment.objects)
        adapters = [ref for ref in self.fleet.objects if ref.kind == "LoRAAdapter"]
        world.contents |= {f"sha256:{ref.name}": ADAPTER_BYTES for ref in adapters}
        self._places: dict[str, tuple[Ref, int]] = {}  # pool and index of each runner's process

    def start(self, process: SimulatedProcess) -> SimulatedController:
        return SimulatedController(self.fleet, process.now)

    def perform(self, process: SimulatedProcess, effect: Any) -> None:
        clock = self._world.clock
        match effect:
            case Resolve(ref, uid):
                verdict = {"rank": 8, "sizeBytes": ADAPTER_BYTES}
                resolved = DepotAnswered(uid, OperationStatus("Fetched", f"sha256:{ref.name}", verdict))
                clock.call_after(RESOLVE_S, Rank.WORK, process.post_at, process.generation, resolved)
            case EnsureRunner(pool, index, launch):
                name = f"{pool.name}-{index}"
                self._places[name] = pool, index
                _put(self.fleet.runners, pool, index, RunnerProcess(launch, "Starting", name=name))
                clock.call_after(START_S, Rank.WORK, self._start, name)
            case RemoveRunner(pool, index):
                self._observe(f"{pool.name}-{index}", "Leaving")
                self._leave(f"{pool.name}-{index}")
            case _:
                pass

    def ready(self, name: str, *, ready: bool) -> None:
        """Note that a runner says whether requests should come to it."""
        self._observe(name, "Ready" if ready else "Starting")

    def may_start(self, name: str) -> bool:
        """Return whether a dead process is started again."""
        return name not in self._places or self._state(name) not in ("", "Leaving")

    def serves(self, name: str) -> bool:
        return self._state(name) == "Ready"

    def _state(self, name: str) -> str:
        pool, index = self._places[name]
        process = self.fleet.runners.get(pool, {}).get(index)
        return process.state if process is not None else ""

    def _observe(self, name: str, state: RunnerState | None) -> None:
        """Note that the state of a process has changed; None: it has ended."""
        pool, index = self._places[name]
        previous = self.fleet.runners.get(pool, {}).get(index)
        if previous is None or previous.state == state or (previous.state == "Leaving" and state is not None):
            return
        current = None if state is None else replace(previous, state=state)
        _put(self.fleet.runners, pool, index, current)
        registry = self._world.registry
        if registry.up:
            self._world.clock.call_after(
                0.0, Rank.WORK, registry.post_at, registry.generation, RunnerObserved(pool, index, current)
            )

    def _start(self, name: str) -> None:
        if self._state(name) != "Starting":
            return  # it is not wanted any more
        runner, (pool, index) = self._world.runners.get(name), self._places[name]
        template, launch = self._world.deployment.template, self.fleet.runners[pool][index].launch
        assert template is not None
        role = None if launch.phase == "Any" else RunnerRole(launch.phase.lower())
        identity = RunnerId(f"{pool.namespace}.{name}", "")
        spec = replace(template.spec, runner=identity, address=name, pool=str(pool), name=name, role=role)
        if spec.kv_layout:
            spec = replace(spec, kv_address=name)
        plan = replace(template, spec=spec, host=f"host-{name}")
        if runner is None:
            runner = self._world.add_runner(plan, cores=1)
        elif isinstance(runner.shell, RunnerShell):
            runner.shell.plan = plan
        if not runner.up:
            runner.start()

    def _leave(self, name: str) -> None:
        """Drain a runner, which gives its sequences back; when none is left its process ends."""
        runner = self._world.runners.get(name)
        if runner is None or not runner.up:
            self._observe(name, None)
            return
        runner.post(rn.Drain(True, MIGRATE_S))
        self._world.clock.call_after(DRAINED_S, Rank.WORK, self._poll, name, runner.generation)

    def _poll(self, name: str, generation: int) -> None:
        runner = self._world.runners[name]
        machine = runner.machine
        if isinstance(machine, Runner) and generation == runner.generation:
            if machine.pool.sequences or not machine.pool.drain.on:
                self._world.clock.call_after(DRAINED_S, Rank.WORK, self._poll, name, generation)
                return
            runner.crash()
        self._observe(name, None)
