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

from weft.artifacts.pattern_syntax import (
    WORD,
    Chars,
    CharSet,
    Choice,
    Guard,
    Node,
    PatternError,
    Repeat,
    Sequence,
    parse_pattern,
)

__all__ = ["Budget", "Pattern", "PatternError"]

MAX_STATES = 4096
MAX_STEPS = 1_000_000  # states visited by all patterns of one config; about half a second


@dataclass(slots=True)
class Budget:
    """Steps that the patterns of one config may take together."""

    steps: int = MAX_STEPS

    def take(self, pattern: str) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise PatternError(f"matching takes too long at {pattern[:60]!r}; list the modules by name")


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
        self.text = text
        builder = _Builder()
        self._start = builder.build(parse_pattern(text), builder.add(State(None, "", ())))
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
        return frozenset(found), char in WORD

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
            return (bool(before) != (char is not None and char in WORD)) == (guard == "b")
        case _:
            return True


class _Builder:
    """Nodes -> states, from the end of the pattern to its start: every node is told where it leads."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self._built = 0  # nodes: repeats of nothing make no states and could go on for ever

    def add(self, state: State) -> int:
        if len(self.states) >= MAX_STATES:
            raise PatternError(f"more than {MAX_STATES} states; list the modules by name")
        self.states.append(state)
        return len(self.states) - 1

    def build(self, node: Node, after: int) -> int:
        """The state that starts `node` and goes on at `after`. Raises PatternError when there are too many."""
        self._built += 1
        if self._built > 4 * MAX_STATES:
            raise PatternError("too many repeats; list the modules by name")
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
