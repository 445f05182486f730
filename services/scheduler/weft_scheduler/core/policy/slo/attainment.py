"""The share of requests that met a pool's objectives."""

import math

from weft.domain.routes import SloAttainment

TAU_S = 300.0  # memory of the share: most of it is of the last five minutes


class Attainment:
    """Exponentially decayed counts of finished requests. A share does not change while none finishes."""

    def __init__(self) -> None:
        self._counts = (0.0, 0.0, 0.0, 0.0)  # finished; met both objectives, that of the first token, of the others
        self._at = 0.0

    def count(self, ttft_met: bool, token_time_met: bool, now: float) -> None:
        """A request has finished."""
        kept = math.exp(-max(0.0, now - self._at) / TAU_S)
        more = (True, ttft_met and token_time_met, ttft_met, token_time_met)
        finished, both, ttft, token_time = [n * kept + one for n, one in zip(self._counts, more, strict=True)]
        self._counts, self._at = (finished, both, ttft, token_time), now

    def percents(self) -> SloAttainment | None:
        """Rounded down, so that 100 is all of them; None: no request has finished."""
        finished = self._counts[0]
        if not finished:
            return None
        return SloAttainment(*[math.floor(100 * met / finished + 1e-9) for met in self._counts[1:]])
