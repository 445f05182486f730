"""Full pages that a later sequence may read instead of computing them again.

A page is named by a chain of SHA-256 over (tenant salt, adapter digest) and the tokens of every page up to it, so that
two sequences share a page only where tenant, adapter and the whole text before it are the same. Named pages are never
written to again. A page that no sequence holds is *reusable*: as good as free, and evicted least recently used first.

A page is worth a copy in host memory (`host.py`) once it was *needed twice*: a second sequence has read it, or
it was computed again after its eviction, which is why names are remembered for a while (2Q: Johnson and Shasha, VLDB
1994). What is asked for once, as most prompts are, costs no copy and takes no memory from what is asked for often; what
comes again is computed twice at most.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from hashlib import sha256

from weft.domain.lru import LruDict

EVICTED_PER_PAGE, MAX_EVICTED = 4, 65_536  # names that are remembered: of a million tokens, in some 15 MB


class PageHashChain:
    """The names of one sequence's full pages, each computed once."""

    __slots__ = ("_last", "_page_tokens", "names")

    def __init__(self, salt: str, adapter: str, page_tokens: int, kind: str = "") -> None:
        """`kind`: of the keys in the pages, if a model has several for one text."""
        self.names: list[bytes] = []
        self._page_tokens = page_tokens
        # each part by its own hash: no salt and adapter that together spell another pair's
        parts = (salt, adapter, kind) if kind else (salt, adapter)
        self._last = sha256(b"".join(sha256(part.encode()).digest() for part in parts)).digest()

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
    """name -> page, and which of the named pages no sequence holds. One owner: the page table, of `total_pages`."""

    def __init__(self, total_pages: int) -> None:
        self.unsaved: OrderedDict[int, None] = OrderedDict()  # reusable, needed twice, without a copy; as `_reusable`
        self.saving: set[int] = set()  # pages that are being copied to host memory
        self._in_host: Container[bytes] = ()  # names with a copy there, complete or not
        self._discard: Callable[[bytes], None] = lambda _: None
        self._page_of: dict[bytes, int] = {}
        self._named: dict[int, tuple[bytes, str]] = {}  # the name of a page, and its adapter
        self._twice: set[bytes] = set()  # of the names that are here
        self._evicted: LruDict[bytes, None] = LruDict(min(EVICTED_PER_PAGE * total_pages, MAX_EVICTED))
        self._reusable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def copy_to_host(self, in_host: Container[bytes], discard: Callable[[bytes], None]) -> None:
        """Have a tier in host memory: the names with a copy there, and what drops a name's."""
        self._in_host, self._discard = in_host, discard

    def begin_saving(self, pages: Iterable[int]) -> None:
        """Evict these pages last while they are copied."""
        self.saving.update(pages)

    def end_saving(self, pages: Iterable[int]) -> None:
        self.saving.difference_update(pages)

    def __len__(self) -> int:
        """Reusable pages."""
        return len(self._reusable)

    def __iter__(self) -> Iterator[int]:
        return iter(self._reusable)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest run of present names from the first name on."""
        pages: list[int] = []
        for name in names:
            if (page := self._page_of.get(name)) is None:
                break
            pages.append(page)
        return pages

    def name(self, page: int, name: bytes, adapter: str) -> None:
        """Name a full page. If the name exists, the page stays private to its holder."""
        if name not in self._page_of:
            self._page_of[name], self._named[page] = page, (name, adapter)
            if name in self._evicted:
                del self._evicted[name]
                self._twice.add(name)

    def named(self, page: int) -> tuple[bytes, str]:
        """Return a page's name and its adapter."""
        return self._named[page]

    def forget(self, page: int) -> None:
        """No sequence is to find it any more, here or in host memory."""
        if page in self._named:
            self._discard(self._unname(page))

    def release(self, page: int) -> bool:
        """No sequence holds it any more. False: it has no name, so it is free."""
        if (named := self._named.get(page)) is None:
            return False
        self._reusable[page] = None
        if named[0] in self._twice and named[0] not in self._in_host:
            self.unsaved[page] = None
        return True

    def is_reusable(self, page: int) -> bool:
        return page in self._reusable

    def acquire(self, page: int) -> None:
        """One more sequence holds it."""
        if (named := self._named.get(page)) is not None:
            self._twice.add(named[0])
            self._reusable.pop(page, None)
            self.unsaved.pop(page, None)

    def evict(self) -> int:
        """The least recently used reusable page, without its name. One that is being copied goes last, its copy too."""
        page = next((page for page in self._reusable if page not in self.saving), None)
        copied = page is None
        if page is None:
            page = next(iter(self._reusable))
        del self._reusable[page]
        self.unsaved.pop(page, None)
        name = self._unname(page)
        self._evicted[name] = None
        if copied:
            self._discard(name)
        return page

    def _unname(self, page: int) -> bytes:
        name, _ = self._named.pop(page)
        del self._page_of[name]
        self._twice.discard(name)
        return name


def check_prefixes(cache: PrefixCache) -> None:
    """Check that names and pages correspond one to one, that reusable pages have a name, and that pages to copy can be
    copied.
    """
    pages, names = cache._page_of, cache._named  # pyright: ignore[reportPrivateUsage]
    assert pages == {name: page for page, (name, _) in names.items()}, "a name and its page disagree"
    assert set(cache) <= set(names), "a reusable page without a name"
    assert cache._twice <= pages.keys(), "needed twice, and not here"  # pyright: ignore[reportPrivateUsage]
    assert all(cache.is_reusable(page) for page in cache.unsaved), "a page that is held is not about to be evicted"
    assert cache.saving <= names.keys(), "a page that is being copied has another owner"
