"""The page book under any sequence of commands."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as StateBundle
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, multiple, rule

from weft_runner.core.pages import PageBook, check_pages


class PageMachine(RuleBasedStateMachine):
    """Reserve, fill, grow and release in any order, against a plain model of who holds how many."""

    keys = StateBundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.book = PageBook(total_pages=13, page_tokens=4)
        self.held: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.drawn = 0

    @rule(target=keys, n_pages=st.integers(0, 9))
    def reserve(self, n_pages: int):
        key, self.drawn = f"s{self.drawn}", self.drawn + 1
        pages = self.book.reserve(key, n_pages)
        assert (pages is None) == (n_pages > 13 - sum(self.held.values()))
        if pages is None:
            return multiple()
        assert len(set(pages)) == n_pages
        self.held[key], self.tokens[key] = n_pages, 0
        return key

    @rule(key=keys, n_pages=st.integers(0, 9))
    def grow(self, key: str, n_pages: int) -> None:
        before = list(self.book.pages_of(key))
        granted = self.book.grow(key, n_pages)
        assert len(granted) == min(n_pages, 13 - sum(self.held.values()))
        assert self.book.pages_of(key) == before + granted, "token order is kept"
        self.held[key] += len(granted)

    @rule(key=keys, share=st.floats(0, 1))
    def fill(self, key: str, share: float) -> None:
        most = self.held[key] * 4
        self.tokens[key] += round((most - self.tokens[key]) * share)
        self.book.fill(key, self.tokens[key])
        assert self.book.is_full(key) == (self.tokens[key] == most)

    @rule(key=consumes(keys))
    def release(self, key: str) -> None:
        assert self.book.release(key) == self.held.pop(key)
        del self.tokens[key]

    @invariant()
    def the_book_balances(self) -> None:
        check_pages(self.book)
        assert self.book.reserved_pages == sum(self.held.values())
        assert self.book.used_pages == sum(-(-n // 4) for n in self.tokens.values())
        assert self.book.holders() == set(self.held)


PageMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_the_page_book_balances_under_any_commands = PageMachine.TestCase


def test_filling_beyond_the_reservation_is_our_own_mistake():
    book = PageBook(4, 16)
    book.reserve("a", 1)
    with pytest.raises(AssertionError):
        book.fill("a", 17)


def test_the_check_notices_a_page_that_is_held_twice():
    book = PageBook(4, 16)
    pages = book.reserve("a", 2)
    assert pages is not None
    pages[1] = pages[0]
    with pytest.raises(AssertionError, match="held twice"):
        check_pages(book)
