"""Control tokens that a text spells are hidden behind marks, and counted.

One search for each spelling, the longest first: as many short calls. A regex of all spellings is one call that holds
the interpreter lock, and with it the event loop, for seconds on a long text.
"""

import re
from collections import Counter
from collections.abc import Iterable

# Private-use characters of plane 16 are the marks; those in the text are hidden like control tokens.
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD
MARK = re.compile(f"([{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}])")


class TooManySpecialTokens(ValueError):
    """The text spells more different control tokens than there are marks."""


class SpecialTokenEscaper:
    """Hides and counts the control tokens of one tokenizer."""

    def __init__(self, contents: Iterable[str]) -> None:
        self._longest_first = sorted(filter(None, set(contents)), key=len, reverse=True)

    def hide(self, text: str, hidden: dict[str, str]) -> str:
        """Put a mark in place of each spelling. `hidden` maps spellings to marks; equal spellings share a mark."""
        text = MARK.sub(lambda found: _mark_of(found[0], hidden), text)
        for spelling in self._longest_first:
            if spelling in text:
                text = text.replace(spelling, _mark_of(spelling, hidden))
        return text

    def count(self, text: str) -> Counter[str]:
        """How often the text spells each control token; a part of a longer spelling does not count."""
        found: Counter[str] = Counter()
        for spelling in self._longest_first:
            if times := text.count(spelling):
                found[spelling] = times
                text = text.replace(spelling, chr(_LAST_MARK))
        return found


def _mark_of(spelling: str, hidden: dict[str, str]) -> str:
    if spelling not in hidden and len(hidden) > _LAST_MARK - _FIRST_MARK:
        raise TooManySpecialTokens("too many different control characters")
    return hidden.setdefault(spelling, chr(_FIRST_MARK + len(hidden)))
