"""What a row samples, and what its sequence makes of its logits before: biases, penalties, tokens that are banned.

The adjustments are kept token by token, so that a step does no work over prompt and answer: O(1) for each token
appended, and flat arrays that a kernel reads in place. They are a function of the request and its answer so far.
"""

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from math import inf, isfinite
from typing import NamedTuple

from weft.domain.request import MAX_ALTERNATIVES, Sampling, TokenLogprob


class SampledToken(NamedTuple):
    """A token, and its log probability where the request asked for it: from the executor to the wire.

    `hidden`: of a request that pools, instead of a token: little-endian fp32 [H], see `PooledState`.
    """

    token: int
    logprob: TokenLogprob | None = None
    hidden: bytes = b""


class BadWords:
    """Token sequences forbidden in an answer (vLLM's `bad_words`): after the first tokens the last token is banned.

    The prompt does not count: a sequence that begins in it and ends in the answer is allowed. `always`: tokens that are
    sequences alone, and may never be sampled. One owner: its sequence's adjustments.
    """

    __slots__ = ("_after_token", "_tail", "always")

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """`sequences`: none is empty."""
        self.always = frozenset([tokens[0] for tokens in sequences if len(tokens) == 1])
        self._after_token: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by the token before the last one
        for *beginning, last in sequences:
            if beginning:
                self._after_token.setdefault(beginning[-1], []).append((tuple(beginning), last))
        self._tail: deque[int] = deque(maxlen=max(map(len, sequences)))

    def add(self, token: int) -> Collection[int]:
        """Record the next token. Return the tokens banned at the following position, in addition to `always`."""
        self._tail.append(token)
        if (sequences := self._after_token.get(token)) is None:
            return ()
        tail = tuple(self._tail)
        return [last for beginning, last in sequences if tail[-len(beginning) :] == beginning]


class LogitAdjustments:
    """The adjusted logits of some tokens; all remaining logits are unchanged. Owner: its sequence.

    Of `tokens[i]`, in double precision: the logit, plus `biases[i]`, divided by `scales[i]` where that is positive and
    multiplied if it is not, plus `values[i]`. `biases` and `scales` are None without a repetition penalty (CTRL,
    Keskar et al. 2019, section 4.1, as transformers has it: of each token of prompt and answer, once); then `values`
    have the biases too.
    The other penalties are OpenAI's: count * frequency + (count > 0) * presence, where `count` is how often the token
    stands in the answer so far, the prompt not counted. A token that may not be sampled now has a value of -inf.
    """

    __slots__ = (
        "_bad_words", "_banned", "_bias", "_counts", "_ends", "_frequency", "_lasts", "_length", "_min_tokens",
        "_places", "_presence", "_reads", "_repetition", "biases", "scales", "tokens", "values",
    )  # fmt: skip

    def __init__(self, sampling: Sampling, answer: Iterable[int], prompt: Iterable[int], eos: Iterable[int]) -> None:
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        self._repetition, self._min_tokens = sampling.repetition_penalty, sampling.min_tokens
        self._bias = dict(sampling.logit_bias)
        self._bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        self._reads = bool(self._bad_words or _penalises(sampling))  # which tokens the answer has
        self._lasts = bool(self._bias or self._reads)
        self._counts: dict[int, int] = {}
        self._banned: Collection[int] = ()
        self._ends = frozenset((*sampling.stop_token_ids, *eos)) if self._min_tokens else frozenset[int]()
        self._length = 0
        repeated = dict.fromkeys(prompt) if self._repetition != 1.0 else {}
        self._places = {token: place for place, token in enumerate(repeated)}
        self.tokens, self.values = array("i", repeated), array("d", bytes(8 * len(repeated)))
        self.biases = self.scales = None
        if self._repetition != 1.0:
            self.biases, self.scales = array("d", self.values), array("d", [self._repetition]) * len(repeated)
        always = self._bad_words.always if self._bad_words else ()
        for token in {**self._bias, **dict.fromkeys(always), **dict.fromkeys(sorted(self._ends))}:
            self._update(token)
        for token in answer:
            self.add(token)

    def add(self, token: int) -> bool:
        """The answer has one more token. False: from now on no logit is adjusted."""
        self._length += 1
        if self._frequency != 0.0 or self._presence != 0.0 or self._repetition != 1.0:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._update(token)
        if self._ends and self._length >= self._min_tokens:
            ends, self._ends = self._ends, frozenset[int]()
            for end in sorted(ends):
                self._update(end)
        if self._bad_words is not None:
            old_banned, self._banned = self._banned, self._bad_words.add(token)
            for banned in (*old_banned, *self._banned):
                self._update(banned)
        return self._lasts or bool(self._ends)

    def is_steady(self, n_tokens: int) -> bool:
        """Whether the adjustments stay the same for the next `n_tokens` tokens, whatever these are."""
        return not self._reads and (not self._ends or self._length + n_tokens < self._min_tokens)

    def _update(self, token: int) -> None:
        """Compute the penalties' numbers after the answer so far."""
        if (place := self._places.get(token)) is None:
            place = self._places[token] = len(self.tokens)
            self.tokens.append(token)
            self.values.append(0.0)
            if self.biases is not None and self.scales is not None:
                self.biases.append(0.0)
                self.scales.append(1.0)
        count, bias = self._counts.get(token, 0), self._bias.get(token, 0.0)
        penalty = count * self._frequency + self._presence if count else 0.0
        if self._is_banned(token):
            self.values[place] = -inf
        elif self.biases is None or self.scales is None:
            self.values[place] = bias - penalty
        else:
            self.biases[place], self.values[place] = bias, -penalty
            if count:
                self.scales[place] = self._repetition

    def _is_banned(self, token: int) -> bool:
        words = self._bad_words
        return token in self._ends or (words is not None and (token in self._banned or token in words.always))


def logit_adjustments(
    sampling: Sampling, answer: Iterable[int], prompt: Iterable[int] = (), eos: Iterable[int] = ()
) -> LogitAdjustments | None:
    """What becomes of the logits after an answer so far to that prompt; None if they stay as they are for good."""
    if not (sampling.logit_bias or sampling.min_tokens or sampling.bad_words or _penalises(sampling)):
        return None
    return LogitAdjustments(sampling, answer, prompt, eos)


def _penalises(sampling: Sampling) -> bool:
    return not sampling.frequency_penalty == 0.0 == sampling.presence_penalty or sampling.repetition_penalty != 1.0


def sampling_fault(sampling: Sampling, vocab_size: int) -> str | None:
    """What makes it impossible to sample like this, found before it can disturb another sequence."""
    if not 0.0 <= sampling.temperature < float("inf"):
        return f"temperature {sampling.temperature} is not a finite number >= 0"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p {sampling.top_p} is outside (0, 1]"
    if not 0.0 <= sampling.min_p <= 1.0:
        return f"min_p {sampling.min_p} is outside [0, 1]"
    if not 0.0 < sampling.repetition_penalty < inf:
        return f"repetition_penalty {sampling.repetition_penalty} is not a finite number > 0"
    numbers = {"frequency_penalty": sampling.frequency_penalty, "presence_penalty": sampling.presence_penalty}
    numbers.update((f"logit_bias of token {token}", bias) for token, bias in sampling.logit_bias)
    if (endless := next((name for name, value in numbers.items() if not isfinite(value)), None)) is not None:
        return f"{endless} {numbers[endless]} is not a finite number"
    if (sampling.top_logprobs or 0) > MAX_ALTERNATIVES:
        return f"top_logprobs {sampling.top_logprobs} is more than {MAX_ALTERNATIVES}"
    if (sampling.prompt_logprobs or 0) > MAX_ALTERNATIVES:
        return f"prompt_logprobs {sampling.prompt_logprobs} is more than {MAX_ALTERNATIVES}"
    if not all(sampling.bad_words):
        return "a sequence of bad_words has no tokens"
    return _outside(sampling, vocab_size)


def _outside(sampling: Sampling, vocab_size: int) -> str | None:
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "stop_token_ids": sampling.stop_token_ids,
        "eos_token_ids": sampling.eos_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": chain.from_iterable(sampling.bad_words),
    }
    for name, tokens in named.items():
        if (outside := next((token for token in tokens if not 0 <= token < vocab_size), None)) is not None:
            return f"{name} token {outside} is outside the vocabulary of {vocab_size}"
    return None
