"""How often one object may be written about: a burst, then a steady pace. Pure.

A controller that puts right what another one keeps changing (a second installation, a webhook, a script) would
do so as fast as the API server answers. Nothing that happens by itself comes near these numbers for long.
"""

from weft_operator.core.resources import Ref

BURST = 100  # writes: a pool whose adapters and runners all come up at once
PER_S = 1.0


class TokenBucket:
    """What was written lately, by object. One owner; `now` is in seconds."""

    def __init__(self) -> None:
        self._spent: dict[Ref, tuple[float, float]] = {}  # writes not yet forgiven, and as of when

    def take(self, ref: Ref, now: float) -> None:
        """Something was written."""
        self._spent[ref] = (self._level(ref, now) + 1.0, now)

    def pause_s(self, ref: Ref, now: float) -> float:
        """How long to leave it alone; 0: not at all."""
        return max(0.0, self._level(ref, now) - BURST + 1.0) / PER_S

    def forget(self, ref: Ref) -> None:
        """The object is gone."""
        self._spent.pop(ref, None)

    def _level(self, ref: Ref, now: float) -> float:
        level, at = self._spent.get(ref, (0.0, now))
        return max(0.0, level - max(0.0, now - at) * PER_S)
