"""Commands of rank 0 to its workers, and their bytes: int32 arrays for what is sent each step, JSON for the rest.

No pickles: the bytes of a step are exact (`model.partition` has the formula, and a test compares), and no process of
a runner can be made to execute what it receives.

`STEPS` (in their order, between two steps): RUN, AGAIN, PUT, CLEAR, CLEAR_PAGES, ADAPTER_PAGES. `LOADS` (beside steps):
START and its READY or REFUSED; BUILD and NEEDS, and the SHARE or REFUSED that answers either.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from weft_kernels.plan import Segment, SegmentPlan
from weft_runner.model.step import Step, StepRow

HEAD, ROW, SEGMENT = 6, 5, 4  # integers of what RUN begins with, of a row, of a segment


class Kind(IntEnum):
    """Of a frame."""

    HELLO = 1
    START = 2
    READY = 3
    REFUSED = 4
    RUN = 5
    AGAIN = 6
    BUILD = 7
    SHARE = 8
    PUT = 9
    CLEAR = 10
    CLEAR_PAGES = 11
    ADAPTER_PAGES = 12
    NEEDS = 13


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers [first, last) of a step; `hidden`: they begin with what rank 0 broadcasts, not with the embedding."""

    first: int
    last: int
    hidden: bool


@dataclass(frozen=True, slots=True)
class BuiltShard:
    """What a rank has, or will have, of an adapter: its ranks there (0: nothing, or not built) and its KV pages."""

    pages: int
    rank: int = 0
    site_rank: int = 0


def write_run(step: Step, layers: Layers) -> bytes:
    """RUN: a new step."""
    rows = [(row.start, row.end, row.position, len(row.pages), int(row.samples)) for row in step.rows]
    segments = [(one.start, one.end, one.slot, one.rank) for one in step.plan.segments]
    head = (layers.first, layers.last, int(layers.hidden), len(step.tokens), len(rows), len(segments))
    pages = [page for row in step.rows for page in row.pages]
    parts = (head, step.tokens, rows, segments, pages)
    return b"".join(np.asarray(part, "<i4").tobytes() for part in parts)


def read_run(body: bytes) -> tuple[Step, Layers]:
    """The same step, an object of this process."""
    ints = np.frombuffer(body, "<i4")
    first, last, hidden, n_tokens, n_rows, n_segments = ints[:HEAD].tolist()
    tokens, rows, segments, pages = np.split(ints[HEAD:], np.cumsum([n_tokens, ROW * n_rows, SEGMENT * n_segments]))
    listed, at = pages.tolist(), 0
    made: list[StepRow] = []
    for start, end, position, n_pages, samples in rows.reshape(-1, ROW).tolist():
        made.append(StepRow(start, end, position, tuple(listed[at : at + n_pages]), bool(samples)))
        at += n_pages
    plan = SegmentPlan(n_tokens, tuple(Segment(*one) for one in segments.reshape(-1, SEGMENT).tolist()))
    return Step(tokens.tolist(), tuple(made), plan), Layers(first, last, bool(hidden))


def write_again(step: Step, layers: Layers) -> bytes:
    """AGAIN: the step before, with other tokens and positions (`Step.advance`)."""
    head = (layers.first, layers.last, int(layers.hidden), len(step.tokens))
    positions = [row.position for row in step.rows]
    return b"".join(np.asarray(part, "<i4").tobytes() for part in (head, step.tokens, positions))


def read_again(body: bytes, step: Step) -> Layers:
    """Moves `step`, the one before, on."""
    ints: list[int] = np.frombuffer(body, "<i4").tolist()
    first, last, hidden, n_tokens = ints[:4]
    step.advance(ints[4 : 4 + n_tokens], ints[4 + n_tokens :])
    return Layers(first, last, bool(hidden))


def write_ints(numbers: Sequence[int]) -> bytes:
    """CLEAR: a slot; CLEAR_PAGES, ADAPTER_PAGES: pages; PUT: a slot, the adapter for it, and adapters to forget."""
    return np.asarray(numbers, "<i4").tobytes()


def read_ints(body: bytes) -> list[int]:
    return np.frombuffer(body, "<i4").tolist()


def write_shard(share: BuiltShard) -> bytes:
    """SHARE."""
    return write_ints((share.pages, share.rank, share.site_rank))


def read_shard(body: bytes) -> BuiltShard:
    return BuiltShard(*read_ints(body))


def write_json(value: Mapping[str, Any]) -> bytes:
    """START, BUILD, NEEDS, REFUSED."""
    return json.dumps(value).encode()


def read_json(body: bytes) -> dict[str, Any]:
    return json.loads(body)
