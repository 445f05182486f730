"""A gateway whose stream is open, and what its requests avoid."""

from collections import Counter

from weft.domain.ids import RunnerId
from weft.domain.machine import Kind, Peer

MAX_AVOID_S = 60.0  # avoidance of a runner whose sessions are lost again and again
MAX_DOUBLINGS = 16  # doublings of an avoidance: a float takes no more than 2**1023


class Avoidance:
    """Runners to avoid until a time."""

    def __init__(self) -> None:
        self._deadlines: dict[RunnerId, float] = {}

    def __bool__(self) -> bool:
        return bool(self._deadlines)

    def add(self, runner_id: RunnerId, deadline: float) -> None:
        self._deadlines[runner_id] = deadline

    def current(self, now: float) -> list[RunnerId]:
        """Return the runners still avoided, and forget the rest."""
        for runner_id in [r for r, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[runner_id]
        return [*self._deadlines]

    def next_deadline(self, now: float) -> float | None:
        """Forget ended avoidances. Return the end of the next avoidance; None without any."""
        self.current(now)
        return min(self._deadlines.values(), default=None)


class GatewayStream:
    """A stream of a gateway. Messages of an earlier stream are void."""

    def __init__(self, name: str, *, applies_routes: bool = False) -> None:
        """Begin a stream. `applies_routes`: the gateway says which route table it has applied, and is waited for."""
        self.id = name
        self.applied_routes: int | None = 0 if applies_routes else None  # the version; None: it does not say
        self.peer = Peer(Kind.GATEWAY, name)
        self.complete = False  # it has submitted again everything that it holds
        self.requests: set[str] = set()
        self.pools: Counter[str] = Counter()  # requests of each pool
        self.avoidance = Avoidance()
        self.checks: set[RunnerId] = set()  # runners that it has not said yet to be alive or not
        self._lost_sessions: dict[RunnerId, int] = {}  # in a row

    def add(self, request_id: str, pool: str) -> None:
        self.requests.add(request_id)
        self.pools[pool] += 1

    def remove(self, request_id: str, pool: str) -> None:
        self.requests.discard(request_id)
        self.pools[pool] -= 1
        if not self.pools[pool]:
            del self.pools[pool]

    def apply_routes(self, version: int) -> None:
        """Record that later submissions of the gateway use this route table or a newer one."""
        self.applied_routes = version

    def resubmitted(self) -> None:
        """Record that the order of the stream's requests is known now."""
        self.complete = True

    def lost_session(self, runner_id: RunnerId, now: float, avoid_s: float) -> float | None:
        """Avoid a runner with a broken session, for this gateway only: a broken network takes no runner from other
        gateways.

        Twice as long each time until the runner starts a request of this gateway: a runner that was killed counts as
        Ready until its lease runs out, and requests must not spend all their migrations on it. Returns until when;
        None: another request of the same session has reported the loss.
        """
        if runner_id in self.avoidance.current(now):
            return None
        lost_before = self._lost_sessions.get(runner_id, 0)
        self._lost_sessions[runner_id] = min(lost_before + 1, MAX_DOUBLINGS)
        deadline = now + min(avoid_s * 2**lost_before, max(avoid_s, MAX_AVOID_S))
        self.avoidance.add(runner_id, deadline)
        return deadline

    def check(self, runner_id: RunnerId) -> None:
        """Record that the gateway is asked whether a runner is alive."""
        self.checks.add(runner_id)

    def checked(self, runner_id: RunnerId) -> None:
        """Record that the gateway's answer about a runner is known or irrelevant."""
        self.checks.discard(runner_id)

    def runner_lost(self, runner_id: RunnerId) -> None:
        """Forget the lost sessions of an ended incarnation."""
        self.checked(runner_id)
        self._lost_sessions.pop(runner_id, None)

    def started(self, runner_id: RunnerId) -> None:
        """Forget the lost sessions of a runner with a new session of this gateway."""
        self._lost_sessions.pop(runner_id, None)
