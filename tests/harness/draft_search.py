"""Searches of drafts for tests: what a text goes on with, stated plainly, and guesses of a test's own making."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from weft_runner.core import Draft, DraftQuery

MAX_MATCH, MAX_PLACES = 64, 256
NOTHING = Draft(0, (), (), ())


def search_plainly(queries: Sequence[DraftQuery]) -> list[Draft]:
    """Find each draft by its definition: the longest match, its newest places, what most of them go on with."""
    return [_draft(list(text[first:]), list(tail), most) for text, tail, most, first in queries]


def _draft(text: list[int], tail: list[int], most: int) -> Draft:
    matches = [(_match(text[: end + 1], tail), end) for end in range(len(text) - 1) if text[end + 1] >= 0]
    matched = max((length for length, _ in matches), default=0)
    if not matched or not most:
        return NOTHING
    live = [end + 1 for length, end in reversed(matches) if length == matched][:MAX_PLACES]
    tokens, agree, places = list[int](), list[int](), list[int]()
    while live and len(tokens) < most:
        counts = Counter(text[place] if place < len(text) else -1 for place in live)
        ended = counts.pop(-1, 0)
        if not counts:
            break
        token = max(counts, key=lambda one: counts[one])  # the newest of equals: a Counter keeps the order
        if ended >= counts[token]:
            break
        tokens.append(token)
        agree.append(counts[token])
        places.append(len(live))
        live = [place + 1 for place in live if place < len(text) and text[place] == token]
    return Draft(matched, tuple(tokens), tuple(agree), tuple(places)) if tokens else NOTHING


def _match(before: list[int], tail: list[int]) -> int:
    length = 0
    for one, other in zip(reversed(before), reversed(tail[-MAX_MATCH:]), strict=False):
        if one != other or one < 0:
            break
        length += 1
    return length


def guess(of: Callable[[DraftQuery], Sequence[int]]) -> Callable[[Sequence[DraftQuery]], list[Draft]]:
    """Make a search that drafts what `of` says, as if many places had agreed on it."""

    def search(queries: Sequence[DraftQuery]) -> list[Draft]:
        drafts = [tuple(of(query))[: query.max_tokens] for query in queries]
        return [Draft(64, one, (9,) * len(one), (9,) * len(one)) if one else NOTHING for one in drafts]

    return search


def know(
    texts: Sequence[Sequence[int]], seed: int, wrong: float = 0.15
) -> Callable[[Sequence[DraftQuery]], list[Draft]]:
    """Make a search that knows how whole texts go on, and is mistaken now and then."""
    rng = random.Random(seed)

    def go_on(query: DraftQuery) -> list[int]:
        tail = query.tail.tolist()
        text = next((text for text in texts if list(text[: len(tail)]) == tail), tail)
        following = text[len(tail) : len(tail) + rng.randrange(1, 9)]
        return [max(0, token - 1) if rng.random() < wrong else token for token in following]

    return guess(go_on)
