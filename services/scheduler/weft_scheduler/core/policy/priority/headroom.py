"""The room that batch requests leave free on a runner, for the interactive ones that are about to arrive."""

import math
from typing import NamedTuple

from weft_scheduler.core.policy.autoscaling.throughput import DecayedRate

HEADROOM_S = 1.0  # of arrivals: long against a preemption, which takes a round trip and costs what was computed
LEAST = 0.05  # arrivals in that time; fewer are worth no room that stays empty


class Headroom(NamedTuple):
    """What stays free on each runner: places for sequences, and the tokens that they need."""

    sequences: int = 0
    tokens: int = 0


class InteractiveArrivals:
    """How many interactive requests arrived of late, how large they are, and the room for the next ones."""

    def __init__(self) -> None:
        self._requests, self._tokens = DecayedRate(), DecayedRate()
        self.headroom = Headroom()

    def count(self, now: float, footprint_tokens: int) -> None:
        self._requests.count(now)
        self._tokens.count(now, footprint_tokens)

    def renew(self, now: float, runners: int) -> None:
        """`headroom` is that of the present rates from now on, spread over so many runners."""
        per_s = self._requests.per_s(now)
        expected = per_s * HEADROOM_S / max(1, runners)
        sequences = max(0, math.ceil(expected - LEAST))
        mean_tokens = self._tokens.per_s(now) / per_s if per_s else 0.0
        self.headroom = Headroom(sequences, math.ceil(sequences * mean_tokens))
