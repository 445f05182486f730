"""The order of connections that give way to new connections at the bound.

First the oldest connection with an unfinished head, of the peer with most of them; then the connection idle longest. A
connection with a request never gives way. Each step has constant cost for any number of connections and peers.
"""

from typing import Generic, TypeVar

C = TypeVar("C")


class ConnectionPlaces(Generic[C]):
    """The connections by state. `limit`: the largest number of connections."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: dict[C, None] = {}
        self._peers: dict[C, str] = {}  # peers of the connections with an unfinished head
        self._heads: dict[str, dict[C, None]] = {}
        self._by_count: list[dict[str, None]] = [{}]  # peers by the number of their unfinished heads

    def busy(self, connection: C) -> None:
        """Note that a connection has a request, or has gone."""
        self._idle.pop(connection, None)
        if connection in self._peers:
            peer = self._peers.pop(connection)
            del self._heads[peer][connection]
            self._count(peer, -1)

    def idle(self, connection: C) -> None:
        """Note that a connection waits for a request. A waiting connection keeps its place."""
        if connection not in self._idle:
            self.busy(connection)
            self._idle[connection] = None

    def unfinished(self, connection: C, peer: str) -> None:
        """Note that a connection's head is incomplete. A connection with an incomplete head keeps its place."""
        if connection not in self._peers:
            self.busy(connection)
            self._peers[connection] = peer
            self._heads.setdefault(peer, {})[connection] = None
            self._count(peer, +1)

    def next_to_go(self) -> C | None:
        """Return the first connection to give way. None: all connections have a request."""
        peer = next(iter(self._by_count[-1]), None)
        return next(iter(self._idle if peer is None else self._heads[peer]), None)

    def _count(self, peer: str, change: int) -> None:
        """Move a peer to the rank of its present number of heads, `change` more than before."""
        count, ranks = len(self._heads[peer]), self._by_count
        ranks[count - change].pop(peer, None)
        if not count:
            del self._heads[peer]
        elif count == len(ranks):
            ranks.append({peer: None})
        else:
            ranks[count][peer] = None
        while len(ranks) > 1 and not ranks[-1]:
            ranks.pop()
