"""The page book under any sequence of commands."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as StateBundle
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, multiple, rule

from weft_runner.core.page_table import PageTable, check_page_table
from weft_runner.core.prefix.cache import PageHashChain

TOTAL, P = 13, 4


class PageMachine(RuleBasedStateMachine):
    """Sequences reserve, share, fill, grow and leave, adapters borrow, against a plain model of who holds what.

    Texts are of three kinds that begin alike for a page or two, so that pages are found by others than their writers.
    """

    keys = StateBundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.book = PageTable(TOTAL, P)
        self.held: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}
        self.chains: dict[str, tuple[PageHashChain, list[int]]] = {}
        self.lent: dict[str, tuple[int, ...]] = {}
        self.written: dict[int, tuple[int, ...]] = {}  # page -> the text up to its end, if it is full
        self.order: dict[int, list[str]] = {}  # page -> who holds it, the eldest first
        self.drawn = 0

    @property
    def free(self) -> int:
        return TOTAL - len({page for pages in self.held.values() for page in pages}) - sum(map(len, self.lent.values()))

    @rule(target=keys, n_pages=st.integers(0, 9), kind=st.integers(0, 2))
    def reserve(self, n_pages: int, kind: int):
        key, self.drawn = f"s{self.drawn}", self.drawn + 1
        text = [0] * (P * kind) + [kind + 1] * (TOTAL * P)
        chain = PageHashChain("tenant", "", P)
        shared = self.book.prefixes.match(chain.extend(text, n_pages)[:n_pages])
        held_by_others = {page for pages in self.held.values() for page in pages}
        missing = n_pages - len(set(shared) & held_by_others)
        pages = self.book.reserve(key, n_pages, shared)
        assert (pages is None) == (missing > self.free)
        if pages is None:
            return multiple()
        assert pages[: len(shared)] == shared
        assert not set(pages[len(shared) :]) & held_by_others, "nobody writes to a page that another one holds"
        for i, page in enumerate(shared):
            assert self.written[page] == tuple(text[: (i + 1) * P]), "the same text from its beginning"
        self.held[key], self.tokens[key], self.chains[key] = list(pages), len(shared) * P, (chain, text)
        self.forget_what_is_written_anew(pages[len(shared) :])
        return key

    @rule(key=keys)
    def share(self, key: str) -> None:
        """Take what others have computed meanwhile."""
        at, rest = divmod(self.tokens[key], P)
        chain, text = self.chains[key]
        names = chain.extend(text, len(self.held[key]))[at : len(self.held[key])]
        shared = [] if rest else self.book.prefixes.match(names)
        if shared:
            mine = self.book.share(key, shared)
            assert mine == self.held[key][at : at + len(shared)]
            self.held[key][at : at + len(shared)] = shared
            self.tokens[key] += len(shared) * P
        assert self.book.pages_of(key) == self.held[key]

    @rule(key=keys, n_pages=st.integers(0, 9))
    def grow(self, key: str, n_pages: int) -> None:
        granted = self.book.grow(key, n_pages)
        assert len(granted) == min(n_pages, self.free)
        self.held[key] += granted
        assert self.book.pages_of(key) == self.held[key], "token order is kept"
        self.forget_what_is_written_anew(granted)

    @rule(key=keys, share=st.floats(0, 1), name=st.booleans())
    def fill(self, key: str, share: float, name: bool) -> None:
        before, most = self.tokens[key], len(self.held[key]) * P
        self.tokens[key] += round((most - before) * share)
        self.book.fill(key, self.tokens[key])
        assert self.book.is_full(key) == (self.tokens[key] == most)
        chain, text = self.chains[key]
        for index in range(before // P, self.tokens[key] // P):
            self.written[self.held[key][index]] = tuple(text[: (index + 1) * P])
            if name:
                self.book.name(key, index, chain.extend(text, index + 1)[index])

    @rule(key=consumes(keys), forget=st.booleans())
    def release(self, key: str, forget: bool) -> None:
        pages, free, charged = self.held.pop(key), self.book.free_pages, self.book.reserved_by(key)
        assert self.book.release(key, forget=forget) == len(pages)
        alone = set(pages) - {page for others in self.held.values() for page in others}
        assert self.book.free_pages - free == len(alone) <= charged, "what no other one holds, and nothing else"
        del self.tokens[key]
        chain, text = self.chains.pop(key)
        if forget:
            found = self.book.prefixes.match(chain.extend(text, len(pages))[:1])
            assert not set(found) & set(pages), "what it wrote is not found any more"

    @rule(digest=st.sampled_from("xy"), n_pages=st.integers(0, 9))
    def lend(self, digest: str, n_pages: int) -> None:
        if n_pages <= self.free and digest not in self.lent:
            self.lent[digest] = self.book.allocate(n_pages)
            assert len(self.lent[digest]) == n_pages
            self.forget_what_is_written_anew([*self.lent[digest]])

    @rule(digest=st.sampled_from("xy"))
    def unlend(self, digest: str) -> None:
        self.book.take_back(self.lent.pop(digest, ()))

    def forget_what_is_written_anew(self, pages: list[int]) -> None:
        for page in pages:
            self.written.pop(page, None)

    @invariant()
    def the_book_balances(self) -> None:
        lent = [page for pages in self.lent.values() for page in pages]
        check_page_table(self.book, lent)
        assert self.book.free_pages == self.free
        assert self.book.holders() == set(self.held)
        assert (self.book.all_adapter_pages, self.book.free_adapter_pages) == (len(lent), self.free)
        assert self.book.used_pages == len(
            {page for key, pages in self.held.items() for page in pages[: -(-self.tokens[key] // P)]}
        ), "a page that many read is used once"

    @invariant()
    def a_page_is_charged_to_the_one_that_has_held_it_longest(self) -> None:
        for page in range(TOTAL):
            now = [key for key, pages in self.held.items() if page in pages]
            stay = [key for key in self.order.get(page, ()) if key in now]
            self.order[page] = [*stay, *(key for key in now if key not in stay)]
        eldest = [keys[0] for keys in self.order.values() if keys]
        assert {key: self.book.reserved_by(key) for key in self.held} == {key: eldest.count(key) for key in self.held}


PageMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
test_the_page_book_balances_under_any_commands = PageMachine.TestCase


def test_filling_beyond_the_reservation_is_our_own_mistake():
    book = PageTable(4, 16)
    book.reserve("a", 1)
    with pytest.raises(AssertionError):
        book.fill("a", 17)


# ---- prefixes


def written(book: PageTable, key: str, text: list[int], salt: str = "t", adapter: str = "") -> list[int]:
    """A sequence with that text in KV, its full pages named."""
    pages = book.reserve(key, book.pages_for(len(text)))
    assert pages is not None
    book.fill(key, len(text))
    names = PageHashChain(salt, adapter, book.page_tokens).extend(text, len(text) // book.page_tokens)
    for index, name in enumerate(names):
        book.name(key, index, name)
    return list(pages)


def test_a_page_that_several_read_is_counted_for_the_eldest_and_then_for_the_next():
    book = PageTable(8, 2)
    text = [1, 2, 3, 4, 5]
    pages = written(book, "a", text)
    for key in ("b", "c"):
        assert book.reserve(key, 3, pages[:2]) is not None
    assert [book.reserved_by(key) for key in "abc"] == [3, 1, 1]
    assert [book.used_by(key) for key in "abc"] == [3, 0, 0]
    assert book.reserved_pages == 5
    assert book.release("b") == 3
    assert [book.reserved_by(key) for key in "ac"] == [3, 1]
    book.release("a")
    assert (book.reserved_by("c"), book.used_by("c")) == (3, 2)
    assert book.free_pages == 5
    check_page_table(book)


def test_what_the_newest_is_charged_is_not_free_when_it_leaves_if_an_older_one_reads_it():
    book = PageTable(8, 2)
    assert book.reserve("old", 3) is not None
    pages = written(book, "new", [1, 2, 3, 4, 5])
    assert book.share("old", pages[:2]) == [0, 1], "it has the same text, and has computed nothing of it yet"
    assert [book.reserved_by(key) for key in ("old", "new")] == [1, 3]
    assert book.free_pages == 4
    book.release("new")
    assert book.free_pages == 5, "its last page: the two that are read pass to the older one"
    assert book.reserved_by("old") == 3
    check_page_table(book)


def test_what_nobody_holds_is_given_away_least_recently_used_first_and_the_end_of_a_text_before_its_beginning():
    book = PageTable(6, 2)
    old, new = [1] * 6, [2] * 4
    written(book, "old", old)
    written(book, "new", new)
    book.release("old")
    book.release("new")
    assert book.free_pages == 6
    names = PageHashChain("t", "", 2).extend(old, 3)
    assert len(book.prefixes.match(names)) == 3
    for left in (2, 1, 0):
        book.reserve(f"taker{left}", 2 if left == 2 else 1)  # one page was free from the beginning
        assert len(book.prefixes.match(names)) == left
    assert len(book.prefixes.match(PageHashChain("t", "", 2).extend(new, 2))) == 2
    check_page_table(book)


def test_a_page_that_is_read_again_is_not_the_next_to_go():
    book = PageTable(4, 2)
    first, second = [1, 1], [2, 2]
    written(book, "a", first)
    written(book, "b", second)
    book.release("a")
    book.release("b")
    assert book.reserve("again", 1, book.prefixes.match(PageHashChain("t", "", 2).extend(first, 1))) is not None
    book.release("again")
    assert book.reserve("taker", 3) is not None
    assert book.prefixes.match(PageHashChain("t", "", 2).extend(first, 1))
    assert not book.prefixes.match(PageHashChain("t", "", 2).extend(second, 1))


TEXT = st.lists(st.integers(0, 2), min_size=2, max_size=8)
NAMED = st.tuples(st.sampled_from(["", "a", "ab", "b"]), st.sampled_from(["", "a", "b", "ba"]), TEXT)


@given(NAMED, NAMED)
def test_names_are_equal_only_where_tenant_adapter_and_the_whole_text_before_are(one, other):
    names = [PageHashChain(salt, adapter, 2).extend(text, len(text) // 2) for salt, adapter, text in (one, other)]
    assert [*map(len, names)] == [len(text) // 2 for _, _, text in (one, other)]
    for i, (a, b) in enumerate(zip(*names, strict=False)):
        same = one[:2] == other[:2] and one[2][: 2 * (i + 1)] == other[2][: 2 * (i + 1)]
        assert (a == b) == same


@given(TEXT, st.integers(0, 4))
def test_a_chain_that_grows_gives_the_names_of_one_that_is_whole(text, first):
    chain = PageHashChain("t", "x", 2)
    whole = len(text) // 2
    chain.extend(text, min(first, whole))
    assert chain.extend(text, whole) == PageHashChain("t", "x", 2).extend(text, whole)


def test_adapters_borrow_pages_that_lie_together_and_return_them_to_where_they_were():
    book = PageTable(8, 2)
    pages = book.allocate(3)
    assert pages == (7, 6, 5)
    assert book.reserve("s", 2) == [0, 1]
    assert (book.all_adapter_pages, book.free_pages) == (3, 3)
    book.take_back(pages)
    assert book.reserve("t", 6) == [2, 3, 4, 5, 6, 7]


def test_a_name_is_remembered_for_as_many_evictions_as_four_a_page() -> None:
    """A page that comes again after its eviction is needed twice; one that comes much later is new."""
    names = [f"{number}".encode() for number in range(4 * TOTAL)]
    for first, twice in ((1, True), (0, False)):
        book = PageTable(TOTAL, P)

        def use(name: bytes, book: PageTable = book) -> None:
            (page,) = book.reserve("s", 1) or ()
            book.prefixes.name(page, name, "")
            book.release("s")

        for name in [*names, *(f"other {number}".encode() for number in range(TOTAL))]:
            use(name)  # those of `names` are evicted in the end
        use(names[first])  # its page was that of another name
        assert bool(book.prefixes.unsaved) == twice
