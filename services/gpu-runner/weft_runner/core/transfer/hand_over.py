"""Sequences that are handed over between runners with their KV, both sides: where transfers meet pages and phases."""

from collections.abc import Mapping
from typing import Protocol

from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvAccept, KvAck, KvComplete, KvOffer, KvRefuse
from weft.domain.machine import Close, Peer, Send
from weft.domain.request import Ended, EndReason, FinishReason, Freeze, Frozen, SequenceTokens, TokenLogprob
from weft.domain.timers import TimerQueue
from weft_runner.core.admission import HighestEpochs, PoolLimits
from weft_runner.core.batch import Batch
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.events import REPORT, Effect
from weft_runner.core.page_table import PageTable
from weft_runner.core.reserve.reservations import Reservations
from weft_runner.core.sequence import RUNNING, Sequence, SequencePhase
from weft_runner.core.transfer.transfers import IncomingKv, KvTransfers, OutgoingKv

MIGRATE_S = 8.0  # for the sequences of a process that ends to move to other runners


class _Pool(Protocol):
    """The request pool as seen by a hand-over."""

    @property
    def sequences(self) -> Mapping[str, Sequence]: ...

    def go_on(self, sequence: Sequence) -> None: ...

    def produce(self, owner: Peer, produced: list[SequenceTokens]) -> None: ...

    def end(self, sequence: Sequence, reason: EndReason, detail: str, *, epoch: Epoch | None = None) -> None: ...

    def remove(self, sequence: Sequence, *, finish: FinishReason | None = None) -> None: ...


class HandOver:
    """One owner: the request pool. `lost`, `received` and `handed_over` count since start."""

    def __init__(
        self, pool: _Pool, limits: PoolLimits, pages: PageTable, reservations: Reservations, scheduler: BatchScheduler,
        epochs: HighestEpochs, effects: list[Effect], timers: TimerQueue[tuple[str, ...]],
    ) -> None:  # fmt: skip
        self._pool, self._limits, self._pages, self._reservations = pool, limits, pages, reservations
        self._scheduler, self._epochs, self._effects, self._timers = scheduler, epochs, effects, timers
        self.kv = KvTransfers(limits.kv, limits.kv_claim_s, limits.kv_page_bytes, effects, timers)
        self.freezing: list[tuple[Freeze, Peer]] = []  # whose sequences are in a batch in flight
        self.handed_over = self.received = self.lost = 0

    # ---- events

    def freeze(self, freeze: Freeze, owner: Peer, now: float) -> None:
        """End an epoch here after the computed tokens, and offer its KV to another runner.

        Where there is none to send it ends with KV_LOST: the other runner computes it.
        """
        pool, kv = self._pool, self.kv
        sequence = pool.sequences.get(freeze.request_id)
        answer = Ended(freeze.request_id, freeze.epoch, EndReason.KV_LOST, "nothing of it is here to send")
        if sequence is None or sequence.owner != owner or sequence.start.epoch != freeze.epoch:
            self._effects.append(Send(owner, answer))
            return
        if sequence.in_flight:
            self.freezing.append((freeze, owner))
            return
        ready = sequence.phase in (*RUNNING, SequencePhase.PAUSED)
        if not ready or not sequence.in_kv or kv.identity is None or sequence.key in kv.outgoing:
            pool.end(sequence, EndReason.KV_LOST, answer.detail)
            return
        self._effects.append(Send(owner, Frozen(sequence.key, freeze.epoch, sequence.n_emitted)))
        kv.offer(sequence, freeze.to, freeze.next_epoch)
        self.leave(sequence, now)

    def freeze_again(self, now: float) -> None:
        """Freeze sequences that waited for a batch in flight: a batch is complete."""
        freezing, self.freezing = self.freezing, []
        for freeze, owner in freezing:
            self.freeze(freeze, owner, now)

    def on_message(self, peer: Peer, message: object, now: float) -> None:
        """Take a message of a runner that KV comes from, or is sent to."""
        pool, kv = self._pool, self.kv
        match message:
            case KvOffer(request_id, epoch):
                kv.offered(peer, message, now, stale=self._epochs.is_stale(request_id, epoch))
            case KvComplete(request_id, epoch):
                if (incoming := kv.awaited(peer, request_id, epoch)) is not None:
                    self._take(peer, incoming, message)
            case KvAccept():
                if (accepted := kv.accepted(peer, message)) is not None:
                    self._send(accepted)
            case KvAck(request_id, epoch):
                if (outgoing := kv.find(peer, request_id, epoch)) and outgoing.sequence.phase is SequencePhase.SEND:
                    self.handed_over += 1
                    kv.forget(request_id, acknowledged=True)
                    pool.remove(outgoing.sequence)
            case KvRefuse(request_id, epoch, reason):
                if (refused := kv.find(peer, request_id, epoch)) is not None:
                    self._lose(refused, f"the other runner refuses it: {reason}")
            case _:
                pass  # of a newer version

    def on_stream_closed(self, peer: Peer, reason: str) -> None:
        """End the transfers of a closed stream."""
        outgoing, incoming = self.kv.closed(peer)
        for kv in outgoing:
            self._lose(kv, f"the stream to the other runner is over: {reason}")
        for other in incoming:
            self.lost += 1
            detail = f"the stream of the other runner is over: {reason}"
            self._pool.end(other.sequence, EndReason.KV_LOST, detail)

    def expire(self, key: str) -> None:
        """End a transfer after its time."""
        self._lose(self.kv.outgoing[key], "the other runner did not take it in time")

    # ---- the sender's side

    def before_step(self, batch: Batch) -> None:
        """Send the KV of prompts that a batch completes layer by layer, before it runs, if it is large enough."""
        if batch.prompt_tokens < self._limits.layer_by_layer_tokens:
            return
        pages = self._pages
        for key, _, n_tokens, samples, _ in batch.rows[: batch.n_prefills]:
            if samples and (outgoing := self.kv.outgoing.get(key)) is not None:
                end_page = pages.pages_for(self._pool.sequences[key].in_kv + n_tokens)
                self.kv.send_pages(outgoing, pages.pages_of(key), end_page, layer_by_layer=True)

    def leave(self, sequence: Sequence, now: float, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        """Compute nothing more for it here. `logprobs`: of its first token, that is sent with its KV."""
        outgoing = self.kv.outgoing[sequence.key]
        self._reservations.remove(sequence.key)
        sequence.send()
        self._scheduler.count_departure()
        self.kv.computed(outgoing, self._pages.pages_for(sequence.in_kv), now, logprobs)
        self._send(outgoing)

    def _send(self, outgoing: OutgoingKv) -> None:
        """Send complete pages once the receiver has accepted; after the last pages send the tokens of the epoch."""
        sequence, pages = outgoing.sequence, self._pages
        if not outgoing.accepted:
            return
        held = pages.pages_of(sequence.key)
        if sequence.phase is not SequencePhase.SEND:
            self.kv.send_pages(outgoing, held, sequence.in_kv // pages.page_tokens)
            return
        self.kv.send_pages(outgoing, held, pages.pages_for(sequence.in_kv))
        tokens = tuple(sequence.tokens[sequence.base_len :]) if outgoing.epoch == sequence.start.epoch else ()
        about = tokens, outgoing.logprobs, sequence.cached_tokens
        complete = KvComplete(sequence.key, outgoing.epoch, sequence.in_kv, *about)
        self._effects.append(Send(outgoing.peer, complete))

    def _lose(self, outgoing: OutgoingKv, detail: str) -> None:
        """End it: the gateway ends the epoch on both runners, and it is computed again."""
        self.lost += 1
        self._pool.end(outgoing.sequence, EndReason.KV_LOST, detail, epoch=outgoing.epoch)

    # ---- the receiver's side

    def await_kv(self, sequence: Sequence, pages: list[int], there: bool) -> None:
        """Wait for what is not here: each of these pages is written as a whole. `there`: its adapter is."""
        source, table = sequence.start.kv_from, self._pages
        assert source is not None
        first = sequence.in_kv // table.page_tokens
        awaited = tuple(pages[first : table.pages_for(sequence.base_len)])
        self._reservations.drop_granted([*awaited])
        sequence.await_kv()
        self.kv.await_kv(IncomingKv(sequence, source, first, awaited, there))

    def adapter_there(self, sequence: Sequence) -> None:
        """Record that the adapter of a sequence waiting for KV is on the device."""
        if self.kv.arrived(sequence.key, adapter=True):
            self._go_on(sequence)

    def _take(self, peer: Peer, incoming: IncomingKv, complete: KvComplete) -> None:
        """Take it over: every page is here. The tokens that came with it are repeated to the gateway."""
        pool, sequence, tokens = self._pool, incoming.sequence, complete.tokens
        if fault := self._fault_of(sequence, complete):
            self._effects.append(Close(peer, fault))
            self.on_stream_closed(peer, fault)
            return
        self.received += 1
        key, epoch, position = sequence.key, sequence.start.epoch, sequence.n_emitted
        sequence.take_kv(complete.in_kv, tokens, complete.cached_tokens)
        self._pages.fill(key, complete.in_kv)
        self._reservations.add_granted([*incoming.pages[self._pages.pages_for(complete.in_kv) - incoming.first_page :]])
        self._effects.append(Send(peer, KvAck(key, epoch)))
        runs = self.kv.arrived(key, kv=True)
        self._timers.set(REPORT, 0.0)
        if tokens:
            reused = complete.cached_tokens
            produced = [SequenceTokens(key, epoch, position, tokens, None, 0, complete.logprobs, reused)]
            # the context beside its adapter is smaller than at its sender
            if full := len(sequence.tokens) == sequence.max_len:
                produced.append(SequenceTokens(key, epoch, sequence.n_emitted, (), FinishReason.LENGTH))
            pool.produce(sequence.owner, produced)
            if full:
                pool.remove(sequence, finish=FinishReason.LENGTH)
                return
        if runs:
            self._go_on(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        self.kv.forget(sequence.key)
        self._pool.go_on(sequence)

    def _fault_of(self, sequence: Sequence, complete: KvComplete) -> str:
        start, n_tokens = sequence.start, len(sequence.tokens) + len(complete.tokens)
        max_tokens = min(n_tokens - 1, sequence.base_len)
        too_many = n_tokens > sequence.max_len or n_tokens >= len(start.prompt) + max(1, start.max_tokens)
        if too_many or not max(sequence.in_kv, 1) <= complete.in_kv <= max_tokens:
            return f"request {sequence.key!r} of {n_tokens} tokens came with {complete.in_kv} in KV"
        if any(not 0 <= token < self._limits.vocab_size for token in complete.tokens):
            return f"request {sequence.key!r} came with a token outside the vocabulary"
        wants_logprobs = start.sampling.top_logprobs is not None
        if wants_logprobs and len(complete.logprobs) != len(complete.tokens):
            return f"request {sequence.key!r} came without log probabilities"
        return ""
