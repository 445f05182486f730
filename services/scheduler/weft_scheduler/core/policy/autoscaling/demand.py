"""The number of runners that a load needs, and for how long: pure functions, and memory of what was recommended."""

import math
from collections import deque
from dataclasses import dataclass

from weft.domain.routes import PhaseCounts

SPARE_RUNNERS = 0.5  # runners kept beyond the load: a runner is lightly loaded below half
ROUNDING = 1e-9
MAX_WANTED_RUNNERS = 1_000_000  # a pool whose runners compute next to nothing wants no more


@dataclass(frozen=True, slots=True)
class RunnerCapacity:
    """Capacity of one runner of the pool (a token runner in a split pool); for sequences, its best batch.

    `tokens_per_s`: what it computes when loaded, `prefill_tokens_per_s`: of prompts alone; 0: not measured yet.
    """

    sequences: float
    kv_tokens: float
    slots: float  # for adapters that are not pinned
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The work of a pool. `queued_tokens`: what queued requests have to compute and hold, by prediction.

    `ttft_s`: time within which their prompts should be computed; 0: no objective. `prompt_tokens_per_s`: tokens that
    arrive. `reused_share`: of all prompt tokens, what is found in pages of earlier requests and not computed again.
    """

    running: int = 0
    queued: int = 0
    reserved_tokens: int = 0
    queued_tokens: int = 0
    busy_slots: int = 0
    queued_adapters: int = 0  # different ones that queued requests need
    queued_prompt_tokens: int = 0
    ttft_s: float = 0.0
    split: bool = False  # prompts and the tokens after them are counted apart
    prompt_tokens_per_s: float = 0.0
    reused_share: float = 0.0
    batch: bool = False  # there are batch requests; everything else is of interactive ones

    @property
    def computed_share(self) -> float:
        """Share of prompt tokens to compute, not reused."""
        return 1.0 - self.reused_share

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return self.running + self.queued


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """Bounds of the number of wanted runners. `maximum` None: no bound is known."""

    minimum: int
    maximum: int | None

    def clamp(self, runners: int) -> int:
        runners = max(self.minimum, runners)
        return runners if self.maximum is None else min(runners, max(self.maximum, self.minimum))


def demand_runners(load: PoolLoad, capacity: RunnerCapacity | None, work_s: float) -> PhaseCounts:
    """Return the runners filled by running and queued requests, without bounds.

    For any phase, or for each apart where phases are split. `capacity` None: no runner ever reported.
    """
    minimum = int(load.batch)  # all that batch requests ask for
    filled = max(minimum, _ceil(max(_filled(load, capacity), _pressure(load, capacity, work_s))))
    if not load.split:
        return PhaseCounts(any=filled)
    return PhaseCounts(max(minimum, _ceil(_prompts(load, capacity, work_s))), filled)


def desired_runners(
    load: PoolLoad, capacity: RunnerCapacity | None, work_s: float, minimum: PhaseCounts
) -> PhaseCounts:
    """Return the demand, one lightly loaded spare runner, and at least `minimum` of each phase; 0 without requests."""
    if not load.requests:
        alone = PhaseCounts(minimum.prompt, minimum.token) if load.split else PhaseCounts(any=1)
        return alone if load.batch else PhaseCounts()
    spare = SPARE_RUNNERS if capacity is not None else 0.0
    filled, pressure = _filled(load, capacity), _pressure(load, capacity, work_s)
    if not load.split:
        return PhaseCounts(any=max(1, _ceil(max(filled + spare, pressure))))
    prompt = max(minimum.prompt, _ceil(_prompts(load, capacity, work_s)))
    token, coming = max(minimum.token, _ceil(max(filled, pressure))), _coming(load, capacity)
    if prompt + token - coming - filled < spare:  # the fuller side
        prompt, token = (prompt + 1, token) if coming * token > filled * prompt else (prompt, token + 1)
    return PhaseCounts(prompt, token)


def _coming(load: PoolLoad, capacity: RunnerCapacity | None) -> float:
    """Return the runners for arriving prompts, or 1 without a measurement."""
    if not load.requests:
        return 0.0
    if capacity is None or not capacity.prefill_tokens_per_s:
        return 1.0
    return load.computed_share * load.prompt_tokens_per_s / capacity.prefill_tokens_per_s


def _prompts(load: PoolLoad, capacity: RunnerCapacity | None, work_s: float) -> float:
    """Return the runners for arriving prompts and, within the objective, for waiting prompts."""
    coming = _coming(load, capacity)
    if capacity is None or not capacity.prefill_tokens_per_s:
        return coming
    in_time = capacity.prefill_tokens_per_s * (load.ttft_s or work_s)
    return coming + load.computed_share * load.queued_prompt_tokens / in_time


def _filled(load: PoolLoad, capacity: RunnerCapacity | None) -> float:
    """Return the number of runners filled with sequences or with pages."""
    if capacity is None:
        return float(load.requests > 0)
    sequences = load.requests / capacity.sequences
    return max(sequences, (load.reserved_tokens + load.queued_tokens) / capacity.kv_tokens)


def _pressure(load: PoolLoad, capacity: RunnerCapacity | None, work_s: float) -> float:
    """Return the runners that queued requests need: slots for adapters, work done within `work_s`, prompts in time."""
    if capacity is None or not load.queued:
        return 0.0
    slots = (load.busy_slots + load.queued_adapters) / capacity.slots if load.queued_adapters else 0.0
    elsewhere = load.queued_prompt_tokens * (1.0 if load.split else load.reused_share)
    work = (load.queued_tokens - elsewhere) / (capacity.tokens_per_s * work_s) if capacity.tokens_per_s else 0.0
    in_time = capacity.prefill_tokens_per_s * load.ttft_s * (not load.split)
    prompts = load.computed_share * load.queued_prompt_tokens / in_time if in_time else 0.0
    return max(slots, load.running / capacity.sequences + max(work, prompts))


def _ceil(runners: float) -> int:
    return math.ceil(min(runners, MAX_WANTED_RUNNERS) - ROUNDING)


class ScaleDownStabilization:
    """The maximum that was recommended within the last `window_s` seconds (as the HPA's stabilization window).

    Times never go back. `_past`: what was recommended before and until when, larger and older first.
    """

    def __init__(self) -> None:
        self._recommended = 0
        self._past: deque[tuple[int, float]] = deque()

    def recommend(self, runners: int, now: float, window_s: float) -> int:
        """Recommend `runners` from now on. Returns how many are wanted."""
        self._past.append((self._recommended, now))
        self._recommended = runners
        while self._past and (self._past[0][1] + window_s <= now):
            self._past.popleft()
        while self._past and self._past[-1][0] <= runners:
            self._past.pop()
        return self._past[0][0] if self._past else runners

    def next_deadline(self, window_s: float) -> float | None:
        """Return when fewer runners will be wanted if nothing else is recommended."""
        return self._past[0][1] + window_s if self._past else None
