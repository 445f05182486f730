"""Where artifacts come from. A scheme is one module here and one line in `weft_depot.main`.

A source opens a URI as a snapshot: plain files by name, read through `open`. It never follows where a URI must not
lead, and it can say afterwards whether what was read was one consistent state.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from weft.artifacts.errors import Reason, Refused

MAX_URI_CHARS = 2048
Wants = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Location:
    """What a request says about its source. `path` is what follows the scheme's colon."""

    scheme: str
    path: str
    revision: str | None
    namespace: str
    credentials: str | None


class Files(Protocol):
    """Named files that can be read: a source's snapshot, a copy, or blobs."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Plain file names -> bytes."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open one of them; the caller closes it. Raises Refused, Unavailable."""
        ...


class Snapshot(Files, Protocol):
    """One state of a source."""

    @property
    def signature(self) -> str | None:
        """Equal signatures mean equal contents; None where the source cannot promise that now."""
        ...

    def unchanged(self) -> bool:
        """Whether everything read so far was of the state this snapshot was opened at."""
        ...


class Source(Protocol):
    """One scheme. Methods block and are called from worker threads."""

    def open(self, location: Location, wants: Wants) -> AbstractContextManager[Snapshot]:
        """The files that `wants` asks for, by name. Raises Refused (BadURI, SourceNotFound, TooLarge), Unavailable."""
        ...


def parse_uri(uri: str, *, revision: str | None, namespace: str, credentials: str | None) -> Location:
    """`scheme:rest` -> Location. Raises Refused(BadURI)."""
    scheme, colon, path = uri.partition(":")
    if not colon or not scheme.isascii() or not scheme.isalnum() or not scheme.islower():
        raise Refused(Reason.BAD_URI, f"{uri[:200]!r} is no URI; write for example file:adapters/upper")
    if len(uri) > MAX_URI_CHARS:
        raise Refused(Reason.BAD_URI, f"a URI of {len(uri)} characters, the limit is {MAX_URI_CHARS}")
    return Location(scheme, path, revision or None, namespace, credentials or None)


def open_source(sources: Mapping[str, Source], location: Location, wants: Wants) -> AbstractContextManager[Snapshot]:
    """Open a location with the source of its scheme. Raises Refused(SchemeNotAllowed) and what the source raises."""
    source = sources.get(location.scheme)
    if source is None:
        allowed = ", ".join(f"{scheme}:" for scheme in sorted(sources)) or "none (start the depot with --file-root)"
        raise Refused(Reason.SCHEME_NOT_ALLOWED, f"{location.scheme}: is not allowed here; allowed: {allowed}")
    return source.open(location, wants)
