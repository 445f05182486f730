"""Runners in placement order, searchable by room: a treap on (preference, uuid) that knows each subtree's most room.

`put`, `drop` and `best` cost O(log n) expected. Priorities come from the caller (a hash of the uuid), so that the shape
depends on nothing but the members.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple, Optional


class Key(NamedTuple):
    """The order of preference, highest first (`room.preference`); ties to the highest UUID (Punica, section 5.1)."""

    preference: int
    uuid: str


class Node:
    """One runner. `most` is the most room in its subtree."""

    __slots__ = ("key", "left", "most", "priority", "right", "room")

    def __init__(self, key: Key, room: int, priority: int) -> None:
        self.key, self.room, self.priority, self.most = key, room, priority, room
        self.left: Tree = None
        self.right: Tree = None


Tree = Optional[Node]  # noqa: UP045 (a forward reference needs the spelled form)


class Ranking:
    """A set of runners under one kind of admission. Each key is in it at most once."""

    def __init__(self) -> None:
        self._root: Tree = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[tuple[Key, int]]:
        """(key, room), best first."""
        return _descending(self._root, 0)

    def put(self, key: Key, room: int, priority: int) -> None:
        """Insert a key that is not in it."""
        low, high = _split(self._root, key)
        self._root = _merge(_merge(low, Node(key, room, priority)), high)
        self._size += 1

    def drop(self, key: Key) -> None:
        """Remove a key that is in it. Raises KeyError."""
        self._root = _drop(self._root, key)
        self._size -= 1

    def best(self, room: int, avoid: Container[str] = (), skip_limit: int = 64) -> Key | None:
        """The highest key with at least `room` that is not avoided, looking past at most `skip_limit` avoided ones."""
        for skipped, (key, _) in enumerate(_descending(self._root, room)):
            if key.uuid not in avoid:
                return key
            if skipped >= skip_limit:
                return None
        return None


def _refresh(node: Node) -> None:
    most = node.room
    if node.left is not None and node.left.most > most:
        most = node.left.most
    if node.right is not None and node.right.most > most:
        most = node.right.most
    node.most = most


def _split(node: Tree, key: Key) -> tuple[Tree, Tree]:
    """(keys below `key`, the others)."""
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
    """One tree of two, every key of `low` below every key of `high`."""
    if low is None or high is None:
        return low or high
    if low.priority > high.priority:
        low.right = _merge(low.right, high)
        _refresh(low)
        return low
    high.left = _merge(low, high.left)
    _refresh(high)
    return high


def _drop(node: Tree, key: Key) -> Tree:
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


def _descending(root: Tree, room: int) -> Iterator[tuple[Key, int]]:
    """Members with at least `room`, highest key first; subtrees without such room are not entered."""
    stack: list[Node] = []
    node = root
    while node is not None or stack:
        while node is not None and node.most >= room:
            stack.append(node)
            node = node.right
        if not stack:
            return
        node = stack.pop()
        if node.room >= room:
            yield node.key, node.room
        node = node.left
