"""Batch lines by priority beside fixed caps of their rows: what is reported, of the engine alone and of a stack."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft_stage.lines import Line, percentile

INTERACTIVE = 2  # rows
PROMPT_TOKENS, LINE_TOKENS = 16, 64  # of a line; a prompt that no step can take in one piece keeps no token time
TOKEN_TIMES = 2.0  # steps of one row
CAPS = (0, 1, 2, 4, 8, 12, 16, 24)


class Reporter(Protocol):
    """`Origin.line`, or one that knows the model."""

    def __call__(
        self, case: str, metric: str, value: float | None, unit: str, *, baseline: float | None = None,
        target: str | None = None,
    ) -> Line: ...  # fmt: skip


def caps(rows: int) -> tuple[int, ...]:
    """Return the caps that leave the interactive rows their places, and the largest such."""
    return *(cap for cap in CAPS if cap + INTERACTIVE < rows), rows - INTERACTIVE


@dataclass(frozen=True, slots=True)
class RuleRun:
    """Under one rule, a cap or priorities: gaps between the answers' tokens, tokens of lines a second."""

    gaps_s: Sequence[float]
    lines_per_s: float

    def gap_ms(self, percent: int) -> float:
        return percentile(self.gaps_s, percent) * 1e3 if self.gaps_s else math.nan


def figures(line: Reporter, prefix: str, found: Mapping[int | None, RuleRun], token_time_ms: float) -> Iterator[Line]:
    """Yield the figures of every rule. `found`: by cap, and last for None: priorities."""
    for cap, run in found.items():
        rule = f"capped at {cap} rows" if cap is not None else "by priority"
        case = f"{prefix}{INTERACTIVE} interactive rows, lines {rule}"
        yield line(case, "interactive token time p50", run.gap_ms(50), "ms", baseline=token_time_ms)
        yield line(case, "interactive token time p99", run.gap_ms(99), "ms", baseline=token_time_ms)
        yield line(case, "batch lines", run.lines_per_s, "tokens/s")
        if cap is None:
            late_ms = run.gap_ms(99)
            yield line(case, "interactive p99 / token time", late_ms / token_time_ms, "x", target="<= 1")
            for what, most_ms, target in (("keeps it", token_time_ms, ">= 0.9"), ("is no later", late_ms, None)):
                rows, per_s = _best(found, most_ms)
                metric = f"batch tokens/s / best cap that {what} ({rows} rows)"
                yield line(case, metric, run.lines_per_s / per_s if per_s else None, "x", target=target)


def _best(found: Mapping[int | None, RuleRun], most_ms: float) -> tuple[int, float]:
    """Return the cap with the most tokens of lines a second, and these, among those whose p99 is at most `most_ms`."""
    kept = [(run.lines_per_s, cap) for cap, run in found.items() if cap is not None and run.gap_ms(99) <= most_ms]
    per_s, rows = max(kept, default=(0.0, 0))
    return rows, per_s
