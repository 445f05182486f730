"""Stop strings, found across token boundaries.

The result does not depend on how the text is chunked: the stop string that is complete first wins, among those that end
together the longest. Text that may yet become a stop string is held back; the rest is released at once.
"""

from collections.abc import Sequence

MAX_STOPS = 64
MAX_STOP_CHARS = 512


class StopMatcher:
    """Release text up to the first stop string; `include`: and that string. At most 64 stop strings, none empty."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARS} characters")
        self._stops, self._include = tuple(stops), include
        self._begun = [0] * len(stops)  # characters at the text's end that begin each stop string
        self._held = ""  # the longest of these ends
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to be part of the answer; nothing after a match.

        Each stop string is searched from where it may have begun: a character is passed over once for each of them.
        """
        if self.matched or not self._stops:
            return "" if self.matched else text
        held, text = len(self._held), self._held + text
        size = keep = len(text)
        found: list[tuple[int, int]] = []
        for index, stop in enumerate(self._stops):
            start = held - self._begun[index]
            if (match := text.find(stop, start)) >= 0:
                found.append((match + len(stop), match))
                continue
            start = text.find(stop[0], max(start, size - len(stop)))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            self._begun[index] = size - start if start >= 0 else 0
            keep = min(keep, size - self._begun[index])
        if found:
            end, start = min(found)
            self.matched = text[start:end]
            return text[: end if self._include else start]
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return "" if self.matched else held
