"""What one sequence adds to its logits before a token is chosen: biases, less penalties for what it has said already.

The account is kept token by token, so that a step does no work over the answer: O(1) for each token appended, and two
flat arrays that a kernel reads in place.
"""

from array import array
from collections.abc import Iterable, Mapping


class Shifts:
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
