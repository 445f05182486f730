"""The room that batch requests leave free on a runner, for the interactive ones that are about to arrive."""

import math
from typing import NamedTuple

from weft_scheduler.core.policy.autoscaling.throughput import RATE_TAU_S

HEADROOM_S = 1.0  # time of arrivals: long against a preemption, which takes a round trip and costs what was computed
MIN_ARRIVALS = 0.05  # arrivals in `HEADROOM_S`; fewer are worth no room that stays empty


class Headroom(NamedTuple):
    """Free room on each runner for expected requests: places for sequences, and their tokens."""

    sequences: int = 0
    tokens: int = 0


class InteractiveArrivals:
    """Interactive requests of about the last 30 s, and the tokens of their prompts and of their footprints.

    Times never go back.
    """

    def __init__(self) -> None:
        self._requests = self._prompt_tokens = self._footprint_tokens = self._at = 0.0

    def count(self, now: float, prompt_tokens: int, footprint_tokens: int) -> None:
        remaining, self._at = self._remaining(now), now
        self._requests = remaining * self._requests + 1
        self._prompt_tokens = remaining * self._prompt_tokens + prompt_tokens
        self._footprint_tokens = remaining * self._footprint_tokens + footprint_tokens

    def prompt_tokens_per_s(self, now: float) -> float:
        return self._prompt_tokens * self._remaining(now) / RATE_TAU_S

    def headroom(self, now: float, runners: int) -> Headroom:
        """Return the room for the next requests, spread over `runners` runners."""
        expected = self._requests * self._remaining(now) / RATE_TAU_S * HEADROOM_S / max(1, runners)
        sequences = math.ceil(expected - MIN_ARRIVALS)
        if sequences <= 0:
            return Headroom()
        return Headroom(sequences, math.ceil(sequences * self._footprint_tokens / self._requests))

    def _remaining(self, now: float) -> float:
        """Return the remaining share of the counts at `now`."""
        return math.exp((self._at - now) / RATE_TAU_S)
