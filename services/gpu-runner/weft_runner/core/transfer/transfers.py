"""KV on its way between this runner and others of its pool: what is offered, sent and awaited.

A sequence that another runner is to take over is offered to it as soon as it is here. Once the other has accepted,
which it does with pages that it has reserved, pages leave as they become full. `KvComplete` follows the last one,
`KvAck` frees the pages here. The sender answers for a transfer: where one fails it ends the sequence with KV_LOST.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvAccept, KvHello, KvOffer, KvReady, KvRefuse
from weft.domain.machine import Close, Kind, Peer, Send
from weft.domain.request import KvTarget, TokenLogprob
from weft.domain.timers import TimerQueue
from weft_runner.core.events import DropKv, Effect, OpenKvStream, ReceiveKv, SendKv
from weft_runner.core.sequence import Sequence, SequencePhase

MAX_OFFERS = 4096  # without a Start: more requests than two runners exchange at a time
SLOWEST_BYTES_PER_S = 10e6  # a transfer that is slower than this has failed


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What a runner says of itself before it exchanges KV. Equal pools, bases and layouts can.

    `shard_addresses`: where its ranks from 1 on take theirs (`shards.py`).
    """

    runner: RunnerId
    pool: str
    base_digest: str
    kv_layout: str
    shard_addresses: tuple[str, ...] = ()

    def hello(self, incarnation: str) -> KvHello:
        """Greet that incarnation of another runner, to send it KV."""
        return KvHello(self.runner, incarnation, self.pool, self.base_digest, self.kv_layout)


@dataclass(slots=True, eq=False)
class OutgoingKv:
    """KV to send. `epoch`: the receiver's epoch of the sequence. `sent`: its first pages, sent or already present."""

    sequence: Sequence
    peer: Peer
    epoch: Epoch
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that go along
    accepted: bool = False
    sent: int = 0


@dataclass(slots=True, eq=False)
class IncomingKv:
    """KV to receive. `peer`: its stream; None before the offer. `pages`: the pages to write, from `first_page`."""

    sequence: Sequence
    source: RunnerId
    first_page: int
    pages: tuple[int, ...]
    adapter_there: bool
    peer: Peer | None = None
    complete: bool = False


@dataclass(slots=True)
class KvTransfers:
    """One owner: the hand-over of the request pool. `page_bytes`: of KV.

    `offers`: without a Start so far. What is empty costs a step nothing: callers look at `outgoing` and `offers` before
    they call. `effects` takes what follows; what ends a transfer stands before its pages have new owners. Timers
    ("offer", request) and ("transfer", request) say when the time of each is over.
    """

    identity: KvIdentity | None
    claim_s: float
    page_bytes: int
    effects: list[Effect]
    timers: TimerQueue[tuple[str, ...]]
    outgoing: dict[str, OutgoingKv] = field(default_factory=dict[str, OutgoingKv])
    incoming: dict[str, IncomingKv] = field(default_factory=dict[str, IncomingKv])
    _streams: dict[Peer, bool] = field(default_factory=dict[Peer, bool])  # to receivers; True: it has answered
    _senders: dict[Peer, RunnerId] = field(default_factory=dict[Peer, RunnerId])
    offers: dict[str, tuple[Peer, KvOffer]] = field(default_factory=dict[str, tuple[Peer, KvOffer]])

    @property
    def moving(self) -> bool:
        """KV is on its way, so that an event follows."""
        return any(o.sequence.phase is SequencePhase.SEND for o in self.outgoing.values()) or any(
            i.adapter_there and not i.complete for i in self.incoming.values()
        )

    def expire_offer(self, request_id: str) -> None:
        """Refuse an offer without a waiting sequence."""
        peer, offer = self.offers.pop(request_id)
        self.effects.append(Send(peer, KvRefuse(request_id, offer.epoch, "nobody waits for it")))

    # ---- streams

    def connected(self, peer: Peer, hello: object) -> None:
        """A stream to a receiver has been answered, or a sender opens one."""
        if peer in self._streams:
            self._streams[peer] = True
            self.effects.extend(self._offer(outgoing) for outgoing in self.outgoing.values() if outgoing.peer == peer)
            return
        fault = hello_fault(self.identity, hello)
        if fault is not None or not isinstance(hello, KvHello) or self.identity is None:
            self.effects.append(Close(peer, fault or "no KV is exchanged here"))
            return
        self._senders[peer] = hello.runner
        self.effects.append(Send(peer, KvReady(self.identity.runner, self.identity.shard_addresses)))

    def closed(self, peer: Peer) -> tuple[list[OutgoingKv], list[IncomingKv]]:
        """A stream is over: the transfers that were on it."""
        self._streams.pop(peer, None)
        self._senders.pop(peer, None)
        for request_id in [
            request_id for request_id, (offering_peer, _) in self.offers.items() if offering_peer == peer
        ]:
            self._take_offer(request_id)
        outgoing = [kv for kv in self.outgoing.values() if kv.peer == peer]
        return outgoing, [kv for kv in self.incoming.values() if kv.peer == peer and not kv.complete]

    # ---- the sender's side

    def offer(self, sequence: Sequence, target: KvTarget, epoch: Epoch) -> None:
        """Offer the sequence's KV to its next runner, under the new epoch."""
        assert self.identity is not None, "a runner that exchanges no KV"
        peer = Peer(Kind.RUNNER, f"{target.runner.uuid}/{target.runner.incarnation}")
        outgoing = self.outgoing[sequence.key] = OutgoingKv(sequence, peer, epoch)
        if peer not in self._streams:
            self._streams[peer] = False
            hello = self.identity.hello(target.runner.incarnation)
            self.effects.append(OpenKvStream(peer, target.address, hello))
        elif self._streams[peer]:
            self.effects.append(self._offer(outgoing))

    def accepted(self, peer: Peer, accept: KvAccept) -> OutgoingKv | None:
        """Let the pages of a transfer leave. Return None if this epoch is not offered to the peer."""
        outgoing = self.find(peer, accept.request_id, accept.epoch)
        if outgoing is None or outgoing.accepted:
            return None
        outgoing.accepted, outgoing.sent = True, accept.first_page
        return outgoing

    def send_pages(self, kv: OutgoingKv, pages: list[int], end_page: int, *, layer_by_layer: bool = False) -> None:
        """Send its pages before number `end_page` that have not left; `layer_by_layer`: see SendKv."""
        if kv.accepted and kv.sent < end_page:
            leaving = tuple(pages[kv.sent : end_page])
            send = SendKv(kv.peer, kv.sequence.key, kv.epoch, kv.sent, leaving, layer_by_layer)
            self.effects.append(send)
            kv.sent = end_page

    def computed(self, kv: OutgoingKv, pages: int, now: float, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Bound the time in which it is claimed and arrives: nothing more is computed for it here."""
        kv.logprobs = logprobs
        deadline = now + self.claim_s + pages * self.page_bytes / SLOWEST_BYTES_PER_S
        self.timers.set(("transfer", kv.sequence.key), deadline)

    def find(self, peer: Peer, request_id: str, epoch: Epoch) -> OutgoingKv | None:
        """Return the offered or running transfer of this epoch to this peer."""
        outgoing = self.outgoing.get(request_id)
        return outgoing if outgoing is not None and (outgoing.peer, outgoing.epoch) == (peer, epoch) else None

    def _offer(self, kv: OutgoingKv) -> Send:
        return Send(kv.peer, KvOffer(kv.sequence.key, kv.epoch, kv.sequence.start.adapter))

    # ---- the receiver's side

    def await_kv(self, kv: IncomingKv) -> None:
        """A sequence waits for KV; it may have been offered already."""
        self.incoming[kv.sequence.key] = kv
        if (offered := self._take_offer(kv.sequence.key)) is not None:
            self._answer(*offered, kv)

    def offered(self, peer: Peer, offer: KvOffer, now: float, *, stale: bool) -> None:
        """Handle an offer. `stale`: the epoch was here already. An offer before its Start is answered when the Start
        comes.
        """
        incoming = self.incoming.get(offer.request_id)
        if incoming is not None and incoming.sequence.start.epoch == offer.epoch:
            self._answer(peer, offer, incoming)
        elif stale or offer.request_id in self.offers or len(self.offers) >= MAX_OFFERS:
            self.effects.append(Send(peer, KvRefuse(offer.request_id, offer.epoch, "nobody waits for it")))
        else:
            self.offers[offer.request_id] = peer, offer
            self.timers.set(("offer", offer.request_id), now + self.claim_s)

    def _take_offer(self, request_id: str) -> tuple[Peer, KvOffer] | None:
        self.timers.clear(("offer", request_id))
        return self.offers.pop(request_id, None)

    def _answer(self, peer: Peer, offer: KvOffer, kv: IncomingKv) -> None:
        start = kv.sequence.start
        request_id, epoch = offer.request_id, offer.epoch
        reason = ""
        if epoch != start.epoch:
            reason = f"epoch {epoch.term}.{epoch.counter} is not {start.epoch.term}.{start.epoch.counter}"
        elif self._senders.get(peer) != kv.source:
            reason = "it is awaited from another runner"
        elif offer.adapter != start.adapter:
            reason = f"adapter {offer.adapter!r} is not {start.adapter!r}"
        elif kv.peer is not None:
            reason = "it was offered before"
        if reason:
            self.effects.append(Send(peer, KvRefuse(request_id, epoch, reason)))
            return
        kv.peer = peer
        self.effects.append(ReceiveKv(peer, request_id, epoch, kv.first_page, kv.pages))
        self.effects.append(Send(peer, KvAccept(request_id, epoch, kv.first_page)))

    def awaited(self, peer: Peer, request_id: str, epoch: Epoch) -> IncomingKv | None:
        incoming = self.incoming.get(request_id)
        if incoming is None or incoming.complete or (incoming.peer, incoming.sequence.start.epoch) != (peer, epoch):
            return None
        return incoming

    # ---- both

    def arrived(self, key: str, *, kv: bool = False, adapter: bool = False) -> bool:
        """Note that its KV is here, or its adapter. True: both are."""
        incoming = self.incoming[key]
        incoming.complete, incoming.adapter_there = incoming.complete or kv, incoming.adapter_there or adapter
        return incoming.complete and incoming.adapter_there

    def forget(self, key: str, *, acknowledged: bool = False) -> None:
        """Forget a sequence that is over here, or runs: nothing of it is sent or received any more."""
        outgoing = self.outgoing.pop(key, None)
        self.timers.clear(("transfer", key))
        if outgoing is not None and outgoing.accepted and not acknowledged:
            self.effects.append(DropKv(outgoing.peer, key, outgoing.epoch))
        incoming = self.incoming.pop(key, None)
        if incoming is not None and incoming.peer is not None and not incoming.complete:
            epoch = incoming.sequence.start.epoch
            self.effects.append(DropKv(incoming.peer, key, epoch))
            self.effects.append(Send(incoming.peer, KvRefuse(key, epoch, "nobody waits for it any more")))


def hello_fault(mine: KvIdentity | None, hello: object) -> str | None:
    """Return the reason to refuse the KV of a sender."""
    if mine is None or not isinstance(hello, KvHello):
        return "no KV is exchanged here"
    for quantity, theirs, ours in (
        ("incarnation", hello.incarnation, mine.runner.incarnation),
        ("pool", hello.pool, mine.pool),
        ("base", hello.base_digest, mine.base_digest),
        ("KV layout", hello.kv_layout, mine.kv_layout),
    ):
        if theirs != ours:
            return f"{quantity} {theirs!r} is not {ours!r}"
    return None


def check_kv_transfers(transfers: KvTransfers, sequences: Iterable[Sequence]) -> None:
    """Check that sequences waiting for KV are in RECEIVE, that sent sequences are in SEND, and that each transfer has a
    stream.
    """
    by_phase = {phase: {s.key for s in sequences if s.phase is phase} for phase in SequencePhase}
    assert by_phase[SequencePhase.RECEIVE] == transfers.incoming.keys(), "a sequence waits for no KV"
    assert by_phase[SequencePhase.SEND] <= transfers.outgoing.keys(), "KV goes to nobody"
    for kv in transfers.outgoing.values():
        assert kv.peer in transfers._streams, kv.peer  # pyright: ignore[reportPrivateUsage]
        timed = ("transfer", kv.sequence.key) in transfers.timers
        assert timed == (kv.sequence.phase is SequencePhase.SEND), kv.sequence.key
