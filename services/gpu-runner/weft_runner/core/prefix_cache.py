"""Full pages that a later sequence may read instead of computing them again.

A page is named by a chain of SHA-256 over (tenant salt, adapter digest) and the tokens of every page up to it, so that
two sequences share a page only where tenant, adapter and the whole text before it are the same. Named pages are never
written to again. A page that no sequence holds is *reusable*: as good as free, and evicted least recently used first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256


class PageHashChain:
    """The names of one sequence's full pages, each computed once."""

    __slots__ = ("_last", "_page_tokens", "names")

    def __init__(self, salt: str, adapter: str, page_tokens: int) -> None:
        self.names: list[bytes] = []
        self._page_tokens = page_tokens
        # each part by its own hash: no salt and adapter that together spell another pair's
        self._last = sha256(sha256(salt.encode()).digest() + sha256(adapter.encode()).digest()).digest()

    def extend(self, tokens: Sequence[int], n_pages: int) -> list[bytes]:
        """The names of at least the first n pages of a text that only ever grows."""
        size = self._page_tokens
        for start in range(len(self.names) * size, n_pages * size, size):
            page = array("Q", tokens[start : start + size])
            assert len(page) == size, "only a full page has a name"
            self._last = sha256(self._last + page.tobytes()).digest()
            self.names.append(self._last)
        return self.names


class PrefixCache:
    """name -> page, and which of the named pages no sequence holds. One owner: the page table."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Reusable pages."""
        return len(self._reusable)

    def __iter__(self) -> Iterator[int]:
        return iter(self._reusable)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of names, from the first one, that is there."""
        pages: list[int] = []
        for name in names:
            if (page := self._page_of.get(name)) is None:
                break
            pages.append(page)
        return pages

    def name(self, page: int, name: bytes) -> None:
        """The page is full. Where another one has that name already, this one stays its holder's alone."""
        if name not in self._page_of:
            self._page_of[name], self._name_of[page] = page, name

    def forget(self, page: int) -> None:
        """No sequence is to find it any more."""
        if (name := self._name_of.pop(page, None)) is not None:
            del self._page_of[name]

    def release(self, page: int) -> bool:
        """No sequence holds it any more. False: it has no name, so it is free."""
        if page not in self._name_of:
            return False
        self._reusable[page] = None
        return True

    def is_reusable(self, page: int) -> bool:
        return page in self._reusable

    def acquire(self, page: int) -> None:
        """A sequence holds it again."""
        self._reusable.pop(page, None)

    def evict(self) -> int:
        """The least recently used reusable page, without its name."""
        page, _ = self._reusable.popitem(last=False)
        self.forget(page)
        return page


def check_prefixes(cache: PrefixCache) -> None:
    """One name a page and one page a name; what is reusable has a name."""
    pages, names = cache._page_of, cache._name_of  # pyright: ignore[reportPrivateUsage]
    assert pages == {name: page for page, name in names.items()}, "a name and its page disagree"
    assert set(cache) <= set(names), "a reusable page without a name"
