"""KV of a runner of several ranks: each rank sends its pages to the rank of its place in the other runner.

Rank 0's machine orders transfers as one of a single process does (`transfers.py`). What it orders about pages goes to
the other ranks as well, in the order of the steps: pages have the same numbers on all ranks. Each of these has streams
of its own to its like, under the same contract: hello, offer, accept, pages, complete, ack. To the machine a transfer
is complete once it is complete on every rank (`ShardedTransfers`), and a stream is over when a rank loses one on it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvAccept, KvAck, KvComplete, KvOffer, KvReady, KvRefuse
from weft.domain.machine import Close, Closed, Connected, Kind, Peer, Received, Send
from weft_runner.core.events import DropKv, KvAction, OpenKvStream, ReceiveKv, SendKv
from weft_runner.core.transfer.transfers import MAX_OFFERS, KvIdentity, hello_fault

Key = tuple[str, Epoch]
KvEvent = Connected | Received | Closed


@dataclass(frozen=True, slots=True)
class SendComplete:
    """A KvComplete sent by each rank after its own pages."""

    peer: Peer
    complete: KvComplete


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """An order of rank 0 to the other ranks.

    `addresses`: of the other runner's ranks from 1 on, where something is sent to them.
    """

    order: SendKv | ReceiveKv | DropKv | SendComplete
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardComplete:
    """To rank 0: this rank's pages of the first `in_kv` tokens have arrived."""

    request_id: str
    epoch: Epoch
    in_kv: int


@dataclass(frozen=True, slots=True)
class ShardLost:
    """To rank 0: this rank's pages neither leave nor arrive any more."""

    request_id: str
    epoch: Epoch
    reason: str


ShardEffect = KvAction | Send | ShardComplete | ShardLost


def shard_runner(runner: RunnerId, rank: int) -> RunnerId:
    """Return the RunnerId of a rank on its streams."""
    return RunnerId(runner.uuid, f"{runner.incarnation}.{rank}")


@dataclass(slots=True)
class _Outgoing:
    peer: Peer
    accepted: bool = False
    waiting: list[SendKv | Send] = field(default_factory=list[SendKv | Send])


@dataclass(slots=True)
class _Incoming:
    """`peer`: the stream that it comes on; None: not offered yet."""

    order: ReceiveKv
    peer: Peer | None = None


class KvShard:
    """A rank's part in the transfers of its runner. What a call returns is to be done in that order.

    An offer may be here before rank 0's order, and the order before the offer.
    """

    def __init__(self, rank: int, identity: KvIdentity) -> None:
        """`identity`: of this rank, see `shard_runner`."""
        self._rank, self._identity = rank, identity
        self._streams: dict[Peer, bool] = {}  # to others; True: it has answered
        self._outgoing: dict[Key, _Outgoing] = {}
        self._incoming: dict[Key, _Incoming] = {}
        self._offers: dict[Key, Peer] = {}  # without an order so far, the oldest first

    def order(self, shard_order: ShardOrder) -> list[ShardEffect]:
        match shard_order.order:
            case SendKv(peer, request_id, epoch) as send:
                return self._send(peer, (request_id, epoch), send, shard_order.addresses)
            case SendComplete(peer, complete):
                return self._send(
                    peer, (complete.request_id, complete.epoch), Send(peer, complete), shard_order.addresses
                )
            case ReceiveKv(_, request_id, epoch) as receive:
                key = request_id, epoch
                self._incoming[key] = _Incoming(receive)
                offered = self._offers.pop(key, None)
                return [] if offered is None else self._accept(key, offered)
            case DropKv(_, request_id, epoch):
                return self._drop((request_id, epoch))

    def event(self, event: KvEvent) -> list[ShardEffect]:
        match event:
            case Connected(peer, hello):
                return self._connected(peer, hello)
            case Received(peer, message):
                return self._received(peer, message)
            case Closed(peer, reason):
                return self._closed(peer, reason)

    def _send(self, to: Peer, key: Key, message: SendKv | Send, addresses: tuple[str, ...]) -> list[ShardEffect]:
        peer = Peer(Kind.RUNNER, f"{to.name}.{self._rank}")
        effects: list[ShardEffect] = []
        outgoing = self._outgoing.get(key)
        if outgoing is None:
            outgoing = self._outgoing[key] = _Outgoing(peer)
            if peer not in self._streams:
                self._streams[peer] = False
                hello = self._identity.hello(peer.name.split("/")[1])
                effects.append(OpenKvStream(peer, addresses[self._rank - 1], hello))
            elif self._streams[peer]:
                effects.append(_offer(peer, key))
        message = replace(message, peer=peer) if isinstance(message, SendKv) else message._replace(peer=peer)
        if outgoing.accepted:
            effects.append(message)
        else:
            outgoing.waiting.append(message)
        return effects

    def _drop(self, key: Key) -> list[ShardEffect]:
        outgoing, incoming = self._outgoing.pop(key, None), self._incoming.pop(key, None)
        peers = [shard.peer for shard in (outgoing, incoming) if shard is not None and shard.peer is not None]
        return [DropKv(peer, *key) for peer in peers]

    def _accept(self, key: Key, peer: Peer) -> list[ShardEffect]:
        incoming = self._incoming[key]
        if incoming.peer is not None or _runner(peer) != f"{_runner(incoming.order.peer)}.{self._rank}":
            return [Send(peer, KvRefuse(*key, "it is awaited from another runner"))]
        incoming.peer = peer
        return [replace(incoming.order, peer=peer), Send(peer, KvAccept(*key, incoming.order.first_page))]

    def _connected(self, peer: Peer, hello: object) -> list[ShardEffect]:
        if peer in self._streams:
            self._streams[peer] = True
            return [_offer(peer, key) for key, outgoing in self._outgoing.items() if outgoing.peer == peer]
        if (fault := hello_fault(self._identity, hello)) is not None:
            return [Close(peer, fault)]
        return [Send(peer, KvReady(self._identity.runner))]

    def _received(self, peer: Peer, message: object) -> list[ShardEffect]:
        match message:
            case KvOffer(request_id, epoch):
                key = request_id, epoch
                if key in self._incoming:
                    return self._accept(key, peer)
                self._offers[key] = peer
                return self._refuse_oldest() if len(self._offers) > MAX_OFFERS else []
            case KvComplete(request_id, epoch, in_kv):
                self._incoming.pop((request_id, epoch), None)
                return [Send(peer, KvAck(request_id, epoch)), ShardComplete(request_id, epoch, in_kv)]
            case KvAccept(request_id, epoch) if outgoing := self._outgoing.get((request_id, epoch)):
                outgoing.accepted, waiting, outgoing.waiting = True, outgoing.waiting, []
                return [*waiting]
            case KvAck(request_id, epoch):
                self._outgoing.pop((request_id, epoch), None)
            case KvRefuse(request_id, epoch, reason) if self._outgoing.pop((request_id, epoch), None):
                return [ShardLost(request_id, epoch, reason)]
            case _:
                pass  # of a transfer that was dropped meanwhile
        return []

    def _refuse_oldest(self) -> list[ShardEffect]:
        key, peer = next(iter(self._offers.items()))
        del self._offers[key]
        return [Send(peer, KvRefuse(*key, "nobody waits for it"))]

    def _closed(self, peer: Peer, reason: str) -> list[ShardEffect]:
        self._streams.pop(peer, None)
        self._offers = {key: offering_peer for key, offering_peer in self._offers.items() if offering_peer != peer}
        lost = [
            key for shards in (self._outgoing, self._incoming) for key, shard in shards.items() if shard.peer == peer
        ]
        for key in lost:
            self._outgoing.pop(key, None)
            self._incoming.pop(key, None)
        return [ShardLost(*key, reason) for key in lost]


def _offer(peer: Peer, key: Key) -> Send:
    return Send(peer, KvOffer(*key, ""))


def _runner(incoming: Peer) -> str:
    """Return the runner of a stream that came in, without the number of the stream."""
    return incoming.name.rpartition("/")[0]


@dataclass(slots=True)
class _Gathering:
    """`in_kv`: of how many tokens each of the other ranks has pages. `complete`: rank 0's, which waits for them."""

    peer: Peer
    in_kv: dict[int, int] = field(default_factory=dict[int, int])
    complete: KvComplete | None = None


class ShardedTransfers:
    """On rank 0: the view of the other ranks' parts for the machine. `n_ranks`: their number."""

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self._incoming: dict[Key, _Gathering] = {}
        self._outgoing: dict[Key, Peer] = {}
        self._addresses: dict[Peer, tuple[str, ...]] = {}  # of the other ranks of runners with a stream to them

    def ordered(self, order: KvAction | Send) -> ShardOrder | None:
        """Return the messages to the other ranks for an order of the machine."""
        match order:
            case SendKv(peer, request_id, epoch):
                return self._to_send(order, (request_id, epoch))
            case Send(peer, KvComplete(request_id, epoch) as complete):
                bare = replace(complete, tokens=(), logprobs=())
                return self._to_send(SendComplete(peer, bare), (request_id, epoch))
            case ReceiveKv(peer, request_id, epoch):
                self._incoming[request_id, epoch] = _Gathering(peer)
                return ShardOrder(order)
            case DropKv(_, request_id, epoch):
                self._forget([(request_id, epoch)])
                return ShardOrder(order)
            case Close(peer):
                self._forget_peer(peer)
            case _:
                pass
        return None

    def _to_send(self, order: SendKv | SendComplete, key: Key) -> ShardOrder | None:
        if (addresses := self._addresses.get(order.peer)) is None:
            return None  # the stream is over
        self._outgoing[key] = order.peer
        return ShardOrder(order, addresses)

    def event(self, event: KvEvent) -> KvEvent | None:
        """Turn an event of rank 0's streams into an event for the machine. Layouts that differ from its own are
        refused.

        Another event's Closed: that stream breaks the contract, and has to be closed.
        """
        match event:
            case Connected(peer, KvReady(_, addresses)):
                if len(addresses) != self._n_ranks:
                    return Closed(peer, f"a runner of {len(addresses) + 1} ranks: this one has {self._n_ranks + 1}")
                self._addresses[peer] = tuple(addresses)
            case Received(_, KvComplete(request_id, epoch) as complete):
                if (incoming := self._incoming.get((request_id, epoch))) is not None:
                    incoming.complete = complete
                    return self._gathered((request_id, epoch))
            case Received(_, KvAck(request_id, epoch) | KvRefuse(request_id, epoch)):
                self._outgoing.pop((request_id, epoch), None)
            case Closed(peer):
                self._forget_peer(peer)
            case _:
                pass
        return event

    def shard_event(self, rank: int, event: ShardComplete | ShardLost) -> KvEvent | None:
        """Turn an event of another rank into what the machine gets. After a Closed, rank 0's stream has to end too."""
        key = event.request_id, event.epoch
        incoming = self._incoming.get(key)
        if isinstance(event, ShardComplete):
            if incoming is None:
                return None
            incoming.in_kv[rank] = event.in_kv
            return self._gathered(key)
        peer = incoming.peer if incoming is not None else self._outgoing.get(key)
        if peer is None:
            return None
        self._forget_peer(peer)
        return Closed(peer, f"rank {rank}: {event.reason}")

    def _gathered(self, key: Key) -> Received | Closed | None:
        incoming = self._incoming[key]
        if incoming.complete is None or len(incoming.in_kv) < self._n_ranks:
            return None
        for rank, in_kv in incoming.in_kv.items():
            if in_kv != incoming.complete.in_kv:
                self._forget_peer(incoming.peer)
                reason = f"{key[0]}: {in_kv} tokens in KV of rank {rank}, {incoming.complete.in_kv} of rank 0"
                return Closed(incoming.peer, reason)
        del self._incoming[key]
        return Received(incoming.peer, incoming.complete)

    def _forget_peer(self, peer: Peer) -> None:
        self._addresses.pop(peer, None)
        self._forget([key for key, incoming in self._incoming.items() if incoming.peer == peer])
        self._forget([key for key, receiver in self._outgoing.items() if receiver == peer])

    def _forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._incoming.pop(key, None)
            self._outgoing.pop(key, None)
