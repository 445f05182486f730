"""Regular expressions with look-around, matched in bounded time. RE2 has no look-around, and Python's `re` may run for
years.

A match needs neither captures nor an order of trials, so all positions are processed at once (Thompson, "Regular
Expression Search Algorithm", 1968). Positions are the bits of an integer. A part of the expression maps its possible
end positions to its possible start positions. A look-ahead is the set of start positions for any end. A look-behind has
a part of fixed width, and is the set moved by the width. Nothing is tried twice, so the cost of an expression is known
before any name: the maximum number of parts to run for a name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_MODULE_NAME_CHARS = 64  # the basis of costs: `model.layers.1023.self_attn.q_proj` has 34
_MAX_DEPTH = 40  # of parentheses
_SET_COST = 4  # of a set of characters; a part costs 1
LOOKAROUNDS = {
    "(?=": (False, False),
    "(?!": (False, True),
    "(?<=": (True, False),
    "(?<!": (True, True),
}  # is_behind, negated
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_BOUNDS = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")


class LookaroundError(ValueError):
    """The expression is malformed or costs too much."""


@dataclass(frozen=True, slots=True)
class _Name:
    """All positions of a name, before each character and at the end, and the positions with a character of each set."""

    all: int
    sets: tuple[int, ...]


_Starts = Callable[[_Name, int], int]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an expression. `starts` maps end positions to start positions. `width`: its characters, if fixed."""

    starts: _Starts
    width: int | None
    cost: int


def compile_lookaround(tokens: list[str], max_cost: int) -> tuple[Callable[[str], bool], int]:
    """Compile an expression. Return a function that says whether a whole name (ASCII, no line breaks) matches, and the
    cost.

    Raises LookaroundError."""
    reader = _Reader(tokens[::-1])
    expression = reader.alternatives()
    if reader.left:
        raise LookaroundError("unbalanced parentheses")
    cost = expression.cost + _SET_COST * len(reader.sets)
    if cost > max_cost:
        raise LookaroundError("too large a pattern; list the modules by name")
    tables = [_table(text) for text in reader.sets]

    def matches(name: str) -> bool:
        last_first = name[::-1].encode("ascii", "replace")
        sets = tuple(int(b"0" + last_first.translate(table), 2) for table in tables)
        return expression.starts(_Name((2 << len(name)) - 1, sets), 1 << len(name)) & 1 == 1

    return matches, cost


def _table(text: str) -> bytes:
    """Map each character to 1 if it is in a set, given in the syntax of expressions."""
    try:
        pattern = re.compile(text, re.ASCII)
    except re.error as error:
        raise LookaroundError(str(error)) from error
    return bytes(b"01"[code < 128 and pattern.fullmatch(chr(code)) is not None] for code in range(256))


@dataclass(slots=True)
class _Reader:
    """A reader of tokens. The first token is the last of `left`. `sets`: index by the text of a set of characters."""

    left: list[str]
    sets: dict[str, int] = field(default_factory=dict[str, int])
    depth: int = 0

    def alternatives(self) -> _Part:
        parts = [self.sequence()]
        while self._take("|"):
            parts.append(self.sequence())
        widths = {part.width for part in parts}
        either = [part.starts for part in parts]

        def starts(name: _Name, ends: int) -> int:
            begins = 0
            for part_starts in either:
                begins |= part_starts(name, ends)
            return begins

        return _Part(starts, widths.pop() if len(widths) == 1 else None, 1 + sum(part.cost for part in parts))

    def sequence(self) -> _Part:
        parts: list[_Part] = []
        while self.left and self.left[-1] not in ("|", ")"):
            parts.append(self._repeated(self._part(self.left.pop())))
        fixed = [part.width for part in parts if part.width is not None]
        backwards = [part.starts for part in reversed(parts)]

        def starts(name: _Name, ends: int) -> int:
            for part_starts in backwards:
                if not ends:
                    break
                ends = part_starts(name, ends)
            return ends

        return _Part(starts, sum(fixed) if len(fixed) == len(parts) else None, 1 + sum(part.cost for part in parts))

    def _part(self, text: str) -> _Part:
        if text in ("(", "(?:", *LOOKAROUNDS):
            return self._group(text)
        if text[0] in "*+?{":
            raise LookaroundError("nothing to repeat")
        if text == "^":
            return _Part(lambda _, ends: ends & 1, 0, 1)
        if text == "$":
            return _Part(lambda name, ends: ends & (name.all ^ name.all >> 1), 0, 1)
        if text in (r"\b", r"\B"):
            letters, flip = self._set(r"\w"), text == r"\B"
            return _Part(lambda name, ends: ends & (_edges(name, letters) ^ (flip and name.all)), 0, 1)
        set_index = self._set(text)
        return _Part(lambda name, ends: ends >> 1 & name.sets[set_index], 1, 1)

    def _group(self, text: str) -> _Part:
        self.depth += 1
        inner = self.alternatives() if self.depth < _MAX_DEPTH else None
        if inner is None or not self._take(")"):
            raise LookaroundError("unbalanced or too many parentheses")
        self.depth -= 1
        return _lookaround(inner, *LOOKAROUNDS[text]) if text in LOOKAROUNDS else inner

    def _repeated(self, part: _Part) -> _Part:
        if (bounds := self._bounds()) is None:
            return part
        self._take("?")  # lazy: the same names match
        if self._bounds():
            raise LookaroundError("multiple repeat")
        return _repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        token = self.left[-1] if self.left else ""
        match = _BOUNDS.fullmatch(token)
        if token not in _REPEATS and not match:
            return None
        self.left.pop()
        if not match:
            return _REPEATS[token]
        minimum = int(match[1])
        return minimum, int(match[3]) if match[3] else None if match[2] else minimum

    def _take(self, token: str) -> bool:
        return bool(self.left) and self.left[-1] == token and bool(self.left.pop())

    def _set(self, text: str) -> int:
        return self.sets.setdefault(text, len(self.sets))


def _edges(name: _Name, letters: int) -> int:
    r"""Return the positions with a letter (`\w`) on exactly one side."""
    return (name.sets[letters] ^ name.sets[letters] << 1) & name.all


def _lookaround(part: _Part, is_behind: bool, negated: bool) -> _Part:
    width = part.width if is_behind else 0
    if width is None:
        raise LookaroundError("look-behind requires fixed-width pattern")

    def starts(name: _Name, ends: int) -> int:
        there = part.starts(name, name.all) << width & name.all
        return ends & ~there if negated else ends & there

    return _Part(starts, 0, part.cost + 1)


def _repeat(part: _Part, minimum: int, maximum: int | None) -> _Part:
    if maximum is not None and maximum < minimum:
        raise LookaroundError("min repeat greater than max repeat")
    optional = None if maximum is None else maximum - minimum

    def starts(name: _Name, ends: int) -> int:
        for _ in range(minimum):
            ends = part.starts(name, ends)
        begins = new = ends
        for _ in range(name.all.bit_length() if optional is None else optional):
            if not (new := part.starts(name, new) & ~begins):
                break
            begins |= new
        return begins

    fixed = part.width is not None and (minimum == maximum or part.width == 0)
    return _Part(
        starts,
        minimum * (part.width or 0) if fixed else None,
        1 + (minimum + (MAX_MODULE_NAME_CHARS if optional is None else optional)) * part.cost,
    )
