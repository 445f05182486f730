"""SpecialTokenEscaper of control tokens in a text, hidden behind marks and counted.

One search for each spelling, the longest first: as many short calls. A regex of them all is one call that keeps the
interpreter, and with it the event loop, for seconds on a long text.
"""

import re
from collections import Counter
from collections.abc import Iterable

# Private-use characters of plane 16 stand in for what is hidden; typed ones are hidden like control tokens.
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD
MARK = re.compile(f"([{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}])")


class TooManySpecialTokens(ValueError):
    """More different things to hide than there are marks."""


class SpecialTokenEscaper:
    """The spellings of one tokenizer's control tokens."""

    def __init__(self, contents: Iterable[str]) -> None:
        self._longest_first = sorted(filter(None, set(contents)), key=len, reverse=True)

    def hide(self, text: str, hidden: dict[str, str]) -> str:
        """Put a mark in place of each spelling; `hidden` says which, and equal ones share theirs."""
        text = MARK.sub(lambda found: _mark_of(found[0], hidden), text)
        for spelling in self._longest_first:
            if spelling in text:
                text = text.replace(spelling, _mark_of(spelling, hidden))
        return text

    def count(self, text: str) -> Counter[str]:
        """How often each is spelt; a part of a longer one does not count."""
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
