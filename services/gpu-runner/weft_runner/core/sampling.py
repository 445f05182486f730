"""What a row samples, and what its sequence adds to its logits before: biases, less penalties for its answer so far.

The adjustments are kept token by token, so that a step does no work over the answer: O(1) for each token appended, and
two flat arrays that a kernel reads in place.
"""

from array import array
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import NamedTuple

from weft.domain.request import Sampling, TokenLogprob

MAX_TOP_LOGPROBS = 20
_MISSING = (  # fields of Sampling that this runner does not act on
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids", "grammar",
    "prompt_logprobs",
)  # fmt: skip
_DEFAULT = Sampling()


class SampledToken(NamedTuple):
    """A token, and its log probability where the request asked for it: from the executor to the wire."""

    token: int
    logprob: TokenLogprob | None = None


class LogitAdjustments:
    """`tokens[i]`'s logit is shifted by `values[i]`; all other logits stay as they are. One owner: its sequence.

    As in OpenAI's API: logit + bias - (count * frequency + (count > 0) * presence), where `count` is how often the
    token stands in the answer so far (the prompt does not count), in double precision.
    """

    __slots__ = ("_bias", "_counts", "_frequency", "_places", "_presence", "tokens", "values")

    def __init__(self, frequency: float, presence: float, bias: Mapping[int, float], answer: Iterable[int]) -> None:
        self._frequency, self._presence, self._bias = frequency, presence, bias
        self._counts: dict[int, int] = {}
        self._places = {token: place for place, token in enumerate(bias)}
        self.tokens = array("i", bias)
        self.values = array("d", bias.values())
        for token in answer:
            self.add(token)

    def add(self, token: int) -> None:
        """The answer has one more token."""
        if self._frequency == 0.0 == self._presence:
            return
        count = self._counts[token] = self._counts.get(token, 0) + 1
        value = self._bias.get(token, 0.0) - (count * self._frequency + self._presence)
        if (place := self._places.get(token)) is None:
            self._places[token] = len(self.tokens)
            self.tokens.append(token)
            self.values.append(value)
        else:
            self.values[place] = value


def logit_adjustments(sampling: Sampling, answer: Iterable[int]) -> LogitAdjustments | None:
    """What an answer so far adds to the logits; None where it never adds anything."""
    if not sampling.logit_bias and sampling.frequency_penalty == 0.0 == sampling.presence_penalty:
        return None
    return LogitAdjustments(sampling.frequency_penalty, sampling.presence_penalty, dict(sampling.logit_bias), answer)


def sampling_fault(sampling: Sampling, vocab_size: int) -> str | None:
    """What makes it impossible to sample like this, found before it can disturb another sequence."""
    if (missing := next((n for n in _MISSING if getattr(sampling, n) != getattr(_DEFAULT, n)), None)) is not None:
        return f"{missing} is not implemented by this runner"
    if not 0.0 <= sampling.temperature < float("inf"):
        return f"temperature {sampling.temperature} is not a finite number >= 0"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p {sampling.top_p} is outside (0, 1]"
    numbers = {"frequency_penalty": sampling.frequency_penalty, "presence_penalty": sampling.presence_penalty}
    numbers.update((f"logit_bias of token {token}", bias) for token, bias in sampling.logit_bias)
    if (endless := next((name for name, value in numbers.items() if not isfinite(value)), None)) is not None:
        return f"{endless} {numbers[endless]} is not a finite number"
    if (sampling.top_logprobs or 0) > MAX_TOP_LOGPROBS:
        return f"top_logprobs {sampling.top_logprobs} is more than {MAX_TOP_LOGPROBS}"
    outside = next((token for token, _ in sampling.logit_bias if not 0 <= token < vocab_size), None)
    return None if outside is None else f"logit_bias token {outside} is outside the vocabulary of {vocab_size}"
