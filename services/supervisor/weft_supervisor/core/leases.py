"""Runner leases. Every message renews its runner's lease; a runner silent for `lease_s` is lost.

An expired lease is forgotten, so the same incarnation may come back, with a full report. A replaced incarnation never
comes back: the last 4 of each uuid are remembered.
"""

from collections import OrderedDict, deque

from weft.domain.ids import RunnerId
from weft.domain.lru import LruDict

REMEMBERED = 4  # replaced incarnations of a uuid
MAX_UUIDS = 10_000


class Leases:
    """The leases of live runners, at most one incarnation per uuid."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._expires: OrderedDict[str, tuple[float, RunnerId]] = OrderedDict()  # soonest first: leases are equal
        self._held_until = 0.0
        self._replaced: LruDict[str, deque[str]] = LruDict(MAX_UUIDS)

    def __len__(self) -> int:
        return len(self._expires)

    def holds(self, runner: RunnerId) -> bool:
        """Whether this incarnation of the uuid is alive."""
        return self.current(runner.uuid) == runner

    def current(self, uuid: str) -> RunnerId | None:
        """Return the live incarnation of a uuid; None: the uuid has no lease."""
        lease = self._expires.get(uuid)
        return lease[1] if lease else None

    def replaced(self, runner: RunnerId) -> bool:
        """Whether a newer incarnation of its uuid has been seen."""
        return runner.incarnation in self._replaced.get(runner.uuid, ())

    def grant(self, runner: RunnerId, now: float) -> RunnerId | None:
        """Grant a lease to an incarnation without a newer one. Return the incarnation that it replaces, if any."""
        assert not self.replaced(runner), f"{runner} was replaced by a newer incarnation"
        old = self.current(runner.uuid)
        self._extend(runner, now)
        if old is None or old == runner:
            return None
        self._replaced.touch(old.uuid, lambda: deque(maxlen=REMEMBERED)).append(old.incarnation)
        return old

    def renew(self, runner: RunnerId, now: float) -> bool:
        """Renew a lease; any message does so. Return False if the incarnation has no lease."""
        if not self.holds(runner):
            return False
        self._extend(runner, now)
        return True

    def expire(self, now: float) -> list[RunnerId]:
        """End expired leases. Return their runners, each once."""
        expired: list[RunnerId] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, (_, runner) = self._expires.popitem(last=False)
            expired.append(runner)
        return expired

    def hold_all(self, deadline: float) -> None:
        """Keep every lease until `deadline`, and keep the order of the leases."""
        self._held_until = max(self._held_until, deadline)
        self._expires = OrderedDict((uuid, (max(at, deadline), id_)) for uuid, (at, id_) in self._expires.items())

    def next_deadline(self) -> float | None:
        """Return the end of the next lease to expire unless renewed."""
        for expires, _ in self._expires.values():
            return expires
        return None

    def _extend(self, runner: RunnerId, now: float) -> None:
        self._expires[runner.uuid] = (max(now + self._lease_s, self._held_until), runner)
        self._expires.move_to_end(runner.uuid)

    def check(self) -> None:
        """Check the order of deadlines, and the absence of replaced incarnations."""
        entries = list(self._expires.values())
        assert entries == sorted(entries, key=lambda entry: entry[0]), "leases are out of order"
        assert not any(self.replaced(runner) for _, runner in entries), "a replaced incarnation holds a lease"
