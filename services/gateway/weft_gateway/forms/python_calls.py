"""Python's calls in the text of an answer, as OLMo 3 writes them: `name(city="Oslo", days=[1, 2])`. Pure."""

import json
import re
from collections.abc import Sequence

from weft_gateway.forms.marks import begun

_NAME = r"[\w.-]{1,64}"
PYTHON_NAME = re.compile(_NAME)  # of a function, or of an argument
_VALUE = r"""(?:["'\[{(]|-?\d|(?:[Tt]rue|[Ff]alse|None|null)\b)"""
_BEFORE = r"[\s,;\[\]]*"  # a call
_HEAD = re.compile(rf"({_BEFORE})({_NAME})\(\s*(?=\)|{_NAME}\s*=\s*{_VALUE})")
_HEAD_BEGUN = re.compile(rf"{_BEFORE}(?:{_NAME}(?:\(\s*(?:{_NAME}\s*(?:=\s*-?\w{{0,5}})?)?)?)?")
_KEY = re.compile(rf"(\s*)({_NAME})\s*=\s*")
_KEY_BEGUN = re.compile(rf"\s*(?:{_NAME}\s*=?\s*)?")
_PLAIN = re.compile(r"""[^"'\\]+|\\.""", re.DOTALL)  # in a text
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonCalls:
    """A writer of Python's calls after a mark as JSON objects with a name and arguments: `push` text, then `flush`
    once.

    All further text stays unchanged. Values outside Python and JSON stay too; the reader of the object rejects them.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self._pending, self._at = "", 0  # the text, and the length read of it: an answer may come in a single piece
        self._inside = False  # after a mark: a call may follow
        self._open: list[str] = []  # brackets to close the call
        self._awaits_key = False
        self._quote = ""

    def push(self, text: str) -> str:
        """Return the text certain by now."""
        self._pending, self._at, written = self._pending[self._at :] + text, 0, list[str]()
        while (part := self._step()) is not None:
            written.append(part)
        return "".join(written)

    def flush(self) -> str:
        """Return the remaining text at the end of the answer."""
        pending, self._pending, self._at = self._pending[self._at :], "", 0
        return pending

    def _take(self, end: int) -> str:
        piece, self._at = self._pending[self._at : end], end
        return piece

    def _step(self) -> str | None:
        """Read the next part; None: more text is needed."""
        if self._at == len(self._pending):
            return None
        if self._quote:
            return self._in_text()
        if self._open:
            return self._in_call()
        if not self._inside:
            return self._find_mark()
        if head := _HEAD.match(self._pending, self._at):
            self._take(head.end())
            self._open, self._awaits_key = [")"], True
            return f'{head[1]}{{"name": {json.dumps(head[2])}, "arguments": {{'
        if _HEAD_BEGUN.fullmatch(self._pending, self._at):
            return None
        self._inside = False
        return ""

    def _find_mark(self) -> str | None:
        if match := self._mark.search(self._pending, self._at):
            self._inside = True
            return self._take(match.end())
        return self._take(len(self._pending) - begun(self._pending[self._at :], self._marks)) or None

    def _in_call(self) -> str | None:
        if self._awaits_key and (key := _KEY.match(self._pending, self._at)):
            if key.end() == len(self._pending):
                return None
            self._take(key.end())
            self._awaits_key = False
            return f"{key[1]}{json.dumps(key[2])}: "
        if self._awaits_key and _KEY_BEGUN.fullmatch(self._pending, self._at):
            return None
        char = self._take(self._at + 1)
        match char:
            case '"' | "'":
                self._quote = char
                return '"'
            case "(" | "[" | "{":
                self._open.append(_CLOSING[char])
                return "[" if char == "(" else char
            case ")" | "]" | "}" if char == self._open[-1]:
                self._open.pop()
                return ("]" if char == ")" else char) if self._open else "}}"
            case "," if len(self._open) == 1:
                self._awaits_key = True
            case _ if char == "<" or "\ufdd0" <= char <= "\ufdef":  # a mark: the call ends early
                self._open, self._inside, self._at = [], False, self._at - 1
                return ""
            case _:
                pass
        return char

    def _in_text(self) -> str | None:
        if plain := _PLAIN.match(self._pending, self._at):
            return self._take(plain.end())
        char = self._pending[self._at]
        if char == "\\":  # the last character: an earlier backslash is plain together with its successor
            return None
        self._take(self._at + 1)
        if char != self._quote:
            return f"\\{char}"
        self._quote = ""
        return '"'
