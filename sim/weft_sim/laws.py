"""What must always hold (docs/architecture.md; the design's section 9), watched from outside the machines.

Machines' own `check()` runs after every event beside these. Everything here is seen in messages and by clients: what
a client reads against the undisturbed answer, assignments against epochs, reports against the page arithmetic, outcomes
against what clients saw. `settled` holds once faults are over and every client has its answer.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.domain.ids import NEVER, Epoch
from weft.domain.machine import Close, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.request import (
    Assign,
    Ended,
    Failed,
    FailReason,
    Frozen,
    NoCapacity,
    OutcomeReport,
    Priority,
    Reject,
    ResubmitComplete,
    Start,
    Started,
    Step,
    Stop,
    Submit,
)
from weft.domain.runner import ReportGap, RunnerBook, RunnerReport, RunnerSpec
from weft.wire.codec.scheduling import outcome_from_bytes
from weft_scheduler.core import MAX_CONSOLIDATIONS, Consolidated, Stale
from weft_sim.executor_model import answer, text_of
from weft_sim.process import LawBroken, SimulatedProcess

COMPLETE = ("eos", "length", "stop")


@dataclass(slots=True)
class ClientRequest:
    """A client's request, and its read text so far. Times are virtual seconds."""

    id: str
    request_id: str  # of the request that it is an answer of
    gateway: str
    namespace: str
    model_name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    choice: int = 0
    stops: tuple[str, ...] = ()
    arrived: float = 0.0
    text: str = ""
    first_at: float | None = None
    ended_at: float | None = None
    finish: str = ""
    error: str = ""
    is_gone: bool = False  # the client went away
    trusted: bool = True  # its runners do not lie
    last_at: float | None = None  # of its latest token
    adapter: str = ""  # what the gateway resolved the name to
    resolved: bool = False
    route: object = None
    priority: Priority = Priority.INTERACTIVE
    _expected: tuple[str, str] | None = None

    def expected(self) -> tuple[str, str]:
        """The undisturbed answer and how it ends."""
        if self._expected is None:
            tokens = answer(self.prompt, self.adapter, self.seed, self.choice, self.max_tokens)
            text, finish = text_of(tokens), "length" if len(tokens) == self.max_tokens else "eos"
            cut = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=-1)
            self._expected = (text[:cut], "stop") if cut >= 0 else (text, finish)
        return self._expected


@dataclass(slots=True)
class Waiting:
    """A request in the scheduler's queue, as its messages show it."""

    gateway: str
    pool: str
    tenant: str
    start_s: float
    number: int
    priority: Priority = Priority.INTERACTIVE
    fresh: bool = True  # nothing has happened to it yet
    passes: int = 0


@dataclass
class Laws:
    """`now`: the virtual time, for messages; `scheduler_now`: the scheduler's clock, which may have jumped, for ages.

    `bound`: of passes by requests of the same tenant; None: none. `max_preemptions`: of a request, by all
    runners together.
    """

    now: Callable[[], float]
    scheduler_now: Callable[[], float]
    bound: int | None = 32
    avoid_s: float = 3.0
    max_preemptions: int = 8
    requests: dict[str, ClientRequest] = field(default_factory=dict[str, ClientRequest])
    excused: set[str] = field(default_factory=set[str])  # died with their gateway
    stored: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    epochs: dict[str, Epoch] = field(default_factory=dict[str, Epoch])  # the latest assigned
    owners: dict[str, dict[Epoch, set[Peer]]] = field(
        default_factory=lambda: defaultdict[str, dict[Epoch, set[Peer]]](dict)
    )
    books: dict[Peer, RunnerBook] = field(default_factory=dict[Peer, RunnerBook])
    waiting: dict[str, Waiting] = field(default_factory=dict[str, Waiting])
    lost_at: dict[str, float] = field(default_factory=dict[str, float])  # a gateway lost a session
    terms: list[int] = field(default_factory=list[int])
    liars: set[Peer] = field(default_factory=set[Peer])
    starts: dict[tuple[str, Epoch, bool], Peer] = field(default_factory=dict[tuple[str, Epoch, bool], Peer])
    began_with: dict[str, int] = field(default_factory=dict[str, int])  # tokens that the latest Start had
    preemptions: Counter[str] = field(default_factory=Counter[str])
    consolidations: Counter[str] = field(default_factory=Counter[str])  # of requests, by the present scheduler
    complete: set[str] = field(default_factory=set[str])  # gateways that have submitted again all that they hold
    _arrivals: int = 0

    # ---------------------------------------------------------------- clients

    def submitted(self, request: ClientRequest) -> None:
        assert request.id not in self.requests, request.id
        self.requests[request.id] = request

    def read(self, request: ClientRequest, text: str) -> None:
        """Let a client read more of its answer: it has to be the undisturbed one, so far."""
        if request.finish:
            raise LawBroken(f"{request.id} reads on after its end ({request.finish})")
        n_chars = len(request.text)
        request.text += text
        if request.trusted and not request.expected()[0].startswith(text, n_chars):
            raise LawBroken(f"{request.id}: the answer differs from the undisturbed one after token {n_chars // 2}")

    def ended(self, request_id: str, finish: str, error: str) -> None:
        """Record the end of a client's answer."""
        request = self.requests[request_id]
        if request.finish:
            raise LawBroken(f"{request_id} ends twice: {request.finish}, then {finish}")
        request.finish, request.error, request.ended_at = finish, error, self.now()
        if request.trusted and finish in COMPLETE and (request.text, finish) != request.expected():
            text, expected_finish = request.expected()
            raise LawBroken(
                f"{request_id} ends by {finish} after {len(request.text) / 2:g} tokens; "
                f"undisturbed it ends by {expected_finish} after {len(text) / 2:g}"
            )
        if finish == "cancelled" and not request.is_gone:
            duplicates = [r for r in self.requests.values() if r.request_id == request.request_id]
            if not any(duplicate.finish == "failed" for duplicate in duplicates):
                raise LawBroken(f"{request_id} is cancelled, and its client is there")

    def gateway_died(self, gateway: str) -> None:
        """Count a gateway's clients as lost: their connections break."""
        for request in self.requests.values():
            if request.gateway == gateway and not request.finish:
                request.finish = "lost"
        self.excused |= {r.id for r in self.requests.values() if r.gateway == gateway and not self.stored[r.id]}

    def violation(self, peer: Peer, reason: str) -> None:
        """Record that a machine ended a stream for a message of its peer."""
        if peer not in self.liars:
            raise LawBroken(f"{peer.name} broke the contract: {reason}")

    # ---------------------------------------------------------------- messages

    def effects(self, process: SimulatedProcess, event: object, effects: Sequence[Any]) -> None:
        """Check the last event and effects of a machine."""
        if process.kind is Kind.GATEWAY:
            self._gateway(process, event, effects)
        elif process.kind is Kind.SCHEDULER:
            self._scheduler(event, effects)
        elif process.kind is Kind.RUNNER and process.peer not in self.liars:
            for effect in effects:
                if type(effect) is Send and isinstance(effect.message, RunnerReport):
                    self._report(process, effect.message)

    def _gateway(self, process: SimulatedProcess, event: object, effects: Sequence[Any]) -> None:
        match event:
            case Received(peer=Peer(kind=Kind.RUNNER) as peer, message=message):
                match message:
                    case Step():
                        for sequence in message.sequences:
                            if sequence.finish is not None:
                                self._disown(sequence.request_id, sequence.epoch, peer)
                    case NoCapacity() | Ended() | Frozen():
                        self._disown(message.request_id, message.epoch, peer)
                    case _:
                        pass
            case Closed(peer=Peer(kind=Kind.RUNNER) as peer):
                self.lost_at[process.name] = self.now()
                self._drop(process.name, peer)
            case _:
                pass
        for effect in effects:
            if type(effect) is Close:
                self.lost_at[process.name] = self.now()
                self._drop(process.name, effect.peer)
            if type(effect) is not Send or effect.peer.kind not in (Kind.RUNNER, Kind.SCHEDULER):
                continue
            match effect.message:
                case Failed():
                    self._failed(effect.message)
                case Start(request_id=request_id, epoch=epoch) as start:
                    self._preempted_again(request_id)
                    self.began_with[request_id] = len(start.emitted)
                    runner = self.starts.setdefault((request_id, epoch, start.kv_from is not None), effect.peer)
                    if runner != effect.peer:
                        raise LawBroken(f"{request_id} {epoch} starts at two runners")
                    self.owners[request_id].setdefault(epoch, set()).add(effect.peer)
                case Started(request_id=request_id, epoch=epoch, handed_off=True):
                    receiver = self.starts[request_id, epoch, True]
                    if receiver in self.owners[request_id].get(epoch, ()):
                        self.owners[request_id][epoch] = {receiver}
                case Stop(request_id=request_id, epoch=epoch):
                    self._disown(request_id, epoch, effect.peer)
                case _:
                    pass
        for effect in effects:
            if type(effect) is Send and isinstance(effect.message, Start):
                owners = self.owners[effect.message.request_id]
                if len(owners) > 1 or any(len(peers) > 2 for peers in owners.values()):
                    named = ", ".join(f"{sorted(p.name for p in peers)} {tuple(e)}" for e, peers in owners.items())
                    raise LawBroken(f"{effect.message.request_id} has two owners: {named}")

    def _failed(self, failed: Failed) -> None:
        """Record the end of an epoch. An epoch without capacity may never have begun."""
        produced = failed.emitted_tokens > self.began_with[failed.request_id]
        preempted = failed.reason is FailReason.PREEMPTED or (failed.reason is FailReason.NO_CAPACITY and produced)
        self.preemptions[failed.request_id] += preempted

    def _preempted_again(self, request_id: str) -> None:
        """Check that a request with a new start was preempted within the bound.

        A request that is rejected is stopped by another bound. Lines of batches leave for interactive requests as often
        as these need their capacity.
        """
        if self.requests[request_id].priority is Priority.BATCH:
            return
        count = self.preemptions[request_id]
        if count > self.max_preemptions and self.requests[request_id].trusted:
            raise LawBroken(f"{request_id} is preempted {count} times, the bound is {self.max_preemptions}")

    def _disown(self, request_id: str, epoch: Epoch, peer: Peer) -> None:
        owners = self.owners.get(request_id, {})
        if peer in (peers := owners.get(epoch, set())):
            peers.discard(peer)
            if not peers:
                del owners[epoch]

    def _drop(self, gateway: str, runner: Peer) -> None:
        """End a session, with all requests of the gateway on the runner."""
        for request_id, owners in self.owners.items():
            if self.requests[request_id].gateway == gateway:
                for epoch in list(owners):
                    self._disown(request_id, epoch, runner)

    def _scheduler(self, event: object, effects: Sequence[Any]) -> None:
        match event:
            case Received(peer=peer, message=Submit() as submit):
                self._arrivals += 1
                is_known = submit.request_id in self.waiting or any(type(effect) is Stale for effect in effects)
                if submit.epoch == NEVER and not is_known:
                    fresh = submit.request_id not in self.epochs
                    queued_at = self.scheduler_now() - submit.waited_s
                    tenant = submit.namespace
                    order = queued_at, self._arrivals, submit.priority
                    waiting = Waiting(peer.name, submit.pool, tenant, *order, fresh)
                    self.waiting[submit.request_id] = waiting
            case Received(message=Failed(request_id=request_id, reason=reason)):
                if reason not in (FailReason.NO_CAPACITY, FailReason.PREEMPTED) and (at := event.peer.name):
                    self.lost_at[at] = self.now()
                self.waiting.pop(request_id, None)
            case Closed(peer=Peer(kind=Kind.GATEWAY, name=name)) | Connected(peer=Peer(kind=Kind.GATEWAY, name=name)):
                self._gateway_closed(name)
            case Received(peer=peer, message=ResubmitComplete()):
                self.complete.add(peer.name)
            case Received(message=message) if type(message).__name__ in ("Cancel", "OutcomeReport"):
                self.waiting.pop(message.request_id, None)  # pyright: ignore
            case _:
                pass
        for effect in effects:
            if type(effect) is Consolidated:
                self._consolidated(effect)
            if type(effect) is Close and effect.peer.kind is Kind.GATEWAY:
                self._gateway_closed(effect.peer.name)
            if type(effect) is not Send:
                continue
            match effect.message:
                case Assign():
                    self._assigned(effect.message)
                case Reject():
                    self.waiting.pop(effect.message.request_id, None)
                case _:
                    pass

    def _gateway_closed(self, name: str) -> None:
        """Forget a gateway's requests as the scheduler does until it has submitted them again."""
        self.complete.discard(name)
        for request_id in [r for r, w in self.waiting.items() if w.gateway == name]:
            del self.waiting[request_id]

    def _assigned(self, assign: Assign) -> None:
        latest = self.epochs.get(assign.request_id, NEVER)
        if assign.epoch <= latest:
            raise LawBroken(f"{assign.request_id}: epoch {tuple(assign.epoch)} after {tuple(latest)}")
        self.epochs[assign.request_id] = assign.epoch
        submitted = self.waiting.pop(assign.request_id, None)
        if submitted is None:
            return
        for request_id, waiting in self.waiting.items():
            quiet = self.now() - self.lost_at.get(waiting.gateway, -1e9) > self.avoid_s
            here = (waiting.pool, waiting.gateway in self.complete) == (submitted.pool, True)
            passes = (waiting.priority, submitted.priority) == (Priority.INTERACTIVE, Priority.BATCH)
            if here and passes and waiting.fresh and submitted.fresh:
                raise LawBroken(f"{assign.request_id} is placed, a line of a batch, while {request_id} waits")
            older = (waiting.start_s, waiting.number) < (submitted.start_s, submitted.number)
            is_unchanged = (waiting.tenant, waiting.priority) == (submitted.tenant, submitted.priority)
            if here and is_unchanged and waiting.fresh and submitted.fresh and older and quiet:
                waiting.passes += 1
                if self.bound is not None and waiting.passes > self.bound:
                    raise LawBroken(f"{request_id} has been passed {waiting.passes} times, the bound is {self.bound}")

    def _consolidated(self, effect: Consolidated) -> None:
        """Check that a runner is emptied a bounded number of times for each request, and while none waits."""
        here = [(r, w) for r, w in self.waiting.items() if w.pool == effect.pool and w.gateway in self.complete]
        if queued := [request_id for request_id, _ in here]:
            raise LawBroken(f"{effect.runner.uuid} is emptied while {', '.join(queued)} wait")
        self.consolidations.update(effect.request_ids)
        for request_id in effect.request_ids:
            if self.consolidations[request_id] > MAX_CONSOLIDATIONS:
                raise LawBroken(f"{request_id} is migrated by consolidation {self.consolidations[request_id]} times")

    def scheduler_died(self) -> None:
        self.consolidations.clear()
        self.waiting.clear()
        self.complete.clear()

    def term(self, term: int) -> None:
        """Record a durable term of a scheduler."""
        if self.terms and term <= self.terms[-1]:
            raise LawBroken(f"term {term} after {self.terms[-1]}")
        self.terms.append(term)

    # ---------------------------------------------------------------- reports and the store

    def registered(self, peer: Peer, spec: RunnerSpec) -> None:
        self.books[peer] = RunnerBook(spec)

    def _report(self, process: SimulatedProcess, report: RunnerReport) -> None:
        book = self.books[process.peer]
        try:
            book.apply(report)
        except ReportGap:
            return  # the runner has no stream; its next full report counts
        figures, total = book.figures, book.spec.total_pages
        if figures.free_pages + book.reserved_pages + figures.adapter_pages != total:
            raise LawBroken(
                f"{process.name}: {figures.free_pages} free pages, {book.reserved_pages} reserved and "
                f"{figures.adapter_pages} of adapters are not {total}"
            )
        if figures.used_pages > total:
            raise LawBroken(f"{process.name}: {figures.used_pages} used of {total} pages")

    def outcome_stored(self, report: OutcomeReport) -> None:
        """Count a stored outcome. Raises LawBroken before its request's end, or if the client read other text."""
        request = self.requests[report.request_id]
        self.stored[report.request_id] += 1
        if request.finish == "lost" or not request.trusted:
            return
        if not request.finish:
            raise LawBroken(f"{report.request_id} has an outcome before its end")
        outcome, read = outcome_from_bytes(report.record), len(request.text) // 2
        if outcome.finish.value != request.finish:
            raise LawBroken(f"{report.request_id}: stored as {outcome.finish.value}, read as {request.finish}")
        if request.finish in COMPLETE and request.finish != "stop" and outcome.completion_tokens != read:
            raise LawBroken(f"{report.request_id}: {outcome.completion_tokens} tokens are billed, {read} were read")

    # ---------------------------------------------------------------- the end

    def unfinished(self) -> list[str]:
        """Return the requests with awaited clients or outcomes."""
        return [
            r.id for r in self.requests.values() if not r.finish or (not self.stored[r.id] and r.id not in self.excused)
        ]

    def settled(self, runners: Iterable[Peer], allowed: frozenset[str]) -> None:
        """Check what holds once faults are over and every client has its answer."""
        for request in self.requests.values():
            if request.finish == "failed" and request.trusted and request.error not in allowed:
                raise LawBroken(f"{request.id} failed: {request.error}")
        for peer in runners:
            book = self.books[peer]
            if peer in self.liars:
                continue
            if book.sequences or book.reserved_pages:
                raise LawBroken(f"{peer.name} still holds {sorted(book.sequences)} and {book.reserved_pages} pages")
            if not book.figures.ready:
                raise LawBroken(f"{peer.name} is not ready")
