"""Every sequence of the runner, its pages and its adapter: ORCA's request pool, pure.

Messages come in between steps (`start`, `stop`, ...), `schedule` says what runs next, `account` takes what the model
sampled. What follows stands in `effects`, in the order in which it is to be done: each part appends to that one list
as it decides, so that what ends a use of pages stands before their next one. Reports read the marks of page table and
adapter manager.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf

from weft.domain.adapter import DesiredChange
from weft.domain.ids import Epoch
from weft.domain.machine import Peer, Send
from weft.domain.preemption import latest_arrival, victim_candidates
from weft.domain.request import (
    Ended,
    EndReason,
    FinishReason,
    NoCapacity,
    PooledState,
    Priority,
    PromptLogprobs,
    SequenceTokens,
    Start,
    Step,
    TokenLogprob,
)
from weft.domain.runner import OffloadState, RunnerFigures, RunnerRole
from weft.domain.timers import TimerQueue
from weft_runner.core.adapters.manager import AdapterManager, check_adapters
from weft_runner.core.admission import HighestEpochs, PoolLimits, ended, first_pages, no_capacity, refusal
from weft_runner.core.awaited_grammars import WAIT_S
from weft_runner.core.batch import Batch, Batching, Candidate
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.events import (
    REPORT,
    AdapterEvent,
    Effect,
    Fetched,
    FoundOnDisk,
    PromptComputed,
    RunStep,
    SequenceEnded,
    SwapDone,
    SwapFailed,
)
from weft_runner.core.page_table import PageTable, check_page_table
from weft_runner.core.prefix.host import HostPrefixes, check_host_prefixes
from weft_runner.core.prefix.reuse import PrefixReuse
from weft_runner.core.reserve.reservations import Reservations
from weft_runner.core.sampling import SampledToken
from weft_runner.core.sequence import BETWEEN_RUNNERS, RUNNING, SWAPPING, Sequence, SequencePhase, check_sequence
from weft_runner.core.step_time_model import GUESS, StepModel
from weft_runner.core.swap.swaps import MOST_SWAPS, KvSwap, SwappedKv, check_swap
from weft_runner.core.token_mask import GrammarState, token_mask
from weft_runner.core.token_times import TokenTimes
from weft_runner.core.transfer.hand_over import HandOver
from weft_runner.core.transfer.transfers import check_kv_transfers

DRAIN_IDLE_S = 1.0  # without a sequence that leaves: what is left on a runner that drains has nowhere to go
UNCOMPUTED = (SequencePhase.WAITING, SequencePhase.PREFILL)


class RequestPool:
    """One owner: the runner's machine."""

    def __init__(self, limits: PoolLimits, model: StepModel = GUESS) -> None:
        self.limits = limits
        self.effects: list[Effect] = []
        self.timers: TimerQueue[tuple[str, ...]] = TimerQueue()
        self.scheduler = BatchScheduler(limits.batch, model)
        self._epochs = HighestEpochs()
        self.pages = PageTable(limits.total_pages, limits.page_tokens, limits.most_adapter_pages, self.effects)
        self.reuse = PrefixReuse(self.pages)
        self.adapters = AdapterManager(
            limits.max_adapters,
            host_bytes=limits.host_bytes,
            keep_copies=limits.keep_copies,
            pages=self.pages,
            page_bytes=limits.page_bytes,
            effects=self.effects,
        )
        self.reservations = Reservations(self.pages, self.adapters.slots)
        self.swap = KvSwap(self.adapters.host, limits.swap_page_bytes, self.effects)
        self.host_prefixes = HostPrefixes(self.pages.prefixes, self.adapters.host, self.swap, self.effects)
        self.role = RunnerRole.MIXED
        self.stuck = True  # no swap helps those that are paused: the supervisor names a victim
        self.sequences: dict[str, Sequence] = {}
        self.constrained: dict[str, Sequence] = {}  # those with a grammar
        self.masked_out: set[str] = set()  # those of them whose masks are not ready; timers ("mask", key)
        self.draining = False
        self._drain_by = 0.0  # sequences of a runner that drains end at the latest; the timer ("drain",): when
        self._left_before_drain: int  # `departures` when it was looked at last, while it drains
        self.iterations = self.forwards = self.tokens = 0
        self.offload: OffloadState | None = None  # as the engine says
        self.stalled_s = self.now = 0.0  # of all sequences that were paused or swapped; the time of the event
        self.token_times, self.preemptions = TokenTimes(), 0
        self._admissions = self._launches = 0
        self.hand_over = HandOver(
            self, limits, self.pages, self.reservations, self.scheduler, self._epochs, self.effects, self.timers
        )
        self.kv = self.hand_over.kv

    def elapse(self, now: float) -> None:
        """Who is paused or swapped has stood still since the call before this one."""
        if self.reservations.paused or self.swap.by_key:
            stalled = len(self.reservations.paused) + self.swap.away
            self.stalled_s += stalled * (now - self.now)
        self.now = now

    # ---- messages

    def start(
        self, start: Start, owner: Peer, gateway: str, now: float, grammar: GrammarState | None = None
    ) -> None:  # fmt: skip
        """Admit a sequence, or say why not. An epoch that is not above the highest seen is ignored.

        `grammar`: of its Start, behind the tokens that were emitted before.
        """
        if self._epochs.is_stale(start.request_id, start.epoch):
            return
        held = self.sequences.get(start.request_id)
        if held is not None and held.gateway != gateway:
            answer = ended(start, EndReason.INTERNAL, "another gateway's request has this id")
            self.effects.append(Send(owner, answer))
            return
        self._epochs.see(start.request_id, start.epoch)
        if held is not None:
            self.remove(held)  # one owner a request: the highest epoch
        match self._start(start, owner, gateway, now, grammar):
            case SequenceTokens() as answer:
                self.produce(owner, [answer])
            case None:
                pass
            case answer:
                self.effects.append(Send(owner, answer))

    def stop(
        self, request_id: str, epoch: Epoch, owner: Peer, finish: FinishReason | None = None, *, preempted: bool = False
    ) -> None:
        """Cancel an epoch: its pages are free before the next step. Only the session that started it may."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.owner == owner and sequence.start.epoch <= epoch:
            self.preemptions += preempted
            self.remove(sequence, finish=finish)
            self._epochs.see(request_id, epoch)

    def set_role(self, role: RunnerRole) -> None:
        """From the next batch on. Sequences that are here run to their ends."""
        self.role, batch = role, self.limits.batch
        if role is RunnerRole.PROMPT:
            batch = replace(batch, max_prefills=self.limits.max_sequences, token_time_ms=inf, chunk_time_ms=inf)
        self.scheduler.limit(batch)
        self.timers.set(REPORT, 0.0)

    def session_closed(self, owner: Peer) -> None:
        """Cancel what the session held."""
        for sequence in [s for s in self.sequences.values() if s.owner == owner]:
            self.remove(sequence)

    def apply(self, change: DesiredChange) -> None:
        self.adapters.apply(change)
        self.settle()

    def drain(self, *, on: bool, migrate_s: float = 0.0) -> None:
        """Admit none until drained is taken back. What is here ends at once, or may move to other runners meanwhile."""
        self.draining = on
        self.timers.set(REPORT, 0.0)
        self._drain_by = self.now + (migrate_s if self.kv.identity is not None else 0.0)
        self._left_before_drain = self.scheduler.departures
        self.timers.clear(("drain",))
        if on and self._drain_by > self.now:
            self.timers.set(("drain",), min(self._drain_by, self.now + DRAIN_IDLE_S))
        elif on:
            self.end_drained()

    def end_drained(self) -> None:
        """End what is left. Those that still leave get more time; whose KV is on its way, all there is."""
        over = self.now >= self._drain_by
        if not over and self.scheduler.departures != self._left_before_drain:
            self._left_before_drain = self.scheduler.departures
            self.timers.set(("drain",), min(self._drain_by, self.now + DRAIN_IDLE_S))
            return
        if not over:
            self.timers.set(("drain",), self._drain_by)
        for sequence in list(self.sequences.values()):
            sent = self.kv.outgoing.get(sequence.key) if sequence.phase is SequencePhase.SEND else None
            if over or sent is None:
                epoch = sent.epoch if sent is not None else None
                self.end(sequence, EndReason.DRAINED, "the runner is draining", epoch=epoch)

    def on_adapter_event(self, event: AdapterEvent) -> None:
        """Take a result of the adapter pool; end the sequences whose adapter failed, or can never be loaded."""
        if isinstance(event, FoundOnDisk):
            self.adapters.known.find_on_disk(event.digests)
            return
        if (lost := self.adapters.on_event(event)) is not None:
            self._end_all_of(event.digest, *lost)
        self.settle()
        if lost or self.adapters.prefetcher.idle or not isinstance(event, Fetched):
            self.timers.set(REPORT, 0.0)

    def on_swap_event(self, event: SwapDone | SwapFailed) -> None:
        """A copy to host memory or back has ended. Where it failed the sequence is scheduled again, and recomputed."""
        if isinstance(event, SwapFailed):
            self.host_prefixes.on_failed(event.number)
            if (failed := self.swap.of_number(event.number)) is not None:
                self._give_back(failed.sequence)
            return
        self.host_prefixes.on_copied(event.number)
        swap = self.swap.on_copied(event.number, event.pages, event.seconds)
        if swap is not None and swap.sequence.phase is SequencePhase.SWAP_OUT:
            swap.sequence.swapped_out()
            self.pages.release(swap.sequence.key)
            if swap.sequence.start.adapter:
                self.adapters.swap_out(swap.sequence.start.adapter)
        elif swap is not None:
            self._resume(swap)
        self.settle()

    # ---- steps

    @property
    def runnable(self) -> bool:
        """Something can run in the next iteration."""
        held = self.masked_out
        for s in self.sequences.values():  # noqa: SIM110 (at every iteration: `any` would call a generator)
            if s.phase in RUNNING and not s.in_flight and s.key not in held:
                return True
        return False

    @property
    def next_tokens(self) -> int:
        """What all that run, here and in flight, have to compute before each gets its next token."""
        return sum(s.pending for s in self.sequences.values() if s.phase in RUNNING)

    def schedule(self, depth: int = 1, free: int = 1) -> Batch:
        """Grow what is full, then form the next batch; the last one again where nothing has changed.

        `depth`: so many batches may be in flight at a time, `free` of them are not, this one included (`_decoding`).
        """
        if self.constrained:
            self._await_masks()
        if depth == 1 and self.scheduler.standing is not None:
            return self.scheduler.standing
        for sequence in self._here(SequencePhase.PREFILL):
            self.reuse.extend(sequence)
        self.settle()
        overrun = False
        full = [sequence for sequence in self._here(SequencePhase.DECODE) if self.pages.is_full(sequence.key)]
        for sequence in sorted(full, key=_priority):
            if not self.reservations.grow(sequence):
                overrun = True
                self.adapters.queue.owe_pages(owed=True)
        if self.reservations.paused:
            overrun, self.stuck = overrun or not self.stuck, depth > 1 or not self._swap_out()
            if overrun and self.stuck:
                self.timers.set(REPORT, 0.0)
        self._unstick()
        decoding, again = self._decoding(depth, free), depth == 1 and not self.reservations.paused
        return self.scheduler.schedule(
            [_candidate(s) for s in sorted(self._here(SequencePhase.PREFILL), key=lambda s: s.order)],
            [_candidate(s) for s in decoding],
            sum(s.in_kv for s in decoding),
            lambda: min((self._steps_left(s) for s in decoding), default=0) if again else 0,
        )

    def schedule_behind(self, step: RunStep) -> Batch:
        """The batch that follows a step in flight, whose sequences are taken to go on; empty: its results come first.

        A sequence whose next token is its last by length is left out. What turns out to have ended otherwise is a row
        too many, which is not accounted for. Nothing is paused: where pages are short the step in flight ends first.
        """
        nothing = Batch((), 0)
        if self.reservations.paused or self.kv.outgoing or self.hand_over.freezing:
            return nothing
        if self.limits.batch.batching is not Batching.MIXED:
            return nothing
        if self.constrained:
            self._await_masks()
        in_flight = {
            row.key: row for row, sequence in zip(step.batch.rows, step.sequences, strict=True) if self.runs(sequence)
        }
        # 1. those that are in no step, as ever
        for sequence in self._here(SequencePhase.PREFILL):
            if sequence.key not in in_flight:
                self.reuse.extend(sequence)
        self.settle()
        # 2. each as it will be: in KV, and with how many tokens to feed
        prefilling, decoding, full = list[tuple[Sequence, Candidate]](), list[Candidate](), list[Sequence]()
        keys, steps_left, lasts = 0, self.limits.max_context_tokens, True
        for sequence in self.sequences.values():
            if sequence.phase not in RUNNING or sequence.key in self.masked_out:
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

    def _await_masks(self) -> None:
        """Who has no mask yet, and will have none by the end of a step, is in no batch until it has."""
        running = ((key, s.mask) for key, s in self.constrained.items() if s.phase in RUNNING)
        before, late = self.masked_out, {key for key, mask in running if mask is not None and not mask.ready}
        if late != before:
            for key in late - before:
                self.timers.set(("mask", key), self.now + WAIT_S)
            for key in before - late:
                self.timers.clear(("mask", key))
            self.masked_out = late
            self.scheduler.changed()

    def end_masked_out(self, key: str) -> None:
        """End a sequence whose time is over, by name, if its mask is not there now."""
        self._await_masks()
        if key in self.masked_out:
            detail = f"the mask behind a token was not there within {WAIT_S:g} s"
            self.end(self.sequences[key], EndReason.GRAMMAR, detail)

    def masks_follow(self) -> bool:
        """Say whether all who have a mask now will have the one behind the next token, too."""
        if self.constrained:
            self._await_masks()
        return all(s.mask is None or s.mask.quick for s in self.constrained.values())

    def runs(self, sequence: Sequence) -> bool:
        """Say whether a row of it in a step in flight is accounted for: what has left since is not."""
        return self.sequences.get(sequence.key) is sequence and sequence.runs

    def sit_out(self, keys: Iterable[str]) -> None:
        """Take back rows of a complete batch, whose masks came too late for it."""
        for key in keys:
            self.sequences[key].sit_out()
            self.scheduler.changed()

    def launched(self, batch: Batch) -> None:
        """Of several batches in flight: until it is complete none of its sequences is scheduled, grows, or pauses."""
        self._launches += 1
        for row in batch.rows:
            self.sequences[row.key].launch(self._launches)

    def account(
        self, batch: Batch, tokens: Mapping[str, SampledToken], failures: Mapping[str, str],
        prompts: Mapping[str, list[TokenLogprob]] | None = None,
    ) -> None:  # fmt: skip
        """Take an iteration's results, see `StepResults`."""
        self.iterations += 1
        self.scheduler.ran(batch)
        if first := self.token_times.ran(batch, self.sequences, self.now):
            self._had_first_tokens(first)
        sequences, pages, page_tokens = self.sequences, self.pages, self.limits.page_tokens
        produced: dict[str, tuple[Peer, list[SequenceTokens]]] = {}  # by session; a peer's own hash is slow
        for key, _, n_tokens, samples in batch.rows:
            sequence = sequences[key]
            if key in failures:
                reason = EndReason.GRAMMAR if sequence.mask is not None and sequence.mask.fault else EndReason.INTERNAL
                self.end(sequence, reason, failures[key], forget=True)
                continue
            if prompts and key in prompts:
                part = PromptLogprobs(key, sequence.start.epoch, sequence.in_kv + 1, prompts[key])
                self.effects.append(Send(sequence.owner, part))
            sequence.fed(n_tokens)
            self.tokens += n_tokens
            pages.fill(key, sequence.in_kv)
            if sequence.chain is not None and sequence.in_kv // page_tokens != sequence.named_pages:
                self.reuse.publish(sequence)
            if samples:
                self._append(sequence, tokens[key], produced)
            elif (outgoing := self.kv.outgoing.get(key)) is not None:
                self.kv.send_pages(outgoing, pages.pages_of(key), sequence.in_kv // page_tokens)
        for owner, of_session in produced.values():
            self.produce(owner, of_session)
        self._unstick()

    # ---- what follows

    def produce(self, owner: Peer, produced: list[SequenceTokens]) -> None:
        """Send what an event produced for a session, as one Step."""
        self.effects.append(Send(owner, Step(self.iterations, produced)))

    def figures(self, *, ready: bool) -> RunnerFigures:
        pages, free_pages = self.pages, max(0, self.adapters.free_pages() - self.owed_pages())
        return RunnerFigures(
            free_pages=free_pages,
            used_pages=pages.used_pages,
            adapter_pages=pages.total_pages - free_pages - pages.reserved_pages,
            draining=self.draining,
            ready=ready,
            desired_version=self.adapters.known.version or 0,
            iterations=self.iterations,
            forwards=self.forwards,
            grown_pages=self.reservations.grown_pages,
            doublings=self.reservations.doublings,
            tokens=self.tokens,
            prefix_reused_tokens=self.reuse.tokens,
            role=self.role,
            pending_prompt_tokens=sum(s.pending for s in self.sequences.values() if s.phase in UNCOMPUTED),
            offload=self.offload,
        )

    # ---- how

    def _start(
        self, start: Start, owner: Peer, gateway: str, now: float, grammar: GrammarState | None
    ) -> Ended | NoCapacity | SequenceTokens | None:
        """Admit it, or why not."""
        if self.draining:
            return ended(start, EndReason.DRAINED, "the runner is draining")
        adapters, limits, digest = self.adapters, self.limits, start.adapter
        if fault := adapters.infeasible_reason(digest):
            return ended(start, EndReason.LOAD_FAILED, fault)
        context = limits.context_beside(adapters.pages_beside(digest, announced=False))
        free_pages = adapters.free_pages(digest, alone=not self.sequences) - self.owed_pages(start.priority)
        if (answer := refusal(start, limits, context, free_pages)) is not None:
            return answer
        if len(self.sequences) >= limits.max_sequences:
            return no_capacity(start, free_pages, "sequences")
        chain = self.reuse.chain(start) if start.sampling.prompt_logprobs is None else None
        shared = self.reuse.find(chain, [*start.prompt, *start.emitted])
        n_pages = first_pages(start, limits, limits.context_beside(adapters.pages_beside(digest, announced=True)))
        if n_pages - len(shared) > free_pages - (self.pages.free_pages - self.pages.free_beside(shared)):
            return no_capacity(start, free_pages, "pages")
        self._admissions += 1
        sequence = Sequence(
            start, owner, gateway, admitted=self._admissions, now=now, max_context_tokens=context, chain=chain,
            eos=limits.eos.union(start.sampling.eos_token_ids),
            mask=token_mask(start.sampling.allowed_token_ids, grammar, limits.vocab_size),
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
        if sequence.mask is not None and sequence.mask.grammar is not None:
            self.constrained[sequence.key] = sequence
        self.reuse.begin(sequence, shared)
        rank, adapter_bytes, *_ = start.allotment
        there = not start.adapter or self.adapters.acquire(start.adapter, rank=rank, n_bytes=adapter_bytes)
        if start.kv_to is not None and self.limits.kv is not None:
            self.kv.offer(sequence, start.kv_to, start.epoch)
        if start.kv_from is not None:
            self.hand_over.await_kv(sequence, pages, there)
        elif self._read_from_host(sequence, pages):
            self.swap.by_key[sequence.key].adapter_there = there
        elif there:
            self._join(sequence)
        if not there:  # with nothing else to run, no iteration would report this admission while it waits
            self.timers.set(REPORT, 0.0)
        self.settle()

    def _read_from_host(self, sequence: Sequence, pages: list[int]) -> bool:
        """It waits until the next pages of its text are copied in. False: they are not there, or computed sooner."""
        at = sequence.in_kv // self.pages.page_tokens
        names = [*self.reuse.names(sequence.chain, sequence.tokens, at)]
        if names and (behind := self.swap.arriving.get(names[0])):
            self.swap.follow(sequence, behind)
            return True
        if not (cached := self.host_prefixes.find(names)):
            return False
        n_tokens = len(cached) * self.pages.page_tokens
        if self.swap.copy_ms(len(cached)) + self._step_ms() >= self.scheduler.step_time.prefill_ms(n_tokens):
            return False
        sequence.reuse(n_tokens)
        self.pages.fill(sequence.key, sequence.in_kv)
        copied = pages[at : at + len(cached)]
        self.reservations.overwritten(copied)
        self.swap.read(sequence, cached, copied)
        return True

    def _step_ms(self) -> float:
        """What a step of those that decode takes: a sequence that waits for a copy misses one."""
        decoding = sum(s.phase is SequencePhase.DECODE for s in self.sequences.values())
        return self.scheduler.step_time.step_ms(decoding, self.scheduler.keys, 0) if decoding else 0.0

    def _join(self, sequence: Sequence) -> None:
        self.scheduler.changed()
        sequence.times.joined(self.now)
        sequence.join(self._most_tokens(sequence))

    def go_on(self, sequence: Sequence) -> None:
        """Run it from the next batch on: its KV and its adapter are on the device."""
        self.scheduler.changed()
        sequence.go_on(self._most_tokens(sequence))
        self.reuse.publish(sequence)

    def _most_tokens(self, sequence: Sequence) -> int:
        """Count the tokens in KV beside its adapter."""
        beside = self.pages.n_adapter_pages(sequence.start.adapter)
        return (self.pages.total_pages - beside) * self.pages.page_tokens

    def settle(self) -> None:
        """Pages or slots may have come free: first for paused sequences, then for adapters that sequences wait for."""
        self.reservations.serve_paused(self.sequences)
        self.adapters.queue.owe_pages(owed=bool(self.reservations.paused))
        self._swap_in()
        self.adapters.reconcile()
        for digest in self.adapters.queue.take_ready():
            for sequence in self.sequences.values():
                if sequence.start.adapter != digest:
                    continue
                if sequence.phase is SequencePhase.WAITING:
                    self._join(sequence)
                elif sequence.phase is SequencePhase.SWAP_IN:
                    self.swap.by_key[sequence.key].adapter_there = True
                    self._resume(self.swap.by_key[sequence.key])
                elif sequence.phase is SequencePhase.RECEIVE:
                    self.hand_over.adapter_there(sequence)
        if self.pages.short:
            page_ms = self.scheduler.step_time.prefill_ms(self.limits.page_tokens)
            self.host_prefixes.save(page_ms, self.adapters.adapters.__contains__)

    def _unstick(self) -> None:
        """No sequence runs, none is copied and no adapter loads: pinned adapters are evicted, then the newest ends."""
        while (
            self.sequences and not self._any_running and not self.adapters.slots.loading
            and not self.swap.moving and not self.kv.moving
        ):  # fmt: skip
            if self.reservations.paused:
                if not self.adapters.slots.evict_for(1, pinned_too=True):
                    return  # the supervisor names a victim
            elif self.adapters.queue.force_evict_pinned():
                return
            elif not self._swap_in(pinned_too=True):
                if self.adapters.queue.fetching:
                    return
                here = [s for s in self.sequences.values() if s.phase is not SequencePhase.SWAPPED]
                last = victim_candidates(here or list(self.sequences.values()), _priority)
                self._give_back(latest_arrival(last, _arrived))
            self.settle()

    # ---- swap

    def overruns(self) -> dict[str, int]:
        """Paused sequences, and pages that they want, where the supervisor has to name a victim."""
        return self.reservations.paused if self.stuck else {}

    def owed_pages(self, priority: Priority = Priority.INTERACTIVE) -> int:
        """What sequences in host memory, and adapters that went with them, want before any newcomer of that priority.

        Batch ones wait until no interactive newcomer takes their pages.
        They come back as soon as they fit, so no newcomer is admitted while one is out, though it would fit (as in
        vLLM). The pages that lie free meanwhile, 2 % at the most, are those that running sequences grow into; newcomers
        would take them, and swap out others for it.
        """
        out = [swap for swap in self.swap.returning() if _priority(swap.sequence) <= priority]
        adapters = {swap.sequence.start.adapter for swap in out}
        return sum(swap.wanted_pages for swap in out) + self.adapters.pages_to_load(adapters)

    def _swap_out(self) -> bool:
        """Begin to free pages for those that are paused, or wait for some. False: recomputing is better, or is left."""
        if self.swap.leaving:
            return True
        elsewhere = (SequencePhase.SWAPPED, SequencePhase.SWAP_IN, *BETWEEN_RUNNERS)
        here = [s for s in self.sequences.values() if s.phase not in elsewhere]
        if len(here) < 2:
            return self.swap.moving
        last = victim_candidates(here, _priority)
        paused = map(self.sequences.__getitem__, self.reservations.paused)
        victim = next((s for s in paused if s.start.allotment.leaves and s in last), None)
        if victim is None:
            again = [s for s in last if s.swaps < MOST_SWAPS and not s.start.allotment.stays]
            victim = latest_arrival(again or last, _arrived)
        return self._swap_out_one(victim)

    def _swap_out_one(self, victim: Sequence) -> bool:
        if victim.phase is SequencePhase.WAITING:
            return False  # nothing was computed
        pages = self.pages.pages_of(victim.key)
        wanted = len(pages) + self.reservations.paused.get(victim.key, 0)
        if victim.swaps + 1 >= MOST_SWAPS:
            wanted = max(wanted, self.pages.pages_for(victim.max_len))
        kv_pages = pages[: self.pages.pages_for(victim.in_kv)]
        recompute_ms = self.scheduler.step_time.prefill_ms(victim.in_kv)
        if not self.swap.swap_out(victim, kv_pages, wanted, recompute_ms):
            return False
        self.reservations.remove(victim.key)
        self.preemptions += 1
        self.scheduler.changed()
        return True

    def _swap_in(self, *, pinned_too: bool = False) -> bool:
        """Bring back those that left, the earliest arrival first, as far as pages are free. True: one is on its way."""
        begun = False
        for swap in self.swap.returning():
            if self.reservations.paused or not self._swap_in_one(swap, pinned_too=pinned_too):
                break
            begun = True
        return begun

    def _swap_in_one(self, swap: SwappedKv, *, pinned_too: bool) -> bool:
        sequence, pages, adapters = swap.sequence, self.pages, self.adapters
        start = sequence.start
        shared = self.reuse.find(sequence.chain, sequence.tokens)[: sequence.in_kv // pages.page_tokens]
        taken = pages.free_pages - pages.free_beside(shared) + swap.wanted_pages - len(shared)
        to_load = adapters.pages_to_load([start.adapter])
        if taken + to_load > adapters.free_pages(start.adapter, alone=pinned_too):
            return False
        evicted = adapters.slots.evict_for(taken + to_load, start.adapter, pinned_too=pinned_too)
        held = pages.reserve(sequence.key, swap.wanted_pages, shared)
        assert evicted, "free pages were checked"
        assert held is not None, "pages were freed"
        pages.fill(sequence.key, sequence.in_kv)
        copied = held[len(shared) : len(swap.hosts)]
        self.reservations.overwritten(copied)
        self.reservations.granted(held[len(swap.hosts) :])
        sequence.share_pages(len(shared))
        self.swap.swap_in(swap, copied)
        if start.adapter:
            adapters.release_swapped(start.adapter)
        swap.adapter_there = not start.adapter or adapters.acquire(start.adapter)
        return True

    def _resume(self, swap: SwappedKv) -> None:
        """It runs on, once both its KV and its adapter are there."""
        if swap.copied and swap.adapter_there:
            self.reuse.came_back(len(swap.cached) * self.pages.page_tokens)
            self.go_on(swap.sequence)
            self._end_swap(swap.sequence)

    def _end_swap(self, sequence: Sequence) -> None:
        """Those that waited for its copy read what it has brought, or compute it."""
        for behind in self.swap.forget(sequence.key):
            self._resume(behind)

    def _give_back(self, sequence: Sequence) -> None:
        """It cannot run here now: it is scheduled again, and computed once more."""
        self.preemptions += sequence.times.scheduled_at is not None
        self.remove(sequence)
        answer = no_capacity(sequence.start, self.adapters.free_pages(), "pages")
        self.effects.append(Send(sequence.owner, answer))

    def remove(self, sequence: Sequence, *, forget: bool = False, finish: FinishReason | None = None) -> None:
        """Pages and references back, at once; freed pages go to the longest paused sequence first.

        `finish`: how its request ended; None: it goes on elsewhere.
        """
        self.scheduler.departed()
        joined, swapped = self._has_joined(sequence), sequence.phase is SequencePhase.SWAPPED
        sequence.end()
        self.effects.append(_ended_fact(sequence, finish, self.now))
        del self.sequences[sequence.key]
        if self.constrained.pop(sequence.key, None) is not None:
            self.masked_out.discard(sequence.key)
            self.timers.clear(("mask", sequence.key))
        self.reservations.remove(sequence.key)
        self._end_swap(sequence)
        self.kv.forget(sequence.key)
        if swapped:
            self.pages.mark(sequence.key)
        else:
            self.pages.release(sequence.key, forget=forget)
        if sequence.start.adapter and swapped:
            self.adapters.release_swapped(sequence.start.adapter)
        elif sequence.start.adapter:
            self.adapters.release(sequence.start.adapter, joined=joined)
        self.settle()
        self.timers.set(REPORT, 0.0)

    def _has_joined(self, sequence: Sequence) -> bool:
        """It counts among those that run with its adapter."""
        if sequence.phase is SequencePhase.SWAP_IN:
            return self.swap.by_key[sequence.key].adapter_there
        if sequence.phase is SequencePhase.RECEIVE:
            return self.kv.incoming[sequence.key].adapter_there
        return sequence.phase not in (SequencePhase.WAITING, SequencePhase.SWAPPED)

    def _end_all_of(self, digest: str, reason: EndReason, detail: str) -> None:
        """Not those in host memory, which do not want it now."""
        for sequence in [s for s in self.sequences.values() if s.start.adapter == digest]:
            if sequence.phase is not SequencePhase.SWAPPED:
                self.end(sequence, reason, detail)

    def end(
        self, sequence: Sequence, reason: EndReason, detail: str, *, forget: bool = False, epoch: Epoch | None = None
    ) -> None:
        """`epoch`: the one that another runner was to have it under, where that is its next one."""
        self.remove(sequence, forget=forget)
        of = epoch or sequence.start.epoch
        self.effects.append(Send(sequence.owner, Ended(sequence.key, of, reason, detail, sequence.n_emitted)))

    def _steps_left(self, sequence: Sequence) -> int:
        """Iterations before its reserved pages are full, or its answer is as long as it may be."""
        return min(self._free_tokens(sequence, sequence.in_kv), sequence.max_len - len(sequence.tokens))

    def _free_tokens(self, sequence: Sequence, in_kv: int) -> int:
        """Tokens that its reserved pages hold beside so many."""
        return len(self.pages.pages_of(sequence.key)) * self.limits.page_tokens - in_kv

    @property
    def _any_running(self) -> bool:
        """Here or in flight."""
        for s in self.sequences.values():  # noqa: SIM110 (at every iteration: `any` would call a generator)
            if s.phase in RUNNING:
                return True
        return False

    def _here(self, phase: SequencePhase) -> Iterator[Sequence]:
        """Sequences of a phase that are not in flight and wait for no mask, in order of admission."""
        held = self.masked_out
        return (s for s in self.sequences.values() if s.phase is phase and not s.in_flight and s.key not in held)

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

    def _append(
        self, sequence: Sequence, sampled: SampledToken, produced: dict[str, tuple[Peer, list[SequenceTokens]]]
    ) -> None:
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
        if (of_session := produced.get(sequence.owner.name)) is None:
            of_session = produced[sequence.owner.name] = sequence.owner, []
        of_session[1].append(
            SequenceTokens(sequence.key, start.epoch, position, tokens, finish, sequence.doublings, logprobs)
        )
        if finish is not None:
            self.remove(sequence, finish=finish)
        elif start.kv_to is not None and self.limits.kv is not None:
            self.hand_over.leave(sequence, self.now, logprobs)

    def _had_first_tokens(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            start = sequence.start
            if start.kv_from is None and not start.emitted:
                self.effects.append(PromptComputed(len(start.prompt), self.now - sequence.arrived))

    def paused(self) -> list[str]:
        """Keys of paused sequences, the longest paused first."""
        return list(self.reservations.paused)


def _ended_fact(sequence: Sequence, finish: FinishReason | None, now: float) -> SequenceEnded:
    times = sequence.times
    return SequenceEnded(
        sequence.start, finish, sequence.n_emitted, sequence.arrived, times.admitted_at, times.joined_at,
        times.scheduled_at, times.first_token_at, now,
    )  # fmt: skip


def _candidate(sequence: Sequence) -> Candidate:
    scores = sequence.scored(sequence.pending) > 0
    start = sequence.start
    return Candidate(sequence.key, start.adapter, sequence.pending, sequence.in_kv, start.priority, scores)


def _priority(sequence: Sequence) -> Priority:
    return sequence.start.priority


def _arrived(sequence: Sequence) -> float:
    return sequence.arrived


def check_pool(pool: RequestPool) -> None:
    """Every book balances and agrees with the sequences. Cheap enough for an idle loop."""
    check_page_table(pool.pages)
    check_adapters(pool.adapters)
    check_swap(pool.swap)
    check_host_prefixes(pool.host_prefixes)
    check_kv_transfers(pool.kv, pool.sequences.values())
    known = {"", *pool.adapters.adapters}
    assert all(page.adapter in known for page in pool.adapters.host.cached.values()), "KV without its adapter"
    masked = [s.key for s in pool.sequences.values() if s.mask is not None and s.mask.grammar is not None]
    assert masked == list(pool.constrained)
    assert pool.masked_out <= pool.constrained.keys()
    assert all(("mask", key) in pool.timers for key in pool.masked_out)
    here = {key for key, sequence in pool.sequences.items() if sequence.phase is not SequencePhase.SWAPPED}
    assert pool.pages.holders() == here
    for sequence in pool.sequences.values():
        check_sequence(sequence)
        assert (sequence.phase is SequencePhase.PAUSED) == (sequence.key in pool.paused()), sequence.key
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
    if pool.paused():
        assert pool.pages.free_pages == 0, "a free page while a sequence waits for one"
        assert pool.adapters.slots.evictable_pages() == 0, "an unused adapter while a sequence waits for a page"
