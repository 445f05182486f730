"""What resolved sources looked like, so that asking whether they have changed costs a few looks at the file system.

A watch is a name for one state of one source, and for the blobs that were made of it. They are memory only and bounded:
one that is not known here has changed, which costs a resolve and gives a new watch.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from weft_depot.sources import Marks
from weft_depot.sources.folder import identity_of


class _State(NamedTuple):
    host: str
    marks: Marks
    blobs: frozenset[str]


class Watched:
    """The states, the longest unasked first. Called from any thread."""

    def __init__(self, held: Callable[[], set[str]], limit: int = 50_000) -> None:
        """`held` gives the names of all blobs that are there."""
        self._held, self._limit = held, limit
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, host: str, marks: Marks, blobs: Iterable[str]) -> str:
        """Know a state: a source, and the names of its blobs. Returns its watch."""
        state = _State(host, marks, frozenset(blobs))
        watch = hashlib.sha256(repr((host, marks, sorted(state.blobs))).encode()).hexdigest()[:32]
        with self._lock:
            self._states[watch] = state
            self._states.move_to_end(watch)
            if len(self._states) > self._limit:
                self._states.popitem(last=False)
        return watch

    def by_host(self, watches: Iterable[str]) -> dict[str | None, list[str]]:
        """Watches by the host whose files they are on; None: they are not known."""
        found: dict[str | None, list[str]] = {}
        with self._lock:
            for watch in watches:
                state = self._states.get(watch)
                if state:
                    self._states.move_to_end(watch)
                found.setdefault(state and state.host, []).append(watch)
        return found

    def changed(self, watches: Iterable[str]) -> list[str]:
        """Those whose state is no more. Blocks as the file system does; raises OSError of the depot's own disk."""
        with self._lock:
            states = {watch: self._states.get(watch) for watch in watches}
        held = self._held()
        return [watch for watch, state in states.items() if state is None or not _holds(state, held)]


def _holds(state: _State, held: set[str]) -> bool:
    try:
        return state.blobs <= held and all(identity_of(os.stat(path)) == identity for path, identity in state.marks)  # noqa: PTH116 (no Paths)
    except (OSError, ValueError):  # a path may hold anything
        return False
