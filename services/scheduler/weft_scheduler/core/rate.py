"""Exponentially decayed rates: how many requests leave per second, how many tokens a busy runner computes."""

import math

TAU_S = 30.0  # memory of the rate; long against a request, short against a day's swing


class Rate:
    """Departures per second over about the last 30 s."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        self._weight = self._decayed(now) + 1.0
        self._at = now

    def per_s(self, now: float) -> float:
        return self._decayed(now) / TAU_S

    def _decayed(self, now: float) -> float:
        return self._weight * math.exp(-max(0.0, now - self._at) / TAU_S)


PACE_TAU_S = 60.0  # memory of the pace, in seconds of busy runners
PACE_LEAST_S = 1.0  # less evidence says nothing


class Pace:
    """Tokens per second of one runner that is busy."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def measure(self, tokens: int, seconds: float) -> None:
        """A busy runner has computed so many in that time."""
        kept = math.exp(-seconds / PACE_TAU_S)
        self._tokens, self._seconds = self._tokens * kept + tokens, self._seconds * kept + seconds

    def per_s(self) -> float:
        """0.0 where nobody was busy yet."""
        return self._tokens / self._seconds if self._seconds >= PACE_LEAST_S else 0.0


RETRY_MIN_MS, RETRY_MAX_MS, RETRY_UNKNOWN_MS = 1_000, 60_000, 5_000


def retry_after_ms(queued: int, departures_per_s: float) -> int:
    """When half of the queue will have left: by then a caller that was refused finds a place, and so do its peers.

    1 s to 60 s (clients take more than two minutes as "never"); 5 s where nothing has left yet.
    """
    if departures_per_s <= 1e-6:
        return RETRY_UNKNOWN_MS
    return min(RETRY_MAX_MS, max(RETRY_MIN_MS, math.ceil(1000 * (queued / 2) / departures_per_s)))
