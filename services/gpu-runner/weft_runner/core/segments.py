"""Segment boundaries of a batch, once a step (Punica, section 5.1)."""

from collections.abc import Iterable
from dataclasses import dataclass

from weft_runner.core.iteration import Row


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Tokens [start, end) of the step belong to rows of one adapter."""

    start: int
    end: int
    adapter: str


def adapter_segments(rows: Iterable[Row]) -> tuple[AdapterSegment, ...]:
    """Boundaries in tokens; neighbours of one adapter share a segment, rows of the base belong to none."""
    segments: list[AdapterSegment] = []
    start = 0
    for row in rows:
        end = start + row.n_tokens
        if row.adapter and segments and (segments[-1].end, segments[-1].adapter) == (start, row.adapter):
            segments[-1] = AdapterSegment(segments[-1].start, end, row.adapter)
        elif row.adapter:
            segments.append(AdapterSegment(start, end, row.adapter))
        start = end
    return tuple(segments)
