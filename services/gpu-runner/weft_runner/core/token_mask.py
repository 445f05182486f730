"""Masks of the tokens that a sequence may emit next: what its request allows, and its grammar goes on with.

A mask is a function of the request and of the answer so far, so that a new epoch of a sequence has the same one: its
grammar's state is made from the tokens that were emitted before. Packed: bit i % 32 of word i / 32 is token i.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

BITS = 32


class GrammarState(Protocol):
    """A grammar after an answer so far, with a mask computed in parallel to steps. All states of a runner have the same
    class.

    `late`: `fill` has had no mask of it, and it has none since. `forced`: tokens of the text that has to follow, as far
    as it is known; others may spell the same.
    """

    late: bool
    forced: Sequence[int]

    @property
    def fault(self) -> str:
        """Why no token may follow; "": some may, or nobody knows yet."""
        ...

    @property
    def ready(self) -> bool:
        """Say whether the mask is there, or will be by the end of a step, which the row sits out otherwise."""
        ...

    @property
    def quick(self) -> bool:
        """Say whether the mask behind the next token will be there by the end of a step, as far as is known."""
        ...

    def add(self, *tokens: int) -> None:
        """Record further tokens of the answer. Returns at once."""
        ...

    def fill(
        self, states: Sequence[tuple["GrammarState", int]], address: int, row_bytes: int, computing: Callable[[], bool]
    ) -> None:
        """Write each state's mask to its row at `address`; of a state with a fault, or that is late, nothing is set.

        Masks are waited for as long as something else computes, and a fraction of a millisecond then.
        """
        ...

    def await_forced(self, states: Sequence["GrammarState"], most_s: float) -> None:
        """Wait until each state's `forced` is of the whole answer, `most_s` at most."""
        ...


class TokenMask:
    """One owner: its sequence. `allowed`: packed, None: all tokens; `grammar`: None: of any text."""

    __slots__ = ("allowed", "grammar")

    def __init__(self, allowed: "array[int] | None", grammar: GrammarState | None) -> None:
        self.allowed, self.grammar = allowed, grammar

    @property
    def fault(self) -> str:
        """Why no token may follow, if the grammar says so."""
        return "" if self.grammar is None else self.grammar.fault

    @property
    def ready(self) -> bool:
        """A step may have its row."""
        return self.grammar is None or self.grammar.ready

    @property
    def quick(self) -> bool:
        """Whether the row may be in the step directly after the step that samples its next token."""
        return self.grammar is None or self.grammar.quick

    @property
    def late(self) -> bool:
        """The last step had no mask of its grammar in time."""
        return self.grammar is not None and self.grammar.late

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar forces, or nearly forces."""
        return () if self.grammar is None else self.grammar.forced

    def add(self, *tokens: int) -> None:
        """Record further tokens of the answer."""
        if self.grammar is not None:
            self.grammar.add(*tokens)


def token_mask(allowed: Iterable[int], grammar: GrammarState | None, vocab_size: int) -> TokenMask | None:
    """None if every token may come. `allowed`: tokens of the vocabulary; empty: all of them."""
    packed = _packed(allowed, vocab_size)
    return None if packed is None and grammar is None else TokenMask(packed, grammar)


def _packed(tokens: Iterable[int], vocab_size: int) -> "array[int] | None":
    words: array[int] | None = None
    for token in tokens:
        words = words or array("I", bytes(4 * words_of(vocab_size)))
        words[token // BITS] |= 1 << token % BITS
    return words


def words_of(vocab_size: int) -> int:
    """Return the number of words in a mask."""
    return -(-vocab_size // BITS)
