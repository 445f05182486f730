"""How many runners a pool wants: a function of its load, held for a while.

Straight to N: as many as what runs and waits would fill, and half a runner in hand, so that there is always a lightly
loaded one (Punica, section 5.1: "no lightly loaded runner: ask for more; an idle one: give it back"). `Hold` keeps the
most that was asked for within the last `idle_s`: nothing shrinks before its time, and what does not change settles.
"""

import math
from collections import deque
from dataclasses import dataclass

IN_HAND = 0.5  # of a runner: lightly loaded is under half
ROUNDING = 1e-9
MOST_RUNNERS = 1_000_000  # a pool whose runners compute next to nothing asks for no more


@dataclass(frozen=True, slots=True)
class Unit:
    """What one runner of the pool holds, of sequences what it runs well (its best batch).

    `tokens_per_s`: what it computes when busy, 0: not measured yet.
    """

    sequences: float
    kv_tokens: float
    slots: float  # for adapters that are not pinned
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What a pool has to do. `waiting_tokens`: what the waiting ones have to compute and hold, by prediction."""

    running: int = 0
    queued: int = 0
    reserved_tokens: int = 0
    waiting_tokens: int = 0
    busy_slots: int = 0
    waiting_adapters: int = 0  # different ones that waiting requests want


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many runners may be wanted. `most` None: nobody said."""

    least: int
    most: int | None

    def clamp(self, runners: int) -> int:
        runners = max(self.least, runners)
        return runners if self.most is None else min(runners, max(self.most, self.least))


def demand_runners(load: PoolLoad, unit: Unit | None, work_s: float) -> int:
    """What running and waiting requests would fill, whatever the bounds. `unit` None: no runner has ever told."""
    return _ceil(max(_filled(load, unit), _pressure(load, unit, work_s)))


def asked_runners(load: PoolLoad, unit: Unit | None, work_s: float) -> int:
    """The same with a lightly loaded runner in hand; 0 where nobody runs or waits."""
    if not load.running and not load.queued:
        return 0
    in_hand = IN_HAND if unit is not None else 0.0
    return max(1, _ceil(max(_filled(load, unit) + in_hand, _pressure(load, unit, work_s))))


def _filled(load: PoolLoad, unit: Unit | None) -> float:
    """Runners full of sequences or of pages."""
    if unit is None:
        return 1.0 if load.running or load.queued else 0.0
    sequences = (load.running + load.queued) / unit.sequences
    return max(sequences, (load.reserved_tokens + load.waiting_tokens) / unit.kv_tokens)


def _pressure(load: PoolLoad, unit: Unit | None, work_s: float) -> float:
    """Runners that those who wait need: slots for their adapters, and their work done within `work_s`."""
    if unit is None or not load.queued:
        return 0.0
    slots = (load.busy_slots + load.waiting_adapters) / unit.slots if load.waiting_adapters else 0.0
    work = load.waiting_tokens / (unit.tokens_per_s * work_s) if unit.tokens_per_s else 0.0
    return max(slots, load.running / unit.sequences + work)


def _ceil(runners: float) -> int:
    return math.ceil(min(runners, MOST_RUNNERS) - ROUNDING)


class Hold:
    """The most that was asked for within the last `keep_s` seconds; one owner, times never go back.

    `_past`: numbers that were asked for before and until when, larger and older first.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._past: deque[tuple[int, float]] = deque()

    def ask(self, runners: int, now: float, keep_s: float) -> int:
        """From now on so many are asked for. Returns how many are wanted."""
        if runners < self._asked:
            self._remember(self._asked, now)
        self._asked = runners
        while self._past and (self._past[0][1] + keep_s <= now):
            self._past.popleft()
        while self._past and self._past[-1][0] <= runners:
            self._past.pop()
        return max(runners, self._past[0][0] if self._past else 0)

    def next_deadline(self, keep_s: float) -> float | None:
        """When fewer will be wanted if nothing else is asked for."""
        return self._past[0][1] + keep_s if self._past else None

    def _remember(self, runners: int, until: float) -> None:
        while self._past and self._past[-1][0] <= runners:
            self._past.pop()
        self._past.append((runners, until))
