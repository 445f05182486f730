"""A batch: which rows run in the next iteration, and in which order. Pure, host integers.

ORCA (section 4.2): a batch is formed for every iteration. Punica (section 5.1): prefill rows first, decode rows
after; rows of one adapter adjacent; the last prefill and the first decode share an adapter where possible, so that they
share a segment. At most `max_prefills` prompts are worked on in an iteration, a long one in chunks:
`step_time_model.py` decides how large a chunk may be.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import inf
from typing import NamedTuple

from weft.domain.request import Priority

MAX_LOGIT_ROWS = 32  # of an iteration, for log probabilities of prompts: 16 MiB with a vocabulary of 128 Ki


class Batching(Enum):
    """The batching mechanisms compared by Splitwise (section 2.5). Serving uses the first mechanism."""

    MIXED = "mixed"  # prompts, in chunks, and decode rows in one iteration
    CONTINUOUS = "continuous"  # prompts alone, and before decode rows (ORCA)
    REQUEST = "request"  # a batch runs to the end of its last request before another one begins


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`max_batch_tokens` >= the number of sequences, so that every decode row runs in every iteration.

    `token_time_ms`: within it running rows should get their next token; inf: the pool has no objective.
    `chunk_time_ms`: of such a pool; prompts beside running rows are chunked to it. `max_prompt_tokens`: of
    `max_batch_tokens`, those of prompts.
    """

    max_prefills: int = 1
    max_batch_tokens: int = 512
    token_time_ms: float = inf
    batching: Batching = Batching.MIXED
    chunk_time_ms: float = inf
    max_prompt_tokens: int = 1 << 30

    def prompt_tokens_beside(self, n_others: int) -> int:
        """Return the maximum prompt tokens of a step with `n_others` tokens of other rows."""
        return min(self.max_prompt_tokens, self.max_batch_tokens - n_others)

    @property
    def prompt_time_ms(self) -> float:
        """The time within which a step with a prompt and running rows should end."""
        return min(self.token_time_ms, self.chunk_time_ms)


class Row(NamedTuple):
    """A sequence's part of a step: `n_tokens` of its pending tokens. `samples`: nothing is pending afterwards.

    `drafted`: guesses that follow its one pending token, counted in `n_tokens`: each is sampled behind, and checked.
    """

    key: str
    adapter: str
    n_tokens: int
    samples: bool
    drafted: tuple[int, ...] = ()


class Candidate(NamedTuple):
    """A sequence that may run: `pending` tokens are to be fed before its next token can be chosen, to `keys` in KV.

    `scores`: each of them has a row of logits, for log probabilities of its prompt.
    """

    key: str
    adapter: str
    pending: int
    keys: int = 0
    priority: Priority = Priority.INTERACTIVE
    scores: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in the order of the step's tokens; the first `n_prefills` are in prefill.

    Of all `n_tokens` `prompt_tokens` are those of rows in prefill and `guesses` are drafted; `n_adapters` differ.
    Counted once: a batch may run many times, and has the same `number` then, which no other has; 0: what is left of
    one, or one with guesses, which `extends` the batch of that number.
    """

    rows: tuple[Row, ...]
    n_prefills: int
    number: int = field(default=0, compare=False)
    extends: int = field(default=0, compare=False)
    n_tokens: int = field(init=False)
    prompt_tokens: int = field(init=False)
    guesses: int = field(init=False)
    n_adapters: int = field(init=False)

    def __post_init__(self) -> None:
        n_tokens = guesses = 0
        for row in self.rows:
            n_tokens += row.n_tokens
            guesses += len(row.drafted)
        count = partial(object.__setattr__, self)
        count("n_tokens", n_tokens)
        count("prompt_tokens", sum([row.n_tokens for row in self.rows[: self.n_prefills]]))
        count("guesses", guesses)
        count("n_adapters", len({row.adapter for row in self.rows if row.adapter}))


def form_batch(
    prefilling: Iterable[Candidate], decoding: Iterable[Candidate], limits: BatchLimits, *,
    prompt_tokens: int | None = None, number: int = 0,
) -> Batch:  # fmt: skip
    """Form the next batch. Both inputs are in order of service; that order holds inside each adapter's group.

    `prompt_tokens`: how many fit into the step (None: what the limits allow).
    """
    decodes = [Row(c.key, c.adapter, 1, samples=True) for c in decoding][: limits.max_batch_tokens]
    max_tokens = limits.prompt_tokens_beside(len(decodes))
    budget = max_tokens if prompt_tokens is None else min(prompt_tokens, max_tokens)
    prefills = _prefill_rows(prefilling, limits.max_prefills, budget)
    shared = _shared_adapter(prefills, decodes)
    first = _grouped(prefills, last=shared)
    return Batch((*first, *_grouped(decodes, first=shared)), len(first), number)


def _prefill_rows(prefilling: Iterable[Candidate], max_prefills: int, budget_tokens: int) -> list[Row]:
    logits = MAX_LOGIT_ROWS
    rows: list[Row] = []
    for candidate in prefilling:
        n_tokens = min(candidate.pending, budget_tokens, logits if candidate.scores else budget_tokens)
        if len(rows) == max_prefills or n_tokens <= 0:
            break
        rows.append(Row(candidate.key, candidate.adapter, n_tokens, samples=n_tokens == candidate.pending))
        budget_tokens -= n_tokens
        logits -= n_tokens if candidate.scores else 0
    return rows


def _shared_adapter(prefills: list[Row], decodes: list[Row]) -> str | None:
    """Find an adapter on both sides of the border: the adapter of the last prefill with an adapter."""
    decoding = {row.adapter for row in decodes}
    return next((row.adapter for row in reversed(prefills) if row.adapter in decoding), None)


def _grouped(rows: list[Row], *, first: str | None = None, last: str | None = None) -> list[Row]:
    """Put rows of one adapter side by side, adapters in order of their first row, `first` and `last` at the ends."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.adapter, []).append(row)
    order = sorted(groups, key=lambda adapter: (adapter == last) - (adapter == first))
    return [row for adapter in order for row in groups[adapter]]


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Tokens [start, end) of the step belong to rows of one adapter."""

    start: int
    end: int
    adapter: str


def adapter_segments(rows: Iterable[Row]) -> tuple[AdapterSegment, ...]:
    """Find the boundaries in tokens; neighbours of one adapter share a segment, rows of the base belong to none."""
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
