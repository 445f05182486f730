"""What each event costs on this machine, from live runs of known load; and the simulator with these costs.

Four runs are measured: single tokens one after the other at rest, whole answers one after the other, some streams, and
as many streams as saturate. The CPU seconds of each process are lines in what it did: requests, steps, tokens, reports,
transactions, and how often it was woken, since a process that has nothing to do pays for being woken and a busy one
does not. Reports, transactions and wakes are counted in a simulation of the same requests.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from weft.domain.machine import Kind, Received
from weft_bench.fidelity_engine import EngineCosts, least_errors
from weft_bench.fidelity_live import CLIENT, ENGINE, RUNNER, Bodies, Live, LiveRun
from weft_sim.clock import Rank
from weft_sim.hosts import MEASURED, Costs
from weft_sim.process import Process
from weft_sim.report import Served
from weft_sim.shells import RunnerShell, SupervisorShell
from weft_sim.simulate import WARM_S, PoolDescription, deployment_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival

STREAMS, SOME_STREAMS = 16, 4  # that saturate, and that do not
WARM_GAP_S = 0.3  # between the requests that load each adapter
HOPS = 6  # messages before a first token: predictor, scheduler and runner, there and back
SWITCHES = 2  # of the interpreter's lock in a step: to the thread that sends, and back
ROUNDS = 6  # costs change how often processes are woken, which changes costs
MIN_S = 1e-7  # what costs nothing is counted all the same
BESIDE = ("supervisor", "depot", "controller")  # whose work follows reports and outcomes


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is run: runs of each load with their seconds, requests for a token, whole answers."""

    runs: int = 5
    seconds: float = 12.0
    singles: int = 30
    answers: int = 12


@dataclass(frozen=True, slots=True)
class Counted:
    """What happened in a simulated run. `starts`: sequences that began at a runner. `cpu`: seconds by process."""

    reports: int = 0
    starts: int = 0
    commits: int = 0
    model_s: float = 0.0
    woken: Mapping[str, int] = field(default_factory=dict[str, int])
    cpu: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Simulated:
    """`served`: of each request, in their order. `gaps_s`: between two tokens, of all requests."""

    served: tuple[Served, ...]
    gaps_s: Sequence[float]
    counted: Counted


@dataclass(frozen=True, slots=True)
class Model:
    """The simulator's deployment of one stack on this machine."""

    pool: PoolDescription
    engine: EngineCosts
    costs: Costs = field(default_factory=Costs)
    delay_s: float = 0.0

    def replay(self, arrivals: Sequence[TraceArrival]) -> Simulated:
        """Replay these requests, after a request for each adapter that brings it to its slot."""
        warm = [TraceArrival(WARM_GAP_S * i, 8, 2, i) for i in range(self.pool.adapters)]
        lead_s = WARM_GAP_S * (len(warm) + 3)
        trace = [*warm, *(replace(arrival, at_s=lead_s + arrival.at_s) for arrival in arrivals)]
        deployment = deployment_of(self.pool)
        runners = tuple(replace(plan, times=self.engine.times) for plan in deployment.runners)
        deployment = replace(deployment, runners=runners, costs=self.costs, delay_s=self.delay_s)
        counter = _Counter(WARM_S + lead_s - WARM_GAP_S)
        result = simulate(self.pool, trace, deployment=deployment, attach=counter.attach, tbt=True)
        return Simulated(result.figures.served[len(warm) :], result.figures.gaps_s, counter.counted())


class _Counter:
    """Counts from a time on."""

    def __init__(self, after_s: float) -> None:
        self._after_s, self._events = after_s, Counter[str]()
        self._before = Counted()

    def attach(self, world: World) -> None:
        self._world = world
        for process in world.processes.values():
            process.on_event = self._note
        world.clock.after(self._after_s, Rank.LAW, self._begin)

    def _begin(self) -> None:
        self._before = self._now()
        self._events.clear()

    def _note(self, process: Process, event: object, _: float) -> None:
        if process.kind in (Kind.SUPERVISOR, Kind.RUNNER) and isinstance(event, Received):
            self._events[type(event.message).__name__] += 1

    def _now(self) -> Counted:
        world = self._world
        shells = [p.shell for p in world.runners.values() if isinstance(p.shell, RunnerShell)]
        supervisor = world.supervisor.shell
        assert isinstance(supervisor, SupervisorShell)
        woken = {process.kind.value: process.python.woken for process in world.processes.values()}
        cpu = {
            process.kind.value: process.busy_s + process.python.woken * process.costs.wake.get(process.kind, 0.0)
            for process in world.processes.values()
        }
        return Counted(
            self._events["ReceivedReport"], self._events["Start"], supervisor.commits,
            sum(shell.model_s for shell in shells), {**woken, CLIENT: world.client.woken}, cpu,
        )  # fmt: skip

    def counted(self) -> Counted:
        now, before = self._now(), self._before
        return replace(
            now,
            commits=now.commits - before.commits,
            model_s=now.model_s - before.model_s,
            woken={name: count - before.woken.get(name, 0) for name, count in now.woken.items()},
            cpu={name: seconds - before.cpu.get(name, 0.0) for name, seconds in now.cpu.items()},
        )


def calibrate(
    live: Live, bodies: Callable[[random.Random, int], Bodies], model: Model, amounts: Amounts, rng: random.Random
) -> tuple[Model, LiveRun]:
    """Return the model with what events of a stack cost, and the run that saturated it. `bodies`: makes requests."""
    live.closed(bodies(rng, 6 * STREAMS), STREAMS)  # every adapter in its slot, every path warm
    live.rest(1.0)
    single = live.singly([(number, {**body, "max_tokens": 1}) for number, body in bodies(rng, amounts.singles)])
    answers = live.singly(bodies(rng, amounts.answers))
    few = live.closed(bodies(rng, 3 * STREAMS), SOME_STREAMS)
    saturated = live.closed(bodies(rng, max(3 * STREAMS, int(few.rate * amounts.seconds))), STREAMS)
    return calibrated(model, single, answers, [few, saturated]), saturated


def calibrated(model: Model, single: LiveRun, answers: LiveRun, others: Sequence[LiveRun]) -> Model:
    """Return the model with costs that explain what these processes used, and with the latencies of the stack.

    `single`: requests for one token, `answers`: whole ones, each alone; `others`: some streams, then many. What the
    time to a first token and the time per token are more than the CPU seconds on their way is the time until messages
    and threads are noticed: the mean of a quiet stack and of one with some streams, since busy cores notice later.
    """
    model, runs = replace(model, costs=MEASURED), [single, answers, *others]  # as a first guess
    delay_s = switch_s = 0.0
    for _ in range(ROUNDS):
        replays = [model.replay(run.trace()) for run in runs]
        first = [run.ttft_s() - _ttft_s(replay) for run, replay in zip(runs, replays, strict=True)]
        between = [run.token_s() - _token_s(replay) for run, replay in zip(runs[1:], replays[1:], strict=True)]
        delay_s = max(0.0, delay_s + (first[0] + first[2]) / 2 / HOPS)
        switch_s = max(0.0, switch_s + (between[0] + between[1]) / 2 / SWITCHES)
        costs = _costs(model.engine, single, runs, [replay.counted for replay in replays])
        model = replace(model, costs=replace(costs, switch=switch_s), delay_s=delay_s)
    return model


def _ttft_s(run: Simulated) -> float:
    return median(one.ttft_ms for one in run.served) / 1e3


def _token_s(run: Simulated) -> float:
    return median(one.tpot_ms for one in run.served if one.tpot_ms is not None) / 1e3


def _costs(engine: EngineCosts, single: LiveRun, runs: Sequence[LiveRun], counted: Sequence[Counted]) -> Costs:
    requests = [len(run.answers) for run in runs]
    tokens, steps = [run.tokens for run in runs], [run.steps for run in runs]
    reports, commits = [each.reports for each in counted], [each.commits for each in counted]
    starts = [max(each.starts, 1) for each in counted]

    def woken(name: str) -> list[int]:
        return [each.woken.get(name, 0) for each in counted]

    def solve(names: Sequence[str], *columns: Sequence[float]) -> list[float]:
        used = [max(sum(run.cpu[name] for name in names), MIN_S) for run in runs]
        return [max(cost, MIN_S) for cost in least_errors(list(zip(*columns, strict=True)), used, rounds=1)]

    def later(name: str) -> float:
        """Return the share of a request's cost that comes after its answer has ended."""
        assert single.after is not None
        return min(max(single.after[name] / max(single.cpu[name], MIN_S), 0.0), 1.0)

    request, step, token, gateway_wake = solve(["gateway"], requests, steps, tokens, woken("gateway"))
    submit, cluster, scheduler_wake = solve(["scheduler"], requests, reports, woken("scheduler"))
    outcome, report, commit, supervisor_wake = solve(BESIDE, requests, reports, commits, woken("supervisor"))
    predict, predictor_wake = solve(["predictor"], requests, woken("predictor"))
    start, send = solve([RUNNER], starts, steps)
    client, client_token, client_wake = solve([CLIENT], requests, tokens, woken(CLIENT))
    extra_start, extra_step, extra_row = _extra(engine, runs, counted, steps, tokens)
    learn = predict * later("predictor")
    return Costs(
        events={
            (Kind.GATEWAY, "RequestArrived"): request * (1 - later("gateway")),
            (Kind.GATEWAY, "OutcomeAck"): request * later("gateway"),
            (Kind.GATEWAY, "Step"): step,
            (Kind.SCHEDULER, "Submit"): submit * (1 - later("scheduler")),
            (Kind.SCHEDULER, "OutcomeReport"): submit * later("scheduler"),
            (Kind.SCHEDULER, "ClusterReport"): cluster,
            (Kind.SUPERVISOR, "ReceivedReport"): report,
            (Kind.PREDICTOR, "PredictItem"): predict - learn,
            (Kind.RUNNER, "Start"): start + engine.prefill_s + extra_start,
            (Kind.RUNNER, "StepDone"): engine.step_s + extra_step,
        },
        per_item={(Kind.GATEWAY, "Step"): token, (Kind.RUNNER, "StepDone"): engine.row_s + extra_row},
        wake={
            Kind.GATEWAY: gateway_wake,
            Kind.SCHEDULER: scheduler_wake,
            Kind.SUPERVISOR: supervisor_wake,
            Kind.PREDICTOR: predictor_wake,
        },
        sends={"Step": send},
        commit=commit,
        outcome=outcome + learn,
        client_request=client,
        client_token=client_token,
        client_wake=client_wake,
    )


def _extra(
    engine: EngineCosts, runs: Sequence[LiveRun], counted: Sequence[Counted], steps: Sequence[float],
    tokens: Sequence[int],
) -> tuple[float, float, float]:  # fmt: skip
    """Fit what a sequence, a step and a row of it cost the engine's thread beside other threads, more than alone.

    Known where the model computes on that thread: with more of them they count what they wait for each other.
    """
    if engine.threads > 1:
        return 0.0, 0.0, 0.0
    starts = [each.starts for each in counted]
    alone = [
        each.model_s + engine.step_s * steps[i] + engine.row_s * tokens[i] + engine.prefill_s * starts[i]
        for i, each in enumerate(counted)
    ]
    more = [max(run.cpu[ENGINE] - used, MIN_S) for run, used in zip(runs, alone, strict=True)]
    start, step, row = least_errors(list(zip(starts, steps, tokens, strict=True)), more, rounds=1)
    return start, step, row
