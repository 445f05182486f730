"""What `check` runs: a small deployment, requests and faults, all drawn from one seed, and the laws at its end."""

import random
from collections import deque
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from weft.domain.adapter import Tier
from weft.domain.ids import RunnerId
from weft.domain.machine import TICK, Received
from weft.domain.prediction import Prediction
from weft.domain.request import Priority
from weft.domain.routes import AdapterSpec, PoolSpec, RegistryChange
from weft.domain.runner import Heartbeat, RunnerRole, RunnerSpec
from weft_runner.core import MIGRATE_S, Drain
from weft_scheduler.core import SchedulerConfig
from weft_sim.clock import Rank, random_of
from weft_sim.controller import DRAINED_S
from weft_sim.deployment import Deployment, RunnerPlan
from weft_sim.executor_model import VOCABULARY, StepTimes, seed_of
from weft_sim.faults import Fault, Liar, What, draw
from weft_sim.laws import ClientRequest
from weft_sim.objects import adapter_object, pool_object
from weft_sim.process import LawBroken, SimulatedProcess
from weft_sim.shells import RunnerShell, SupervisorShell
from weft_sim.stack import World
from weft_sim.timeline import Timeline

POOL, LIARS_POOL = "acme/p", "evil/p"
WARM_S = 1.0  # before the first request: routes and runners are there
SPAN_S = 4.0  # requests and faults fall into this time
SETTLE_S = 120.0  # after the faults are over everything ends within this
SETTLED_EVERY_S = 0.25
QUIET_S = 6.0  # and then nothing is under way any more: longer than a runner waits between attempts (RETRY_S)
MAX_RUNNERS = 3  # of an autoscaled pool
LOG = 40  # latest events that a failure shows
FAILURES = frozenset({"queue_full", "slo_unattainable", "too_many_migrations", "adapter_failed"})


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed decides."""

    seed: int
    deployment: Deployment
    requests: tuple[tuple[float, list[ClientRequest], int], ...]  # time, the answers, predicted p90
    cancels: tuple[tuple[float, str], ...]
    faults: tuple[Fault, ...]


def scenario(seed: int) -> Scenario:
    """Draw a seed's scenario. Every fourth has no faults, every eighth a runner that lies, every eighth an operator."""
    chance, lies = random_of(seed, "scenario"), seed % 8 == 5
    adapters, runners = _adapters_and_runners(chance, random_of(seed, "swap"), lies)
    phases = random_of(seed, "phases")
    runners = _exchanging_kv(phases, runners)
    drafts = random_of(seed, "speculation").random() < 0.5
    runners = tuple(replace(plan, drafts=drafts and plan.depth == 1) for plan in runners)  # not in stages
    deployment = Deployment(
        runners=runners,
        pools=_pools(random_of(seed, "policies"), phases, lies),
        adapters=adapters,
        gateways=chance.randint(1, 2),
        hosts={"control": 2, **{plan.host: 1 for plan in runners}},
        jitter_s=chance.choice((0.0, 0.001, 0.02)),
        load_s=chance.choice((0.01, 0.1, 0.5)),
        replayed_lengths=seed % 2 == 1,  # predictions that are far off, too
        scheduler=SchedulerConfig(
            starvation_bound=chance.choice((2, 4, 8)),
            max_preemptions=random_of(seed, "preemptions").choice((1, 2, 8)),
            assign_s=2.0,
            avoid_s=1.0,
            drain_s=chance.choice((1.0, 30.0)),
            max_outcomes=chance.choice((4, 1000)),
            max_migrations=20,
            consolidation_s=random_of(seed, "consolidation").choice((0.05, 0.3)),
            lapsed_s=random_of(seed, "lapsed").choice((0.5, 60.0)),
        ),
    )
    requests = tuple(_requests(chance, random_of(seed, "tenants"), deployment, lies))
    _draw_priorities(random_of(seed, "priorities"), requests)
    if seed % 8 == 3:
        deployment = _autoscaled(deployment, seed)
    cancels = tuple(
        (at + chance.uniform(0.0, 2.0), answers[0].request_id) for at, answers, _ in requests if chance.random() < 0.06
    )
    faults = _faults(chance, deployment, 0 if seed % 4 == 0 else chance.randint(2, 8))
    return Scenario(seed, deployment, requests, cancels, faults)


def _adapters_and_runners(
    chance: random.Random, swap: random.Random, lies: bool
) -> tuple[tuple[AdapterSpec, ...], tuple[RunnerPlan, ...]]:
    """Draw up to four runners with a common page size, some with swap and one that lies, and up to five adapters."""
    page_tokens, slots = chance.choice((2, 4, 8)), chance.choice((2, 3))
    total_pages = chance.choice((64, 96, 160, 256)) // page_tokens
    swap_page_bytes = swap.choice((0, 100, 100))
    if swap_page_bytes and total_pages >= 16:
        total_pages //= 2
    count = chance.randint(1, 4)
    adapters = tuple(
        AdapterSpec(
            f"acme/a{i}", "acme", POOL, f"sha256:{i}", 8, f"uid-{i}", bytes=1000,
            pinned=i == 0 and chance.random() < 0.2,
            tier=chance.choice((Tier.UNSPECIFIED, Tier.UNSPECIFIED, Tier.HOST, Tier.DISK)),
        )
        for i in range(chance.randint(0, 5))
    )  # fmt: skip
    pages = (page_tokens, total_pages)
    runners = [
        _swapping(swap, _runner(chance, f"runner-{i}", POOL, pages, slots), swap_page_bytes) for i in range(count)
    ]
    if lies:
        runners.append(_runner(chance, "liar", LIARS_POOL, pages, slots))
    return adapters, tuple(runners)


def _runner(chance: random.Random, name: str, pool: str, pages: tuple[int, int], slots: int) -> RunnerPlan:
    """Draw a runner. `pages`: tokens of each, and how many."""
    page_tokens, total_pages = pages
    spec = RunnerSpec(
        RunnerId(f"{pool.partition('/')[0]}.{name}", ""), name, pool, page_tokens, total_pages,
        max_sequences=chance.choice((2, 4, 8)), max_adapters=slots, max_rank=64,
        max_context_tokens=page_tokens * total_pages, name=name,
        numerics_class=chance.choice(("class-a", "class-a", "class-b")), best_batch=chance.choice((2, 4, 8)),
        step_ms_1=20.0, step_ms_best=26.0, prefill_tokens_per_s=2000.0,
    )  # fmt: skip
    plan = RunnerPlan(
        spec, f"host-{name}", chance.choice((8, 16, 64)), chance.choice((1, 2)), chance.choice((1, 1, 2))
    )  # fmt: skip
    return replace(plan, spec=replace(spec, page_bytes=chance.choice((0, 500))))


def _swapping(swap: random.Random, plan: RunnerPlan, swap_page_bytes: int) -> RunnerPlan:
    """Let a runner swap: most host memories hold a sequence or two; copies are fast, or as slow as prefill."""
    page_copy_ms = plan.spec.page_tokens * swap.choice((0.01, 0.01, 0.3))
    times = replace(StepTimes.of_spec(plan.spec), page_copy_ms=page_copy_ms)
    host_bytes = swap.choice((400, 3_000, 100_000))
    depth = 1 if swap_page_bytes else plan.depth  # stages swap nothing
    return replace(plan, swap_page_bytes=swap_page_bytes, host_bytes=host_bytes, times=times, depth=depth)


def _exchanging_kv(phases: random.Random, runners: tuple[RunnerPlan, ...]) -> tuple[RunnerPlan, ...]:
    """Let most runners take KV of others, over slow and fast links, a few with another layout, one for a phase."""
    if phases.random() < 0.3:
        return runners
    plans = list[RunnerPlan]()
    for plan in runners:
        role = phases.choice((None, None, None, RunnerRole.PROMPT, RunnerRole.TOKEN))
        layout = "other" if phases.random() < 0.1 else f"layout {plan.spec.page_tokens}"
        address = plan.spec.address if phases.random() < 0.9 else ""
        spec = replace(plan.spec, kv_address=address, kv_layout=layout, role=role)
        rates = phases.choice((1e9, 1e5, 2e4)), phases.choice((1.0, 8.0, inf))
        plans.append(replace(plan, spec=spec, kv_bytes_per_s=rates[0], layer_by_layer_tokens=rates[1]))
    return tuple(plans)


def _pools(policies: random.Random, phases: random.Random, lies: bool) -> tuple[PoolSpec, ...]:
    pool = PoolSpec(
        POOL, "base", "base", max_queue=100,
        queue=policies.choice(("fcfs", "s3", "shortest")),
        reservation=policies.choice(("calibrated", "constant", "max", "paged", "pooled", "s3")),
        consolidation=policies.choice(("always", "autoscaled", "never")),
        # always: draws of what is no field any more keep the scenario of every seed
        shared_all=policies.choice((0.05, 0.3)) > 0 and policies.random() + policies.random() < 2.0,
        tenant_weights=policies.choice(((), (("acme", 3),), (("blue", 5),))),
        slo_ttft_s=policies.choice((0.0, 0.5)), slo_token_time_s=policies.choice((0.0, 0.03)),
        slo_reject=policies.random() < 0.5,
        phases=phases.choice(("split", "split", "unified")), kv_across_classes=phases.random() < 0.5,
    )  # fmt: skip
    return (pool, PoolSpec(LIARS_POOL, "base", "evil-base", max_queue=100)) if lies else (pool,)


def _faults(chance: random.Random, deployment: Deployment, count: int) -> tuple[Fault, ...]:
    """Draw `count` faults of processes, and the lies of the runner that lies."""
    names = ["scheduler", "supervisor", "predictor", *(f"gateway-{i}" for i in range(deployment.gateways))]
    honest = [plan.spec.address for plan in deployment.runners if plan.spec.pool == POOL]
    if deployment.objects:
        honest = [f"p-{index}" for index in range(MAX_RUNNERS)]
        names += ["registry", *honest]
    names += [plan.spec.address for plan in deployment.runners]
    faults = draw(chance, names, honest, count, SPAN_S)
    if any(plan.spec.pool == LIARS_POOL for plan in deployment.runners):
        faults.append(Fault(0.0, What.LIE, "liar", SPAN_S + 2.0))
    return tuple(faults)


def _autoscaled(deployment: Deployment, seed: int) -> Deployment:
    """Declare the same pool and adapters as objects: the operator starts and ends runners like the first one."""
    template, scaling = deployment.runners[0], {"minReplicas": seed // 8 % 2, "maxReplicas": MAX_RUNNERS}
    pool = pool_object(
        "acme", "p", template.spec, autoscaling=scaling | {"idleSeconds": 2}
    )  # fmt: skip
    pool["spec"]["advanced"]["consolidation"] = "autoscaled"
    adapters = [
        adapter_object("acme", f"a{i}", "p", tier=adapter.tier.name.capitalize())
        if adapter.tier is not Tier.UNSPECIFIED
        else adapter_object("acme", f"a{i}", "p", pinned=adapter.pinned)
        for i, adapter in enumerate(deployment.adapters)
    ]
    return replace(
        deployment, runners=(), pools=(), adapters=(), objects=(pool, *adapters), template=template,
        scheduler=replace(deployment.scheduler, give_back_s=1.0, work_s=0.5),
    )  # fmt: skip


def _requests(
    chance: random.Random, tenants: random.Random, deployment: Deployment, lies: bool
) -> list[tuple[float, list[ClientRequest], int]]:
    """Draw bursts of short requests with common beginnings of prompts, so that requests of a tenant share pages.

    One tenant of three floods the others, whose requests are for the base.
    """
    groups: list[tuple[float, list[ClientRequest], int]] = []
    capacity = deployment.runners[0].spec.max_context_tokens
    openings = [[chance.randint(1, VOCABULARY) for _ in range(24)] for _ in range(2)]
    at_s, count = 0.0, chance.randint(20, 50)
    gap_s = SPAN_S / count * chance.choice((0.3, 0.8))
    for number in range(count):
        at_s += chance.expovariate(1 / gap_s)
        evil = lies and chance.random() < 0.25
        prompt = [*chance.choice(openings)[: chance.randint(0, 24)], chance.randint(1, VOCABULARY)]
        prompt = prompt[: max(1, capacity // 3)]
        output = chance.choice((1, 2, chance.randint(3, 20), chance.randint(10, 50)))
        adapter = chance.choice(deployment.adapters).model_name if deployment.adapters and not evil else "base"
        stops = (chr(33 + chance.randrange(94)),) if chance.random() < 0.08 else ()
        model = "evil-base" if evil else adapter if chance.random() < 0.8 else "base"
        tenant = tenants.choice(("acme", "blue", "green")) if model == "base" else "evil" if evil else "acme"
        gateway, answers = f"gateway-{chance.randrange(deployment.gateways)}", chance.choice((1, 1, 1, 2))
        most_output = (
            capacity - 2 * deployment.runners[0].spec.page_tokens - len(prompt) - 1
        )  # beside an adapter in pages
        max_output, draw_ = min(chance.choice((output, 60)), most_output), chance.getrandbits(24)
        groups.append(
            (
                at_s,
                [
                    ClientRequest(
                        f"r{number}/{choice}" if answers > 1 else f"r{number}", f"r{number}", gateway,
                        tenant, model, tuple(prompt), max_output, seed_of(draw_, len(prompt), output),
                        choice, stops, trusted=not evil,
                    )
                    for choice in range(answers)
                ],
                chance.choice((0, output, output // 2, 4)),
            )
        )  # fmt: skip
    return groups


def _draw_priorities(chance: random.Random, requests: tuple[tuple[float, list[ClientRequest], int], ...]) -> None:
    """Put lines of batches into half of the scenarios, few or most of the requests."""
    share = chance.choice((0.0, 0.0, 0.3, 0.7))
    for _, answers, _ in requests:
        batch = chance.random() < share
        for answer in answers:
            answer.priority = Priority.BATCH if batch else Priority.INTERACTIVE


class Run:
    """A scenario on its way. `story` has the latest events, for a failure's text."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.plan = scenario(seed)
        self.timeline = Timeline() if trace else None
        self.world = World(self.plan.deployment, seed, timeline=self.timeline)
        self._happened: deque[tuple[float, str, object]] = deque(maxlen=LOG)
        self._chance = random_of(seed, "faults")
        self._liars: dict[str, Liar] = {}

    def run(self) -> str:
        """Run to the end; return the trace's hash. Raises LawBroken, or the AssertionError of a machine's check."""
        world, clock, laws = self.world, self.world.clock, self.world.laws
        if self._liars_of_plan():
            world.network.corrupt = self._corrupt
        for process in world.processes.values():
            process.on_event = self._note
        world.on_event = self._note
        world.start()
        clock.run(end_s=clock.now + WARM_S)
        begin = clock.now
        for at_s, answers, p90 in self.plan.requests:
            predicted = Prediction("", p90 // 2, p90, "drawn", p90 // 4, 2 * p90)
            clock.at(begin + at_s, Rank.ARRIVAL, world.submit, answers[0].request_id, answers, predicted)
        for at_s, request_id in self.plan.cancels:
            clock.at(begin + at_s, Rank.ARRIVAL, world.cancel, request_id)
        for fault in self.plan.faults:
            clock.at(begin + fault.at_s, Rank.FAULT, self._strike, fault)
        last = max([at_s for at_s, *_ in self.plan.requests] + [SPAN_S], default=SPAN_S)
        clock.run(end_s=begin + last + 4.0)
        clock.call_after(0.0, Rank.LAW, self._settle)
        clock.run(end_s=clock.now + SETTLE_S)
        if unfinished := laws.unfinished():
            raise LawBroken(f"{SETTLE_S:g} s after the faults {', '.join(unfinished)} have no end")
        clock.run(end_s=clock.now + QUIET_S)
        deleted = any(fault.kind is What.DELETE for fault in self.plan.faults)
        allowed = FAILURES | {"model_not_found"} if deleted else FAILURES
        laws.settled([process.peer for process in world.serving()], allowed)
        for process in world.serving():
            if isinstance(shell := process.shell, RunnerShell):
                cached = {page.host for page in shell.machine.pool.adapters.host.cached.values()}
                if shell.device.host.keys() != cached:
                    raise LawBroken(f"{process.name} holds {[*shell.device.host]} in host memory, its books {cached}")
        self._store_is_complete()
        return world.trace_hash

    def _settle(self) -> None:
        """Stop the clock once every request has ended; otherwise look again later."""
        if self.world.laws.unfinished():
            self.world.clock.call_after(SETTLED_EVERY_S, Rank.LAW, self._settle)
        else:
            self.world.clock.stop()

    @property
    def story(self) -> tuple[str, ...]:
        """The latest events."""
        return tuple(f"{at_s:.6f} {actor}: {_short(event)}" for at_s, actor, event in self._happened)

    def write(self, path: Path) -> None:
        assert self.timeline is not None, "a run without a timeline"
        self.timeline.write(path)

    # ---------------------------------------------------------------- faults

    def _strike(self, fault: Fault) -> None:
        world, clock = self.world, self.world.clock
        if fault.target not in world.processes or (fault.second and fault.second not in world.processes):
            return  # a runner that the operator has not started
        process, seconds = world.processes[fault.target], fault.seconds
        self._happened.append((clock.now, "fault", fault))
        if self.timeline is not None:
            self.timeline.instant(fault.target, str(fault), clock.now)
        shell = process.shell
        match fault.kind:
            case What.CRASH | What.POWER:
                process.crash(0.0 if fault.kind is What.CRASH else min(seconds, 2.0))
                clock.call_after(seconds, Rank.FAULT, self._restart, process)
            case What.TERMINATE if isinstance(shell, RunnerShell) and process.up:
                process.post(Drain(True, MIGRATE_S))
                clock.call_after(DRAINED_S, Rank.FAULT, self._end_drained, process, process.generation, seconds)
            case What.BREAK:
                for stream, _ in world.network.streams_of(process):
                    notices = (self._chance.uniform(0.0, seconds), self._chance.uniform(0.0, seconds))
                    world.network.break_stream(stream, notice_s=notices)
            case What.PAUSE:
                if process.up:
                    process.pause(seconds)
            case What.CLOCK:
                process.offset_s += seconds
                if process.up:
                    process.post(TICK)
            case What.SLOW if isinstance(shell, RunnerShell):
                shell.slow_until = clock.now + seconds
            case What.DELAY:
                self._slow_streams(process, seconds / 10)
                clock.call_after(seconds, Rank.FAULT, self._slow_streams, process, 0.0)
            case What.PARTITION:
                hosts = (process.host_name, world.processes[fault.second].host_name)
                if hosts[0] != hosts[1]:
                    world.network.partition(hosts)
                    clock.call_after(seconds, Rank.FAULT, world.network.heal, hosts)
            case What.DUPLICATE:
                world.network.duplicate = 0.2
                clock.call_after(seconds, Rank.FAULT, setattr, world.network, "duplicate", 0.0)
            case What.REORDER:
                jitter_s = self.plan.deployment.jitter_s
                world.network.jitter_s = jitter_s + seconds / 5
                clock.call_after(seconds, Rank.FAULT, setattr, world.network, "jitter_s", jitter_s)
            case What.LOAD if isinstance(shell, RunnerShell):
                shell.failing_until = clock.now + seconds
            case What.DISK if isinstance(shell, RunnerShell | SupervisorShell):
                shell.full_until = clock.now + seconds
            case What.DELETE if self.plan.deployment.adapters:
                adapter = self._chance.choice(self.plan.deployment.adapters)
                process.post(RegistryChange(False, removed_adapters=(adapter.uid,)))
                clock.call_after(seconds, Rank.FAULT, process.post, RegistryChange(False, adapters=(adapter,)))
            case What.LIE:
                clock.call_after(seconds, Rank.FAULT, self._honest, fault.target)
            case _:
                pass

    def _restart(self, process: SimulatedProcess) -> None:
        controller = self.world.controller
        if not process.up and (controller is None or controller.may_start(process.name)):
            process.start()

    def _end_drained(self, process: SimulatedProcess, generation: int, seconds: float) -> None:
        """End a process that drains when nothing is left on it."""
        if not process.up or generation != process.generation or not isinstance(process.shell, RunnerShell):
            return
        pool, clock = process.shell.machine.pool, self.world.clock
        if pool.sequences or not pool.drain.on:
            clock.call_after(DRAINED_S, Rank.FAULT, self._end_drained, process, generation, seconds)
            return
        process.crash()
        clock.call_after(seconds, Rank.FAULT, self._restart, process)

    def _slow_streams(self, process: SimulatedProcess, seconds: float) -> None:
        for stream, _ in self.world.network.streams_of(process):
            stream.slow = [seconds, seconds]

    def _liars_of_plan(self) -> bool:
        for fault in self.plan.faults:
            if fault.kind is What.LIE:
                peer = self.world.processes[fault.target].peer
                self._liars[fault.target] = Liar(peer, random_of(self.plan.seed, "liar"), 0.05)
        return bool(self._liars)

    def _corrupt(self, sender: object, receiver: object, data: bytes) -> bytes:
        for name, liar in self._liars.items():
            peer = self.world.processes[name].peer
            self.world.laws.liars.add(peer)
            if sender == peer:
                return liar(data)
        return data

    def _honest(self, name: str) -> None:
        """Take a liar out of service: its process is started again and behaves."""
        del self._liars[name]
        process = self.world.processes[name]
        process.crash()
        process.start()

    # ---------------------------------------------------------------- the record

    def _note(self, process: SimulatedProcess, event: object, now: float) -> None:
        if event is not TICK and not (isinstance(event, Received) and isinstance(event.message, Heartbeat)):
            self._happened.append((self.world.clock.now, process.peer.name, event))

    def _store_is_complete(self) -> None:
        shell = self.world.supervisor.shell
        assert isinstance(shell, SupervisorShell)
        for request in self.world.clients.values():
            if request.id not in self.world.laws.excused and request.id not in shell.outcomes:
                raise LawBroken(f"{request.id} has no outcome in the store")


def _short(event: object) -> str:
    text = repr(event)
    return text if len(text) <= 220 else f"{text[:217]}..."
