"""Sessions to runners, a session for each incarnation: opened for its first assignment, closed after a long idle
time."""

from dataclasses import dataclass, field

from weft.domain.ids import RunnerId
from weft.domain.machine import Close, Peer
from weft.domain.request import SessionHello
from weft_gateway.core.config import Deadline, GatewayConfig, Timers
from weft_gateway.core.events import OpenSession
from weft_gateway.core.stream import Located


@dataclass(slots=True)
class SessionEntry:
    """A stream to a runner's incarnation, and the requests running there. `ready`: the runner has answered."""

    peer: Peer
    runner: RunnerId
    ready: bool = False
    checking: bool = False  # the scheduler waits for news of the runner: the session's end, or an answer
    requests: dict[str, None] = field(default_factory=dict[str, None])  # an ordered set


class SessionTable:
    """The open sessions. Each session has a deadline while it connects, and while no request runs there."""

    def __init__(self, gateway_id: str, config: GatewayConfig, timers: Timers) -> None:
        self._gateway_id, self._config, self._timers = gateway_id, config, timers
        self._open: dict[Peer, SessionEntry] = {}
        self.get = self._open.get

    def __len__(self) -> int:
        return len(self._open)

    def replaced_by(self, located: Located) -> list[SessionEntry]:
        """Return the sessions to earlier incarnations of a runner's device; empty if it has a session already."""
        if located.peer in self._open:
            return []
        return [session for session in self._open.values() if session.runner.uuid == located.runner.uuid]

    def enter(self, located: Located, request_id: str, pool: str, now: float) -> list[OpenSession]:
        """Enter a request of the pool. It runs at the runner now."""
        (runner, address, peer), opened = located, list[OpenSession]()
        if peer not in self._open:
            self._open[peer] = SessionEntry(peer, runner)
            self._timers.set((Deadline.SESSION, peer.name), now + self._config.connect_s)
            opened = [OpenSession(peer, address, SessionHello(self._gateway_id, runner.incarnation), pool)]
        session = self._open[peer]
        session.requests[request_id] = None
        if session.ready:
            self._timers.clear((Deadline.SESSION, peer.name))
        return opened

    def leave(self, peer: Peer, request_id: str, now: float) -> None:
        """Remove a request after its end at the runner."""
        if session := self._open.get(peer):
            session.requests.pop(request_id, None)
            self._watch(session, now)

    def connected(self, session: SessionEntry, now: float) -> None:
        session.ready = True
        self._timers.clear((Deadline.SESSION, session.peer.name))
        self._watch(session, now)

    def remove(self, session: SessionEntry) -> None:
        """Remove a session after its end."""
        del self._open[session.peer]
        self._timers.clear((Deadline.SESSION, session.peer.name))

    def close(self, session: SessionEntry, reason: str) -> Close:
        self.remove(session)
        return Close(session.peer, reason)

    def check(self, running: dict[Peer, set[str]]) -> None:
        """Check the sessions. `running`: the running requests by runner. Raises AssertionError."""
        requests_by_peer = {entry.peer: set(entry.requests) for entry in self._open.values() if entry.requests}
        assert requests_by_peer == running, "the requests of a session differ from the running requests"
        for peer, session in self._open.items():
            watched = (Deadline.SESSION, peer.name) in self._timers
            assert watched == (not (session.ready and session.requests)), "an unused session has a deadline"

    def _watch(self, session: SessionEntry, now: float) -> None:
        if session.ready and not session.requests:
            self._timers.set((Deadline.SESSION, session.peer.name), now + self._config.session_idle_s)
