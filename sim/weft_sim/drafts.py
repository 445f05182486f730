"""Drafts as they were measured: how many of a draft's leading tokens are the ones that the answer goes on with.

`SEARCHES` are counts of one run of the engine on the quickstart's model (cpu/avx512_bf16, AMD EPYC): 64 answers of each
task as its adapter's text, then 200 more, greedy, one stream, a search in both texts before every decode step, and its
draft of at most 32 tokens, used or not, beside the answer that came. What of a draft is checked the shipped drafter
decides; here its chances do not depend on the length of its match, as they do in a real text.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weft_runner.core import SUREST, Draft, DraftQuery, weigh_alike
from weft_runner.core import Sequence as PoolSequence
from weft_sim.executor_model import VOCABULARY, key_of

# By task: searches of a request's own prompt and answer, and of its adapter's answers, which found no draft, one with 0
# right tokens before the first wrong one, with 1, ...
SEARCHES = {
    "json": (
        (410, 3987, 1513, 1198, 1664, 334, 98, 43, 31, 9, 8, 3, 1, 1),
        (0, 4234, 1115, 380, 1257, 610, 638, 438, 275, 94, 38, 10, 180, 23, 7, 1),
    ),
    "reverse-words": (
        (0, 1437, 417, 504, 800, 927, 489, 190, 53, 29, 12, 4, 1),
        (0, 3447, 696, 276, 204, 155, 56, 20, 2, 2, 4, 1),
    ),
    "digits": (
        (
            0, 159, 38, 12, 14, 7, 6, 8, 11, 8, 6, 4, 4, 6, 3, 8, 10, 4, 6, 6, 5, 5, 4, 5, 6, 7, 10, 4, 8, 9, 4, 1, 5,
            389,
        ),
        (0, 488, 129, 92, 39, 25, 6, 1, 1, 1),
    ),
    "upper": (
        (2551, 5798, 695, 141, 54, 29, 11, 7, 3, 1, 1),
        (0, 5005, 1680, 1287, 714, 390, 125, 55, 20, 9, 6),
    ),
}  # fmt: skip
TASKS = tuple(SEARCHES)
WRONG = VOCABULARY + 1  # is never sampled


@dataclass(frozen=True, slots=True)
class MeasuredSearch:
    """A `Search` with knowledge of the answer. Each adapter has the drafts of a task.

    `sequences`: those of the runner. `next_tokens`: a number of those that the model samples next for one, to its end.
    """

    sequences: Callable[[], Iterable[PoolSequence]]
    next_tokens: Callable[[PoolSequence, int], Sequence[int]]
    chance: random.Random

    def __call__(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        return [self._draft(query) for query in queries]

    def _draft(self, query: DraftQuery) -> Draft:
        """Propose a drawn number of right tokens, followed by wrong tokens."""
        tail = [*query.tail]
        sequence = next(one for one in self.sequences() if one.tokens == tail)
        searches = SEARCHES[TASKS[key_of(sequence.start.adapter) % len(TASKS)]][query.text is not query.tail]
        (n_right,) = self.chance.choices(range(-1, len(searches) - 1), searches)
        if n_right < 0:
            return Draft((), (), ())
        right = self.next_tokens(sequence, min(n_right, query.max_tokens))
        tokens = (*right, *(WRONG,) * (query.max_tokens - len(right)))
        return weigh_alike(tokens, SUREST, query.shares)  # all of one class: what to expect of it is learnt
