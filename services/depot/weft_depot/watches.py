"""Watches of resolved sources: a check for changes costs a few `stat` calls.

A watch names a state of a source, and the blobs made from it. Watches are in memory only and bounded. A watch unused
for a quarter of an hour is forgotten. An unknown watch counts as changed: the cost is a resolve, which returns a new
watch. If only the host of a source knows its state, the watch is the digest of its artifact. It counts as changed once
the depot does not hold the artifact any more.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from weft.artifacts.digest import Digest, hex_of
from weft.artifacts.errors import ArtifactError
from weft.domain.lru import ExpiringDict
from weft_depot.sources.folder import identity_of
from weft_depot.sources.source import Marks


class _State(NamedTuple):
    host: str
    marks: Marks
    blobs: frozenset[str]


DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
OWN_DISK = "the depot's disk"  # in place of a host, for watches that are digests
KEEP_S = 900.0  # operators check each watch every few seconds


class Watches:
    """The states, least recently checked first. Called from any thread."""

    def __init__(
        self,
        list_blobs: Callable[[], set[str]],
        holds: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
        limit: int = 50_000,
    ) -> None:
        """`list_blobs` returns the names of all blobs in the store, `holds` whether an artifact is complete there."""
        self._list_blobs, self._holds_artifact, self._now = list_blobs, holds, now
        self._states = ExpiringDict[str, _State](limit, KEEP_S)
        self._lock = threading.Lock()

    def add(self, host: str, marks: Marks, blobs: Iterable[str]) -> str:
        """Keep a state: a source, and the names of its blobs. Return its watch."""
        state = _State(host, marks, frozenset(blobs))
        watch = hashlib.sha256(repr((host, marks, sorted(state.blobs))).encode()).hexdigest()[:32]
        with self._lock:
            self._states.put(watch, state, self._now())
        return watch

    def by_host(self, watches: Iterable[str]) -> dict[str | None, list[str]]:
        """Group watches by the host of their files; None: unknown watches."""
        watches_by_host: dict[str | None, list[str]] = {}
        now = self._now()
        with self._lock:
            for watch in watches:
                state = self._states.get(watch, now)
                if state:
                    self._states.put(watch, state, now)
                host = state.host if state else OWN_DISK if is_digest(watch) else None
                watches_by_host.setdefault(host, []).append(watch)
        return watches_by_host

    def changed(self, watches: Iterable[str]) -> list[str]:
        """List the watches with a changed state. Blocks as the file system does. Raises OSError of the depot's disk."""
        now = self._now()
        with self._lock:
            states = {watch: self._states.get(watch, now) for watch in watches}
        blobs = self._list_blobs()
        return [watch for watch, state in states.items() if not self._is_current(watch, state, blobs)]

    def _is_current(self, watch: str, state: _State | None, blobs: set[str]) -> bool:
        if state is not None:
            return _holds(state, blobs)
        if not is_digest(watch) or hex_of(Digest(watch)) not in blobs:
            return False
        try:
            return self._holds_artifact(watch)
        except ArtifactError:  # a damaged manifest
            return False


def is_digest(watch: str) -> bool:
    """Return whether a watch is the digest of an artifact."""
    return DIGEST.fullmatch(watch) is not None


def _holds(state: _State, blobs: set[str]) -> bool:
    try:
        return state.blobs <= blobs and all(identity_of(os.stat(path)) == identity for path, identity in state.marks)  # noqa: PTH116 (no Paths)
    except (OSError, ValueError):  # a path may hold anything
        return False
