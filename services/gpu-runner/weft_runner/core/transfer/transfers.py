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
    """`epoch`: under which the receiver has the sequence. `sent`: its first pages that have left, or are there."""

    sequence: Sequence
    peer: Peer
    epoch: Epoch
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that go along
    accepted: bool = False
    sent: int = 0


@dataclass(slots=True, eq=False)
class IncomingKv:
    """`peer`: the stream that it comes on; None: not offered yet. `pages`: that will be written, from `first_page`."""

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
        """Refuse an offer that nobody has waited for."""
        peer, offer = self.offers.pop(request_id)
        self.effects.append(Send(peer, KvRefuse(request_id, offer.epoch, "nobody waits for it")))

    # ---- streams

    def connected(self, peer: Peer, hello: object) -> None:
        """A stream to a receiver has been answered, or a sender opens one."""
        if peer in self._streams:
            self._streams[peer] = True
            self.effects.extend(self._offer(one) for one in self.outgoing.values() if one.peer == peer)
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
        for request_id in [request_id for request_id, (other, _) in self.offers.items() if other == peer]:
            self._take_offer(request_id)
        outgoing = [one for one in self.outgoing.values() if one.peer == peer]
        return outgoing, [one for one in self.incoming.values() if one.peer == peer and not one.complete]

    # ---- the sender's side

    def offer(self, sequence: Sequence, target: KvTarget, epoch: Epoch) -> None:
        """Offer it to the runner that is to take it over, under that epoch."""
        assert self.identity is not None, "a runner that exchanges no KV"
        peer = Peer(Kind.RUNNER, f"{target.runner.uuid}/{target.runner.incarnation}")
        one = self.outgoing[sequence.key] = OutgoingKv(sequence, peer, epoch)
        if peer not in self._streams:
            self._streams[peer] = False
            hello = self.identity.hello(target.runner.incarnation)
            self.effects.append(OpenKvStream(peer, target.address, hello))
        elif self._streams[peer]:
            self.effects.append(self._offer(one))

    def accepted(self, peer: Peer, accept: KvAccept) -> OutgoingKv | None:
        """Let its pages leave. None: nothing of that epoch is offered to that peer."""
        one = self.find(peer, accept.request_id, accept.epoch)
        if one is None or one.accepted:
            return None
        one.accepted, one.sent = True, accept.first_page
        return one

    def send_pages(self, one: OutgoingKv, pages: list[int], until: int, *, layer_by_layer: bool = False) -> None:
        """Send its pages before number `until` that have not left; `layer_by_layer`: see SendKv."""
        if one.accepted and one.sent < until:
            leaving = tuple(pages[one.sent : until])
            send = SendKv(one.peer, one.sequence.key, one.epoch, one.sent, leaving, layer_by_layer)
            self.effects.append(send)
            one.sent = until

    def computed(self, one: OutgoingKv, pages: int, now: float, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Bound the time in which it is claimed and arrives: nothing more is computed for it here."""
        one.logprobs = logprobs
        until = now + self.claim_s + pages * self.page_bytes / SLOWEST_BYTES_PER_S
        self.timers.set(("transfer", one.sequence.key), until)

    def find(self, peer: Peer, request_id: str, epoch: Epoch) -> OutgoingKv | None:
        """Return what is offered or sent of that epoch to that peer."""
        one = self.outgoing.get(request_id)
        return one if one is not None and (one.peer, one.epoch) == (peer, epoch) else None

    def _offer(self, one: OutgoingKv) -> Send:
        return Send(one.peer, KvOffer(one.sequence.key, one.epoch, one.sequence.start.adapter))

    # ---- the receiver's side

    def await_kv(self, one: IncomingKv) -> None:
        """A sequence waits for KV; it may have been offered already."""
        self.incoming[one.sequence.key] = one
        if (offered := self._take_offer(one.sequence.key)) is not None:
            self._answer(*offered, one)

    def offered(self, peer: Peer, offer: KvOffer, now: float, *, stale: bool) -> None:
        """`stale`: that epoch was here already. One whose Start is on its way is answered when it comes."""
        one = self.incoming.get(offer.request_id)
        if one is not None and one.sequence.start.epoch == offer.epoch:
            self._answer(peer, offer, one)
        elif stale or offer.request_id in self.offers or len(self.offers) >= MAX_OFFERS:
            self.effects.append(Send(peer, KvRefuse(offer.request_id, offer.epoch, "nobody waits for it")))
        else:
            self.offers[offer.request_id] = peer, offer
            self.timers.set(("offer", offer.request_id), now + self.claim_s)

    def _take_offer(self, request_id: str) -> tuple[Peer, KvOffer] | None:
        self.timers.clear(("offer", request_id))
        return self.offers.pop(request_id, None)

    def _answer(self, peer: Peer, offer: KvOffer, one: IncomingKv) -> None:
        start = one.sequence.start
        request_id, epoch = offer.request_id, offer.epoch
        reason = ""
        if epoch != start.epoch:
            reason = f"epoch {epoch.term}.{epoch.counter} is not {start.epoch.term}.{start.epoch.counter}"
        elif self._senders.get(peer) != one.source:
            reason = "it is awaited from another runner"
        elif offer.adapter != start.adapter:
            reason = f"adapter {offer.adapter!r} is not {start.adapter!r}"
        elif one.peer is not None:
            reason = "it was offered before"
        if reason:
            self.effects.append(Send(peer, KvRefuse(request_id, epoch, reason)))
            return
        one.peer = peer
        self.effects.append(ReceiveKv(peer, request_id, epoch, one.first_page, one.pages))
        self.effects.append(Send(peer, KvAccept(request_id, epoch, one.first_page)))

    def awaited(self, peer: Peer, request_id: str, epoch: Epoch) -> IncomingKv | None:
        one = self.incoming.get(request_id)
        if one is None or one.complete or (one.peer, one.sequence.start.epoch) != (peer, epoch):
            return None
        return one

    # ---- both

    def arrived(self, key: str, *, kv: bool = False, adapter: bool = False) -> bool:
        """Note that its KV is here, or its adapter. True: both are."""
        one = self.incoming[key]
        one.complete, one.adapter_there = one.complete or kv, one.adapter_there or adapter
        return one.complete and one.adapter_there

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
    """Why that sender's KV is not taken."""
    if mine is None or not isinstance(hello, KvHello):
        return "no KV is exchanged here"
    for what, theirs, ours in (
        ("incarnation", hello.incarnation, mine.runner.incarnation),
        ("pool", hello.pool, mine.pool),
        ("base", hello.base_digest, mine.base_digest),
        ("KV layout", hello.kv_layout, mine.kv_layout),
    ):
        if theirs != ours:
            return f"{what} {theirs!r} is not {ours!r}"
    return None


def check_kv_transfers(transfers: KvTransfers, sequences: Iterable[Sequence]) -> None:
    """Who waits for KV is in RECEIVE, whose KV alone is left is in SEND, and each transfer has a stream."""
    by_phase = {phase: {s.key for s in sequences if s.phase is phase} for phase in SequencePhase}
    assert by_phase[SequencePhase.RECEIVE] == transfers.incoming.keys(), "a sequence waits for no KV"
    assert by_phase[SequencePhase.SEND] <= transfers.outgoing.keys(), "KV goes to nobody"
    for one in transfers.outgoing.values():
        assert one.peer in transfers._streams, one.peer  # pyright: ignore[reportPrivateUsage]
        timed = ("transfer", one.sequence.key) in transfers.timers
        assert timed == (one.sequence.phase is SequencePhase.SEND), one.sequence.key
