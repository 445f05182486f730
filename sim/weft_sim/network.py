"""Streams between processes: every message is bytes of the shipped codec, in order within a stream.

A stream connects two peers and is opened by one of them. Each direction has its own delay, never overtakes itself, and
knows nothing of other streams: between streams every order is possible. Faults are those of TCP and of hosts: a stream
breaks and loses what is on the way, and its two ends notice at different times; who has opened one gives it up where
the other end stands still; a partition holds everything back; a message comes twice (a sender that repeats itself); a
direction is slow for a while.
"""

import random
from collections.abc import Callable
from typing import Protocol

from weft.domain.kv_transfer import KvHello
from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.request import GatewayHello, SessionHello
from weft.domain.runner import RunnerSpec, SupervisorHello
from weft.wire.errors import PeerError
from weft_sim.clock import Clock, Rank

CONNECT_S = 0.002  # of a handshake, beside the delays


HELLOS = (GatewayHello, KvHello, RunnerSpec, SessionHello, SupervisorHello)


def peer_of(hello: object, number: int) -> Peer | None:
    """Return the server's name for its client, by the hello, as the shells do. `number`: of the stream."""
    match hello:
        case KvHello(runner=runner):
            return Peer(Kind.RUNNER, f"{runner.uuid}/{runner.incarnation}/{number}")
        case GatewayHello(gateway=name) | SessionHello(gateway=name):
            return Peer(Kind.GATEWAY, name)
        case RunnerSpec(runner=runner):
            return Peer(Kind.RUNNER, f"{runner.uuid}/{runner.incarnation}")
        case SupervisorHello(supervisor=name):
            return Peer(Kind.SUPERVISOR, name)
        case _:
            return None


class Codec(Protocol):
    """Domain messages to bytes and back, by sender and receiver. A message against the contract raises PeerError."""

    def encode(self, sender: Kind, receiver: Kind, message: object) -> bytes: ...

    def decode(self, sender: Kind, receiver: Kind, data: bytes) -> object: ...


class Endpoint(Protocol):
    """A process as the network sees it."""

    @property
    def host_name(self) -> str: ...

    @property
    def peer(self) -> Peer: ...

    @property
    def still_until(self) -> float: ...

    def post(self, event: Connected | Received | Closed, size: int = 0) -> None: ...

    def opened(self, stream: "Stream", side: int, hello: object) -> bool:
        """Tell that a handshake has come through, at a server with the client's hello; False refuses the stream."""
        ...

    def ended(self, stream: "Stream", side: int) -> bool:
        """Record the end of a stream at this end. Return False if a newer stream with the peer replaced it."""
        ...


class Stream:
    """A stream opened by end 0. `alive[side]`: this end considers it alive; `peers[side]`: its name at the far end."""

    __slots__ = ("alive", "broken", "ends", "last", "number", "peers", "slow", "waiting")

    def __init__(self, number: int, ends: tuple[Endpoint, Endpoint], peers: tuple[Peer, Peer]) -> None:
        self.number, self.ends, self.peers = number, ends, peers
        self.alive = [False, False]
        self.broken = False  # what is on the way is lost
        self.last = [0.0, 0.0]  # arrival of the latest message to each side
        self.waiting: list[tuple[int, Callable[..., None], tuple[object, ...]]] = []  # behind a partition
        self.slow = [0.0, 0.0]


class Network:
    """All streams. `delay_s`: of a message; `jitter_s`: more, drawn for each message up to this."""

    def __init__(
        self, clock: Clock, codec: Codec, chance: random.Random, *, delay_s: float = 0.0002, jitter_s: float = 0.0
    ) -> None:
        self.clock, self.codec, self.delay_s, self.jitter_s = clock, codec, delay_s, jitter_s
        self._chance = chance
        self.streams: dict[int, Stream] = {}  # that some end believes in, by number
        self.duplicate = 0.0  # the chance that a message comes twice
        self.messages = self.bytes = 0
        self.peer_errors: list[tuple[Peer, str]] = []  # who broke the contract, and how
        self.on_delivery: Callable[[Peer, Peer, bytes], None] | None = None
        self.corrupt: Callable[[Peer, Peer, bytes], bytes] | None = None  # a lying peer's bytes
        self._cut: set[frozenset[str]] = set()
        self._numbers = 0

    # ---------------------------------------------------------------- what processes use

    def connect(
        self, client: Endpoint, server: Endpoint, hello: object = None, server_peer: Peer | None = None
    ) -> Stream:
        """Open a stream. Each end gets Connected when the handshake reaches it, the server with the client's hello.

        A server that is not there, or is not `server_peer` any more, refuses: the client gets Closed.
        """
        self._numbers += 1
        stream = self.streams[self._numbers] = Stream(
            self._numbers, (client, server), (client.peer, server_peer or server.peer)
        )
        stream.alive[0] = True
        data = None if hello is None else self._encode(client, server, hello)
        self._carry(stream, 1, CONNECT_S, self._accept, data)
        return stream

    def send(self, stream: Stream, side: int, message: object, extra_s: float = 0.0) -> None:
        """Send from end `side` to the far end. `extra_s`: additional delay, also for later messages."""
        if not stream.alive[side] or stream.broken:
            return
        data = self._encode(stream.ends[side], stream.ends[1 - side], message)
        self._carry(stream, 1 - side, extra_s, self._deliver, data)
        if self.duplicate and self._chance.random() < self.duplicate:
            self._carry(stream, 1 - side, 0.0, self._deliver, data)

    def close(self, stream: Stream, side: int, reason: str) -> None:
        """End a stream at end `side`. The far end hears of it after earlier messages."""
        if stream.alive[side]:
            stream.alive[side] = False
            self._carry(stream, 1 - side, 0.0, self._closed, reason)

    # ---------------------------------------------------------------- faults

    def break_stream(self, stream: Stream, reason: str = "broken", notice_s: tuple[float, float] = (0.0, 0.0)) -> None:
        """Lose messages in transit. Each live end notices after its delay."""
        stream.broken = True
        stream.waiting.clear()
        for side in (0, 1):
            self.clock.call_after(notice_s[side], Rank.DELIVERY, self._noticed, stream, side, reason)

    def give_up(self, stream: Stream) -> None:
        """End a stream at the opening end, which hears nothing. The far end is told, once it listens."""
        if stream.alive[0]:
            self.close(stream, 0, "keepalive timeout")
            self._end(stream, 0, "keepalive timeout")

    def partition(self, hosts: tuple[str, str]) -> None:
        """Let nothing through between two hosts until `heal`; what is sent waits."""
        self._cut.add(frozenset(hosts))

    def heal(self, hosts: tuple[str, str]) -> None:
        self._cut.discard(frozenset(hosts))
        for stream in list(self.streams.values()):
            if not self._is_cut(stream):
                waiting, stream.waiting = stream.waiting, []
                for side, action, arguments in waiting:
                    self._carry(stream, side, 0.0, action, *arguments)

    def streams_of(self, endpoint: Endpoint) -> list[tuple[Stream, int]]:
        """Return the streams that a process believes in, and its side of each, in the order of their opening."""
        return [
            (stream, side)
            for stream in self.streams.values()
            for side in (0, 1)
            if stream.ends[side] is endpoint and stream.alive[side]
        ]

    def reaches(self, stream: Stream) -> bool:
        """Return whether the server of a stream answers on it now."""
        passes = all(stream.alive) and not stream.broken and not self._is_cut(stream)
        return passes and stream.ends[1].still_until <= self.clock.now

    # ---------------------------------------------------------------- how

    def _is_cut(self, stream: Stream) -> bool:
        return bool(self._cut) and frozenset((stream.ends[0].host_name, stream.ends[1].host_name)) in self._cut

    def _carry(
        self, stream: Stream, side: int, extra_s: float, action: Callable[..., None], *arguments: object
    ) -> None:
        """Bring an event to an end of a stream, after all messages in transit."""
        if self._cut and self._is_cut(stream):
            stream.waiting.append((side, action, arguments))
            return
        delay_s = self.delay_s + extra_s + stream.slow[side]
        if self.jitter_s:
            delay_s += self.jitter_s * self._chance.random()
        arrival = max(self.clock.now + delay_s, stream.last[side])
        stream.last[side] = arrival
        self.clock.at(arrival, Rank.DELIVERY, action, stream, side, *arguments)

    def _encode(self, sender: Endpoint, receiver: Endpoint, message: object) -> bytes:
        data = self.codec.encode(sender.peer.kind, receiver.peer.kind, message)
        return data if self.corrupt is None else self.corrupt(sender.peer, receiver.peer, data)

    def _decode(self, sender: Endpoint, receiver: Endpoint, data: bytes) -> object:
        """Decode bytes as the receiver does. Raises PeerError."""
        self.messages += 1
        self.bytes += len(data)
        if self.on_delivery is not None:
            self.on_delivery(sender.peer, receiver.peer, data)
        try:
            return self.codec.decode(sender.peer.kind, receiver.peer.kind, data)
        except PeerError as error:
            self.peer_errors.append((sender.peer, str(error)))
            raise

    def _accept(self, stream: Stream, side: int, data: bytes | None) -> None:
        """Accept a handshake at the server, with the client's hello; then give the answer at the client."""
        if stream.broken:
            return
        client, server = stream.ends
        if server.still_until > self.clock.now:  # its kernel takes connections; the handshake is the process's
            self.clock.at(server.still_until, Rank.DELIVERY, self._accept, stream, side, data)
            return
        try:
            hello = None if data is None else self._decode(client, server, data)
        except PeerError as error:
            self._carry(stream, 0, 0.0, self._closed, str(error))
            return
        stream.alive[side] = True
        if (named := peer_of(hello, stream.number)) is not None:
            stream.peers = (named, stream.peers[1])
        if not server.opened(stream, side, hello):
            stream.alive[side] = False
            self._carry(stream, 0, 0.0, self._closed, "refused")
            return
        self._carry(stream, 0, 0.0, self._accepted)
        server.post(Connected(stream.peers[0], hello))

    def _accepted(self, stream: Stream, side: int) -> None:
        if stream.broken or not stream.alive[side]:
            return
        if stream.ends[side].opened(stream, side, None):
            stream.ends[side].post(Connected(stream.peers[1]))

    def _deliver(self, stream: Stream, side: int, data: bytes) -> None:
        if stream.broken or not stream.alive[side]:
            return
        sender, receiver = stream.ends[1 - side], stream.ends[side]
        try:
            message = self._decode(sender, receiver, data)
            if isinstance(message, HELLOS):
                raise PeerError("a second hello")
        except PeerError as error:
            self.close(stream, side, str(error))  # the peer broke the contract: its stream ends, and nothing else
            self._end(stream, side, str(error))
            return
        receiver.post(Received(stream.peers[1 - side], message), len(data))

    def _closed(self, stream: Stream, side: int, reason: str) -> None:
        if not stream.broken:
            self._noticed(stream, side, reason)

    def _noticed(self, stream: Stream, side: int, reason: str) -> None:
        if stream.alive[side]:
            stream.alive[side] = False
            self._end(stream, side, reason)
        if not (stream.alive[0] or stream.alive[1]):
            self.streams.pop(stream.number, None)

    def _end(self, stream: Stream, side: int, reason: str) -> None:
        end = stream.ends[side]
        if end.ended(stream, side):
            end.post(Closed(stream.peers[1 - side], reason))
