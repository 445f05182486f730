"""How much is reserved for a sequence, and what happens when it outruns that.

S3 (section 4, supervisor) doubles the reservation of a sequence that outruns it. Here the doubling is granted in place
from free pages as far as they go; with none free the sequence pauses at its page boundary (an overrun).

It is asked for when the reserved pages are full, not a page ahead: a p90 that is right ends most answers inside their
last page, and asking on entering it would double, and preempt for, sequences that never need the page.
"""

from dataclasses import dataclass

from weft_runner.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Growth:
    """What a full sequence asks for: `wanted_pages` more, under a reservation of `reservation_tokens`."""

    wanted_pages: int
    reservation_tokens: int
    doubled: bool


def first_reservation_pages(base_len: int, reservation_tokens: int, page_tokens: int, max_context_tokens: int) -> int:
    """ceil((prompt + emitted + reservation) / P), never beyond the context, which no sequence can outgrow."""
    return _pages(min(base_len + reservation_tokens, max_context_tokens), page_tokens)


def next_growth(sequence: Sequence, reserved_pages: int, page_tokens: int) -> Growth:
    """What to ask for when the reserved pages are full.

    A reservation that was granted only in part is first completed; a complete one doubles, to one page more at least
    and to no more than the sequence can ever fill.
    """
    granted = _pages(min(sequence.base_len + sequence.reservation_tokens, sequence.max_len), page_tokens)
    if granted > reserved_pages:
        return Growth(granted - reserved_pages, sequence.reservation_tokens, doubled=False)
    one_page_more = (reserved_pages + 1) * page_tokens - sequence.base_len
    doubled = min(max(2 * sequence.reservation_tokens, one_page_more), sequence.max_len - sequence.base_len)
    return Growth(_pages(sequence.base_len + doubled, page_tokens) - reserved_pages, doubled, doubled=True)


def _pages(n_tokens: int, page_tokens: int) -> int:
    return -(-n_tokens // page_tokens)
