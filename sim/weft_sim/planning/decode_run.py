"""Consecutive decode steps of one batch as one piece of time.

Between two events a batch stays the same and each row's context grows by a token a step. A step model that is linear in
the context over some steps gives them an arithmetic series, whose sum is exact. Where the model has a kink (a roofline
turns from one bound to another) the steps are halved until each piece is linear. That finds every kink of a model that
is convex in the context, as sums and maxima of linear terms are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from weft_sim.performance.step import PerformanceModel, StepShape

TOLERANCE = 1e-12  # relative: a middle that is nearer to the line is on it


@dataclass(frozen=True, slots=True)
class Series:
    """`steps` steps: the first takes `first_s`, each next one `growth_s` longer."""

    steps: int
    first_s: float
    growth_s: float

    def seconds(self, steps: int) -> float:
        return steps * (self.first_s + self.growth_s * (steps - 1) / 2)

    def steps_within(self, seconds: float) -> int:
        """Count the completed steps after `seconds`."""
        if not self.growth_s:
            return min(self.steps, int(seconds // self.first_s))
        half = self.first_s / self.growth_s - 0.5
        root = half * half + 2 * seconds / self.growth_s
        steps = min(self.steps, max(0, int(sqrt(max(root, 0.0)) * (1 if self.growth_s > 0 else -1) - half)))
        while steps < self.steps and self.seconds(steps + 1) <= seconds:
            steps += 1
        while steps and self.seconds(steps) > seconds:
            steps -= 1
        return steps


class DecodeRun:
    """At most `steps` steps of a batch of `rows` rows that attend to `context` tokens in the first of them."""

    def __init__(self, model: PerformanceModel, rows: int, context: int, adapters: int, steps: int) -> None:
        def step_s(index: int) -> float:
            shape = StepShape(decode_rows=rows, context_tokens=context + index * rows, adapters=adapters)
            return model.seconds(shape)

        first_s = step_s(0)
        last_s = step_s(steps - 1) if steps > 1 else first_s
        self._series = _series(step_s, 0, steps - 1, first_s, last_s)

    def seconds(self, steps: int) -> float:
        """Return the seconds of the first `steps` steps."""
        total = 0.0
        for series in self._series:
            total += series.seconds(min(steps, series.steps))
            steps -= series.steps
            if steps <= 0:
                break
        return total

    def steps_within(self, seconds: float) -> int:
        """Count the steps completed `seconds` after the begin."""
        done = 0
        for series in self._series:
            steps = series.steps_within(seconds)
            done += steps
            if steps < series.steps:
                break
            seconds -= series.seconds(steps)
        return done


def _series(step_s: Callable[[int], float], low: int, high: int, low_s: float, high_s: float) -> list[Series]:
    """Return the steps from `low` to `high`, both included, as straight pieces."""
    span = high - low
    growth_s = (high_s - low_s) / span if span else 0.0
    if span < 2:
        return [Series(span + 1, low_s, growth_s)]
    middle = (low + high) // 2
    middle_s, straight_s = step_s(middle), low_s + growth_s * (middle - low)
    if abs(middle_s - straight_s) <= TOLERANCE * straight_s:
        return [Series(span + 1, low_s, growth_s)]
    left = _series(step_s, low, middle, low_s, middle_s)
    return left + _series(step_s, middle + 1, high, step_s(middle + 1), high_s)
