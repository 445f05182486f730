"""Every sequence of the runner, its pages and its adapter: ORCA's request pool, pure.

Commands come in between iterations (`start`, `stop`, ...), `choose` says what runs next, `account` takes what the model
chose. What has to be told leaves through `take_events` and `adapters.take_actions`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from weft.domain.adapter import DesiredChange
from weft_runner.core.adapter_manager import AdapterManager, check_adapters
from weft_runner.core.admission import PoolLimits, ended, first_pages, no_room, refusal
from weft_runner.core.choice import Choice
from weft_runner.core.chooser import Chooser
from weft_runner.core.epochs import EpochBook
from weft_runner.core.events import Ended, EndReason, Event, PoolState, Tokens
from weft_runner.core.iteration import Batch, Candidate, Row
from weft_runner.core.pace import GUESS, StepModel
from weft_runner.core.pages import PageBook, check_pages
from weft_runner.core.reservations import Reservations
from weft_runner.core.reuse import Reuse
from weft_runner.core.sequence import RUNNING, Epoch, Finish, Phase, Request, Sequence, check_sequence
from weft_runner.core.views import overrun_view, sequence_view


class RequestPool:
    """One owner: the engine's thread."""

    def __init__(self, limits: PoolLimits, model: StepModel = GUESS) -> None:
        self.limits = limits
        self.chooser = Chooser(limits.batch, model)
        self.pages = PageBook(limits.total_pages, limits.page_tokens)
        self.reuse = Reuse(self.pages)
        self.adapters = AdapterManager(
            limits.max_adapters,
            starvation=limits.starvation,
            host_bytes=limits.host_bytes,
            keep_copies=limits.keep_copies,
            pages=self.pages,
            page_bytes=limits.page_bytes,
        )
        self.reservations = Reservations(self.pages, self.adapters.slots)
        self.epochs = EpochBook()
        self.sequences: dict[str, Sequence] = {}
        self.draining = False
        self.urgent = False
        self.iterations = self.forwards = self.tokens = 0
        self._events: list[Event] = []
        self._admissions = self._launches = 0

    # ---- commands

    def start(self, request: Request) -> None:
        """Admit a sequence, or say why not. An epoch that is not above the highest seen is ignored."""
        if self.epochs.is_stale(request.request_id, request.epoch):
            return
        held = self.sequences.get(request.request_id)
        if held is not None and held.request.gateway_id != request.gateway_id:
            self._events.append(ended(request, EndReason.INTERNAL, "another gateway's request has this id"))
            return
        self.epochs.see(request.request_id, request.epoch)
        if held is not None:
            self._remove(held)  # one owner a request: the highest epoch
        if (answer := self._start(request)) is not None:
            self._events.append(answer)

    def stop(self, request_id: str, epoch: Epoch, owner: int) -> None:
        """Cancel an epoch: its pages are free before the next iteration. Only the session that started it may."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.request.owner == owner and sequence.request.epoch <= epoch:
            self._remove(sequence)
            self.epochs.see(request_id, epoch)

    def owner_lost(self, owner: int) -> None:
        """A session is over: cancel what it held."""
        for sequence in [s for s in self.sequences.values() if s.request.owner == owner]:
            self._remove(sequence)

    def apply(self, change: DesiredChange) -> None:
        self.adapters.apply(change)
        self._settle()

    def retry(self) -> None:
        """Bring what is desired here and could not be brought."""
        self.adapters.retry()

    def drain(self, *, on: bool) -> None:
        """Give every sequence back; refuse new ones until drained is taken back."""
        self.draining = on
        for sequence in list(self.sequences.values()) if on else []:
            self._end(sequence, EndReason.DRAINED, "the runner is draining")

    def fetched(self, digest: str, *, n_bytes: int | None, host_bytes: int | None) -> None:
        """Its file is on disk. An adapter that is too large for this runner ends the sequences that wait for it."""
        fault = self.adapters.on_fetched(digest, n_bytes=n_bytes, host_bytes=host_bytes)
        if fault:
            self._end_all_of(digest, EndReason.LOAD_FAILED, fault)
        self._settle()
        self.urgent = self.urgent or bool(fault) or self.adapters.prefetcher.idle

    def fetch_failed(self, digest: str, reason: EndReason, detail: str, *, permanent: bool = False) -> None:
        """End the sequences that waited for it; the others do not notice."""
        if self.adapters.on_fetch_failed(digest, detail, permanent=permanent):
            self._end_all_of(digest, reason, detail)
        self._settle()
        self.urgent = True

    def loaded(self, digest: str, *, rank: int, n_bytes: int, host_bytes: int | None, load_cost: float) -> None:
        """It is in its slot."""
        self.adapters.on_loaded(digest, rank=rank, n_bytes=n_bytes, host_bytes=host_bytes, load_cost=load_cost)
        self._settle()
        self.urgent = True

    def load_failed(self, digest: str, reason: EndReason, detail: str, *, permanent: bool = False) -> None:
        """As `fetch_failed`."""
        self.adapters.on_load_failed(digest, detail, permanent=permanent)
        self._end_all_of(digest, reason, detail)
        self._settle()
        self.urgent = True

    # ---- the heartbeat's two halves

    @property
    def runnable(self) -> bool:
        """Something can run in the next iteration."""
        return any(s.phase in RUNNING and not s.in_flight for s in self.sequences.values())

    def choose(self, batches: int = 1, left: int = 1) -> Batch:
        """Grow what is full, then choose the next batch; the last one again where nothing has changed.

        `batches`: so many may be in flight at a time, `left` of them are not, this one included (`_decoding`).
        """
        if self.chooser.standing is not None:
            return self.chooser.standing
        for sequence in self._here(Phase.PREFILL):
            self.reuse.look_again(sequence)
        self._settle()
        for sequence in list(self._here(Phase.DECODE)):
            if self.pages.is_full(sequence.key) and not self.reservations.grow(sequence):
                self.urgent = self.adapters.page_debt = True
        self._unstick()
        decoding, again = self._decoding(batches, left), batches == 1 and not self.reservations.paused
        return self.chooser.choose(
            [_candidate(s) for s in self._here(Phase.PREFILL)],
            [_candidate(s) for s in decoding],
            sum(s.in_kv for s in decoding),
            lambda: min((self._steps_left(s) for s in decoding), default=0) if again else 0,
        )

    def launched(self, batch: Batch) -> None:
        """Of several batches in flight: until it is accounted for nobody of it is chosen, grows, or pauses."""
        self._launches += 1
        for row in batch.rows:
            self.sequences[row.key].launch(self._launches)

    def account(self, batch: Batch, choices: Mapping[str, Choice], failures: Mapping[str, str]) -> None:
        """Take an iteration's results: a token for each row that samples, or why that sequence failed."""
        self.iterations += 1
        self.chooser.ran(batch)
        for row in batch.rows:
            sequence = self.sequences[row.key]
            sequence.in_flight = False
            if row.key in failures:
                self._end(sequence, EndReason.INTERNAL, failures[row.key], forget=True)
                continue
            sequence.fed(row.n_tokens)
            self.tokens += row.n_tokens
            self.pages.fill(row.key, sequence.in_kv)
            self.reuse.name(sequence)
            if row.samples:
                self._take_choice(sequence, choices[row.key])
        self._unstick()

    # ---- what follows

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def take_granted_pages(self) -> list[int]:
        """Pages that changed hands since the last call: cleared before anything is written to them."""
        return self.reservations.take_granted()

    def take_urgent(self) -> bool:
        """Something happened that a report should tell at once."""
        urgent, self.urgent = self.urgent, False
        return urgent

    def take_lent_pages(self) -> list[int]:
        """Pages that adapters borrowed since the last call: until they are granted nobody needs what is behind them."""
        return self.pages.take_lent()

    def state(self) -> PoolState:
        pages, adapters = self.pages, self.adapters
        free_pages = max(0, adapters.free_pages())
        return PoolState(
            free_pages=free_pages,
            used_pages=pages.used_pages,
            total_pages=pages.total_pages,
            sequences=tuple(sequence_view(s, pages) for s in self.sequences.values()),
            adapters=tuple(a.report() for a in adapters.adapters.values() if a.reported),
            adapters_known=len(adapters.adapters),
            overruns=tuple(
                overrun_view(self.sequences[key], wanted) for key, wanted in self.reservations.paused.items()
            ),
            draining=self.draining,
            not_ready=adapters.not_ready_reason(),
            iterations=self.iterations,
            forwards=self.forwards,
            grown_pages=self.reservations.grown_pages,
            doublings=self.reservations.doublings,
            desired_version=self.adapters.desired_version or 0,
            tokens=self.tokens,
            adapter_pages=pages.total_pages - free_pages - pages.reserved_pages,
            prefix_reused_tokens=self.reuse.tokens,
        )

    # ---- how

    def _start(self, request: Request) -> Event | None:
        """Admit it, or why not."""
        if self.draining:
            return ended(request, EndReason.DRAINED, "the runner is draining")
        adapters, limits = self.adapters, self.limits
        if fault := adapters.infeasible_reason(request.adapter):
            return ended(request, EndReason.LOAD_FAILED, fault)
        context = limits.context_beside(adapters.pages_beside(request.adapter, announced=False))
        free_pages = adapters.free_pages(request.adapter, alone=not self.sequences)
        if (answer := refusal(request, limits, context, free_pages)) is not None:
            return answer
        if len(self.sequences) >= limits.max_sequences:
            return no_room(request, free_pages, "sequences")
        chain = self.reuse.chain(request)
        shared = self.reuse.found(chain, [*request.prompt, *request.emitted])
        n_pages = first_pages(
            request, limits, limits.context_beside(adapters.pages_beside(request.adapter, announced=True))
        )
        if n_pages - len(shared) > free_pages - (self.pages.free_pages - self.pages.free_beside(shared)):
            return no_room(request, free_pages, "pages")
        self._admissions += 1
        self._admit(
            Sequence(request, admitted=self._admissions, max_context_tokens=context, chain=chain), n_pages, shared
        )
        return None

    def _admit(self, sequence: Sequence, n_pages: int, shared: list[int]) -> None:
        self.chooser.changed()
        request, first = sequence.request, not self.sequences
        wanted = self.pages.free_pages - self.pages.free_beside(shared) + n_pages - len(shared)
        gave = self.adapters.slots.evict_for(wanted, request.adapter, pinned_too=first)
        pages = self.pages.reserve(sequence.key, n_pages, shared)
        assert gave, "room was checked"
        assert pages is not None, "room was made"
        self.reservations.granted(pages[len(shared) :])
        self.sequences[sequence.key] = sequence
        self.reuse.begin(sequence, shared)
        if not request.adapter or self.adapters.acquire(request.adapter):
            self._join(sequence)
        else:
            self.urgent = True  # with nothing else to run, no iteration would tell of this admission while it waits
        self._settle()

    def _join(self, sequence: Sequence) -> None:
        self.chooser.changed()
        lent = self.pages.lent_to(sequence.request.adapter)
        sequence.join((self.pages.total_pages - lent) * self.pages.page_tokens)

    def _settle(self) -> None:
        """Pages or slots may have come free: paused sequences first, then adapters and those who wait for them."""
        self.reservations.serve_paused(self.sequences)
        self.adapters.page_debt = bool(self.reservations.paused)
        self.adapters.reconcile()
        for digest in self.adapters.take_ready():
            for sequence in self.sequences.values():
                if sequence.request.adapter == digest and sequence.phase is Phase.WAITING:
                    self._join(sequence)

    def _unstick(self) -> None:
        """No sequence runs and no adapter loads: pinned adapters are evicted, then the newest waiting sequence ends."""
        while self.sequences and not self._anybody_runs and not self.adapters.slots.loading:
            if self.reservations.paused:
                if not self.adapters.slots.evict_for(1, pinned_too=True):
                    return  # the supervisor names a victim
            elif not self.adapters.force_evict_pinned():
                if self.adapters.loading:
                    return
                newest = max(self.sequences.values(), key=lambda s: s.admitted)
                self._remove(newest)
                self._events.append(no_room(newest.request, self.adapters.free_pages(), "pages"))
            self._settle()

    def _remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Pages and references back, at once; freed pages go to the longest paused sequence first."""
        self.chooser.changed()
        joined = sequence.phase is not Phase.WAITING
        sequence.end()
        del self.sequences[sequence.key]
        self.reservations.paused.pop(sequence.key, None)
        self.pages.release(sequence.key, forget=forget)
        if sequence.request.adapter:
            self.adapters.release(sequence.request.adapter, joined=joined)
        self._settle()
        self.urgent = True

    def _end_all_of(self, digest: str, reason: EndReason, detail: str) -> None:
        for sequence in [s for s in self.sequences.values() if s.request.adapter == digest]:
            self._end(sequence, reason, detail)

    def _end(self, sequence: Sequence, reason: EndReason, detail: str, *, forget: bool = False) -> None:
        request = sequence.request
        self._remove(sequence, forget=forget)
        self._events.append(Ended(request.owner, request.request_id, request.epoch, reason, detail, sequence.n_emitted))

    def _steps_left(self, sequence: Sequence) -> int:
        """Iterations before its reserved pages are full."""
        return len(self.pages.pages_of(sequence.key)) * self.limits.page_tokens - sequence.in_kv

    @property
    def _anybody_runs(self) -> bool:
        """Here or in flight."""
        return any(s.phase in RUNNING for s in self.sequences.values())

    def _here(self, phase: Phase) -> Iterator[Sequence]:
        """Those of a phase that are not in flight, in order of admission."""
        return (s for s in self.sequences.values() if s.phase is phase and not s.in_flight)

    def _decoding(self, batches: int, left: int) -> list[Sequence]:
        """Who decodes in the next of so many batches in flight: an equal part, those whose last turn is longest ago.

        ORCA (section 4.2) fills its pipeline with batches and leaves open how large they are. With equal ones no stage
        waits for another; a batch of all would leave every stage but one without work. Whoever joins or leaves changes
        the part of each batch from its next turn on, so that they are equal again after a round. And no batch takes
        what those that are `left` need to be launched at all.
        """
        here = list(self._here(Phase.DECODE))
        if batches == 1:
            return here
        running = sum(s.phase is Phase.DECODE for s in self.sequences.values())
        part = min(-(-running // batches), -(-len(here) // left))
        return sorted(here, key=lambda s: s.turn)[:part]

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

    def paused(self) -> list[str]:
        """Keys of paused sequences, the longest paused first."""
        return list(self.reservations.paused)

    def row_sequence(self, row: Row) -> Sequence:
        return self.sequences[row.key]


def _candidate(sequence: Sequence) -> Candidate:
    return Candidate(sequence.key, sequence.request.adapter, sequence.pending)


def check_pool(pool: RequestPool) -> None:
    """Every book balances and agrees with the sequences. Cheap enough for an idle loop."""
    check_pages(pool.pages)
    check_adapters(pool.adapters)
    assert pool.pages.holders() == set(pool.sequences)
    for sequence in pool.sequences.values():
        check_sequence(sequence)
        assert (sequence.phase is Phase.PAUSED) == (sequence.key in pool.paused()), sequence.key
        assert pool.pages.tokens_of(sequence.key) == sequence.in_kv, sequence.key
        assert sequence.named_pages * pool.pages.page_tokens <= sequence.in_kv, sequence.key
    mine = Counter(s.request.adapter for s in pool.sequences.values())
    waiting = Counter(s.request.adapter for s in pool.sequences.values() if s.phase is Phase.WAITING)
    for digest, adapter in pool.adapters.adapters.items():
        assert adapter.waiting == waiting[digest], digest
        assert adapter.running == mine[digest] - waiting[digest], digest
    if pool.paused():
        assert pool.pages.free_pages == 0, "a free page while a sequence waits for one"
        assert pool.adapters.slots.evictable_pages() == 0, "an unused adapter while a sequence waits for a page"
