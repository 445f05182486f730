"""Stop strings, found across token boundaries.

Each stop string is a Knuth-Morris-Pratt automaton fed character by character, so the result does not depend on how the
text is chunked: the stop string that is complete first wins, among those that end together the longest. Text that may
yet become a stop string is held back; the rest is released at once. O(1) amortised a character.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_STOPS = 4
MAX_STOP_CHARS = 512


@dataclass(slots=True)
class _Automaton:
    stop: str
    failure: list[int]
    state: int = 0  # length of the longest prefix of `stop` that ends the text so far

    def feed(self, char: str) -> bool:
        """True when `stop` is complete."""
        state = self.state
        while state and self.stop[state] != char:
            state = self.failure[state - 1]
        self.state = state + 1 if self.stop[state] == char else 0
        return self.state == len(self.stop)


class StopMatcher:
    """Release text up to the first stop string. At most 4 stop strings, none empty."""

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARS} characters")
        self._automata = [_Automaton(stop, _failure(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string; nothing after a match."""
        if self.matched or not self._automata:
            return "" if self.matched else text
        for index, char in enumerate(text):
            if length := self._feed(char):
                self.matched = True
                seen = self._held + text[: index + 1]
                return seen[: len(seen) - length]
        return self._release(self._held + text)

    def flush(self) -> str:
        """The end of the text has come: what was held back."""
        held, self._held = self._held, ""
        return "" if self.matched else held

    def _feed(self, char: str) -> int:
        """Length of the stop string that this character completes, else 0. Every automaton sees the character."""
        done = [automaton for automaton in self._automata if automaton.feed(char)]
        return len(done[0].stop) if done else 0

    def _release(self, text: str) -> str:
        keep = len(text) - max(automaton.state for automaton in self._automata)
        self._held = text[keep:]
        return text[:keep]


def _failure(stop: str) -> list[int]:
    """failure[i]: length of the longest proper prefix of stop[:i+1] that also ends it."""
    table, length = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table
