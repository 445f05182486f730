"""Runners in placement order, searchable by free tokens: a treap on (score, uuid) that knows each subtree's maximum.

`put`, `drop`, `resize` and `best` cost O(log n) expected. Priorities are a hash of the uuid, so that the shape of the
tree depends on nothing but its members.
"""

from collections.abc import Container, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Optional


class RunnerKey(NamedTuple):
    """The order of preference, highest first; ties to the highest UUID (Punica, section 5.1)."""

    score: int
    uuid: str


class TreapNode:
    """The entry of one runner. `maximum`: the maximum of free tokens in its subtree."""

    __slots__ = ("free_tokens", "key", "left", "maximum", "priority", "right")

    def __init__(self, key: RunnerKey, free_tokens: int, priority: int) -> None:
        self.key, self.free_tokens, self.priority, self.maximum = key, free_tokens, priority, free_tokens
        self.left: Tree = None
        self.right: Tree = None


Tree = Optional[TreapNode]  # noqa: UP045 (a forward reference needs the spelled form)


@lru_cache(maxsize=20_000)
def priority_of(uuid: str) -> int:
    """Return the treap priority of a runner; hashing takes as long as a quarter of an insertion."""
    return int.from_bytes(blake2b(uuid.encode(), digest_size=8).digest(), "big")


class CapacityTreap:
    """A set of runners. Each key is in it at most once."""

    def __init__(self) -> None:
        self._root: Tree = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def free_tokens(self) -> int:
        """Maximum of the members' free tokens."""
        return self._root.maximum if self._root is not None else 0

    def put(self, key: RunnerKey, free_tokens: int, priority: int) -> None:
        """Insert a new key into the set."""
        low, high = _split(self._root, key)
        self._root = _merge(_merge(low, TreapNode(key, free_tokens, priority)), high)
        self._size += 1

    def drop(self, key: RunnerKey) -> None:
        """Remove a key. Raises KeyError."""
        self._root = _drop(self._root, key)
        self._size -= 1

    def resize(self, key: RunnerKey, free_tokens: int) -> None:
        """Change the free tokens of a key in place: a fifth of the cost of `drop` and `put`. Raises KeyError."""
        path: list[TreapNode] = []
        node = self._root
        while node is not None and node.key != key:
            path.append(node)
            node = node.left if key < node.key else node.right
        if node is None:
            raise KeyError(key)
        old_tokens, node.free_tokens = node.free_tokens, free_tokens
        if max(old_tokens, free_tokens) < node.maximum:
            return  # a member below it has its subtree's maximum, before and after
        path.append(node)
        while path:
            node = path.pop()
            old_tokens = node.maximum
            _refresh(node)
            if node.maximum == old_tokens:
                return

    def best(self, free_tokens: int, avoid: Container[str] = (), skip_limit: int = 64) -> RunnerKey | None:
        """Return the highest key with at least `free_tokens`, past at most `skip_limit` keys that are avoided."""
        for skipped, (key, _) in enumerate(self.descending(free_tokens)):
            if key.uuid not in avoid:
                return key
            if skipped >= skip_limit:
                return None
        return None

    def descending(self, free_tokens: int) -> Iterator[tuple[RunnerKey, int]]:
        """Yield members with at least `free_tokens`, highest key first; subtrees without any are not entered."""
        stack: list[TreapNode] = []
        node = self._root
        while node is not None or stack:
            while node is not None and node.maximum >= free_tokens:
                stack.append(node)
                node = node.right
            if not stack:
                return
            node = stack.pop()
            if node.free_tokens >= free_tokens:
                yield node.key, node.free_tokens
            node = node.left


def _refresh(node: TreapNode) -> None:
    maximum = node.free_tokens
    if node.left is not None and node.left.maximum > maximum:
        maximum = node.left.maximum
    if node.right is not None and node.right.maximum > maximum:
        maximum = node.right.maximum
    node.maximum = maximum


def _split(node: Tree, key: RunnerKey) -> tuple[Tree, Tree]:
    """Return the keys below `key`, and the remaining keys."""
    if node is None:
        return None, None
    if node.key < key:
        node.right, high = _split(node.right, key)
        _refresh(node)
        return node, high
    low, node.left = _split(node.left, key)
    _refresh(node)
    return low, node


def _merge(low: Tree, high: Tree) -> Tree:
    """Return one tree of two, every key of `low` below every key of `high`."""
    if low is None or high is None:
        return low or high
    if low.priority > high.priority:
        low.right = _merge(low.right, high)
        _refresh(low)
        return low
    high.left = _merge(low, high.left)
    _refresh(high)
    return high


def _drop(node: Tree, key: RunnerKey) -> Tree:
    if node is None:
        raise KeyError(key)
    if node.key == key:
        return _merge(node.left, node.right)
    if key < node.key:
        node.left = _drop(node.left, key)
    else:
        node.right = _drop(node.right, key)
    _refresh(node)
    return node
