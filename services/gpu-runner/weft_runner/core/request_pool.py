"""Every sequence of the runner, its pages and its adapter: ORCA's request pool, pure.

Messages come in between steps (`start`, `stop`, ...), `schedule` says what runs next, `account` takes what the model
sampled. What follows leaves through `take_messages`, `adapters.take_actions` and, for reports, the marks of page table
and adapter manager.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from weft.domain.adapter import DesiredChange
from weft.domain.ids import Epoch
from weft.domain.machine import Peer, Send
from weft.domain.request import Ended, EndReason, FinishReason, NoCapacity, SequenceTokens, Start, Step
from weft.domain.runner import RunnerFigures
from weft_runner.core.adapter_manager import AdapterManager, check_adapters
from weft_runner.core.admission import HighestEpochs, PoolLimits, ended, first_pages, no_capacity, refusal
from weft_runner.core.batch import Batch, Candidate
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.events import AdapterEvent, Fetched, FetchFailed, FoundOnDisk, Loaded, LoadFailed
from weft_runner.core.page_table import PageTable, check_page_table
from weft_runner.core.prefix_reuse import PrefixReuse
from weft_runner.core.reservation import Reservations
from weft_runner.core.sampling import SampledToken
from weft_runner.core.sequence import RUNNING, Sequence, SequencePhase, check_sequence
from weft_runner.core.step_time_model import GUESS, StepModel


class RequestPool:
    """One owner: the runner's machine."""

    def __init__(self, limits: PoolLimits, model: StepModel = GUESS) -> None:
        self.limits = limits
        self.scheduler = BatchScheduler(limits.batch, model)
        self.pages = PageTable(limits.total_pages, limits.page_tokens)
        self.reuse = PrefixReuse(self.pages)
        self.adapters = AdapterManager(
            limits.max_adapters,
            starvation=limits.starvation,
            host_bytes=limits.host_bytes,
            keep_copies=limits.keep_copies,
            pages=self.pages,
            page_bytes=limits.page_bytes,
        )
        self.reservations = Reservations(self.pages, self.adapters.slots)
        self.epochs = HighestEpochs()
        self.sequences: dict[str, Sequence] = {}
        self.draining = False
        self.urgent = False  # a report is due at once
        self.iterations = self.forwards = self.tokens = self.departures = 0
        self.messages: list[Send] = []
        self.produced: dict[str, tuple[Peer, list[SequenceTokens]]] = {}  # by session; a peer's own hash is slow
        self._admissions = self._launches = 0

    # ---- messages

    def start(self, start: Start, owner: Peer, gateway: str, now: float) -> None:
        """Admit a sequence, or say why not. An epoch that is not above the highest seen is ignored."""
        if self.epochs.is_stale(start.request_id, start.epoch):
            return
        held = self.sequences.get(start.request_id)
        if held is not None and held.gateway != gateway:
            answer = ended(start, EndReason.INTERNAL, "another gateway's request has this id")
            self.messages.append(Send(owner, answer))
            return
        self.epochs.see(start.request_id, start.epoch)
        if held is not None:
            self._remove(held)  # one owner a request: the highest epoch
        match self._start(start, owner, gateway, now):
            case SequenceTokens() as answer:
                self.produced.setdefault(owner.name, (owner, []))[1].append(answer)
            case None:
                pass
            case answer:
                self.messages.append(Send(owner, answer))

    def stop(self, request_id: str, epoch: Epoch, owner: Peer) -> None:
        """Cancel an epoch: its pages are free before the next step. Only the session that started it may."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.owner == owner and sequence.start.epoch <= epoch:
            self._remove(sequence)
            self.epochs.see(request_id, epoch)

    def session_closed(self, owner: Peer) -> None:
        """Cancel what the session held."""
        for sequence in [s for s in self.sequences.values() if s.owner == owner]:
            self._remove(sequence)

    def apply(self, change: DesiredChange) -> None:
        self.adapters.apply(change)
        self._settle()

    def drain(self, *, on: bool) -> None:
        """Give every sequence back; refuse new ones until drained is taken back."""
        self.draining = on
        for sequence in list(self.sequences.values()) if on else []:
            self._end(sequence, EndReason.DRAINED, "the runner is draining")

    def on_adapter_event(self, event: AdapterEvent) -> None:
        """A result of the adapter pool. What can never be loaded, or failed, ends the sequences that wait for it."""
        adapters, fault = self.adapters, ""
        match event:
            case FoundOnDisk(digests):
                adapters.on_found_on_disk(digests)
                return
            case Fetched(digest, n_bytes, host_bytes):
                fault = adapters.on_fetched(digest, n_bytes=n_bytes, host_bytes=host_bytes)
                if fault:
                    self._end_all_of(digest, EndReason.LOAD_FAILED, fault)
            case Loaded(digest, rank, n_bytes, host_bytes, load_cost):
                adapters.on_loaded(digest, rank=rank, n_bytes=n_bytes, host_bytes=host_bytes, load_cost=load_cost)
            case FetchFailed(digest, reason, detail, permanent):
                if adapters.on_fetch_failed(digest, detail, permanent=permanent):
                    self._end_all_of(digest, reason, detail)
            case LoadFailed(digest, reason, detail, permanent):
                adapters.on_load_failed(digest, detail, permanent=permanent)
                self._end_all_of(digest, reason, detail)
        self._settle()
        if fault or adapters.prefetcher.idle or not isinstance(event, Fetched):
            self.urgent = True

    # ---- steps

    @property
    def runnable(self) -> bool:
        """Something can run in the next iteration."""
        return any(s.phase in RUNNING and not s.in_flight for s in self.sequences.values())

    def schedule(self, depth: int = 1, free: int = 1) -> Batch:
        """Grow what is full, then form the next batch; the last one again where nothing has changed.

        `depth`: so many batches may be in flight at a time, `free` of them are not, this one included (`_decoding`).
        """
        if self.scheduler.standing is not None:
            return self.scheduler.standing
        for sequence in self._here(SequencePhase.PREFILL):
            self.reuse.extend(sequence)
        self._settle()
        for sequence in list(self._here(SequencePhase.DECODE)):
            if self.pages.is_full(sequence.key) and not self.reservations.grow(sequence):
                self.urgent = self.adapters.page_debt = True
        self._unstick()
        decoding, again = self._decoding(depth, free), depth == 1 and not self.reservations.paused
        return self.scheduler.schedule(
            [_candidate(s) for s in sorted(self._here(SequencePhase.PREFILL), key=lambda s: s.order)],
            [_candidate(s) for s in decoding],
            sum(s.in_kv for s in decoding),
            lambda: min((self._steps_left(s) for s in decoding), default=0) if again else 0,
        )

    def launched(self, batch: Batch) -> None:
        """Of several batches in flight: until it is complete none of its sequences is scheduled, grows, or pauses."""
        self._launches += 1
        for row in batch.rows:
            self.sequences[row.key].launch(self._launches)

    def account(self, batch: Batch, tokens: Mapping[str, SampledToken], failures: Mapping[str, str]) -> None:
        """Take an iteration's results: a token for each row that samples, or why that sequence failed."""
        self.iterations += 1
        self.scheduler.ran(batch)
        sequences, pages, page_tokens = self.sequences, self.pages, self.limits.page_tokens
        for key, _, n_tokens, samples in batch.rows:
            sequence = sequences[key]
            sequence.in_flight = False
            if key in failures:
                self._end(sequence, EndReason.INTERNAL, failures[key], forget=True)
                continue
            sequence.fed(n_tokens)
            self.tokens += n_tokens
            pages.fill(key, sequence.in_kv)
            if sequence.in_kv // page_tokens != sequence.named_pages:
                self.reuse.publish(sequence)
            if samples:
                self._append(sequence, tokens[key])
        self._unstick()

    # ---- what follows

    def take_messages(self) -> list[Send]:
        """Messages to gateways; what an iteration produced leaves as one Step for each of them."""
        messages, self.messages = self.messages, []
        if self.produced:
            messages.extend([Send(peer, Step(self.iterations, tokens)) for peer, tokens in self.produced.values()])
            self.produced = {}
        return messages

    def take_report_now(self) -> bool:
        """Something happened that is reported at once."""
        urgent, self.urgent = self.urgent, False
        return urgent

    def figures(self, *, ready: bool) -> RunnerFigures:
        pages, free_pages = self.pages, max(0, self.adapters.free_pages())
        return RunnerFigures(
            free_pages=free_pages,
            used_pages=pages.used_pages,
            adapter_pages=pages.total_pages - free_pages - pages.reserved_pages,
            draining=self.draining,
            ready=ready,
            desired_version=self.adapters.desired_version or 0,
            iterations=self.iterations,
            forwards=self.forwards,
            grown_pages=self.reservations.grown_pages,
            doublings=self.reservations.doublings,
            tokens=self.tokens,
            prefix_reused_tokens=self.reuse.tokens,
        )

    # ---- how

    def _start(self, start: Start, owner: Peer, gateway: str, now: float) -> Ended | NoCapacity | SequenceTokens | None:
        """Admit it, or why not."""
        if self.draining:
            return ended(start, EndReason.DRAINED, "the runner is draining")
        adapters, limits, digest = self.adapters, self.limits, start.adapter
        if fault := adapters.infeasible_reason(digest):
            return ended(start, EndReason.LOAD_FAILED, fault)
        context = limits.context_beside(adapters.pages_beside(digest, announced=False))
        free_pages = adapters.free_pages(digest, alone=not self.sequences)
        if (answer := refusal(start, limits, context, free_pages)) is not None:
            return answer
        if len(self.sequences) >= limits.max_sequences:
            return no_capacity(start, free_pages, "sequences")
        chain = self.reuse.chain(start)
        shared = self.reuse.find(chain, [*start.prompt, *start.emitted])
        n_pages = first_pages(start, limits, limits.context_beside(adapters.pages_beside(digest, announced=True)))
        if n_pages - len(shared) > free_pages - (self.pages.free_pages - self.pages.free_beside(shared)):
            return no_capacity(start, free_pages, "pages")
        self._admissions += 1
        sequence = Sequence(
            start, owner, gateway, admitted=self._admissions, now=now, max_context_tokens=context, chain=chain
        )  # fmt: skip
        self._admit(sequence, n_pages, shared)
        return None

    def _admit(self, sequence: Sequence, n_pages: int, shared: list[int]) -> None:
        self.scheduler.changed()
        start, first = sequence.start, not self.sequences
        wanted = self.pages.free_pages - self.pages.free_beside(shared) + n_pages - len(shared)
        evicted = self.adapters.slots.evict_for(wanted, start.adapter, pinned_too=first)
        pages = self.pages.reserve(sequence.key, n_pages, shared)
        assert evicted, "free pages were checked"
        assert pages is not None, "pages were freed"
        self.reservations.granted(pages[len(shared) :])
        self.sequences[sequence.key] = sequence
        self.reuse.begin(sequence, shared)
        if not start.adapter or self.adapters.acquire(start.adapter, rank=start.rank, n_bytes=start.adapter_bytes):
            self._join(sequence)
        else:
            self.urgent = True  # with nothing else to run, no iteration would report this admission while it waits
        self._settle()

    def _join(self, sequence: Sequence) -> None:
        self.scheduler.changed()
        beside = self.pages.n_adapter_pages(sequence.start.adapter)
        sequence.join((self.pages.total_pages - beside) * self.pages.page_tokens)

    def _settle(self) -> None:
        """Pages or slots may have come free: first for paused sequences, then for adapters that sequences wait for."""
        self.reservations.serve_paused(self.sequences)
        self.adapters.page_debt = bool(self.reservations.paused)
        self.adapters.reconcile()
        for digest in self.adapters.take_ready():
            for sequence in self.sequences.values():
                if sequence.start.adapter == digest and sequence.phase is SequencePhase.WAITING:
                    self._join(sequence)

    def _unstick(self) -> None:
        """No sequence runs and no adapter loads: pinned adapters are evicted, then the newest waiting sequence ends."""
        while self.sequences and not self._any_running and not self.adapters.slots.loading:
            if self.reservations.paused:
                if not self.adapters.slots.evict_for(1, pinned_too=True):
                    return  # the supervisor names a victim
            elif not self.adapters.force_evict_pinned():
                if self.adapters.loading:
                    return
                newest = max(self.sequences.values(), key=lambda s: (s.arrived, s.admitted))
                self._remove(newest)
                answer = no_capacity(newest.start, self.adapters.free_pages(), "pages")
                self.messages.append(Send(newest.owner, answer))
            self._settle()

    def _remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Pages and references back, at once; freed pages go to the longest paused sequence first."""
        self.scheduler.changed()
        self.departures += 1
        joined = sequence.phase is not SequencePhase.WAITING
        sequence.end()
        del self.sequences[sequence.key]
        self.reservations.paused.pop(sequence.key, None)
        self.pages.release(sequence.key, forget=forget)
        if sequence.start.adapter:
            self.adapters.release(sequence.start.adapter, joined=joined)
        self._settle()
        self.urgent = True

    def _end_all_of(self, digest: str, reason: EndReason, detail: str) -> None:
        for sequence in [s for s in self.sequences.values() if s.start.adapter == digest]:
            self._end(sequence, reason, detail)

    def _end(self, sequence: Sequence, reason: EndReason, detail: str, *, forget: bool = False) -> None:
        start = sequence.start
        self._remove(sequence, forget=forget)
        answer = Ended(start.request_id, start.epoch, reason, detail, sequence.n_emitted)
        self.messages.append(Send(sequence.owner, answer))

    def _steps_left(self, sequence: Sequence) -> int:
        """Iterations before its reserved pages are full."""
        return len(self.pages.pages_of(sequence.key)) * self.limits.page_tokens - sequence.in_kv

    @property
    def _any_running(self) -> bool:
        """Here or in flight."""
        return any(s.phase in RUNNING for s in self.sequences.values())

    def _here(self, phase: SequencePhase) -> Iterator[Sequence]:
        """Those of a phase that are not in flight, in order of admission."""
        return (s for s in self.sequences.values() if s.phase is phase and not s.in_flight)

    def _decoding(self, depth: int, free: int) -> list[Sequence]:
        """What decodes in the next of so many batches in flight: an equal part, those whose last turn is longest ago.

        ORCA (section 4.2) fills its pipeline with batches and leaves open how large they are. With equal ones no stage
        waits for another; a batch of all would leave every stage but one without work. A sequence that joins or leaves
        changes the part of each batch from its next turn on, so that they are equal again after a round. And no batch
        takes what those that are `free` need to be launched at all.
        """
        here = list(self._here(SequencePhase.DECODE))
        if depth == 1:
            return here
        running = sum(s.phase is SequencePhase.DECODE for s in self.sequences.values())
        part = min(-(-running // depth), -(-len(here) // free))
        return sorted(here, key=lambda s: s.turn)[:part]

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        token, logprob = sampled
        start, owner = sequence.start, sequence.owner
        position = len(sequence.tokens) - len(start.prompt)
        finish: FinishReason | None = None
        tokens: tuple[int, ...] = (token,)
        if token in self.limits.eos and not start.sampling.ignore_eos:
            finish, tokens = FinishReason.EOS, ()
        else:
            sequence.append(token)
            if len(sequence.tokens) == sequence.max_len:
                finish = FinishReason.LENGTH
        logprobs = (logprob,) if logprob is not None and tokens else ()
        if (of_session := self.produced.get(owner.name)) is None:
            of_session = self.produced[owner.name] = owner, []
        of_session[1].append(
            SequenceTokens(sequence.key, start.epoch, position, tokens, finish, sequence.doublings, logprobs)
        )
        if finish is not None:
            self._remove(sequence)

    def paused(self) -> list[str]:
        """Keys of paused sequences, the longest paused first."""
        return list(self.reservations.paused)


def _candidate(sequence: Sequence) -> Candidate:
    return Candidate(sequence.key, sequence.start.adapter, sequence.pending)


def check_pool(pool: RequestPool) -> None:
    """Every book balances and agrees with the sequences. Cheap enough for an idle loop."""
    check_page_table(pool.pages)
    check_adapters(pool.adapters)
    assert pool.pages.holders() == set(pool.sequences)
    for sequence in pool.sequences.values():
        check_sequence(sequence)
        assert (sequence.phase is SequencePhase.PAUSED) == (sequence.key in pool.paused()), sequence.key
        assert pool.pages.tokens_of(sequence.key) == sequence.in_kv, sequence.key
        assert sequence.named_pages * pool.pages.page_tokens <= sequence.in_kv, sequence.key
    mine = Counter(s.start.adapter for s in pool.sequences.values())
    waiting = Counter(s.start.adapter for s in pool.sequences.values() if s.phase is SequencePhase.WAITING)
    for digest, adapter in pool.adapters.adapters.items():
        assert adapter.waiting == waiting[digest], digest
        assert adapter.running == mine[digest] - waiting[digest], digest
    if pool.paused():
        assert pool.pages.free_pages == 0, "a free page while a sequence waits for one"
        assert pool.adapters.slots.evictable_pages() == 0, "an unused adapter while a sequence waits for a page"
