"""The KV page book: the runner's book is the truth about its pages.

A page holds P tokens of one sequence, for all layers. A reservation owns physical pages from the moment it is granted,
so that what is promised is there: **free + reserved = total, reserved >= used**, per sequence and in sum.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Holding:
    """One sequence's pages in token order, and how many tokens they hold."""

    pages: list[int]
    tokens: int = 0


@dataclass(slots=True)
class PageBook:
    """Who holds which page. `total_pages` pages of `page_tokens` tokens."""

    total_pages: int
    page_tokens: int
    _free: list[int] = field(init=False)
    _holdings: dict[str, Holding] = field(init=False, default_factory=dict[str, Holding])

    def __post_init__(self) -> None:
        assert self.total_pages > 0, self.total_pages
        assert self.page_tokens > 0, self.page_tokens
        self._free = list(range(self.total_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def reserved_pages(self) -> int:
        return self.total_pages - len(self._free)

    @property
    def used_pages(self) -> int:
        return sum(self.used_by(key) for key in self._holdings)

    def pages_for(self, n_tokens: int) -> int:
        """ceil(n / P)."""
        return -(-n_tokens // self.page_tokens)

    def reserve(self, key: str, n_pages: int) -> list[int] | None:
        """Take n pages for a new sequence, all or none (None: no room)."""
        assert key not in self._holdings, key
        if n_pages > len(self._free):
            return None
        self._holdings[key] = Holding(self._take(n_pages))
        return self._holdings[key].pages

    def grow(self, key: str, n_pages: int) -> list[int]:
        """As many of n further pages as are free; the new ones, in order."""
        taken = self._take(min(n_pages, len(self._free)))
        self._holdings[key].pages.extend(taken)
        return taken

    def fill(self, key: str, n_tokens: int) -> None:
        """The sequence has n tokens in KV from now on."""
        holding = self._holdings[key]
        assert holding.tokens <= n_tokens <= len(holding.pages) * self.page_tokens, (key, n_tokens, holding)
        holding.tokens = n_tokens

    def release(self, key: str) -> int:
        """Give a sequence's pages back; how many."""
        pages = self._holdings.pop(key).pages
        self._free.extend(reversed(pages))
        return len(pages)

    def pages_of(self, key: str) -> list[int]:
        return self._holdings[key].pages

    def reserved_by(self, key: str) -> int:
        return len(self._holdings[key].pages)

    def used_by(self, key: str) -> int:
        return self.pages_for(self._holdings[key].tokens)

    def is_full(self, key: str) -> bool:
        """No room for one more token in what is reserved."""
        holding = self._holdings[key]
        return holding.tokens == len(holding.pages) * self.page_tokens

    def holders(self) -> set[str]:
        return set(self._holdings)

    def _take(self, n_pages: int) -> list[int]:
        return [self._free.pop() for _ in range(n_pages)]

    def everything(self) -> list[int]:
        """Every page id, free ones first: each must be there once (`check_pages`)."""
        return [*self._free, *(page for holding in self._holdings.values() for page in holding.pages)]


def check_pages(book: PageBook) -> None:
    """free + reserved = total, no page twice, reserved >= used for every sequence."""
    assert book.free_pages + book.reserved_pages == book.total_pages
    assert sorted(book.everything()) == list(range(book.total_pages)), "a page is lost or held twice"
    assert sum(book.reserved_by(key) for key in book.holders()) == book.reserved_pages
    for key in book.holders():
        assert book.reserved_by(key) >= book.used_by(key), key
