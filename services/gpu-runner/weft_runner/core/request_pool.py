"""Every sequence of the runner, its pages and its adapter: ORCA's request pool, pure.

The pool keeps sequences and pages. Everything else is a part that it asks at four moments: when a sequence is admitted,
before a step, after a step, when a sequence is removed (`reserve`, `preempt`, `swap`, `transfer`, `prefix`, adapters,
`AwaitedMasks`, `RunnerDrain`). What follows stands in `effects`, in the order in which it is to be done: each part
appends to that one list as it decides, so that what ends a use of pages stands before their next one. Reports read the
marks of page table and adapter manager.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from operator import attrgetter

from weft.domain.adapter import DesiredChange
from weft.domain.ids import Epoch
from weft.domain.machine import Peer, Send
from weft.domain.request import (
    DraftUse,
    Ended,
    EndReason,
    FinishReason,
    NoCapacity,
    PooledState,
    PromptLogprobs,
    SequenceTokens,
    Start,
    Step,
)
from weft.domain.runner import OffloadState, RunnerFigures, RunnerRole
from weft.domain.timers import TimerQueue
from weft_runner.core import events as ev
from weft_runner.core.adapters.manager import AdapterManager, check_adapters
from weft_runner.core.admission import HighestEpochs, PoolLimits, ended, no_capacity, refusal
from weft_runner.core.awaited_grammars import AwaitedMasks
from weft_runner.core.batch import Batch, Batching, Candidate
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.drafts.drafter import Search
from weft_runner.core.drafts.recent_answers import check_recent_answers
from weft_runner.core.drain import RunnerDrain
from weft_runner.core.page_table import PageTable, check_page_table
from weft_runner.core.preempt.parking import DeferredStart, SequenceParking, check_parking
from weft_runner.core.preempt.preemption import Preemptor
from weft_runner.core.prefix.host import HostPrefixes, check_host_prefixes
from weft_runner.core.prefix.reuse import PrefixReuse
from weft_runner.core.reserve.reservations import Reservations, first_reservation_pages
from weft_runner.core.sampling import SampledToken
from weft_runner.core.sequence import RUNNING, SWAPPING, Sequence, SequencePhase, check_sequence
from weft_runner.core.step_time_model import GUESS, StepModel
from weft_runner.core.swap.swapping import Swapping
from weft_runner.core.swap.swaps import KvSwap, check_swap
from weft_runner.core.token_mask import GrammarState, token_mask
from weft_runner.core.token_times import TokenTimes
from weft_runner.core.transfer.hand_over import HandOver
from weft_runner.core.transfer.transfers import check_kv_transfers

UNCOMPUTED = (SequencePhase.WAITING, SequencePhase.PREFILL)
WHOLE = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)  # nobody broke the answer off
# At every iteration, or token: their own constructors are Python functions.
_send, _step = partial(tuple.__new__, Send), partial(tuple.__new__, Step)
_tokens = partial(tuple.__new__, SequenceTokens)


class RequestPool:
    """One owner: the runner's machine."""

    def __init__(
        self, limits: PoolLimits, model: StepModel = GUESS, search: Search | None = None, *, checks_drafts: bool = False
    ) -> None:
        """Make the pool. `checks_drafts`: the executor checks drafts to the bit, at least drafts of callers.

        `search`: of drafts, for such an executor; None: none is searched for.
        """
        self.limits = limits
        self.effects: list[ev.Effect] = []
        self.timers: TimerQueue[tuple[str, ...]] = TimerQueue()
        self.scheduler = BatchScheduler(limits.batch, model, search)
        self._epochs = HighestEpochs()
        self.pages = PageTable(limits.total_pages, limits.page_tokens, limits.most_adapter_pages)
        self.reuse = PrefixReuse(self.pages)
        self.adapters = AdapterManager(
            limits.max_adapters, host_bytes=limits.host_bytes, keep_copies=limits.keep_copies, pages=self.pages,
            page_bytes=limits.page_bytes, effects=self.effects,
        )  # fmt: skip
        self.reservations = Reservations(self.pages, self.adapters.slots)
        self.swap = KvSwap(self.adapters.host, limits.swap_page_bytes, self.effects)
        self.host_prefixes = HostPrefixes(self.pages.prefixes, self.adapters.host, self.swap, self.effects)
        self.role = RunnerRole.MIXED
        self.sequences: dict[str, Sequence] = {}
        self.iterations = self._forwards = self._tokens = 0
        self.now = 0.0  # the time of the event
        self.token_times = TokenTimes()
        self._admissions = self._launches = 0
        self._drafter = self.scheduler.drafter if checks_drafts or search is not None else None
        self.hand_over = HandOver(
            self, limits, self.pages, self.reservations, self.scheduler, self._epochs, self.effects, self.timers
        )
        kv = self._kv = self.hand_over.kv
        self.swapping = Swapping(
            self.go_on, self.swap, self.host_prefixes, self.pages, self.adapters, self.reservations, self.reuse,
            self.scheduler,
        )  # fmt: skip
        parking = SequenceParking(
            self.sequences, limits, self.pages, self.scheduler, self.swapping, self.timers, self._admit_deferred
        )
        self.preemption = Preemptor(
            self.sequences, self.settle, self.remove, self.reservations, self.swapping, kv, self.adapters, self.effects,
            self.timers, parking,
        )  # fmt: skip
        self.drain = RunnerDrain(self.sequences, self.end, kv, self.scheduler, self.timers)
        self.masks = AwaitedMasks(self.scheduler, self.timers)

    def account_stall_time(self, now: float) -> None:
        """Account the time since the call before this one to who is paused, swapped or parked and has stood still."""
        if self.reservations.paused or self.swap.by_key or self.preemption.parking.parked:
            self.preemption.stand_still(now - self.now)
        self.now = now

    # ---- messages

    def start(self, start: Start, owner: Peer, gateway: str, now: float, grammar: GrammarState | None = None) -> None:
        """Admit a sequence, or say why not. An epoch that is not above the highest seen is ignored.

        `grammar`: of its Start, behind the tokens that were emitted before.
        """
        if self._epochs.is_stale(start.request_id, start.epoch):
            return
        sequence, deferred = (
            self.sequences.get(start.request_id),
            self.preemption.parking.deferred.get(start.request_id),
        )
        if (present := sequence or deferred) is not None and present.gateway != gateway:
            answer = ended(start, EndReason.INTERNAL, "another gateway's request has this id")
            self.effects.append(Send(owner, answer))
            return
        self._epochs.see(start.request_id, start.epoch)
        if sequence is not None:
            self.remove(sequence)  # one owner a request: the highest epoch
        self.preemption.parking.withdraw(start.request_id)
        self._answer(owner, self._start(start, owner, gateway, now, grammar))

    def _answer(self, owner: Peer, answer: Ended | NoCapacity | SequenceTokens | None) -> None:
        match answer:
            case SequenceTokens():
                self.produce(owner, [answer])
            case None:
                pass
            case _:
                self.effects.append(Send(owner, answer))

    def _admit_deferred(self, deferred: DeferredStart) -> None:
        """Admit a Start whose room is there, if it still is."""
        start = deferred.start
        start = replace(start, allotment=start.allotment._replace(parks=()))
        answer = self._start(start, deferred.owner, deferred.gateway, self.now, deferred.grammar)
        self._answer(deferred.owner, answer)

    def stop(
        self, request_id: str, epoch: Epoch, owner: Peer, finish: FinishReason | None = None, *, preempted: bool = False
    ) -> None:
        """Cancel an epoch: its pages are free before the next step. Only the session that started it may."""
        sequence, deferred = self.sequences.get(request_id), self.preemption.parking.deferred.get(request_id)
        if deferred is not None and deferred.owner == owner and deferred.start.epoch <= epoch:
            self.preemption.parking.withdraw(request_id)
        if sequence is not None and sequence.owner == owner and sequence.start.epoch <= epoch:
            if preempted:
                self.preemption.count()
            self.remove(sequence, finish=finish)
            self._epochs.see(request_id, epoch)

    def set_role(self, role: RunnerRole) -> None:
        """From the next batch on. Sequences that are here run to their ends."""
        self.role, batch = role, self.limits.batch
        if role is RunnerRole.PROMPT:
            batch = replace(batch, max_prefills=self.limits.max_sequences, token_time_ms=inf, chunk_time_ms=inf)
        self.scheduler.limit(batch)
        self.timers.set(ev.REPORT, 0.0)

    def cancel_session(self, owner: Peer) -> None:
        """Cancel what the session held."""
        for request_id in [r for r, deferred in self.preemption.parking.deferred.items() if deferred.owner == owner]:
            self.preemption.parking.withdraw(request_id)
        for sequence in [s for s in self.sequences.values() if s.owner == owner]:
            self.remove(sequence)

    def apply(self, change: DesiredChange) -> None:
        self.adapters.apply(change)
        self.settle()

    def on_adapter_event(self, event: ev.AdapterEvent) -> None:
        """Take a result of the adapter pool; end the sequences whose adapter failed, or can never be loaded."""
        if isinstance(event, ev.FoundOnDisk):
            self.adapters.catalog.find_on_disk(event.digests)
            return
        if (lost := self.adapters.on_event(event)) is not None:
            self._end_all_of(event.digest, *lost)
        self.settle()
        if lost or self.adapters.prefetcher.idle or not isinstance(event, ev.Fetched):
            self.timers.set(ev.REPORT, 0.0)

    def on_swap_event(self, event: ev.SwapEvent) -> None:
        """A copy to host memory or back has ended. Where it failed the sequence is scheduled again, and recomputed."""
        if isinstance(event, ev.SwapDone):
            self.swapping.on_copied(event)
            self.settle()
        elif (failed := self.swapping.on_failed(event)) is not None:
            self.preemption.give_back(failed)

    # ---- steps

    @property
    def runnable(self) -> bool:
        """Something can run in the next iteration."""
        late, parked = self.masks.late, self.preemption.parking.parked
        for s in self.sequences.values():  # at every iteration: `any` would call a generator
            if s.phase in RUNNING and not s.in_flight and s.key not in late and s.key not in parked:
                return True
        return False

    @property
    def next_tokens(self) -> int:
        """Tokens to compute, here and in flight, before every running sequence gets its next token."""
        parked = self.preemption.parking.parked
        return sum(s.pending for s in self.sequences.values() if s.phase in RUNNING and s.key not in parked)

    def _held_out(self) -> Container[str]:
        """Return the sequences that no batch has: their masks are late, or they are parked."""
        late, parked = self.masks.late, self.preemption.parking.parked
        return late | parked.keys() if parked else late

    def schedule(self, depth: int = 1, free: int = 1) -> Batch:
        """Extend full sequences, then form the next batch. Without changes the last batch is repeated.

        `depth`: batches that may be in flight at a time; `free`: those of them that are not, this one included.
        """
        if self.masks.constrained:
            self.masks.before_step(self.now)
        if depth == 1 and self.scheduler.reusable_batch is not None:
            return self._drafted(self.scheduler.reusable_batch) if self._drafter else self.scheduler.reusable_batch
        for sequence in self._here(SequencePhase.PREFILL):
            self.reuse.before_step(sequence)
        self.settle()
        overrun = False
        full = [sequence for sequence in self._here(SequencePhase.DECODE) if self.pages.is_full(sequence.key)]
        for sequence in sorted(full, key=attrgetter("start.priority")):
            if not self.reservations.grow(sequence):
                overrun = True
                self.adapters.queue.owe_pages(owed=True)
        if self.reservations.paused:
            self.preemption.before_step(depth, overrun=overrun)
        self.preemption.resolve_deadlock()
        decoding, again = self._decoding(depth, free), depth == 1 and not self.reservations.paused
        batch = self.scheduler.schedule(
            [_candidate(s) for s in sorted(self._here(SequencePhase.PREFILL), key=lambda s: s.order)],
            [_candidate(s) for s in decoding],
            sum(s.in_kv for s in decoding),
            lambda: min((self._steps_left(s) for s in decoding), default=0) if again else 0,
        )
        if depth > 1 and batch.rows:  # until it is complete none of its sequences is scheduled, grows, or pauses
            self._launches += 1
            for row in batch.rows:
                self.sequences[row.key].launch(self._launches)
        return self._drafted(batch) if depth == 1 else batch

    def _drafted(self, batch: Batch) -> Batch:
        """Give decode rows of a batch the worthwhile guesses. Such a batch runs once."""
        if self._drafter is None or self._drafter.rests(batch):
            return batch
        return self.scheduler.draft(batch, self.sequences, self._max_guesses, self.now)

    def _max_guesses(self, sequence: Sequence) -> int:
        """Count the guesses that fit into the sequence's reserved pages and answer length, in addition to one token."""
        if sequence.start.sampling.pooling:
            return 0
        return min(self._free_tokens(sequence, sequence.in_kv), sequence.max_len - len(sequence.tokens)) - 1

    def schedule_behind(self, step: ev.RunStep) -> Batch:
        """The batch that follows a step in flight, whose sequences are taken to go on; empty: its results come first.

        A sequence whose next token is its last by length is left out. What turns out to have ended otherwise is a row
        too many, which is not accounted for. Nothing is paused: where pages are short the step in flight ends first.
        """
        nothing = Batch((), 0)
        if self.reservations.paused or self._kv.outgoing or self.hand_over.freezing:
            return nothing
        if self.limits.batch.batching is not Batching.MIXED:
            return nothing
        if self.masks.constrained:
            self.masks.before_step(self.now)
        in_flight = {
            row.key: row
            for row, sequence in zip(step.batch.rows, step.sequences, strict=True)
            if self.runs(sequence, step.departures)
        }
        # 1. those that are in no step, as ever
        for sequence in self._here(SequencePhase.PREFILL):
            if sequence.key not in in_flight:
                self.reuse.before_step(sequence)
        self.settle()
        # 2. each as it will be: in KV, and with how many tokens to feed
        prefilling, decoding, full = list[tuple[Sequence, Candidate]](), list[Candidate](), list[Sequence]()
        keys, steps_left, lasts = 0, self.limits.max_context_tokens, True
        held_out = self._held_out()
        for sequence in self.sequences.values():
            if sequence.phase not in RUNNING or sequence.key in held_out:
                continue
            candidate, row = _candidate(sequence), in_flight.get(sequence.key)
            if row is not None and row.samples:
                if len(sequence.tokens) + 1 >= sequence.max_len:
                    continue
                if sequence.mask is not None and not sequence.mask.quick:
                    lasts = False  # its mask is late, or will be: it may be in the batch behind this one
                    continue
                candidate = candidate._replace(pending=1, keys=candidate.keys + row.n_tokens)
            elif row is not None:
                left, in_kv = candidate.pending - row.n_tokens, candidate.keys + row.n_tokens
                candidate = candidate._replace(pending=left, keys=in_kv)
            if sequence.phase is SequencePhase.PREFILL and not (row is not None and row.samples):
                prefilling.append((sequence, candidate))
                continue
            if not (free_tokens := self._free_tokens(sequence, candidate.keys)):
                full.append(sequence)
            decoding.append(candidate)
            keys += candidate.keys
            steps_left = min(steps_left, free_tokens, sequence.max_len - len(sequence.tokens) - (row is not None))
        # 3. a page for those that will be full
        for sequence in full:
            if not self.pages.free_pages:
                return nothing
            self.reservations.grow(sequence)
        prefilling.sort(key=lambda one: one[0].order)
        steps = (lambda: steps_left) if decoding and lasts else (lambda: 0)
        return self.scheduler.schedule([one for _, one in prefilling], decoding, keys, steps)

    def runs(self, sequence: Sequence, departures: int) -> bool:
        """Say whether a row of it in a step in flight is accounted for: what has left since is not, though it is back.

        `departures`: those before that step.
        """
        return self.sequences.get(sequence.key) is sequence and sequence.runs and sequence.departed <= departures

    def account(self, batch: Batch, results: ev.StepResults, late: Iterable[str] = ()) -> None:
        """Take an iteration's results. `late`: of these no row is in the batch any more."""
        tokens, failures, prompts, _, forwards, checked = results
        self.iterations += 1
        self._forwards += forwards
        for key in late:
            self.sequences[key].sit_out()
            self.scheduler.invalidate()
        self.scheduler.count_run(batch, [len(sampled) - 1 for sampled in checked.values()] if checked else ())
        if first := self.token_times.count_run(batch, self.sequences, self.now):
            for sequence in first:
                start = sequence.start
                if start.kv_from is None and not start.emitted:
                    ttft_s = self.now - sequence.arrived
                    self.effects.append(ev.PromptComputed(len(start.prompt), ttft_s, sequence.cached_tokens))
        sequences, pages, page_tokens = self.sequences, self.pages, self.limits.page_tokens
        produced: dict[str, tuple[Peer, list[SequenceTokens]]] = {}  # by session; a peer's own hash is slow
        for row in batch.rows:
            key, _, n_tokens, samples, drafted = row
            sequence = sequences[key]
            right, draft_use = list[SampledToken](), None  # guesses of its draft
            if key in failures:
                reason = EndReason.GRAMMAR if sequence.mask is not None and sequence.mask.fault else EndReason.INTERNAL
                self.end(sequence, reason, failures[key], forget=True)
                continue
            if prompts and key in prompts:
                part = PromptLogprobs(key, sequence.start.epoch, sequence.in_kv + 1, prompts[key])
                self.effects.append(Send(sequence.owner, part))
            if drafted:
                *right, _ = checked[key]
                n_tokens = 1 + len(right)
                draft_use = self.scheduler.drafter.learn(row, [token.token for token in checked[key]])
                sequence.accept([token.token for token in right])
            sequence.feed(n_tokens)
            self._tokens += n_tokens
            pages.fill(key, sequence.in_kv)
            if sequence.chain is not None and sequence.in_kv // page_tokens != sequence.named_pages:
                self.reuse.publish(sequence)
            if samples:
                self._append(sequence, checked[key][-1] if drafted else tokens[key], produced, right, draft_use)
            elif (outgoing := self._kv.outgoing.get(key)) is not None:
                self._kv.send_pages(outgoing, pages.pages_of(key), sequence.in_kv // page_tokens)
        for owner, of_session in produced.values():
            self.effects.append(_send((owner, _step((self.iterations, of_session)))))
        self.preemption.resolve_deadlock()

    # ---- what follows

    def produce(self, owner: Peer, produced: list[SequenceTokens]) -> None:
        """Send the output of an event to a session as one Step."""
        self.effects.append(Send(owner, Step(self.iterations, produced)))

    def figures(self, *, ready: bool, offload: OffloadState | None = None) -> RunnerFigures:
        """Return the reported figures of the pool."""
        drafts = self.scheduler.drafter.figures
        owed_pages = self.swapping.owed_pages() + self.preemption.parking.owed_pages
        pages, free_pages = self.pages, max(0, self.adapters.free_pages() - owed_pages)
        return RunnerFigures(
            free_pages=free_pages, used_pages=pages.used_pages,
            adapter_pages=pages.total_pages - free_pages - pages.reserved_pages, draining=self.drain.on, ready=ready,
            desired_version=self.adapters.catalog.version or 0, iterations=self.iterations, forwards=self._forwards,
            grown_pages=self.reservations.grown_pages, doublings=self.reservations.doublings, tokens=self._tokens,
            prefix_reused_tokens=self.reuse.tokens, role=self.role,
            pending_prompt_tokens=sum(s.pending for s in self.sequences.values() if s.phase in UNCOMPUTED),
            offload=offload, drafts=drafts.drafts, accepted_tokens=drafts.accepted,
        )  # fmt: skip

    # ---- how

    def _start(
        self, start: Start, owner: Peer, gateway: str, now: float, grammar: GrammarState | None
    ) -> Ended | NoCapacity | SequenceTokens | None:
        """Admit it, or why not."""
        if self.drain.on:
            return ended(start, EndReason.DRAINED, "the runner is draining")
        adapters, limits, digest = self.adapters, self.limits, start.adapter
        if fault := adapters.infeasible_reason(digest):
            return ended(start, EndReason.LOAD_FAILED, fault)
        context = limits.context_beside(adapters.pages_beside(digest, announced=False))
        owed_pages = self.swapping.owed_pages(start.priority) + self.preemption.parking.owed_pages
        free_pages = adapters.free_pages(digest, alone=not self.sequences) - owed_pages
        if (answer := refusal(start, limits, context, free_pages)) is not None:
            return answer
        is_full = self.preemption.parking.places_taken(now) >= limits.max_sequences
        if is_full and not start.allotment.parks:
            return no_capacity(start, free_pages, "sequences")
        long = limits.is_long(start)
        chain = self.reuse.chain(start, long=long) if start.sampling.prompt_logprobs is None else None
        shared = self.reuse.find(chain, [*start.prompt, *start.emitted])
        own_context = limits.context_beside(adapters.pages_beside(digest, announced=True))
        base_len = len(start.prompt) + len(start.emitted)  # of the answer, what leaves room for its adapter
        reserved = min(start.reservation_tokens, start.max_tokens)
        n_pages = first_reservation_pages(base_len, reserved, limits.page_tokens, max(base_len, own_context))
        short_pages = n_pages - len(shared) - free_pages + self.pages.free_pages - self.pages.free_beside(shared)
        if is_full or short_pages > 0:
            leaving = self.preemption.parking.free_capacity(start, short_pages, now)
            if leaving is None:
                return no_capacity(start, free_pages, "sequences" if is_full else "pages")
            if leaving:
                self.preemption.parking.defer(DeferredStart(start, owner, gateway, grammar, n_pages, leaving))
                return None
        self._admissions += 1
        sequence = Sequence(
            start, owner, gateway, admitted=self._admissions, now=now, max_context_tokens=context, chain=chain,
            eos=limits.eos.union(start.sampling.eos_token_ids),
            mask=token_mask(start.sampling.allowed_token_ids, grammar, limits.vocab_size), long=long,
        )  # fmt: skip
        self._admit(sequence, n_pages, shared)
        return None

    def _admit(self, sequence: Sequence, n_pages: int, shared: list[int]) -> None:
        self.scheduler.invalidate()
        start, first = sequence.start, not self.sequences
        needed_pages = self.pages.free_pages - self.pages.free_beside(shared) + n_pages - len(shared)
        evicted = self.adapters.slots.evict_for(needed_pages, start.adapter, pinned_too=first)
        pages = self.pages.reserve(sequence.key, n_pages, shared)
        assert evicted, "free pages were checked"
        assert pages is not None, "pages were freed"
        self.reservations.add_granted(pages[len(shared) :])
        self.sequences[sequence.key] = sequence
        self.masks.admit(sequence)
        if self._drafter is not None:
            self._drafter.admit(sequence)
        self.reuse.admit(sequence, shared)
        rank, adapter_bytes, *_ = start.allotment
        there = not start.adapter or self.adapters.acquire(start.adapter, rank=rank, n_bytes=adapter_bytes)
        if start.kv_to is not None and self.limits.kv is not None:
            self._kv.offer(sequence, start.kv_to, start.epoch)
        if start.kv_from is not None:
            self.hand_over.await_kv(sequence, pages, there)
        else:
            decoding = sum(s.phase is SequencePhase.DECODE for s in self.sequences.values())
            if not self.swapping.admit(sequence, pages, decoding, adapter_there=there) and there:
                self._join(sequence)
        if not there:  # with nothing else to run, no iteration would report this admission while it waits
            self.timers.set(ev.REPORT, 0.0)
        self.settle()

    def _join(self, sequence: Sequence) -> None:
        self.scheduler.invalidate()
        sequence.times.note_joined(self.now)
        sequence.join(self._most_tokens(sequence))

    def go_on(self, sequence: Sequence) -> None:
        """Run it from the next batch on: its KV and its adapter are on the device."""
        self.scheduler.invalidate()
        sequence.go_on(self._most_tokens(sequence))
        self.reuse.publish(sequence)

    def _most_tokens(self, sequence: Sequence) -> int:
        """Count the maximum tokens in KV in addition to the adapter."""
        adapter = self.adapters.adapters.get(sequence.start.adapter)
        adapter_pages = 0 if adapter is None else len(adapter.pages)
        return (self.pages.total_pages - adapter_pages) * self.pages.page_tokens

    def settle(self) -> None:
        """Pages or slots may have come free: first for paused sequences, then for adapters that sequences wait for."""
        self.reservations.serve_paused(self.sequences)
        self.adapters.queue.owe_pages(owed=bool(self.reservations.paused))
        self.swapping.bring_back()
        self.preemption.parking.serve(self.now)
        self.adapters.reconcile()
        for digest in self.adapters.queue.take_ready():
            for sequence in self.sequences.values():
                if sequence.start.adapter != digest:
                    continue
                if sequence.phase is SequencePhase.WAITING:
                    self._join(sequence)
                elif sequence.phase is SequencePhase.SWAP_IN:
                    self.swapping.adapter_there(sequence)
                elif sequence.phase is SequencePhase.RECEIVE:
                    self.hand_over.adapter_there(sequence)
        if self.pages.short:
            page_ms = self.scheduler.step_time.prefill_ms(self.limits.page_tokens)
            self.host_prefixes.save(page_ms, self.adapters.adapters.__contains__)

    def remove(self, sequence: Sequence, *, forget: bool = False, finish: FinishReason | None = None) -> None:
        """Pages and references back, at once; freed pages go to the longest paused sequence first.

        `finish`: how its request ended; None: it goes on elsewhere.
        """
        self.scheduler.count_departure()
        joined, swapped = self._has_joined(sequence), sequence.phase is SequencePhase.SWAPPED
        sequence.end()
        about = sequence.n_emitted, sequence.arrived, sequence.times, self.now, sequence.swaps
        self.effects.append(ev.SequenceEnded(sequence.start, finish, *about))
        del self.sequences[sequence.key]
        self.scheduler.drafter.remove(sequence, self.now, ended=finish in WHOLE)
        self.masks.remove(sequence.key)
        self.preemption.parking.forget(sequence)
        self.reservations.remove(sequence.key)
        self.swapping.remove(sequence)
        self._kv.forget(sequence.key)
        if swapped:
            self.pages.mark(sequence.key)
        else:
            self.reservations.release(sequence.key, forget=forget)
        if sequence.start.adapter and swapped:
            self.adapters.release_swapped(sequence.start.adapter)
        elif sequence.start.adapter:
            self.adapters.release(sequence.start.adapter, joined=joined)
        self.settle()
        self.timers.set(ev.REPORT, 0.0)

    def _has_joined(self, sequence: Sequence) -> bool:
        """Return whether the sequence counts as running with its adapter."""
        if sequence.phase is SequencePhase.SWAP_IN:
            return self.swap.by_key[sequence.key].adapter_there
        if sequence.phase is SequencePhase.RECEIVE:
            return self._kv.incoming[sequence.key].adapter_there
        return sequence.phase not in (SequencePhase.WAITING, SequencePhase.SWAPPED)

    def _end_all_of(self, digest: str, reason: EndReason, detail: str) -> None:
        """End the sequences of an adapter, except sequences in host memory, which do not need it now."""
        for sequence in [s for s in self.sequences.values() if s.start.adapter == digest]:
            if sequence.phase is not SequencePhase.SWAPPED:
                self.end(sequence, reason, detail)

    def end(
        self, sequence: Sequence, reason: EndReason, detail: str, *, forget: bool = False, epoch: Epoch | None = None
    ) -> None:
        """End a sequence. `epoch`: its next epoch, if a second runner was to take it over."""
        self.remove(sequence, forget=forget)
        last_epoch = epoch or sequence.start.epoch
        self.effects.append(Send(sequence.owner, Ended(sequence.key, last_epoch, reason, detail, sequence.n_emitted)))

    def _steps_left(self, sequence: Sequence) -> int:
        """Iterations before its reserved pages are full, or its answer is as long as it may be."""
        return min(self._free_tokens(sequence, sequence.in_kv), sequence.max_len - len(sequence.tokens))

    def _free_tokens(self, sequence: Sequence, in_kv: int) -> int:
        """Count the tokens of its reserved pages after `in_kv`."""
        return len(self.pages.pages_of(sequence.key)) * self.limits.page_tokens - in_kv

    def _here(self, phase: SequencePhase) -> Iterator[Sequence]:
        """Sequences of a phase that are not in flight, wait for no mask and are not parked, in order of admission."""
        held_out = self._held_out()
        return (s for s in self.sequences.values() if s.phase is phase and not s.in_flight and s.key not in held_out)

    def _decoding(self, depth: int, free: int) -> list[Sequence]:
        """Choose the decoding sequences of the next of `depth` batches: an equal part, the least recently run first.

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

    def _append(
        self,
        sequence: Sequence,
        sampled: SampledToken,
        produced: dict[str, tuple[Peer, list[SequenceTokens]]],
        earlier: list[SampledToken],
        draft_use: DraftUse | None,
    ) -> None:
        """Take a sampled token, and send it. `earlier`: accepted tokens of the same step before it."""
        token, logprob, hidden = sampled
        start = sequence.start
        if hidden:
            self.effects.append(Send(sequence.owner, PooledState(sequence.key, start.epoch, hidden)))
        position = len(sequence.tokens) - len(start.prompt)
        finish: FinishReason | None = None
        tokens: tuple[int, ...] = (token,)
        if len(sequence.tokens) == sequence.max_len:  # log probabilities of the prompt are all that it wants
            finish, tokens = FinishReason.LENGTH, ()
        elif not start.sampling.ignore_eos and (token in self.limits.eos or token in start.sampling.eos_token_ids):
            finish, tokens = FinishReason.EOS, ()
        else:
            sequence.append(token)
            if token in sequence.stop_tokens:
                finish = FinishReason.STOP
            elif len(sequence.tokens) == sequence.max_len:
                finish = FinishReason.LENGTH
        logprobs = (logprob,) if logprob is not None and tokens else ()
        if earlier:
            position -= len(earlier)
            tokens = (*(one.token for one in earlier), *tokens)
            logprobs = (*(one.logprob for one in earlier if one.logprob is not None), *logprobs)
        cached_tokens = sequence.cached_tokens if position == len(start.emitted) else 0
        if (of_session := produced.get(sequence.owner.name)) is None:
            of_session = produced[sequence.owner.name] = sequence.owner, []
        key, epoch, doublings = sequence.key, start.epoch, sequence.doublings
        of_session[1].append(
            _tokens((key, epoch, position, tokens, finish, doublings, logprobs, cached_tokens, draft_use))
        )
        if finish is not None:
            self.remove(sequence, finish=finish)
        elif start.kv_to is not None and self.limits.kv is not None:
            self.hand_over.leave(sequence, self.now, logprobs)


def _candidate(sequence: Sequence) -> Candidate:
    scores = sequence.scored(sequence.pending) > 0
    start = sequence.start
    return Candidate(sequence.key, start.adapter, sequence.pending, sequence.in_kv, start.priority, scores)


def check_pool(pool: RequestPool) -> None:
    """Every book balances and agrees with the sequences. Cheap enough for an idle loop."""
    check_recent_answers(pool.scheduler.drafter.answers)
    check_page_table(pool.pages, [page for a in pool.adapters.adapters.values() for page in a.pages])
    check_adapters(pool.adapters)
    check_swap(pool.swap)
    check_parking(pool.preemption.parking)
    check_host_prefixes(pool.host_prefixes)
    check_kv_transfers(pool.hand_over.kv, pool.sequences.values())
    announced = {"", *pool.adapters.adapters}
    assert all(page.adapter in announced for page in pool.adapters.host.cached.values()), "KV without its adapter"
    masked = [s.key for s in pool.sequences.values() if s.mask is not None and s.mask.grammar is not None]
    assert masked == list(pool.masks.constrained)
    assert pool.masks.late <= pool.masks.constrained.keys()
    assert all(("mask", key) in pool.timers for key in pool.masks.late)
    here = {key for key, sequence in pool.sequences.items() if sequence.phase is not SequencePhase.SWAPPED}
    assert pool.pages.holders() == here
    for sequence in pool.sequences.values():
        check_sequence(sequence)
        assert (sequence.phase is SequencePhase.PAUSED) == (sequence.key in pool.reservations.paused), sequence.key
        assert (sequence.phase in SWAPPING) == (sequence.key in pool.swap.by_key), sequence.key
        assert sequence.key not in here or pool.pages.tokens_of(sequence.key) == sequence.in_kv, sequence.key
        assert sequence.named_pages * pool.pages.page_tokens <= sequence.in_kv, sequence.key
    mine = Counter(s.start.adapter for s in pool.sequences.values())
    joined = Counter(s.start.adapter for s in pool.sequences.values() if pool._has_joined(s))  # pyright: ignore[reportPrivateUsage]
    swapped = Counter(s.start.adapter for s in pool.sequences.values() if s.phase is SequencePhase.SWAPPED)
    for digest, adapter in pool.adapters.adapters.items():
        assert adapter.running == joined[digest], digest
        assert adapter.swapped == swapped[digest], digest
        assert adapter.waiting == mine[digest] - joined[digest] - swapped[digest], digest
    if pool.reservations.paused:
        assert pool.pages.free_pages == 0, "a free page while a sequence waits for one"
        assert pool.adapters.slots.evictable_pages() == 0, "an unused adapter while a sequence waits for a page"
