"""One stream of each kind: who it is from, what it says, what its end means.

A gateway or supervisor that connects again replaces its older stream, and whatever that one still delivers is dropped.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from weft.wire.bounds import check_term
from weft.wire.channels import OUTBOX, Outbox
from weft.wire.errors import PeerError
from weft.wire.v1 import scheduler_pb2 as pb
from weft_scheduler import wire
from weft_scheduler.core import events as ev
from weft_scheduler.errors import Superseded

Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Feed = Callable[[ev.Event], None]


class Peers(Generic[Out]):
    """The present stream of each peer of one kind, by the id it gave."""

    def __init__(self) -> None:
        self._outboxes: dict[str, Outbox[Out]] = {}

    def join(self, peer: str, outbox: Outbox[Out]) -> None:
        """This is the peer's stream from now on; an older one ends."""
        self.hang_up(peer)
        self._outboxes[peer] = outbox

    def has(self, peer: str, outbox: Outbox[Out]) -> bool:
        return self._outboxes.get(peer) is outbox

    def leave(self, peer: str, outbox: Outbox[Out]) -> bool:
        """True if that was the peer's present stream."""
        if not self.has(peer, outbox):
            return False
        del self._outboxes[peer]
        return True

    def send(self, peer: str, message: Out) -> None:
        """Queue it. A peer that is gone, or does not keep up, is told again after its next hello."""
        outbox = self._outboxes.get(peer)
        if outbox is not None:
            outbox.put(message)

    def send_all(self, message: Out) -> None:
        for peer in self._outboxes:
            self.send(peer, message)

    def hang_up(self, peer: str) -> None:
        """End its stream, if there is one."""
        if peer in self._outboxes:
            self._outboxes[peer].close()

    def close(self) -> None:
        """End them all."""
        for peer in self._outboxes:
            self.hang_up(peer)


class Stream(Protocol[In_contra]):
    """A stream's ears: each message in order, then its end, once."""

    def heard(self, message: In_contra) -> None: ...

    def ended(self) -> None: ...


class GatewayStream:
    """Hello, what the gateway holds, resubmit_complete, then what happens."""

    def __init__(self, peers: Peers[pb.SchedulerToGateway], feed: Feed) -> None:
        self.outbox: Outbox[pb.SchedulerToGateway] = Outbox()
        self._peers, self._feed, self._gateway = peers, feed, ""

    def heard(self, message: pb.GatewayToScheduler) -> None:
        if message.HasField("hello"):
            self._hello(message.hello)
        elif not self._gateway:
            raise PeerError("a gateway's first message is its hello")
        elif self._peers.has(self._gateway, self.outbox):
            self._feed(wire.gateway_event(self._gateway, message))

    def ended(self) -> None:
        if self._peers.leave(self._gateway, self.outbox):
            self._feed(ev.GatewayDown(self._gateway))

    def _hello(self, hello: pb.GatewayHello) -> None:
        if not hello.gateway_id or self._gateway not in ("", hello.gateway_id):
            raise PeerError(f"a stream is of one gateway, not of {hello.gateway_id!r}")
        if not self._gateway:
            self._gateway = hello.gateway_id
            self._peers.join(self._gateway, self.outbox)
            self._feed(ev.GatewayUp(self._gateway))
        if hello.resubmit_complete and self._peers.has(self._gateway, self.outbox):
            self._feed(ev.ResubmitComplete(self._gateway))


class SupervisorStream:
    """Hello, keys and full reports of all runners, then what changes.

    The hello is answered with every outcome that is not stored, at once: as many as `max_outcomes`.
    """

    def __init__(self, peers: Peers[pb.SchedulerToSupervisor], feed: Feed, max_outcomes: int = 0) -> None:
        self.outbox: Outbox[pb.SchedulerToSupervisor] = Outbox(max_outcomes + OUTBOX)
        self._peers, self._feed, self._supervisor = peers, feed, ""

    def heard(self, message: pb.SupervisorToScheduler) -> None:
        if message.HasField("hello"):
            self._hello(message.hello)
        elif not self._supervisor:
            raise PeerError("a supervisor's first message is its hello")
        elif self._peers.has(self._supervisor, self.outbox):
            self._feed(wire.cluster_event(self._supervisor, message))

    def ended(self) -> None:
        if self._peers.leave(self._supervisor, self.outbox):
            self._feed(ev.SupervisorDown(self._supervisor))

    def _hello(self, hello: pb.SupervisorHello) -> None:
        if not hello.supervisor_id or self._supervisor:
            raise PeerError("a supervisor says hello once, with its id")
        check_term(hello.highest_term)
        self._supervisor = hello.supervisor_id
        self._peers.join(self._supervisor, self.outbox)
        self._feed(ev.SupervisorUp(self._supervisor, hello.highest_term))


class Leadership:
    """The highest term that any registry has spoken under; streams under a lower one are over."""

    def __init__(self) -> None:
        self.term = 0
        self._streams: dict[str, int] = {}

    def heard(self, stream: str, term: int) -> list[str]:
        """A stream speaks. Returns the streams that are over by it. Raises Superseded where it is over itself."""
        if term < self.term:
            raise Superseded(f"term {term} is over: somebody speaks under {self.term}")
        self.term = term
        self._streams[stream] = term
        return [other for other, theirs in self._streams.items() if theirs < term]

    def is_over(self, stream: str) -> bool:
        return self._streams.get(stream, self.term) < self.term

    def forget(self, stream: str) -> None:
        self._streams.pop(stream, None)


class RegistryStream:
    """A complete snapshot, then changes. It has no hello: the first message is the snapshot.

    Once another has spoken under a higher term it speaks for nobody: what it says does not count, and it is ended.
    """

    def __init__(self, peers: Peers[pb.SchedulerToRegistry], feed: Feed, leadership: Leadership, name: str) -> None:
        self.outbox: Outbox[pb.SchedulerToRegistry] = Outbox()
        self._peers, self._feed, self._leadership, self._name = peers, feed, leadership, name
        self._spoken = False
        self._peers.join(name, self.outbox)

    def heard(self, message: pb.RegistryToScheduler) -> None:
        for older in self._leadership.heard(self._name, message.term):
            self._peers.hang_up(older)
        if not self._spoken:
            self._spoken = True
            self._feed(ev.RegistryUp())
        self._feed(wire.registry_event(message))

    def over(self) -> str | None:
        """Why it was ended from here, if it was."""
        superseded = self._leadership.is_over(self._name)
        return f"somebody speaks under term {self._leadership.term}" if superseded else None

    def ended(self) -> None:
        self._leadership.forget(self._name)
        self._peers.leave(self._name, self.outbox)
