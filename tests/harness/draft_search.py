"""Searches of drafts for tests: what a text goes on with, stated plainly, and guesses of a test's own making."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from weft_runner.core import SUREST, Draft, DraftQuery, weigh_alike
from weft_runner.core.drafts.acceptance import MIN_GAIN

MAX_MATCH, MAX_PLACES = 64, 256
LENGTHS = (1, 2, 4, 8, 16, 32, 64)  # the least of each class
NOTHING = Draft((), (), ())


def search_plainly(queries: Sequence[DraftQuery]) -> list[Draft]:
    """Find each draft by its definition."""
    return [
        plain_draft(list(text[first:]), list(tail), list(shares), MIN_GAIN, most)
        for text, tail, shares, most, first in queries
    ]


def plain_draft(
    text: Sequence[int], tail: Sequence[int], shares: Sequence[float], min_gain: float, max_tokens: int
) -> Draft:
    """Follow the newest places of the longest match as most of them go on, as long as that is likely enough."""
    lengths = {place: _match(text[:place], tail) for place in range(len(text)) if text[place] >= 0}
    matched = max(lengths.values(), default=0)
    places = [place for place in reversed(lengths) if matched and lengths[place] == matched][:MAX_PLACES]
    tokens, classes, gains = list[int](), list[int](), [1.0]
    while len(tokens) < max_tokens and places:
        on = [place for place in places if place < len(text) and text[place] >= 0]
        votes = Counter(text[place] for place in on)  # in the order of places: the newest of equals comes first
        token, agree = max(votes.items(), key=lambda item: item[1], default=(0, 0))
        if agree <= len(places) - len(on):
            break
        agreement = (2 + (agree > 1)) if agree == len(places) else 2 * agree > len(places)
        length = sum(matched + len(tokens) >= least for least in LENGTHS) - 1
        classes.append(agreement * len(LENGTHS) + length)
        gains.append(gains[-1] * shares[classes[-1]])
        if gains[-1] < min_gain:
            break
        tokens.append(token)
        places = [place + 1 for place in on if text[place] == token]
    return Draft(tokens, classes[: len(tokens) or 1], gains[1 : 1 + len(tokens)])


def _match(before: Sequence[int], tail: Sequence[int]) -> int:
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
        return [weigh_alike(one, SUREST, [0.9] * (1 + SUREST)) if one else NOTHING for one in drafts]

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
