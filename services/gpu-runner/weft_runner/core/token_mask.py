"""Which tokens a sequence may emit next: those that its request allows, and those with which its grammar goes on.

A mask is a function of the request and of the answer so far, so that a new epoch of a sequence has the same one: its
grammar's state is made from the tokens that were emitted before. Packed: bit i % 32 of word i / 32 is token i.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

BITS = 32


class GrammarState(Protocol):
    """A grammar behind an answer so far. All states of a runner are of one kind."""

    @property
    def fault(self) -> str:
        """Why no token may follow; "": some may, or nobody has asked yet."""
        ...

    def add(self, token: int) -> None:
        """The answer has one more token."""
        ...

    def fill(self, states: Sequence[tuple["GrammarState", int]], address: int, row_bytes: int, rows: int) -> None:
        """Write each state's mask to its row of `rows` masks at `address`; of a state with a fault nothing is set."""
        ...


class TokenMask:
    """One owner: its sequence. `allowed`: packed, None: all tokens; `grammar`: None: of any text."""

    __slots__ = ("allowed", "grammar")

    def __init__(self, allowed: "array[int] | None", grammar: GrammarState | None) -> None:
        self.allowed, self.grammar = allowed, grammar

    @property
    def fault(self) -> str:
        """Why no token may follow, where the grammar says so."""
        return "" if self.grammar is None else self.grammar.fault

    def add(self, token: int) -> None:
        """The answer has one more token."""
        if self.grammar is not None:
            self.grammar.add(token)


def token_mask(allowed: Iterable[int], grammar: GrammarState | None, vocab_size: int) -> TokenMask | None:
    """None where every token may come. `allowed`: tokens of the vocabulary; empty: all of them."""
    packed = _packed(allowed, vocab_size)
    return None if packed is None and grammar is None else TokenMask(packed, grammar)


def _packed(tokens: Iterable[int], vocab_size: int) -> "array[int] | None":
    words: array[int] | None = None
    for token in tokens:
        words = words or array("I", bytes(4 * words_of(vocab_size)))
        words[token // BITS] |= 1 << token % BITS
    return words


def words_of(vocab_size: int) -> int:
    """Of one mask."""
    return -(-vocab_size // BITS)
