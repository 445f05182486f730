"""Gateways, runners, a supervisor and an operator around the real core, with faults: what the whole must do anyway.

Each pair of processes talks over ordered streams that break; between streams every order is possible. Runners generate
one token a step under the contract's rules (epochs, reservations, doubling in place, overruns). The laws are checked
after every event, and when the faults stop every request must have ended exactly once, with exactly its tokens.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from weft.domain.adapter import AdapterSpec
from weft.domain.ids import NEVER, Epoch, RunnerId
from weft.domain.machine import TICK, Close, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.request import (
    Assign,
    Cancel,
    Failed,
    FailReason,
    OutcomeAck,
    OutcomeReport,
    Preempt,
    Reject,
    ResubmitComplete,
    RunnerGone,
    Started,
    Submit,
)
from weft.domain.routes import KeyRoute, Keys, PoolSpec, RegistryChange
from weft.domain.runner import (
    ClusterReport,
    OrderedRunner,
    Overrun,
    PreemptDecision,
    ReportedRunner,
    Resync,
    RunnerFigures,
    RunnerReport,
    RunnerSpec,
    SchedulerHello,
    SequenceState,
    SupervisorHello,
)
from weft_scheduler.core.config import Config
from weft_scheduler.core.effects import Effect, Event, PersistTerm
from weft_scheduler.core.scheduler import Scheduler

REGISTRY, SUPERVISOR = Peer(Kind.REGISTRY, "r"), Peer(Kind.SUPERVISOR, "s")
POOL, PAGE, PAGES, BATCH, SLOTS = "acme/p", 4, 24, 4, 2
CONFIG = Config(starvation_bound=3, max_outcomes=6, drain_s=30.0)
DIGESTS = ("", "sha256:1", "sha256:2", "sha256:3")
ADAPTERS = {d: AdapterSpec(f"uid-{d}", "acme", d, f"acme/{d}", POOL, d, 8) for d in DIGESTS if d}


@dataclass
class Live:
    """A request in its gateway. `true_tokens` is what an undisturbed run would emit."""

    id: str
    digest: str
    prompt: int
    max_tokens: int
    true_tokens: int
    p90: int
    arrived: float
    tokens: list[int] = field(default_factory=list[int])
    highest: Epoch = NEVER
    epoch: Epoch = NEVER  # the epoch it runs under, NEVER: held
    runner: RunnerId | None = None
    reservation: int = 0
    moves: int = 0
    numerics_class: str = ""  # of the runner of the latest tokens


@dataclass
class Sequence:
    """A request on a runner."""

    live_id: str
    gateway: str
    digest: str
    epoch: Epoch
    prompt: int
    base: int  # emitted when it started
    emitted: int
    end: int
    reservation: int
    pages: int
    admitted: int
    paused: bool = False

    @property
    def length(self) -> int:
        return self.prompt + self.emitted


class Runner:
    """One runner process: the book is the truth."""

    def __init__(self, uuid: str, incarnation: int) -> None:
        self.id = RunnerId(uuid, f"i{incarnation}")
        self.sequences: dict[str, Sequence] = {}
        self.highest: dict[str, Epoch] = {}
        self.reports = self.admissions = self.desired_version = 0
        self.known = False
        self.best = ord(uuid[-1]) % (BATCH + 1)  # what it measured of itself; 0: nothing

    @property
    def free(self) -> int:
        return PAGES - sum(s.pages for s in self.sequences.values())

    def report(self) -> ReportedRunner:
        """A full one."""
        self.reports += 1
        paused = [s for s in self.sequences.values() if s.paused]
        report = RunnerReport(
            version=self.reports,
            full=True,
            figures=RunnerFigures(self.free, ready=self.known, desired_version=self.desired_version),
            sequences=[
                SequenceState(s.live_id, s.epoch, s.gateway, s.digest, s.pages, s.reservation, s.admitted)
                for s in self.sequences.values()
            ],
            overruns=[Overrun(s.live_id, s.epoch, 1, s.reservation) for s in paused],
        )
        spec = RunnerSpec(
            self.id,
            f"host:{self.id.uuid}",
            POOL,
            PAGE,
            PAGES,
            BATCH,
            SLOTS,
            64,
            PAGE * PAGES,
            best_batch=self.best,
            numerics_class=class_of(self.id),
        )
        return ReportedRunner(self.id, report, spec)


def changed(before: ReportedRunner | None, now: ReportedRunner) -> ReportedRunner:
    """What a supervisor forwards of a report: what changed, where that follows."""
    if before is None or before.runner != now.runner or before.report.version + 1 != now.report.version:
        return now
    known = {s.request_id: s for s in before.report.sequences}
    change = now.report._replace(
        full=False,
        sequences=[s for s in now.report.sequences if known.get(s.request_id) != s],
        ended=sorted(known.keys() - {s.request_id for s in now.report.sequences}),
    )
    return ReportedRunner(now.runner, change)


def class_of(runner: RunnerId) -> str:
    return f"class-{ord(runner.uuid[-1]) % 2}"


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


class World:
    """All processes and the streams between them. A stream is a deque each way; a break empties both."""

    def __init__(self, seed: int = 0, runners: int = 3, gateways: int = 2) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.term = self.stored_term = 0
        self.numbers = 0
        self.adapters = dict(ADAPTERS)
        self.gateways: dict[str, dict[str, Live]] = {f"g{i}": {} for i in range(gateways)}
        self.outcomes: dict[str, dict[str, OutcomeReport]] = {g: {} for g in self.gateways}
        self.ended: dict[str, list[str]] = {}  # request -> how it ended, each time
        self.submitted: set[str] = set()
        self.excused: set[str] = set()  # died with their gateway
        self.store: set[str] = set()
        self.incarnations = 0
        self.runners: dict[str, Runner] = {}
        self.leases: dict[str, ReportedRunner] = {}  # what the supervisor knows
        self.preempting: dict[str, int] = {}  # uuid -> report number at the decision
        self.unsent: list[RunnerId] = []
        self.resync: set[RunnerId] = set()
        self.supervisor_up = False
        self.up: set[str] = set()
        self.to_core: dict[str, deque[Any]] = {}
        self.sessions: dict[tuple[str, RunnerId], tuple[deque[Any], deque[Any]]] = {}
        self.boot()
        for i in range(runners):
            self.start_runner(f"u{i}")

    # ------------------------------------------------------------ the core

    def boot(self) -> None:
        """Start the scheduler process; every stream to it is new."""
        self.term += 1
        self.core = Scheduler(CONFIG, self.term)
        self.up.clear()
        self.to_core = {}
        self.supervisor_up = False

    def feed(self, event: Event) -> None:
        self.execute(self.core.handle(event, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.execute(self.core.handle(TICK, self.now))

    def execute(self, effects: list[Effect]) -> None:
        self.core.check()
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case PersistTerm(term=term):
                assert term > self.term
                self.term = term
            case Send(message=SchedulerHello(term=term)):
                self.stored_term = max(self.stored_term, term)
            case Send(peer=Peer(kind=Kind.GATEWAY, name=gateway)) if gateway in self.up:
                self.to_core[f">{gateway}"].append(effect.message)
            case Send(peer=Peer(kind=Kind.SUPERVISOR)) if self.supervisor_up:
                self.to_core[">s"].append(effect.message)
            case Close(peer=Peer(name=gateway)):
                self.break_gateway(gateway)
            case _:
                pass

    # ------------------------------------------------------------ connections

    def connect_registry(self) -> None:
        self.feed(Connected(REGISTRY))
        self.tell_registry()

    def tell_registry(self) -> None:
        pool = PoolSpec(POOL, "b", "base", max_queue=50)
        self.feed(Received(REGISTRY, RegistryChange(True, (pool,), tuple(self.adapters.values()))))

    def connect_gateway(self, gateway: str) -> None:
        self.up.add(gateway)
        self.to_core[gateway], self.to_core[f">{gateway}"] = deque(), deque()
        out = self.to_core[gateway]
        peer = Peer(Kind.GATEWAY, gateway)
        out.append(Connected(peer))
        out.extend(Received(peer, self.submit_of(live)) for live in self.gateways[gateway].values())
        out.extend(Received(peer, outcome) for outcome in self.outcomes[gateway].values())
        out.append(Received(peer, ResubmitComplete()))
        self.feed(out.popleft())

    def break_gateway(self, gateway: str) -> None:
        if gateway in self.up:
            self.up.discard(gateway)
            self.to_core.pop(gateway)
            self.to_core.pop(f">{gateway}")
            self.feed(Closed(Peer(Kind.GATEWAY, gateway)))

    def connect_supervisor(self) -> None:
        self.supervisor_up = True
        self.to_core["s"], self.to_core[">s"] = deque(), deque()
        self.feed(Connected(SUPERVISOR, SupervisorHello("s", self.stored_term)))
        self.to_core["s"].append(Received(SUPERVISOR, Keys((KeyRoute("h", "acme", "k"),))))
        self.to_core["s"].append(Received(SUPERVISOR, ClusterReport(tuple(self.leases.values()))))
        self.unsent.clear()

    def break_supervisor(self) -> None:
        if self.supervisor_up:
            self.supervisor_up = False
            self.to_core.pop("s")
            self.to_core.pop(">s")
            self.feed(Closed(SUPERVISOR))

    def reconnect(self) -> None:
        """Every link comes back by itself."""
        if not self.core.state.registry_known:
            self.connect_registry()
        for gateway in self.gateways:
            if gateway not in self.up:
                self.connect_gateway(gateway)
        if not self.supervisor_up:
            self.connect_supervisor()

    # ------------------------------------------------------------ delivery

    def channels(self) -> list[tuple[str, Any]]:
        """Streams with something on the way."""
        some: list[tuple[str, Any]] = [("core", name) for name, queue in self.to_core.items() if queue]
        some += [("down", key) for key, (down, _) in self.sessions.items() if down]
        some += [("back", key) for key, (_, back) in self.sessions.items() if back]
        return some

    def deliver(self, where: str, key: Any) -> None:
        """The next message of one stream."""
        if where == "down":
            self.runner_hears(key, self.sessions[key][0].popleft())
        elif where == "back":
            self.gateway_hears_runner(key, self.sessions[key][1].popleft())
        elif not key.startswith(">"):
            self.feed(self.to_core[key].popleft())
        elif key == ">s":
            self.supervisor_hears(self.to_core[key].popleft())
        else:
            self.gateway_hears(key[1:], self.to_core[key].popleft())

    def deliver_all(self) -> None:
        while channels := self.channels():
            self.deliver(*self.random.choice(channels))

    # ------------------------------------------------------------ gateways

    def submit(self, gateway: str, digest: str, prompt: int, max_tokens: int, true_tokens: int, p90: int) -> None:
        self.numbers += 1
        live = Live(f"r{self.numbers}", digest, prompt, max_tokens, min(true_tokens, max_tokens), p90, self.now)
        self.gateways[gateway][live.id] = live
        self.submitted.add(live.id)
        self.say(gateway, self.submit_of(live))

    def submit_of(self, live: Live) -> Submit:
        running = live.runner is not None
        return Submit(
            live.id, POOL, "acme", "m", live.digest, live.prompt, live.max_tokens,
            emitted_tokens=len(live.tokens), p90_tokens=live.p90, waited_s=self.now - live.arrived,
            epoch=live.epoch if running else NEVER, runner=live.runner, migrations=live.moves,
            reservation_tokens=live.reservation if running else 0, numerics_class=live.numerics_class,
        )  # fmt: skip

    def say(self, gateway: str, message: object) -> None:
        if gateway in self.up:
            self.to_core[gateway].append(Received(Peer(Kind.GATEWAY, gateway), message))

    def gateway_hears(self, gateway: str, effect: object) -> None:
        lives = self.gateways[gateway]
        match effect:
            case Assign() if effect.request_id in lives and effect.epoch > lives[effect.request_id].highest:
                self.start(gateway, lives[effect.request_id], effect)
            case Preempt() if effect.request_id in lives and effect.epoch == lives[effect.request_id].epoch:
                live = lives[effect.request_id]
                self.stop(gateway, live)
                self.give_back(gateway, live, FailReason.PREEMPTED)
            case Reject() if effect.request_id in lives:
                live = lives[effect.request_id]
                self.stop(gateway, live)
                self.end(gateway, live, f"rejected {effect.reason.value}")
            case RunnerGone():
                self.session_lost(gateway, effect.runner)
            case OutcomeAck():
                for request_id in effect.request_ids:
                    self.outcomes[gateway].pop(request_id, None)
            case _:
                pass

    def start(self, gateway: str, live: Live, assign: Assign) -> None:
        self.stop(gateway, live)
        live.moves += live.highest != NEVER
        live.highest = live.epoch = assign.epoch
        live.runner, live.reservation = assign.runner, assign.reservation_tokens
        runner = self.runners.get(assign.runner.uuid)
        if runner is None or runner.id != assign.runner:
            self.give_back(gateway, live, FailReason.SESSION_LOST)
            return
        down, _ = self.sessions.setdefault((gateway, assign.runner), (deque(), deque()))
        down.append(("start", live.id, assign.epoch, len(live.tokens), assign.reservation_tokens))

    def stop(self, gateway: str, live: Live) -> None:
        if live.runner is not None and (gateway, live.runner) in self.sessions:
            self.sessions[(gateway, live.runner)][0].append(("stop", live.id, live.epoch))

    def give_back(self, gateway: str, live: Live, reason: FailReason) -> None:
        failed = Failed(live.id, live.epoch, reason, len(live.tokens))
        live.epoch, live.runner = NEVER, None
        self.say(gateway, failed)
        if self.random.random() < 0.1:
            self.say(gateway, failed)  # a second trigger for the epoch

    def gateway_hears_runner(self, key: tuple[str, RunnerId], message: tuple[Any, ...]) -> None:
        gateway = key[0]
        kind, request_id, epoch, *rest = message
        live = self.gateways[gateway].get(request_id)
        if live is None or live.epoch != epoch:
            return
        if kind == "no_room":
            self.give_back(gateway, live, FailReason.NO_CAPACITY)
            return
        position, tokens, finished = rest
        if position == 0 or position == len(live.tokens):
            assert position == len(live.tokens) or not tokens
            if not live.tokens and tokens:
                self.say(gateway, Started(live.id, epoch))
            live.tokens += tokens
            live.numerics_class = class_of(key[1]) if tokens else live.numerics_class
        if finished:
            self.end(gateway, live, "outcome")

    def end(self, gateway: str, live: Live, how: str) -> None:
        del self.gateways[gateway][live.id]
        self.ended.setdefault(live.id, []).append(how)
        assert live.tokens == list(range(len(live.tokens))), "tokens lost or twice"
        if how == "outcome":
            assert len(live.tokens) == live.true_tokens
        censored = how != "outcome"
        outcome = OutcomeReport(live.id, POOL, live.digest, len(live.tokens), censored, live.id.encode())
        self.outcomes[gateway][live.id] = outcome
        self.say(gateway, outcome)

    def cancel(self, gateway: str, request_id: str) -> None:
        live = self.gateways[gateway][request_id]
        self.stop(gateway, live)
        self.say(gateway, Cancel(request_id))
        self.end(gateway, live, "cancelled")

    def session_lost(self, gateway: str, runner_id: RunnerId) -> None:
        """The gateway's session to that incarnation is over, with all that was on the way."""
        self.sessions.pop((gateway, runner_id), None)
        runner = self.runners.get(runner_id.uuid)
        if runner is not None and runner.id == runner_id:
            for sequence in [s for s in runner.sequences.values() if s.gateway == gateway]:
                del runner.sequences[sequence.live_id]
        for live in self.gateways[gateway].values():
            if live.runner == runner_id:
                self.give_back(gateway, live, FailReason.SESSION_LOST)

    def restart_gateway(self, gateway: str) -> None:
        """Its clients' connections break; it comes back empty."""
        self.excused |= self.gateways[gateway].keys() | self.outcomes[gateway].keys()
        self.gateways[gateway].clear()
        self.outcomes[gateway].clear()
        for key in [k for k in self.sessions if k[0] == gateway]:
            self.session_lost(*key)
        self.break_gateway(gateway)

    # ------------------------------------------------------------ runners

    def start_runner(self, uuid: str) -> None:
        self.incarnations += 1
        self.runners[uuid] = Runner(uuid, self.incarnations)

    def crash_runner(self, uuid: str, back: bool) -> None:
        runner = self.runners.pop(uuid)
        for gateway in self.gateways:
            if (gateway, runner.id) in self.sessions:
                self.session_lost(gateway, runner.id)
        if back:
            self.start_runner(uuid)

    def runner_hears(self, key: tuple[str, RunnerId], message: tuple[Any, ...]) -> None:
        gateway, runner_id = key
        runner = self.runners[runner_id.uuid]
        assert runner.id == runner_id
        kind, request_id, epoch, *rest = message
        if kind == "stop":
            sequence = runner.sequences.get(request_id)
            if sequence is not None and sequence.epoch <= epoch:
                del runner.sequences[request_id]
            runner.highest[request_id] = max(epoch, runner.highest.get(request_id, NEVER))
            return
        live = self.gateways[gateway].get(request_id)
        if live is None or epoch <= runner.highest.get(request_id, NEVER):
            return
        runner.highest[request_id] = epoch
        runner.sequences.pop(request_id, None)
        emitted, reservation = rest
        need = pages(min(live.prompt + emitted + reservation, PAGE * PAGES))
        if need > runner.free or len(runner.sequences) >= BATCH:
            self.sessions[key][1].append(("no_room", request_id, epoch))
            return
        runner.admissions += 1
        runner.sequences[request_id] = Sequence(
            request_id, gateway, live.digest, epoch, live.prompt, emitted, emitted, live.true_tokens,
            reservation, need, runner.admissions,
        )  # fmt: skip

    def step_runner(self, uuid: str) -> None:
        """One iteration."""
        runner = self.runners[uuid]
        for sequence in list(runner.sequences.values()):
            if sequence.length >= sequence.pages * PAGE and not self.grow(runner, sequence):
                continue
            tokens = [sequence.emitted] if sequence.emitted < sequence.end else []
            sequence.emitted += len(tokens)
            finished = sequence.emitted >= sequence.end
            back = self.sessions[(sequence.gateway, runner.id)][1]
            back.append(("tokens", sequence.live_id, sequence.epoch, sequence.emitted - len(tokens), tokens, finished))
            if finished:
                del runner.sequences[sequence.live_id]

    def grow(self, runner: Runner, sequence: Sequence) -> bool:
        """Double the reservation, granted as far as pages go; none: pause."""
        if not sequence.paused:
            sequence.reservation *= 2
        wanted = max(1, pages(sequence.prompt + sequence.base + sequence.reservation) - sequence.pages)
        granted = min(wanted, runner.free)
        sequence.pages += granted
        sequence.paused = not granted
        return bool(granted)

    # ------------------------------------------------------------ supervisor

    def supervise(self) -> None:
        """Collect every runner's state; tell the scheduler; choose victims."""
        reports: list[ReportedRunner] = []
        for uuid, runner in self.runners.items():
            before, self.leases[uuid] = self.leases.get(uuid), runner.report()
            reports.append(changed(None if runner.id in self.resync else before, self.leases[uuid]))
        for uuid in [u for u in self.leases if u not in self.runners]:
            self.unsent.append(self.leases.pop(uuid).runner)
        if not self.supervisor_up:
            return
        self.resync.clear()
        victims = tuple(v for runner in self.runners.values() if (v := self.victim(runner)) is not None)
        self.to_core["s"].append(Received(SUPERVISOR, ClusterReport(tuple(reports), tuple(self.unsent), victims)))
        self.unsent.clear()

    def victim(self, runner: Runner) -> PreemptDecision | None:
        paused = [s for s in runner.sequences.values() if s.paused]
        if not paused:
            return None
        newest = max(runner.sequences.values(), key=lambda s: s.admitted)
        return PreemptDecision(runner.id, newest.live_id, newest.epoch, paused[0].live_id, newest.reservation)

    def supervisor_hears(self, effect: object) -> None:
        match effect:
            case OutcomeReport(request_id=request_id):
                self.store.add(request_id)
                self.to_core["s"].append(Received(SUPERVISOR, OutcomeAck((request_id,))))
            case OrderedRunner(runner=runner_id, order=order) if order.desired is not None:
                runner = self.runners.get(runner_id.uuid)
                if runner is not None and runner.id == runner_id:
                    runner.known, runner.desired_version = True, order.desired.version
            case Resync(runner=runner_id) if runner_id is not None:
                self.resync.add(runner_id)
            case _:
                pass

    # ------------------------------------------------------------ the end

    def one_round(self) -> None:
        """50 ms of a healthy system."""
        self.reconnect()
        self.deliver_all()
        for uuid in list(self.runners):
            self.step_runner(uuid)
        self.supervise()
        self.deliver_all()
        self.tick(0.05)

    def quiesce(self, limit: int = 4000) -> int:
        """Run without faults until nothing is left to do. Returns the rounds it took."""
        if not self.runners:
            self.start_runner("u0")
        for rounds in range(limit):
            held = self.core.state.outcomes.outcomes  # while no supervisor is connected, whoever sent them
            if not any([*self.gateways.values(), *self.outcomes.values(), held, self.channels()]):
                return rounds
            self.one_round()
        raise AssertionError(f"not done after {limit} rounds: {self.gateways} {self.core.state.requests}")

    def check_ends(self) -> None:
        for request_id in self.submitted - self.excused:
            assert len(self.ended.get(request_id, ())) == 1, (request_id, self.ended.get(request_id))
            assert request_id in self.store, request_id
        state = self.core.state
        assert not state.requests
        assert all(not r.unacked and not r.owned for r in state.runners.values())
        assert not self.core.state.outcomes.outcomes


class Faults(RuleBasedStateMachine):
    """Hypothesis chooses what happens; the laws hold after every step."""

    @initialize(seed=st.integers(0, 2**20), runners=st.integers(1, 3))
    def build(self, seed: int, runners: int) -> None:
        self.world = World(seed, runners)
        self.world.reconnect()

    @rule(
        gateway=st.sampled_from(["g0", "g1"]),
        digest=st.sampled_from(DIGESTS),
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 50),
        true_tokens=st.integers(1, 50),
        p90=st.integers(0, 40),
    )
    def submit(self, gateway: str, digest: str, prompt: int, max_tokens: int, true_tokens: int, p90: int) -> None:
        self.world.submit(gateway, digest, prompt, max_tokens, true_tokens, p90)

    @rule(data=st.data(), count=st.integers(1, 12))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            channels = self.world.channels()
            if channels:
                self.world.deliver(*channels[data.draw(st.integers(0, len(channels) - 1))])

    @rule(count=st.integers(1, 10))
    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.world.one_round()

    @rule()
    def step(self) -> None:
        for uuid in list(self.world.runners):
            self.world.step_runner(uuid)

    @rule()
    def supervise(self) -> None:
        self.world.supervise()

    @rule(seconds=st.sampled_from([0.01, 0.3, 3.5, 6.0, 12.0, 40.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(gateway=st.sampled_from(["g0", "g1"]))
    def break_gateway(self, gateway: str) -> None:
        self.world.break_gateway(gateway)

    @rule(gateway=st.sampled_from(["g0", "g1"]))
    def restart_gateway(self, gateway: str) -> None:
        self.world.restart_gateway(gateway)

    @rule()
    def break_supervisor(self) -> None:
        self.world.break_supervisor()

    @rule()
    def restart_scheduler(self) -> None:
        self.world.boot()

    @rule()
    def reconnect(self) -> None:
        self.world.reconnect()

    @precondition(lambda self: bool(self.world.runners))
    @rule(data=st.data(), back=st.booleans())
    def crash_runner(self, data: st.DataObject, back: bool) -> None:
        self.world.crash_runner(data.draw(st.sampled_from(sorted(self.world.runners))), back)

    @precondition(lambda self: bool(self.world.runners))
    @rule(data=st.data(), gateway=st.sampled_from(["g0", "g1"]))
    def break_session(self, data: st.DataObject, gateway: str) -> None:
        uuid = data.draw(st.sampled_from(sorted(self.world.runners)))
        self.world.session_lost(gateway, self.world.runners[uuid].id)

    @precondition(lambda self: any(self.world.gateways.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        gateway = data.draw(st.sampled_from([g for g, lives in self.world.gateways.items() if lives]))
        self.world.cancel(gateway, data.draw(st.sampled_from(sorted(self.world.gateways[gateway]))))

    @rule(digest=st.sampled_from(DIGESTS[1:]))
    def change_adapters(self, digest: str) -> None:
        if self.world.adapters.pop(digest, None) is None:
            self.world.adapters[digest] = ADAPTERS[digest]
        if self.world.core.state.registry_known:
            self.world.tell_registry()

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "world"):
            self.world.core.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.quiesce()
            self.world.check_ends()


def test_whatever_happens_every_request_ends_exactly_once() -> None:
    run_state_machine_as_test(
        Faults,
        settings=settings(stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_storm_of_requests_with_random_faults_ends_clean(seed: int) -> None:
    world = World(seed, runners=3)
    world.reconnect()
    chance = random.Random(seed)
    for _ in range(150):
        if chance.random() < 0.6:
            world.submit(
                f"g{chance.randrange(2)}", chance.choice(DIGESTS), chance.randint(1, 40), chance.randint(1, 50),
                chance.randint(1, 50), chance.randint(0, 30),
            )  # fmt: skip
        world.one_round()
        match chance.randrange(30):
            case 0:
                world.crash_runner(chance.choice(sorted(world.runners)), back=True)
            case 1:
                world.boot()
            case 2:
                world.break_supervisor()
            case 3:
                world.break_gateway("g0")
            case _:
                pass
    world.quiesce()
    world.check_ends()


def test_a_restart_in_full_flight_moves_nobody_and_keeps_the_queue_in_order() -> None:
    world = World(1, runners=2)
    world.reconnect()
    for i in range(14):
        world.submit("g0", DIGESTS[i % 3], 8, 40, 40, 16)
        world.now += 0.01
    for _ in range(5):
        world.one_round()
    running = {live.id: (live.epoch, live.runner) for live in world.gateways["g0"].values() if live.runner}
    waiting = [r.id for r in world.core.state.pools[POOL].queue]
    assert running
    assert waiting
    world.boot()
    world.reconnect()
    world.deliver_all()
    after = {live.id: (live.epoch, live.runner) for live in world.gateways["g0"].values() if live.runner}
    assert after == running
    assert [r.id for r in world.core.state.pools[POOL].queue] == waiting
    world.quiesce()
    world.check_ends()
    assert world.term >= 2
