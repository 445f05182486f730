"""What the runners do, from the scheduler: asked while somebody looks, at most once in FRESH_S, whoever looks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.domain.fleet import FleetAdapter, FleetReport
from weft_gateway.core.standing import places_by_digest

FRESH_S = 1.0
ANSWER_S = 1.0  # that a page waits for the scheduler, before it shows what is known


@dataclass(frozen=True, slots=True)
class FleetNow:
    """The last answer; `at`: when it came, in seconds of the gateway's clock."""

    at: float = float("-inf")
    fleet: FleetReport = field(default_factory=FleetReport)
    places: dict[str, list[FleetAdapter]] = field(default_factory=dict[str, list[FleetAdapter]])


class FleetView:
    """`ask` sends a FleetQuery; False: there is no scheduler. An answer that does not come is asked for again."""

    def __init__(self, ask: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self._now = FleetNow()
        self._request: asyncio.Future[None] | None = None

    def take(self, fleet: FleetReport) -> None:
        """The scheduler's answer."""
        self._now = FleetNow(self._clock(), fleet, places_by_digest(fleet))
        if self._request and not self._request.done():
            self._request.set_result(None)

    async def latest(self) -> FleetNow:
        """The runners as of FRESH_S ago at most, or as they were last known."""
        if self._clock() - self._now.at < FRESH_S:
            return self._now
        if self._request is None or self._request.done():
            self._request = asyncio.get_running_loop().create_future()
            if not self._ask():
                self._request.cancel()
                return self._now
        answered = self._request
        await asyncio.wait([answered], timeout=ANSWER_S)
        if not answered.done():
            answered.cancel()
        return self._now
