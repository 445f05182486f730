"""What stands around each machine in the simulator: disks, devices, clients. One class for each kind of process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvComplete, KvHello
from weft.domain.machine import Closed, Connected, Kind, Machine, Peer, PersistTerm, Received, Send
from weft.domain.prediction import PredictItem
from weft.domain.request import EndReason, GatewayHello, Outcome, OutcomeAck, OutcomeReport, Sampling, SessionHello
from weft.domain.routes import AdapterStatus, Keys, PoolStatus, RegistryChange, Route
from weft.domain.runner import RunnerSpec, SupervisorHello
from weft.wire.codec.kv_transfer import KvPages
from weft.wire.codec.scheduling import outcome_bytes, outcome_from_bytes
from weft_gateway.core import Gateway, Principal
from weft_gateway.core import events as gw
from weft_predictor.core import Arrays, LengthModel, ReplayedLengths, RidgeModel
from weft_runner.core import BatchLimits, KvIdentity, PoolLimits, Runner, SampledToken
from weft_runner.core import Sequence as PoolSequence
from weft_runner.core import events as rn
from weft_scheduler.core import Scheduler
from weft_sim.clock import Rank, random_of
from weft_sim.deployment import Deployment, RunnerPlan
from weft_sim.drafts import MeasuredSearch
from weft_sim.executor_model import EOS, VOCABULARY, Device, StepTimes, answer, bytes_of, ends
from weft_sim.hosts import Host, Lane
from weft_sim.laws import ClientRequest
from weft_sim.process import LawBroken, SimulatedProcess
from weft_sim.wire import KvPayload
from weft_supervisor.core import Supervisor

if TYPE_CHECKING:
    from weft_sim.stack import World

SCHEDULER, PREDICTOR = Peer(Kind.SCHEDULER, "scheduler"), Peer(Kind.PREDICTOR, "predictor")
FEATURES = 1 << 10  # of the predictor's ridge: prompts have no text here
TOKENIZER_S = 0.05  # for a gateway's tokenizer to come
CHECK_S = 1.0  # for a runner to answer a gateway that checks it
SLOW = 10.0  # time of a slow runner's step over that of others
COMMIT_S = 0.002  # of an outcome
KV_CLAIM_S = 2.0  # for a runner to take KV that is offered to it
LAYERS = 30  # of a model: when a step is over, all but the last one's KV may have left
SAMPLED = [SampledToken(token) for token in range(VOCABULARY + 1)]
ALIKE = SAMPLED[1], SAMPLED[EOS]


class RegistryMachine:
    """The operator as the scheduler sees it: a snapshot on each new stream, changes, and the latest statuses."""

    def __init__(self, deployment: Deployment) -> None:
        self._pools = deployment.pools
        self._adapters = {adapter.uid: adapter for adapter in deployment.adapters}
        self._scheduler: Peer | None = None
        self.statuses: dict[str, Any] = {}

    def handle(self, event: Any, now: float) -> list[Any]:
        match event:
            case Connected():
                self._scheduler = event.peer
                return [Send(event.peer, RegistryChange(True, self._pools, tuple(self._adapters.values())))]
            case RegistryChange():
                for uid in event.removed_adapters:
                    self._adapters.pop(uid, None)
                self._adapters.update((adapter.uid, adapter) for adapter in event.adapters)
                return [Send(self._scheduler, event)] if self._scheduler is not None else []
            case Received(message=PoolStatus() | AdapterStatus() as message):
                name = message.pool if isinstance(message, PoolStatus) else message.uid
                self.statuses[name] = message
            case _:
                pass
        return []

    def next_deadline(self) -> float | None:
        return None

    def check(self) -> None: ...


class BaseShell:
    """Defaults of methods that most processes do not need."""

    def accepts(self, process: SimulatedProcess, client: SimulatedProcess, hello: object) -> bool:
        """Return whether the hello is the contract's; a runner's certificate is for its own namespace."""
        match process.kind, client.kind:
            case Kind.SUPERVISOR, Kind.RUNNER:
                assert isinstance(client.shell, RunnerShell)
                namespace = client.shell.plan.spec.pool.partition("/")[0]
                return (
                    isinstance(hello, RunnerSpec)
                    and hello.pool.startswith(f"{namespace}/")
                    and hello.runner.uuid.startswith(f"{namespace}.")
                )
            case Kind.SCHEDULER, Kind.GATEWAY:
                return isinstance(hello, GatewayHello)
            case Kind.SCHEDULER, Kind.SUPERVISOR:
                return isinstance(hello, SupervisorHello)
            case _:
                return True

    def perform(self, process: SimulatedProcess, effect: Any) -> None: ...

    def stopped(self, process: SimulatedProcess) -> None: ...

    def intercept(self, process: SimulatedProcess, event: object) -> bool:
        return False

    def call_after(self, process: SimulatedProcess, event: object) -> None: ...


class RegistryShell(BaseShell):
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def start(self, process: SimulatedProcess) -> RegistryMachine:
        return RegistryMachine(self._deployment)


class SchedulerShell(BaseShell):
    """The scheduler's disk with the term."""

    def __init__(self, world: "World") -> None:
        self._world, self.term = world, 0

    def start(self, process: SimulatedProcess) -> Machine[Any, Any]:
        self.term += 1
        self._world.laws.term(self.term)
        return Scheduler(self._world.deployment.scheduler, self.term)

    def perform(self, process: SimulatedProcess, effect: Any) -> None:
        if isinstance(effect, PersistTerm):
            self.term = effect.term
            self._world.laws.term(self.term)

    def stopped(self, process: SimulatedProcess) -> None:
        self._world.laws.scheduler_died()


class SupervisorShell(BaseShell):
    """The store: outcomes by request, and the highest term. `full_until`: nothing can be written before."""

    def __init__(self, world: "World") -> None:
        self._world, self.term, self.full_until = world, 0, 0.0
        self.commits = 0
        self.outcomes: dict[str, bytes] = {}
        self.unlearned: dict[str, Outcome] = {}  # the predictor has not acknowledged them

    def start(self, process: SimulatedProcess) -> Machine[Any, Any]:
        self._waiting, self._writing = list[OutcomeReport](), False
        return Supervisor(self._world.deployment.supervisor, highest_term=self.term)

    def perform(self, process: SimulatedProcess, effect: Any) -> None:
        if isinstance(effect, PersistTerm):
            self.term = max(self.term, effect.term)

    def intercept(self, process: SimulatedProcess, event: object) -> bool:
        match event:
            case Received(message=OutcomeReport() as report) if process.costs.commit:
                self._waiting.append(report)
                if not self._writing:
                    self._commit(process)
                return True
            case Received(message=OutcomeReport() as report):
                clock = self._world.clock
                stored_at = max(clock.now + COMMIT_S, self.full_until)
                clock.at(stored_at, Rank.WORK, self._store, process, process.generation, report)
                return True
            case Connected(peer=Peer(kind=Kind.SCHEDULER) as scheduler):
                process.send(scheduler, Keys(()))
            case Connected(peer=Peer(kind=Kind.PREDICTOR) as predictor):
                for outcome in self.unlearned.values():
                    process.send(predictor, outcome)
                return True
            case Received(peer=Peer(kind=Kind.PREDICTOR), message=OutcomeAck(request_ids)):
                for request_id in request_ids:
                    self.unlearned.pop(request_id, None)
                return True
            case Closed(peer=Peer(kind=Kind.PREDICTOR)):
                return True
            case _:
                pass
        return False

    def _commit(self, process: SimulatedProcess) -> None:
        """Commit waiting outcomes in one transaction on a separate thread. Later outcomes join the next one."""
        reports, self._waiting, self._writing = self._waiting, [], True
        self.commits += 1
        seconds = process.costs.commit + process.costs.outcome * len(reports)
        process.host.run(seconds, 1, self._committed, process, process.generation, reports)

    def _committed(self, process: SimulatedProcess, generation: int, reports: list[OutcomeReport]) -> None:
        if generation != process.generation:
            return
        for report in reports:
            self._store(process, generation, report)
        self._writing = False
        if self._waiting and process.up:
            self._commit(process)

    def _store(self, process: SimulatedProcess, generation: int, report: OutcomeReport) -> None:
        if generation != process.generation or not process.up:
            return
        if report.request_id not in self.outcomes:
            self.outcomes[report.request_id] = report.record
            outcome = self.unlearned[report.request_id] = outcome_from_bytes(report.record)
            process.send(PREDICTOR, outcome)
        if self._world.watched:
            self._world.laws.outcome_stored(report)
        process.send(SCHEDULER, OutcomeAck((report.request_id,)))


class KvArrivals:
    """Pages of a sequence that come from another runner: each is written once."""

    def __init__(self, first: int, pages: tuple[int, ...]) -> None:
        self._first, self._pages = first, pages
        self._written: set[int] = set()

    def take(self, device: Device, payload: KvPayload) -> bool:
        """Take pages; False: they are not awaited, or not well-formed."""
        first, count = payload.pages.first_page, payload.pages.pages
        indices = range(first, first + count)
        if first < self._first or first + count > self._first + len(self._pages) or self._written & set(indices):
            return False
        self._written.update(indices)
        data, at = payload.data, 0
        for index in indices if data != b"-" else ():
            size = int.from_bytes(data[at : at + 4], "big")
            block, at = data[at + 4 : at + 4 + size], at + 4 + size
            if size % 8 or len(block) != size:
                return False
            if size:
                device.write(self._pages[index - self._first], block)
        return True

    def is_complete(self, in_kv: int, page_tokens: int) -> bool:
        """Return whether every page of `in_kv` tokens is there."""
        return self._written >= set(range(self._first, -(-in_kv // page_tokens)))


class RunnerShell(BaseShell):
    """Device and disk of one runner. `depth` steps may be in flight at a time; they end in their order."""

    def __init__(self, world: "World", plan: RunnerPlan) -> None:
        self._world, self.plan, self.spec = world, plan, plan.spec
        self.times = plan.times or StepTimes.of_spec(plan.spec)
        self.slow_until = self.failing_until = self.full_until = 0.0
        self.busy_s = self.model_s = self._ended_at = 0.0  # with and without what slows it on its host
        self.steps = self.rows = self.prompt_tokens = self.swaps = self.accepted = 0
        self.roles: list[tuple[float, str]] = []  # and since when
        self.on_disk: dict[str, None] = {}

    def start(self, process: SimulatedProcess) -> Machine[Any, Any]:
        identity = RunnerId(self.plan.spec.runner.uuid, f"i{process.generation}")
        self.spec = spec = replace(self.plan.spec, runner=identity, swaps=self.plan.swap_page_bytes > 0)
        process.peer = Peer(Kind.RUNNER, f"{identity.uuid}/{identity.incarnation}")
        self._world.laws.registered(process.peer, spec)
        self.device = Device(spec.page_tokens)
        self._in_flight, self._idle_at, self._last_end, self._offering = 0, 0.0, 0.0, False
        self._built_at = 0.0
        self._copying: dict[int, rn.SwapOut | rn.SwapIn] = {}
        self._link_free_at = 0.0  # nothing is sent to other runners then
        self._streaming = list[rn.SendKv]()  # with the next step
        self._awaited: dict[tuple[Peer, str, Epoch], KvArrivals] = {}
        self._model = Lane(process.host, self.plan.threads)
        self._link = Host(f"{process.name} link", 1, self._world.clock)
        limits = PoolLimits(
            spec.total_pages, spec.page_tokens, spec.max_sequences, spec.max_adapters, spec.max_context_tokens,
            VOCABULARY + 1, frozenset({EOS}),
            BatchLimits(
                self.plan.max_prefills, max(self.plan.max_batch_tokens, spec.max_sequences), self.plan.token_time_ms,
                self.plan.batching,
            ),
            page_bytes=spec.page_bytes, swap_page_bytes=self.plan.swap_page_bytes,
            host_bytes=self.plan.host_bytes,
            kv=KvIdentity(identity, spec.pool, spec.base_digest, spec.kv_layout) if spec.kv_address else None,
            kv_page_bytes=spec.page_bytes, layer_by_layer_tokens=self.plan.layer_by_layer_tokens, kv_claim_s=KV_CLAIM_S,
        )  # fmt: skip
        chance = random_of(self._world.seed, "drafts", process.peer.name)
        search = MeasuredSearch(lambda: self.machine.pool.sequences.values(), self._next_tokens, chance)
        self.machine = Runner(limits, self.times.model, search if self.plan.drafts else None)
        self._world.clock.call_after(
            0.0, Rank.WORK, process.post_at, process.generation, rn.FoundOnDisk(tuple(self.on_disk))
        )
        return self.machine

    def accepts(self, process: SimulatedProcess, client: SimulatedProcess, hello: object) -> bool:
        if isinstance(hello, KvHello):
            return client.kind is Kind.RUNNER
        return isinstance(hello, SessionHello) and hello.incarnation == self.spec.runner.incarnation

    def intercept(self, process: SimulatedProcess, event: object) -> bool:
        """Put pages at their awaited places, each once. Complete KV is passed on; other messages end the stream."""
        if not isinstance(event, Received):
            return False
        peer, message = event
        if isinstance(message, KvPayload):
            pages = message.pages
            awaited = self._awaited.get((peer, pages.request_id, pages.epoch))
            if awaited is not None and not awaited.take(self.device, message):
                self._refuse(process, peer, f"pages of {pages.request_id} that are not awaited")
            return True
        if isinstance(message, KvComplete):
            awaited = self._awaited.pop((peer, message.request_id, message.epoch), None)
            if awaited is not None and not awaited.is_complete(message.in_kv, self.spec.page_tokens):
                self._refuse(process, peer, f"{message.request_id} is complete without all its pages")
                return True
        return False

    def _refuse(self, process: SimulatedProcess, peer: Peer, reason: str) -> None:
        """End a stream like a shell that refuses a message: its machine gets Closed."""
        self._world.network.peer_errors.append((peer, reason))
        if (open_stream := process.streams.pop(peer, None)) is not None:
            self._world.network.close(*open_stream, reason)
        process.post(Closed(peer, reason))

    def call_after(self, process: SimulatedProcess, event: object) -> None:
        """Offer the executor's free places for as long as steps come of it."""
        if isinstance(event, rn.StepDone):
            self._in_flight -= 1
        elif not self.roles or self.roles[-1][1] != self.machine.pool.role.value:
            self.roles.append((self._world.clock.now, self.machine.pool.role.value))
        if self._offering:
            return
        self._offering = True
        try:
            while process.machine is self.machine and self._in_flight < self.plan.depth and self.machine.pool.sequences:
                in_flight = self._in_flight
                process.handle(rn.StepSlot(self.plan.depth, self.plan.depth - in_flight))
                if self._in_flight == in_flight:
                    return
        finally:
            self._offering = False

    def perform(self, process: SimulatedProcess, effect: Any) -> None:
        match effect:
            case rn.RunStep():
                self._run(process, effect)
            case rn.Load():  # one thread builds them, one after the other
                clock = self._world.clock
                self._built_at = max(clock.now, self._built_at) + self._world.deployment.load_s
                clock.at(self._built_at, Rank.WORK, self._loaded, process, process.generation, effect)
            case rn.Fetch():
                deployment = self._world.deployment
                seconds = deployment.load_s if deployment.fetch_s is None else deployment.fetch_s
                self._link.run(seconds, 1, self._loaded, process, process.generation, effect)
            case rn.RunnerStatus() if self._world.controller is not None:
                self._world.controller.ready(process.name, ready=not effect.not_ready)
            case rn.Unload():
                self.device.unload(effect.slot)
            case rn.AdapterPages():
                self.device.clear(effect.pages)
            case rn.SwapOut() | rn.SwapIn():
                self._swap(process, effect)
            case rn.DropSwap():
                for number in effect.numbers:
                    self._copying.pop(number, None)
                for host in effect.hosts:
                    self.device.host.pop(host, None)
            case rn.OpenKvStream():
                self._open_kv_stream(process, effect)
            case rn.SendKv(layer_by_layer=True):
                self._streaming.append(effect)
            case rn.SendKv():
                self._send_kv(process, effect, self._world.clock.now)
            case rn.ReceiveKv():
                key = effect.peer, effect.request_id, effect.epoch
                self._awaited[key] = KvArrivals(effect.first_page, effect.pages)
            case rn.DropKv():
                self._awaited.pop((effect.peer, effect.request_id, effect.epoch), None)
                self._streaming = [
                    s for s in self._streaming if (s.request_id, s.epoch) != (effect.request_id, effect.epoch)
                ]
            case rn.Retain():
                self.on_disk = {digest: None for digest in self.on_disk if digest in effect.digests}
            case _:
                pass

    def stopped(self, process: SimulatedProcess) -> None:
        if self._world.controller is not None:
            self._world.controller.ready(process.name, ready=False)

    def _open_kv_stream(self, process: SimulatedProcess, effect: rn.OpenKvStream) -> None:
        world = self._world
        runner = world.runners.get(effect.address)
        if runner is None:
            nowhere = Closed(effect.peer, f"{effect.address} is no address")
            world.clock.call_after(
                world.deployment.delay_s, Rank.DELIVERY, process.post_at, process.generation, nowhere
            )
            return
        stream = world.network.connect(process, runner, effect.hello, effect.peer)
        process.streams[effect.peer] = (stream, 0)

    def _send_kv(self, process: SimulatedProcess, send: rn.SendKv, ready_at: float, parts: int = 1) -> None:
        """Send pages over the runner's link, in order, complete at `ready_at`: all but one of `parts` left before."""
        if (open_stream := process.streams.get(send.peer)) is None:
            return
        device, clock = self.device, self._world.clock
        seconds = len(send.pages) * max(self.spec.page_bytes, 1) / self.plan.kv_bytes_per_s
        self._link_free_at = max(clock.now, self._link_free_at) + seconds
        arrives = max(self._link_free_at, ready_at + seconds / parts)
        blocks = [device.read(page) for page in send.pages] if self._world.watched else []
        data = b"".join(len(block).to_bytes(4, "big") + block for block in blocks) or b"-"
        pages = KvPages(send.request_id, send.epoch, send.first_page, len(send.pages), 0, 1, len(data))
        self._world.network.send(*open_stream, KvPayload(pages, data), arrives - clock.now)

    def _swap(self, process: SimulatedProcess, order: rn.SwapOut | rn.SwapIn) -> None:
        """Copy pages. A copy reads at its end; until then neither old nor new content is there."""
        clock = self._world.clock
        seconds = self.times.page_copy_ms * len(order.pages) / 1e3 * (SLOW if clock.now < self.slow_until else 1.0)
        self._copying[order.number] = order
        if isinstance(order, rn.SwapIn):
            self.device.clear(order.pages)
        copied = (self._swapped, process, process.generation, order, clock.now)
        if self.plan.threads:
            process.host.run(seconds, 1, *copied)
        else:
            clock.call_after(seconds, Rank.WORK, *copied)

    def _swapped(
        self, process: SimulatedProcess, generation: int, order: rn.SwapOut | rn.SwapIn, began: float
    ) -> None:  # fmt: skip
        now = self._world.clock.now
        if generation != process.generation or not process.up or self._copying.get(order.number) is not order:
            return
        del self._copying[order.number]
        if now < self.failing_until:
            process.post(rn.SwapFailed(order.number, "no memory"))
            return
        if isinstance(order, rn.SwapOut):
            self.device.copy_out(order.pages, order.hosts)
            self.swaps += 1
        else:
            self.device.copy_in(order.hosts, order.pages)
        process.post(rn.SwapDone(order.number, len(order.pages), now - began))

    def _run(self, process: SimulatedProcess, step: rn.RunStep) -> None:
        """Run steps one after another. On the host's cores they compete with all other work."""
        clock, batch = self._world.clock, step.batch
        seconds = self.times.seconds(
            len(batch.rows) - batch.n_prefills, batch.prompt_tokens, step.keys, batch.n_adapters, batch.guesses
        )
        if clock.now < self.slow_until:
            seconds *= SLOW
        self.model_s += seconds
        self.steps += 1
        self.rows += len(batch.rows)
        self.prompt_tokens += batch.prompt_tokens
        self._in_flight += 1
        done = (process, process.generation, step, self._compute(step), clock.now)
        if self.plan.threads:
            self._model.run(seconds, self._step_done, *done)
        else:
            stage_s = seconds / self.plan.stages
            begins = max(clock.now, self._idle_at)  # at the first stage
            self._idle_at = begins + stage_s
            self._last_end = max(begins + seconds, self._last_end + stage_s)
            clock.at(self._last_end, Rank.WORK, self._step_done, *done)
        streaming, self._streaming = self._streaming, []
        for send in streaming:
            self._send_kv(process, send, clock.now + seconds, LAYERS)

    def _next_tokens(self, sequence: PoolSequence, count: int) -> list[int]:
        """Return what the model samples next for a sequence, to its end at most."""
        tokens, sampling = sequence.tokens, sequence.start.sampling
        if self._world.watched:
            return answer(tokens, sequence.start.adapter, sampling.seed, sampling.choice, count)
        places = range(len(tokens), len(tokens) + count)
        return [ALIKE[0].token for place in places if not ends(sampling.seed, place)]

    def _compute(self, step: rn.RunStep) -> rn.StepResults:
        """Return the step's results. Steps are computed in the order of their launch, so it may be done at the launch.

        Where no law compares them, tokens are all alike but for the last of an answer.
        """
        tokens, checked = dict[str, SampledToken](), dict[str, list[SampledToken]]()
        results = rn.StepResults(tokens, {}, forwards=0, checked=checked)  # no model runs
        if not self._world.watched:
            for (key, _, n_tokens, samples, drafted), sequence in zip(step.batch.rows, step.sequences, strict=True):
                seed, last = sequence.start.sampling.seed, sequence.in_kv + n_tokens
                if drafted:
                    places = range(last - len(drafted), last + 1)
                    checked[key] = _checked(drafted, [ALIKE[ends(seed, place)] for place in places])
                elif samples:
                    tokens[key] = ALIKE[ends(seed, last)]
            return results
        device, pool = self.device, self.machine.pool
        device.clear(step.clear_pages)
        compute, pages_of = device.row, pool.pages.pages_of
        last = in_slot = ""  # rows of an adapter are neighbours
        for (key, adapter, n_tokens, samples, drafted), sequence in zip(step.batch.rows, step.sequences, strict=True):
            if adapter != last:
                last = adapter
                in_slot = device.slots.get(pool.adapters.slot_of(adapter), "no adapter") if adapter else ""
            sampling, start = sequence.start.sampling, sequence.in_kv
            fed = sequence.tokens[start : start + n_tokens]
            if drafted:  # wrong ones are in the pages, too, until what follows is computed over them
                sampled = [
                    SAMPLED[compute((token,), start + at, pages_of(key), in_slot, sampling.seed, sampling.choice)]
                    for at, token in enumerate((*fed, *drafted))
                ]
                checked[key] = _checked(drafted, sampled)
                continue
            token = compute(fed, start, pages_of(key), in_slot, sampling.seed, sampling.choice)
            if samples:
                tokens[key] = SAMPLED[token]
        return results

    def _step_done(
        self, process: SimulatedProcess, generation: int, step: rn.RunStep, results: rn.StepResults, scheduled_at: float
    ) -> None:
        now, batch = self._world.clock.now, step.batch
        began = max(scheduled_at, self._ended_at)
        self._ended_at = now
        self.busy_s += now - began
        if self._world.timeline is not None:
            rows, tokens_in = len(batch.rows), batch.n_tokens
            self._world.timeline.span(process.name, "step", began, now - began, rows=rows, tokens=tokens_in)
        if generation == process.generation and process.up:
            self.accepted += sum(len(sampled) - 1 for sampled in results.checked.values())
            process.post(rn.StepDone(step, results, (now - scheduled_at) * 1e3))

    def _loaded(self, process: SimulatedProcess, generation: int, order: rn.Load | rn.Fetch) -> None:
        if generation != process.generation or not process.up:
            return
        digest, now = order.digest, self._world.clock.now
        size = self._world.contents.get(digest, 0)
        if not size:
            failed = EndReason.UNKNOWN_ADAPTER, "the depot does not have it", False
        elif now < self.failing_until or (now < self.full_until and isinstance(order, rn.Fetch)):
            failed = (
                EndReason.LOAD_FAILED,
                "it cannot be read" if now < self.failing_until else "the disk is full",
                False,
            )
        else:
            failed = None
        if isinstance(order, rn.Fetch):
            if failed:
                process.post(rn.FetchFailed(digest, *failed))
                return
            self.on_disk[digest] = None
            process.post(rn.Fetched(digest, size if order.measure else None, size if order.to_host else None))
        elif failed:
            process.post(rn.LoadFailed(digest, *failed))
        else:
            self.device.load(order.slot, digest)
            seconds = self._world.deployment.load_s
            process.post(rn.Loaded(digest, 8, size, size if order.to_host else None, seconds))


def _checked(drafted: Sequence[int], sampled: list[SampledToken]) -> list[SampledToken]:
    """Return the leading guesses equal to the samples, and one more token."""
    n_right = next((at for at, guess in enumerate(drafted) if sampled[at].token != guess), len(drafted))
    return sampled[: n_right + 1]


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client's request is here. The costs of a process have its name."""

    request_id: str


class GatewayShell(BaseShell):
    """Clients and sessions of the gateway. Its tokenizers load within `TOKENIZER_S`."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._clients: dict[str, list[ClientRequest]] = {}  # by the request's id, before its submission
        self._tokenizers: set[str] = set()

    def start(self, process: SimulatedProcess) -> Machine[Any, Any]:
        process.peer = Peer(Kind.GATEWAY, f"{process.name}.{process.generation}")
        self._clients.clear()
        self._tokenizers.clear()
        config = replace(self._world.deployment.gateway)
        self.machine = Gateway(config, process.peer.name, outcome_bytes)
        return self.machine

    def arrive(self, process: SimulatedProcess, request_id: str, answers: list[ClientRequest]) -> None:
        """Take a client's request for one or several answers."""
        self._clients[request_id] = answers
        process.post(RequestArrived(request_id))

    def perform(self, process: SimulatedProcess, effect: Any) -> None:
        world = self._world
        if type(effect) is gw.Emit:  # one for each token
            request = world.clients[effect.request_id]
            if request.first_at is None or world.clients_cost or world.gaps_s is not None:
                world.emitted(request)
            if world.watched:
                world.laws.read(request, effect.text)
            else:
                request.text += effect.text
            return
        match effect:
            case gw.Finish():
                error = effect.end.failure.code if effect.end.failure else ""
                world.finished(effect.request_id, effect.end.reason.value, error)
            case gw.OpenSession():
                runner = world.runners.get(effect.address)
                if runner is None:
                    nowhere = Closed(effect.peer, f"{effect.address} is no address")
                    world.clock.call_after(
                        world.deployment.delay_s, Rank.DELIVERY, process.post_at, process.generation, nowhere
                    )
                    return
                stream = world.network.connect(process, runner, effect.hello, effect.peer)
                process.streams[effect.peer] = (stream, 0)  # what is sent from now on follows the hello
            case gw.CheckSession():
                world.clock.call_after(
                    2 * world.deployment.delay_s, Rank.DELIVERY, self._check, process, process.generation, effect.peer
                )
            case gw.Proceed() | gw.Refuse():
                self._answered(process, effect)
            case gw.Submitted():
                del self._clients[effect.request.request_id]
            case gw.RoutesChanged() if effect.pools:
                for digest in sorted({pool.base_digest for pool in self.machine.routes.pools.values()}):
                    if digest not in self._tokenizers:
                        self._tokenizers.add(digest)
                        ready = gw.TokenizerChanged(digest, gw.TokenizerState.READY)
                        world.clock.call_after(TOKENIZER_S, Rank.WORK, process.post_at, process.generation, ready)
            case gw.RequestFailed():
                raise LawBroken(f"{process.name}: a bug ends {effect.request_id}: {effect.error!r}") from effect.error
            case gw.PeerViolation():
                world.laws.violation(effect.peer, effect.reason)
            case gw.OutcomeDropped():
                raise LawBroken(f"{process.name} drops the outcome of {effect.request_id}")
            case _:
                pass

    def _check(self, process: SimulatedProcess, generation: int, peer: Peer) -> None:
        """Tell whether a session's runner answers now; a session without an answer is given up."""
        stream, _ = process.streams.get(peer, (None, 0))
        if generation != process.generation or stream is None:
            return
        if self._world.network.reaches(stream):
            process.post(gw.SessionAlive(peer))
        else:
            self._world.clock.call_after(CHECK_S, Rank.FAULT, self._world.network.give_up, stream)

    def _answered(self, process: SimulatedProcess, step: gw.Proceed | gw.Refuse | gw.RequestHeld) -> None:
        """Authenticate and parse, then tokenise: the shell's part, without time here."""
        request_id = step.request_id
        if isinstance(step, gw.RequestHeld):
            process.post(step)
            return
        if isinstance(step, gw.Refuse):
            self._over(request_id, "failed", step.failure.code)
            return
        answers = self._clients[request_id]
        first = answers[0]
        if not first.resolved:
            located = self.machine.routes.find(first.model_name, Principal(first.namespace))
            if located is None:
                self._over(request_id, "failed", "model_not_found")
                process.post(gw.ClientGone(request_id))
                return
            first.resolved, first.route = True, located[0]
            pool, n = located[1].name, len(answers)
            resolved = self.machine.admission.resolve(request_id, pool, n, first.priority, process.now)
            self._answered(process, resolved)
            return
        route = first.route
        assert isinstance(route, Route)
        for request in answers:
            request.adapter = route.digest
        prepared = gw.PreparedRequest(
            request_id, request_id, first.namespace, route, first.prompt, "", first.max_tokens,
            Sampling(first.seed), bytes_of, round(self._world.clock.now * 1e3), first.stops, len(answers),
        )  # fmt: skip
        process.post(gw.RequestReady((prepared,)))

    def _over(self, request_id: str, reason: str, error: str) -> None:
        """End a request before its submission: nothing but the client hears of it."""
        for request in self._clients.pop(request_id):
            self._world.laws.excused.add(request.id)
            self._world.finished(request.id, reason, error)

    def intercept(self, process: SimulatedProcess, event: object) -> bool:
        match event:
            case RequestArrived(request_id):
                priority = self._clients[request_id][0].priority
                self._answered(process, self.machine.admission.arrive(request_id, priority, process.now))
                return True
            case gw.ClientGone(request_id) if request_id in self._clients:
                self._world.clock.call_after(
                    0.0, Rank.WORK, self._on_client_gone, process, process.generation, request_id
                )
            case _:
                pass
        return False

    def _on_client_gone(self, process: SimulatedProcess, generation: int, request_id: str) -> None:
        """Let a client leave after the machine has handled it. Unsubmitted requests end without a trace."""
        if generation == process.generation and request_id in self._clients:
            self._over(request_id, "cancelled", "")

    def stopped(self, process: SimulatedProcess) -> None:
        self._world.laws.gateway_died(process.name)


class PredictorMachine:
    """The predictor's two calls of its length model as a machine."""

    def __init__(self, model: LengthModel) -> None:
        self.model = model

    def handle(self, event: Any, now: float) -> list[Any]:
        match event:
            case Received(peer, PredictItem() as item):
                return [Send(peer, prediction) for prediction in self.model.predict_batch([item])]
            case Received(peer, Outcome() as outcome):
                self.model.observe(outcome)
                return [Send(peer, OutcomeAck((outcome.request_id,)))]
            case _:
                return []

    def next_deadline(self) -> float | None:
        return None

    def check(self) -> None: ...


class PredictorShell(BaseShell):
    """The predictor's disk, with a checkpoint of its learning at the last stop."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._checkpoint: Arrays | None = None

    def start(self, process: SimulatedProcess) -> Machine[Any, Any]:
        if self._world.deployment.replayed_lengths:
            return PredictorMachine(ReplayedLengths(self._world.predictions))
        saved = self._checkpoint
        self._model = RidgeModel.cold("simulated", dim=FEATURES) if saved is None else RidgeModel.load(saved)
        return PredictorMachine(self._model)

    def stopped(self, process: SimulatedProcess) -> None:
        if not self._world.deployment.replayed_lengths:
            self._checkpoint = self._model.save()
