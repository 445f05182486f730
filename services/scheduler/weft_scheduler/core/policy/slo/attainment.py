"""A pool's objectives, and the share of requests that met them."""

import math

from weft.domain.routes import SloAttainment

TAU_S = 300.0  # memory of the share: most of it is of the last five minutes


class Attainment:
    """Exponentially decayed counts of finished requests. A share does not change while none finishes.

    Times never go back.
    """

    def __init__(self) -> None:
        self._counts = (0.0,) * 4  # finished; met both objectives, that of the first token, of the others
        self._at = -math.inf

    def count(self, ttft_met: bool, token_time_met: bool, now: float) -> None:
        """Count a finished request by its met objectives."""
        decay = math.exp((self._at - now) / TAU_S)
        met = (True, ttft_met and token_time_met, ttft_met, token_time_met)
        finished, both_met, ttft, token_time = [
            n * decay + increment for n, increment in zip(self._counts, met, strict=True)
        ]
        self._counts, self._at = (finished, both_met, ttft, token_time), now

    def percents(self) -> SloAttainment | None:
        """Return the shares, rounded down so that 100 is all requests; None: no request has finished."""
        finished = self._counts[0]
        if not finished:
            return None
        return SloAttainment(*[math.floor(100 * met / finished + 1e-9) for met in self._counts[1:]])


class ServiceLevel:
    """Objectives (0: none), and their attainment, which is published at most once in a period."""

    def __init__(self, ttft_s: float, token_time_s: float) -> None:
        self._ttft_s, self._token_time_s = ttft_s, token_time_s
        self.attainment = Attainment()
        self._published: SloAttainment | None = None
        self._published_s = -math.inf

    def judge(self, ttft_s: float, tokens: int, total_s: float, now: float) -> tuple[bool, bool]:
        """Count a finished request. Returns whether first token and others were in time. `ttft_s` 0: none came."""
        ttft_met = 0 < ttft_s <= (self._ttft_s or ttft_s)
        token_s = (total_s - ttft_s) / (tokens - 1) if tokens > 1 else 0.0
        met = ttft_met, token_s <= (self._token_time_s or token_s)
        self.attainment.count(*met, now)
        return met

    def published(self, now: float, period_s: float) -> tuple[SloAttainment | None, float]:
        """Return the attainment for the pool's status, and when a new one may follow."""
        if not (self._ttft_s or self._token_time_s):
            return None, now
        if now >= self._published_s + period_s and (percents := self.attainment.percents()) is not None:
            self._published_s, self._published = now, percents
        return self._published, self._published_s + period_s
