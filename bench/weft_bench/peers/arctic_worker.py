"""arctic-inference's suffix cache as a worker, and the replay of known answers that is its measure; see `serve.py`.

The work is {"most": guesses of a step}. Arguments: {"answers", "warm", "cached": how many of the latest answers are
kept, -1: all}. Each call has a cache of its own. The answer is `Replayed` and {"bytes"} of the cache's tree, as it
estimates them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import takewhile
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np

MAX_TOKENS = 1 << 16  # of a request
Answer = tuple[Sequence[int], Sequence[int]]  # its prompt, and its tokens


class Drafts(Protocol):
    """Guesses tokens of one request at a time, and keeps the answers of earlier requests."""

    def begin(self, prompt: Sequence[int]) -> None: ...
    def draft(self, most: int) -> Sequence[int]: ...
    def take(self, tokens: Sequence[int]) -> None: ...  # of a step: the leading guesses that were right, and the next
    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Replayed:
    """The sums over all checked steps; `keep_us`: what a step's tokens and its share of begin and end take to keep."""

    steps: int
    tokens: int
    guesses: int
    draft_median_us: float
    draft_mean_us: float
    keep_us: float

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / self.steps


def replay(
    drafts: Drafts, answers: Sequence[Answer], warm: int, most: int, clock: Callable[[], float] = time.perf_counter
) -> Replayed:
    """Draft at most `most` guesses for each step of each answer; those of the first `warm` are not counted.

    An answer's first token is its prompt's. Raises ValueError if no checked answer has a second token.
    """
    guesses, keep_s, draft_s = 0, 0.0, list[float]()
    for number, (prompt, answer) in enumerate(answers):
        at, began = 1, clock()
        drafts.begin(prompt)
        drafts.take(answer[:1])
        kept_s, drafted_s, guessed = clock() - began, list[float](), 0
        while at < len(answer):
            began = clock()
            draft = drafts.draft(most)
            drafted_s.append(clock() - began)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, answer[at:], strict=False)))
            given, began = answer[at : at + 1 + right], clock()
            drafts.take(given)
            kept_s += clock() - began
            at, guessed = at + len(given), guessed + len(draft)
        began = clock()
        drafts.end()
        kept_s += clock() - began
        if number >= warm:
            guesses, keep_s, draft_s = guesses + guessed, keep_s + kept_s, draft_s + drafted_s
    if not draft_s:
        raise ValueError(f"expected answers of several tokens behind the first {warm}, got none")
    steps, tokens = len(draft_s), sum(max(0, len(answer) - 1) for _, answer in answers[warm:])
    return Replayed(steps, tokens, guesses, 1e6 * median(draft_s), 1e6 * fmean(draft_s), 1e6 * keep_s / steps)


class SuffixCache:
    """A cache with its own defaults; `Drafts`. Contexts are views of an array, the quicker of its two ways."""

    def __init__(self, cache: Any) -> None:
        self.cache, self._request = cache, 0
        self._tokens, self._length = np.zeros(MAX_TOKENS, np.int32), 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._request, self._length = self._request + 1, len(prompt)
        self._tokens[: self._length] = prompt
        self.cache.start_request(self._request, self._tokens[: self._length])

    def draft(self, most: int) -> Sequence[int]:
        return self.cache.speculate(self._request, self._tokens[: self._length], max_spec_tokens=most).token_ids

    def take(self, tokens: Sequence[int]) -> None:
        before, self._length = self._length, self._length + len(tokens)
        self._tokens[before : self._length] = tokens
        self.cache.add_active_response(self._request, self._tokens[before : self._length])

    def end(self) -> None:
        self.cache.stop_request(self._request)


def load(work: dict[str, Any]) -> tuple[str, Callable[..., dict[str, Any]]]:
    """Return versions and what replays answers."""
    from arctic_inference import suffix_decoding  # pyright: ignore[reportMissingImports] (of another Python)

    def run(answers: list[Answer], warm: int, cached: int) -> dict[str, Any]:
        drafts = SuffixCache(suffix_decoding.SuffixDecodingCache(max_cached_requests=cached))
        replayed = replay(drafts, answers, warm, work["most"])
        return asdict(replayed) | {"bytes": drafts.cache._global_tree.estimate_memory()}

    return f"arctic-inference {version('arctic-inference')}", run
