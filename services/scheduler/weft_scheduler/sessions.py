"""The open streams of the scheduler's peers: whose a stream is, what it receives, what its end means.

A peer that connects again replaces its older stream, and what the older one still delivers is dropped.
"""

from collections.abc import Callable
from typing import Any

from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.request import GatewayHello, OutcomeReport
from weft.domain.routes import RegistryHello, Routes
from weft.domain.runner import SupervisorHello
from weft.wire.codec import cluster, registry, scheduling
from weft.wire.errors import PeerError
from weft.wire.streams import SEND_QUEUE, SendQueue
from weft_scheduler.core.effects import Event

# For an outcome on its way to the store, which commits once a second: those of this time go as one message.
OUTCOME_PATIENCE_S = 0.25
Feed = Callable[[Event], None]
RECEIVES: dict[Kind, Any] = {
    Kind.GATEWAY: scheduling.GATEWAY_TO_SCHEDULER,
    Kind.SUPERVISOR: cluster.SUPERVISOR_TO_SCHEDULER,
    Kind.REGISTRY: registry.REGISTRY_TO_SCHEDULER,
}
SENDS: dict[Kind, Any] = {
    Kind.GATEWAY: scheduling.SCHEDULER_TO_GATEWAY,
    Kind.SUPERVISOR: cluster.SCHEDULER_TO_SUPERVISOR,
    Kind.REGISTRY: registry.SCHEDULER_TO_REGISTRY,
}


class Sessions:
    """The present stream of each peer."""

    def __init__(self) -> None:
        self._open: dict[Peer, Session] = {}
        self._last: tuple[Kind, object, list[Any]] | None = None  # a message to several peers is encoded once

    def join(self, peer: Peer, session: "Session") -> None:
        """Make a stream the present stream of the peer. An older stream ends."""
        self.close(peer)
        self._open[peer] = session

    def has(self, peer: Peer | None, session: "Session") -> bool:
        return peer is not None and self._open.get(peer) is session

    def leave(self, peer: Peer | None, session: "Session") -> bool:
        """Forget an ended stream. Return True if it was the peer's present stream."""
        if peer is None or not self.has(peer, session):
            return False
        del self._open[peer]
        return True

    def send(self, peer: Peer, message: object) -> None:
        """Queue a message. A peer that is gone, or does not read fast enough, gets its state after its next hello."""
        session = self._open.get(peer)
        if session is None:
            return
        if self._last is None or self._last[1] is not message or self._last[0] is not peer.kind:
            parts = message.parts() if isinstance(message, Routes) else (message,)
            self._last = (peer.kind, message, [SENDS[peer.kind].encode(part) for part in parts])
        patience_s = OUTCOME_PATIENCE_S if isinstance(message, OutcomeReport) else 0.0
        for envelope in self._last[2]:
            session.outbox.put(envelope, patience_s=patience_s)

    def close(self, peer: Peer, reason: str = "") -> None:
        """End a peer's stream, if present. Later messages of the peer are dropped."""
        session = self._open.pop(peer, None)
        if session is not None:
            session.close_reason = reason
            session.outbox.close()

    def close_all(self) -> None:
        for peer in [*self._open]:
            self.close(peer)


class Session:
    """One stream. Its first message names its peer. A registry has no hello, so it is named here.

    A supervisor's hello is answered with every outcome that is not stored: as many as `max_outcomes`.
    """

    def __init__(self, kind: Kind, sessions: Sessions, feed: Feed, *, name: str = "", max_outcomes: int = 0) -> None:
        self.outbox: SendQueue[Any] = SendQueue(max_outcomes + SEND_QUEUE)
        self.close_reason = ""  # why the machine closed it
        self._kind, self._sessions, self._feed, self._name = kind, sessions, feed, name
        self._peer: Peer | None = None
        if kind is Kind.REGISTRY:  # connected from the start: it may only listen
            self._connect(RegistryHello(None))

    def on_message(self, envelope: Any) -> None:
        """Feed the machine a message of the stream. Raises PeerError."""
        message = RECEIVES[self._kind].decode(envelope)
        hello = isinstance(message, GatewayHello | SupervisorHello)
        if self._peer is None:
            self._connect(message)
        elif hello:
            raise PeerError("a peer sends its hello once")
        if not hello and self._peer is not None and self._sessions.has(self._peer, self):
            self._feed(Received(self._peer, message))

    def on_close(self) -> None:
        if self._sessions.leave(self._peer, self) and self._peer is not None:
            self._feed(Closed(self._peer))

    def _connect(self, hello: object) -> None:
        match hello:
            case GatewayHello():
                name = hello.gateway
            case SupervisorHello():
                name = hello.supervisor
            case RegistryHello():
                name = self._name
            case _:
                raise PeerError(f"a {self._kind.value}'s first message is its hello")
        self._peer = Peer(self._kind, name)
        self._sessions.join(self._peer, self)
        self._feed(Connected(self._peer, hello))
