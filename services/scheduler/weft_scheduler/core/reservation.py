"""How many output tokens a request reserves. `POLICIES` names the policies.

A reservation is kept as `cover`: the output position it reaches to, counted from the answer's first token, so that it
means the same before and after a move. An overrun doubles it (S3, section 3).
"""

from typing import Protocol

from weft_scheduler.core.lengths import Lengths


class Reservation(Protocol):
    """The first cover of a request, in output tokens, 1..max_tokens."""

    def cover(self, lengths: Lengths, pool: str, digest: str, p90_tokens: int, max_tokens: int) -> int: ...


class Calibrated:
    """The predictor's calibrated p90, capped by max_tokens; without a prediction the adapter's own running p90."""

    def cover(self, lengths: Lengths, pool: str, digest: str, p90_tokens: int, max_tokens: int) -> int:
        expected = p90_tokens if p90_tokens > 0 else lengths.quantile_tokens(pool, digest)
        return max(1, min(expected, max_tokens))


POLICIES: dict[str, type[Reservation]] = {"calibrated": Calibrated}


def outgrown(cover_tokens: int, emitted_tokens: int) -> int:
    """The cover after as many doublings as it takes to reach beyond what was emitted."""
    cover_tokens = max(1, cover_tokens)
    while cover_tokens <= emitted_tokens:
        cover_tokens *= 2
    return cover_tokens


def from_here_tokens(cover_tokens: int, emitted_tokens: int, max_tokens: int) -> int:
    """Output tokens to reserve beyond what was emitted: at least 1, never beyond max_tokens."""
    return max(1, min(outgrown(cover_tokens, emitted_tokens), max_tokens) - emitted_tokens)
