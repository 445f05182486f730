"""Exponentially decayed rates: departures, prompt tokens that come or are found, what loaded runners compute."""

import math

RATE_TAU_S = 30.0  # memory of the rate; long against a request, short against a day's swing
THROUGHPUT_TAU_S = 60.0  # memory in seconds of loaded runners
MIN_EVIDENCE_S = 1.0  # less than this of loaded runners proves nothing
MIN_RETRY_MS, MAX_RETRY_MS, UNKNOWN_RETRY_MS = 1_000, 60_000, 5_000


class DecayedRate:
    """Rate of what is counted, in a second, over about the last 30 s. Times never go back."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._at = 0.0

    def count(self, now: float, amount: float = 1.0) -> None:
        self._weight = self._decayed(now) + amount
        self._at = now

    def per_s(self, now: float) -> float:
        return self._decayed(now) / RATE_TAU_S

    def _decayed(self, now: float) -> float:
        return self._weight * math.exp((self._at - now) / RATE_TAU_S)


class ReusedShare:
    """The share of the prompt tokens given to runners that they find in pages of earlier requests, of about 30 s.

    What is given and what is found are counted alike, so that a pause does not change the share.
    """

    def __init__(self) -> None:
        self._assigned, self._reused = DecayedRate(), DecayedRate()

    def give(self, tokens: int, now: float) -> None:
        """Count prompt tokens of an assigned request."""
        self._assigned.count(now, tokens)

    def find(self, tokens: int, now: float) -> None:
        """Count prompt tokens reused from the cache, as reported by a runner."""
        self._reused.count(now, tokens)

    def share(self, now: float) -> float:
        """Return the share, 0..1; 0.0 if nothing was given yet."""
        assigned_per_s = self._assigned.per_s(now)
        return min(1.0, self._reused.per_s(now) / assigned_per_s) if assigned_per_s else 0.0


class TokenThroughput:
    """Tokens per second of one loaded runner."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def measure(self, tokens: int, seconds: float) -> None:
        """Count the tokens of a loaded runner over `seconds`."""
        decay = math.exp(-seconds / THROUGHPUT_TAU_S)
        self._tokens, self._seconds = self._tokens * decay + tokens, self._seconds * decay + seconds

    def per_s(self) -> float:
        """Return tokens per second; 0.0 if no runner was loaded yet."""
        return self._tokens / self._seconds if self._seconds >= MIN_EVIDENCE_S else 0.0


def retry_after_ms(queued: int, departures_per_s: float) -> int:
    """Return when half of the queue will have left, in ms: by then a rejected client and its peers find a place.

    1 s to 60 s (clients take more than two minutes as "never"); 5 s where nothing has left yet.
    """
    if departures_per_s <= 1e-6:
        return UNKNOWN_RETRY_MS
    return bounded_retry_ms((queued / 2) / departures_per_s)


def bounded_retry_ms(seconds: float) -> int:
    """Return `seconds` in milliseconds, within 1 s to 60 s."""
    return min(MAX_RETRY_MS, max(MIN_RETRY_MS, math.ceil(1000 * seconds)))
