"""The text of a regular expression -> its parts. See `weft.artifacts.pattern` for the language and why it is ours."""

from dataclasses import dataclass

MAX_PATTERN_CHARS = 2048
MAX_REPEAT = 1000
MAX_DEPTH = 32

_DIGITS = frozenset("0123456789")
WORD = _DIGITS | frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_SPACE = frozenset(" \t\n\r\f\v")
_CLASSES = {"d": _DIGITS, "w": WORD, "s": _SPACE}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_BARE_QUANTIFIERS = {"*": (0, -1), "+": (1, -1), "?": (0, 1)}


def parse_pattern(text: str) -> "Node":
    """Raises PatternError for what is malformed, not in the language, or too large."""
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"{len(text)} characters, the limit is {MAX_PATTERN_CHARS}")
    return _Parser(text).parse()


class PatternError(ValueError):
    """The pattern is malformed, not in the language above, or too large."""


@dataclass(frozen=True, slots=True)
class CharSet:
    """Characters that may stand at one place: those listed, or all others."""

    chars: frozenset[str]
    negated: bool = False

    def has(self, char: str) -> bool:
        return (char in self.chars) != self.negated


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    accepts: CharSet


@dataclass(frozen=True, slots=True)
class Guard:
    """A place, not a character."""

    kind: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them."""

    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`item`, `least` to `most` times; -1 is no bound."""

    item: "Node"
    least: int
    most: int


Node = Chars | Guard | Sequence | Choice | Repeat


class _Parser:
    """Recursive descent over the pattern's text."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise self._error("a ')' without '('")
        return node

    def _choice(self) -> Node:
        items = [self._sequence()]
        while self._take("|"):
            items.append(self._sequence())
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            items.append(self._quantified(self._atom()))
        return Sequence(tuple(items))

    def _quantified(self, item: Node) -> Node:
        bounds = self._bounds()
        if bounds is None:
            return item
        if isinstance(item, Guard):
            raise self._error("a repeated anchor")
        if not self._take("?") and self._take("+"):
            raise self._error("possessive repeats are not supported")
        if self._bounds() is not None:
            raise self._error("a repeat of a repeat")
        return Repeat(item, *bounds)

    def _bounds(self) -> tuple[int, int] | None:
        char = self._peek()
        if char in _BARE_QUANTIFIERS:
            self._at += 1
            return _BARE_QUANTIFIERS[char]
        if char != "{":
            return None
        body, close, _ = self._text[self._at + 1 :].partition("}")
        low, comma, high = body.partition(",")
        if (
            not close
            or not all(part == "" or (part.isascii() and part.isdigit()) for part in (low, high))
            or not (low or high)
        ):
            raise self._error("a '{' that is no repeat; write \\{")
        least = self._count(low or "0")
        most = least if not comma else self._count(high) if high else -1
        if 0 <= most < least:
            raise self._error("a repeat that ends before it starts")
        self._at += len(body) + 2
        return least, most

    def _count(self, digits: str) -> int:
        if len(digits) > 4 or int(digits) > MAX_REPEAT:
            raise self._error(f"a repeat beyond {MAX_REPEAT}")
        return int(digits)

    def _atom(self) -> Node:
        char = self._text[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return Chars(self._set())
            case "\\":
                return self._escape()
            case ".":
                return Chars(CharSet(frozenset("\n"), negated=True))
            case "^" | "$":
                return Guard(char)
            case "*" | "+" | "?" | "{":
                raise self._error(f"{char!r} repeats nothing")
            case _:
                return Chars(CharSet(frozenset(char)))

    def _group(self) -> Node:
        if self._take("?") and not self._take(":"):
            raise self._error("only plain groups and (?: ) are supported")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups nested beyond {MAX_DEPTH}")
        node = self._choice()
        if not self._take(")"):
            raise self._error("a '(' without ')'")
        self._depth -= 1
        return node

    def _escape(self) -> Node:
        char = self._next_char()
        if char in "bB":
            return Guard(char)
        return Chars(self._escaped_set(char))

    def _escaped_set(self, char: str) -> CharSet:
        if char.lower() in _CLASSES:
            return CharSet(_CLASSES[char.lower()], negated=char.isupper())
        if char in _CONTROL:
            return CharSet(frozenset(_CONTROL[char]))
        if char.isalnum():
            raise self._error(f"\\{char} is not supported")
        return CharSet(frozenset(char))

    def _set(self) -> CharSet:
        negated, chars, first = self._take("^"), frozenset[str](), True
        while first or self._peek() != "]":
            first = False
            chars |= self._set_item()
        self._at += 1
        return CharSet(chars, negated)

    def _set_item(self) -> frozenset[str]:
        low = self._set_char()
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return low
        self._at += 1
        high = self._set_char()
        if len(low) != 1 or len(high) != 1 or min(low) > min(high) or ord(min(high)) > 127:
            raise self._error("a range that is none")
        return frozenset(chr(code) for code in range(ord(min(low)), ord(min(high)) + 1))

    def _set_char(self) -> frozenset[str]:
        char = self._next_char()
        if char != "\\":
            return frozenset(char)
        accepts = self._escaped_set(self._next_char())
        if accepts.negated:
            raise self._error("a negated class inside [ ]")
        return accepts.chars

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next_char(self) -> str:
        char = self._peek()
        if not char:
            raise self._error("the pattern ends too early")
        self._at += 1
        return char

    def _take(self, char: str) -> bool:
        if self._peek() != char:
            return False
        self._at += 1
        return True

    def _error(self, what: str) -> PatternError:
        return PatternError(f"{what}, at character {self._at} of {self._text[:60]!r}")
