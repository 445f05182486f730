r"""Regular expressions from strangers, matched in linear time.

PEFT lets `target_modules`, `rank_pattern` and `alpha_pattern` be regular expressions. Python's `re` backtracks, so one
line of a config could hold a process for years. This is Thompson's construction ("Regular expression search algorithm",
CACM 1968): a set of states walks along the name, each character once, whatever the expression; transitions are
remembered, so the many similar names of one model soon cost one look-up a character.

Understood: literals, `.`, `[...]`, `\d \w \s \D \W \S`, `( )`, `(?: )`, `|`, `* + ? {m} {m,} {m,n}` (lazy ones too:
only whole names are matched, so laziness changes nothing), `^ $ \b \B`. Refused: look-around, back-references, flags.
Agrees with `re.fullmatch` on names of ASCII characters without line breaks; the tests compare the two.
"""

from collections.abc import Iterator
from dataclasses import dataclass

MAX_PATTERN_CHARS = 2048
MAX_STATES = 4096
MAX_REPEAT = 1000
MAX_DEPTH = 32
MAX_STEPS = 1_000_000  # states visited by all patterns of one config; about half a second

_DIGITS = frozenset("0123456789")
_WORD = _DIGITS | frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_SPACE = frozenset(" \t\n\r\f\v")
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_BARE_QUANTIFIERS = {"*": (0, -1), "+": (1, -1), "?": (0, 1)}


class PatternError(ValueError):
    """The pattern is malformed, not in the language above, or too large."""


@dataclass(slots=True)
class Budget:
    """Steps that the patterns of one config may take together."""

    steps: int = MAX_STEPS

    def take(self, pattern: str) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise PatternError(f"matching takes too long at {pattern[:60]!r}; list the modules by name")


@dataclass(frozen=True, slots=True)
class CharSet:
    """Characters that may stand at one place: those listed, or all others."""

    chars: frozenset[str]
    negated: bool = False

    def has(self, char: str) -> bool:
        return (char in self.chars) != self.negated


@dataclass(frozen=True, slots=True)
class State:
    """By a character of `accepts` to `out[0]`; without one, for nothing (or under `guard`) to every `out`."""

    accepts: CharSet | None
    guard: str  # "", "^", "$", "b", "B"
    out: tuple[int, ...]


Position = tuple[
    frozenset[int], bool | None
]  # states, and whether the last character was a word's (None: at the start)


class Pattern:
    """A compiled pattern. `matches` costs O(characters x states) at worst and remembers what it has walked."""

    def __init__(self, text: str, budget: Budget | None = None) -> None:
        """Raises PatternError."""
        if len(text) > MAX_PATTERN_CHARS:
            raise PatternError(f"{len(text)} characters, the limit is {MAX_PATTERN_CHARS}")
        self.text = text
        builder = _Builder()
        self._start = builder.build(_Parser(text).parse(), builder.add(State(None, "", ())))
        self._states = builder.states
        self._next: dict[tuple[Position, str], Position] = {}
        self._ends: dict[Position, bool] = {}
        self._budget = budget or Budget()

    def matches(self, name: str) -> bool:
        """True when the whole name matches. Raises PatternError when the pattern has used up its steps."""
        position: Position = (frozenset((self._start,)), None)
        for char in name:
            if not position[0]:
                return False
            key = (position, char)
            if key not in self._next:
                self._next[key] = self._step(position, char)
            position = self._next[key]
        if position not in self._ends:
            self._ends[position] = any(not self._states[s].out for s in self._reach(position, None))
        return self._ends[position]

    def _step(self, position: Position, char: str) -> Position:
        found: set[int] = set()
        for number in self._reach(position, char):
            state = self._states[number]
            if state.accepts is not None and state.accepts.has(char):
                found.add(state.out[0])
        return frozenset(found), char in _WORD

    def _reach(self, position: Position, char: str | None) -> Iterator[int]:
        """Every state reached before `char` without reading it (None: the end of the name)."""
        todo, seen = list(position[0]), set(position[0])
        while todo:
            self._budget.take(self.text)
            number = todo.pop()
            yield number
            state = self._states[number]
            if state.accepts is None and _holds(state.guard, position[1], char):
                fresh = [target for target in state.out if target not in seen]
                seen.update(fresh)
                todo.extend(fresh)


def _holds(guard: str, before: bool | None, char: str | None) -> bool:
    match guard:
        case "^":
            return before is None
        case "$":
            return char is None
        case "b" | "B":
            return (bool(before) != (char is not None and char in _WORD)) == (guard == "b")
        case _:
            return True


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


class _Builder:
    """Nodes -> states, from the end of the pattern to its start: every node is told where it leads."""

    def __init__(self) -> None:
        self.states: list[State] = []

    def add(self, state: State) -> int:
        if len(self.states) >= MAX_STATES:
            raise PatternError(f"more than {MAX_STATES} states; list the modules by name")
        self.states.append(state)
        return len(self.states) - 1

    def build(self, node: Node, after: int) -> int:
        match node:
            case Chars(accepts):
                return self.add(State(accepts, "", (after,)))
            case Guard(kind):
                return self.add(State(None, kind, (after,)))
            case Sequence(items):
                for item in reversed(items):
                    after = self.build(item, after)
                return after
            case Choice(items):
                return self.add(State(None, "", tuple(self.build(item, after) for item in items)))
            case Repeat(item, least, most):
                return self._repeat(item, least, most, after)

    def _repeat(self, item: Node, least: int, most: int, after: int) -> int:
        if most < 0:
            loop = self.add(State(None, "", ()))
            self.states[loop] = State(None, "", (self.build(item, loop), after))
            first = loop
        else:
            first = after
            for _ in range(most - least):
                first = self.add(State(None, "", (self.build(item, first), after)))
        for _ in range(least):
            first = self.build(item, first)
        return first


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
