"""A cache of digests by source state: a repeated resolve of an unchanged source reads no content.

A small JSON file per source under `DATA/resolved/`, written atomically. It only saves work: after a loss or damage the
source is read again. For an upload it is also the proof of its owner. In memory are the recently resolved requests:
their remote source is not contacted again (operators resolve every source every few seconds; hubs and clouds count
requests).
"""

import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.artifacts.digest import Digest, Kind, parse_digest
from weft.artifacts.verify import last_part
from weft.domain.lru import ExpiringDict
from weft.files import write_atomically

MAX_ENTRY_BYTES = 1 << 14
MAX_RECENT = 50_000


@dataclass(frozen=True, slots=True)
class CachedResolution:
    """The digest of a source at a signature."""

    kind: Kind
    source: str  # the URI with its options, the requesting namespace, and the name of its Secret
    uri: str
    signature: str
    digest: Digest
    reader: str = ""  # fingerprint of the credentials of the read; empty: none were needed


class ResolutionCache:
    """The entries, in memory and on disk. Called from any thread."""

    def __init__(self, folder: Path, recheck_ttl_s: float = 0.0) -> None:
        """Read the entries. `recheck_ttl_s`: how long a resolved request counts as recent."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.tmp"):
            left.unlink()
        self._lock = threading.Lock()
        self._entries = {path.stem: entry for path in folder.glob("*.json") if (entry := _load(path))}
        self._models = {name: entry for name, entry in self._entries.items() if entry.kind == "model"}  # few
        self._recent = ExpiringDict[str, bool](MAX_RECENT, recheck_ttl_s)  # by the request's key

    def find(self, kind: Kind, source: str) -> CachedResolution | None:
        """Return the last resolved state of a source, or None."""
        return self._entries.get(_name(kind, source))

    def names(self, digest: str) -> tuple[str, ...]:
        """Return the last path parts of the URIs of a model."""
        with self._lock:
            return tuple(sorted({last_part(e.uri) for e in self._models.values() if e.digest == digest}))

    def add(self, entry: CachedResolution, *, durable: bool = False) -> None:
        """Keep an entry. `durable`: it is on the disk on return. Other entries only save work."""
        name = _name(entry.kind, entry.source)
        content = json.dumps(asdict(entry)).encode()
        with self._lock:
            write_atomically(self._folder / f"{name}.json", content, durable=durable)
            self._entries[name] = entry
            if entry.kind == "model":
                self._models[name] = entry

    def retain(self, digests: set[str]) -> None:
        """Forget the sources of all digests outside of `digests`."""
        with self._lock:
            for name in [name for name, entry in self._entries.items() if entry.digest not in digests]:
                del self._entries[name]
                self._models.pop(name, None)
                (self._folder / f"{name}.json").unlink(missing_ok=True)

    def mark_resolved(self, key: str, now: float) -> None:
        """Record the success of a request at `now` (seconds)."""
        with self._lock:
            self._recent.put(key, True, now)

    def is_recent(self, key: str, now: float) -> bool:
        """Return whether a request has succeeded within the TTL."""
        with self._lock:
            return bool(self._recent.get(key, now))


def _name(kind: Kind, source: str) -> str:
    return hashlib.sha256(f"{kind} {source}".encode()).hexdigest()


def _load(path: Path) -> CachedResolution | None:
    """Read an entry. Return None for a foreign or damaged file: then the source is read again, and the entry
    replaced."""
    try:
        with path.open("rb") as file:
            entry = CachedResolution(**json.loads(file.read(MAX_ENTRY_BYTES)))
        parse_digest(entry.digest)
    except (ValueError, TypeError):
        return None
    return entry if _name(entry.kind, entry.source) == path.stem else None
