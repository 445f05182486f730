"""Every sequence of the runner, its pages and its adapter: ORCA's request pool, pure.

Commands come in between iterations (`start`, `stop`, ...), `choose` says what runs next, `account` takes what the model
chose. What has to be told leaves through `take_events` and `residency.take_actions`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft_runner.core.adapter import Adapter
from weft_runner.core.choice import Choice
from weft_runner.core.chooser import Chooser
from weft_runner.core.epochs import EpochBook
from weft_runner.core.events import (
    AdapterView,
    Desired,
    Ended,
    EndReason,
    Event,
    NoRoom,
    OverrunView,
    PoolState,
    SequenceView,
    Tokens,
)
from weft_runner.core.growth import Growth, first_reservation_pages, next_growth
from weft_runner.core.iteration import Batch, Candidate, Limits, Row
from weft_runner.core.pace import StepModel
from weft_runner.core.pages import PageBook, check_pages
from weft_runner.core.residency import Residency, check_slots
from weft_runner.core.sequence import Epoch, Finish, Phase, Request, Sequence, check_sequence, shift_fault


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What the runner has. `max_context_tokens` = min(model, total_pages * page_tokens)."""

    total_pages: int
    page_tokens: int
    max_sequences: int
    max_adapters: int
    max_context_tokens: int
    vocab_size: int
    eos: frozenset[int] = frozenset()
    batch: Limits = field(default_factory=Limits)
    starvation: int = 16
    host_bytes: int = 1 << 30


class RequestPool:
    """One owner: the engine's thread."""

    def __init__(self, limits: PoolLimits, model: StepModel = StepModel()) -> None:
        self.limits = limits
        self.chooser = Chooser(limits.batch, model)
        self.pages = PageBook(limits.total_pages, limits.page_tokens)
        self.residency = Residency(limits.max_adapters, starvation=limits.starvation, host_bytes=limits.host_bytes)
        self.epochs = EpochBook()
        self.sequences: dict[str, Sequence] = {}
        self.draining = False
        self.urgent = False
        self.iterations = self.forwards = self.grown_pages = self.doublings = self.desired_version = self.tokens = 0
        self._paused: dict[str, int] = {}  # key -> pages wanted, longest paused first
        self._granted: list[int] = []
        self._events: list[Event] = []
        self._admissions = 0

    # ---- commands

    def start(self, request: Request) -> None:
        """Admit a sequence, or say why not. An epoch that is not above the highest seen is ignored."""
        if self.epochs.is_stale(request.request_id, request.epoch):
            return
        self.epochs.see(request.request_id, request.epoch)
        if request.request_id in self.sequences:
            self._remove(self.sequences[request.request_id])  # one owner a request: the highest epoch
        if (refusal := self._refusal(request)) is not None:
            self._events.append(refusal)
        else:
            self._admit(request)

    def stop(self, request_id: str, epoch: Epoch) -> None:
        """Cancel an epoch: its pages are free before the next iteration."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.request.epoch <= epoch:
            self._remove(sequence)
        self.epochs.see(request_id, epoch)

    def owner_lost(self, owner: int) -> None:
        """A session is over: cancel what it held."""
        for sequence in [s for s in self.sequences.values() if s.request.owner == owner]:
            self._remove(sequence)

    def set_desired(self, version: int, desired: list[Desired]) -> None:
        self.desired_version = version
        self.residency.set_desired(desired)
        self._join_ready()

    def retry(self) -> None:
        """Bring what is desired here and could not be brought."""
        self.residency.retry()

    def drain(self, *, on: bool) -> None:
        """Give every sequence back; refuse new ones until drained is taken back."""
        self.draining = on
        for sequence in list(self.sequences.values()) if on else []:
            self._end(sequence, EndReason.DRAINED, "the runner is draining")

    def loaded(self, digest: str, *, rank: int, n_bytes: int, host_bytes: int, cost: float) -> None:
        self.residency.loaded(digest, rank=rank, n_bytes=n_bytes, host_bytes=host_bytes, cost=cost)
        self._join_ready()
        self.urgent = True

    def fetched(self, digest: str, *, host_bytes: int | None) -> None:
        self.residency.fetched(digest, host_bytes=host_bytes)
        self.urgent = self.urgent or self.residency.keeper.idle

    def fetch_failed(self, digest: str, detail: str, *, hopeless: bool) -> None:
        self.residency.fetch_failed(digest, detail, hopeless=hopeless)
        self.urgent = True

    def load_failed(self, digest: str, reason: EndReason, detail: str, *, hopeless: bool = False) -> None:
        """End the sequences that waited for it; the others do not notice."""
        self.residency.failed(digest, detail, hopeless=hopeless)
        for sequence in [s for s in self.sequences.values() if s.request.adapter == digest]:
            self._end(sequence, reason, detail)
        self.urgent = True

    # ---- the heartbeat's two halves

    @property
    def runnable(self) -> bool:
        """Something can run in the next iteration."""
        return any(s.phase in (Phase.PREFILL, Phase.DECODE) for s in self.sequences.values())

    def choose(self) -> Batch:
        """Grow what is full, then choose the next batch; the last one again where nothing has changed."""
        if self.chooser.standing is not None:
            return self.chooser.standing
        self._serve_paused()
        for sequence in list(self.sequences.values()):
            if sequence.phase is Phase.DECODE and self.pages.is_full(sequence.key):
                self._grow(sequence)
        decoding = [s for s in self.sequences.values() if s.phase is Phase.DECODE]
        return self.chooser.choose(
            self._candidates(Phase.PREFILL),
            self._candidates(Phase.DECODE),
            sum(s.in_kv for s in decoding),
            lambda: 0 if self._paused else min((self._steps_left(s) for s in decoding), default=0),
        )

    def account(self, batch: Batch, choices: Mapping[str, Choice], failures: Mapping[str, str]) -> None:
        """Take an iteration's results: a token for each row that samples, or why that sequence failed."""
        self.iterations += 1
        self.chooser.ran(batch)
        for row in batch.rows:
            sequence = self.sequences[row.key]
            if row.key in failures:
                self._end(sequence, EndReason.INTERNAL, failures[row.key])
                continue
            sequence.fed(row.n_tokens)
            self.tokens += row.n_tokens
            self.pages.fill(row.key, sequence.in_kv)
            if row.samples:
                self._take_choice(sequence, choices[row.key])

    # ---- what follows

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def take_granted_pages(self) -> list[int]:
        """Pages that changed hands since the last call: cleared before anything is written to them."""
        granted, self._granted = self._granted, []
        return granted

    def take_urgent(self) -> bool:
        """Something happened that a report should tell at once."""
        urgent, self.urgent = self.urgent, False
        return urgent

    def state(self) -> PoolState:
        pages = self.pages
        return PoolState(
            free_pages=pages.free_pages,
            used_pages=pages.used_pages,
            total_pages=pages.total_pages,
            sequences=tuple(self._view(s) for s in self.sequences.values()),
            adapters=tuple(self._adapter(a) for a in self.residency.listed()),
            adapters_known=len(self.residency.adapters),
            overruns=tuple(self._overrun(key, wanted) for key, wanted in self._paused.items()),
            draining=self.draining,
            not_ready=self._not_ready(),
            highest_term=self.epochs.highest_term,
            iterations=self.iterations,
            forwards=self.forwards,
            grown_pages=self.grown_pages,
            doublings=self.doublings,
            desired_version=self.desired_version,
            tokens=self.tokens,
        )

    # ---- how

    def _refusal(self, request: Request) -> Event | None:
        owner, key, epoch, emitted = request.owner, request.request_id, request.epoch, len(request.emitted)
        base_len = len(request.prompt) + emitted
        if self.draining:
            return Ended(owner, key, epoch, EndReason.DRAINED, "the runner is draining", emitted)
        if (fault := _fault(request, self.limits.vocab_size)) is not None:
            return Ended(owner, key, epoch, EndReason.INTERNAL, fault, emitted)
        if len(request.prompt) >= self.limits.max_context_tokens:
            return NoRoom(owner, key, epoch, self.pages.free_pages, "context")
        if emitted >= request.max_tokens or base_len >= self.limits.max_context_tokens:
            return Tokens(owner, key, epoch, emitted, (), Finish.LENGTH, 0)
        if len(self.sequences) >= self.limits.max_sequences:
            return NoRoom(owner, key, epoch, self.pages.free_pages, "sequences")
        if self._first_pages(request) > self.pages.free_pages:
            return NoRoom(owner, key, epoch, self.pages.free_pages, "pages")
        return None

    def _first_pages(self, request: Request) -> int:
        base_len = len(request.prompt) + len(request.emitted)
        limits = self.limits
        return first_reservation_pages(
            base_len, request.reservation_tokens, limits.page_tokens, limits.max_context_tokens
        )

    def _admit(self, request: Request) -> None:
        self.chooser.changed()
        self._admissions += 1
        sequence = Sequence(request, admitted=self._admissions, max_context_tokens=self.limits.max_context_tokens)
        pages = self.pages.reserve(sequence.key, self._first_pages(request))
        assert pages is not None, "room was checked"
        self._granted.extend(pages)
        self.sequences[sequence.key] = sequence
        if not request.adapter or self.residency.enter(request.adapter):
            sequence.join()
        else:
            self.urgent = True  # with nothing else to run, no iteration would tell of this admission while it waits
        self._join_ready()

    def _join_ready(self) -> None:
        for digest in self.residency.take_joinable():
            self.chooser.changed()
            for sequence in self.sequences.values():
                if sequence.request.adapter == digest and sequence.phase is Phase.WAITING:
                    sequence.join()

    def _remove(self, sequence: Sequence) -> None:
        """Pages and references back, at once; freed pages go to the longest paused sequence first."""
        self.chooser.changed()
        joined = sequence.phase is not Phase.WAITING
        sequence.end()
        del self.sequences[sequence.key]
        self._paused.pop(sequence.key, None)
        self.pages.release(sequence.key)
        if sequence.request.adapter:
            self.residency.leave(sequence.request.adapter, joined=joined)
            self._join_ready()
        self._serve_paused()
        self.urgent = True

    def _end(self, sequence: Sequence, reason: EndReason, detail: str) -> None:
        request = sequence.request
        self._remove(sequence)
        self._events.append(Ended(request.owner, request.request_id, request.epoch, reason, detail, sequence.n_emitted))

    def _steps_left(self, sequence: Sequence) -> int:
        """Iterations before its reserved pages are full."""
        return len(self.pages.pages_of(sequence.key)) * self.limits.page_tokens - sequence.in_kv

    def _candidates(self, phase: Phase) -> list[Candidate]:
        return [Candidate(s.key, s.request.adapter, s.pending) for s in self.sequences.values() if s.phase is phase]

    def _take_choice(self, sequence: Sequence, choice: Choice) -> None:
        token, logprob = choice
        position, finish, tokens = sequence.n_emitted, Finish.NONE, (token,)
        if token in self.limits.eos and not sequence.request.sampling.ignore_eos:
            finish, tokens = Finish.EOS, ()
        else:
            sequence.append(token)
            finish = Finish.LENGTH if len(sequence.tokens) == sequence.max_len else Finish.NONE
        request = sequence.request
        logprobs = (logprob,) if logprob is not None and tokens else ()
        self._events.append(
            Tokens(
                request.owner, request.request_id, request.epoch, position, tokens, finish, sequence.doublings, logprobs
            )
        )
        if finish is not Finish.NONE:
            self._remove(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Double the reservation; without a free page pause at the page boundary and report an overrun."""
        growth: Growth = next_growth(sequence, self.pages.reserved_by(sequence.key), self.pages.page_tokens)
        sequence.reservation_tokens = growth.reservation_tokens
        sequence.doublings += growth.doubled
        self.doublings += growth.doubled
        if not self._grant(sequence.key, growth.wanted_pages):
            sequence.pause()
            self._paused[sequence.key] = growth.wanted_pages
            self.urgent = True

    def _grant(self, key: str, wanted_pages: int) -> bool:
        pages = self.pages.grow(key, wanted_pages)
        self._granted.extend(pages)
        self.grown_pages += len(pages)
        return bool(pages)

    def _serve_paused(self) -> None:
        for key, wanted in list(self._paused.items()):
            if not self._grant(key, wanted):
                return
            del self._paused[key]
            self.sequences[key].resume()

    def _not_ready(self) -> str:
        if not self.residency.desired_known:
            return "desired adapters are not known yet"
        missing = self.residency.missing_pinned()
        if missing:
            return f"{len(missing)} pinned adapters are not resident yet"
        below = self.residency.keeper.missing()
        return f"{len(below)} adapters are not held at their tier yet" if below else ""

    def _adapter(self, adapter: Adapter) -> AdapterView:
        return AdapterView(
            digest=adapter.digest,
            tier=self.residency.tier_of(adapter),
            running=adapter.running,
            waiting=adapter.waiting,
            n_bytes=adapter.n_bytes,
            rank=adapter.rank,
            loading=adapter.loading or adapter.fetching,
            error=adapter.error,
            shortfall=adapter.shortfall,
        )

    def _view(self, sequence: Sequence) -> SequenceView:
        request = sequence.request
        return SequenceView(
            request_id=request.request_id,
            epoch=request.epoch,
            gateway_id=request.gateway_id,
            adapter=request.adapter,
            reserved_pages=self.pages.reserved_by(sequence.key),
            used_pages=self.pages.used_by(sequence.key),
            tokens=sequence.in_kv,
            admitted=sequence.admitted,
            reservation_tokens=sequence.reservation_tokens,
            waiting=sequence.phase is Phase.WAITING,
        )

    def _overrun(self, key: str, wanted_pages: int) -> OverrunView:
        sequence = self.sequences[key]
        return OverrunView(key, sequence.request.epoch, wanted_pages, sequence.reservation_tokens)

    def paused(self) -> list[str]:
        """Keys of paused sequences, the longest paused first."""
        return list(self._paused)

    def row_sequence(self, row: Row) -> Sequence:
        return self.sequences[row.key]


def _fault(request: Request, vocab_size: int) -> str | None:
    """What makes a request impossible to run, found before it can disturb anybody."""
    if not request.prompt:
        return "the prompt has no tokens"
    if not 0.0 <= request.sampling.temperature < float("inf"):
        return f"temperature {request.sampling.temperature} is not a finite number >= 0"
    if not 0.0 < request.sampling.top_p <= 1.0:
        return f"top_p {request.sampling.top_p} is outside (0, 1]"
    if (fault := shift_fault(request.sampling, vocab_size)) is not None:
        return fault
    outside = next((t for t in (*request.prompt, *request.emitted) if not 0 <= t < vocab_size), None)
    return None if outside is None else f"token {outside} is outside the vocabulary of {vocab_size}"


def check_pool(pool: RequestPool) -> None:
    """Every book balances and agrees with the sequences. Cheap enough for an idle loop."""
    check_pages(pool.pages)
    check_slots(pool.residency)
    assert pool.pages.holders() == set(pool.sequences)
    for sequence in pool.sequences.values():
        check_sequence(sequence)
        assert (sequence.phase is Phase.PAUSED) == (sequence.key in pool.paused()), sequence.key
        assert pool.pages.used_by(sequence.key) == pool.pages.pages_for(sequence.in_kv), sequence.key
    mine = Counter(s.request.adapter for s in pool.sequences.values())
    waiting = Counter(s.request.adapter for s in pool.sequences.values() if s.phase is Phase.WAITING)
    for digest, adapter in pool.residency.adapters.items():
        assert adapter.waiting == waiting[digest], digest
        assert adapter.running == mine[digest] - waiting[digest], digest
    if pool.paused():
        assert pool.pages.free_pages == 0, "a free page while a sequence waits for one"
