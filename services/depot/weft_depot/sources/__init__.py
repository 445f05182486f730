"""Where artifacts come from. A scheme is one module here and one line in `weft_depot.main`.

A source opens a URI as a snapshot: plain files by name, read through `open`. It never follows where a URI must not
lead, and it knows afterwards whether the files that were read were one consistent state.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.errors import Reason, Refused
from weft.domain.text import quoted
from weft_depot.credentials import Secret

MAX_URI_CHARS = 2048
FileFilter = Callable[[str], bool]
Identity = tuple[int, int, int, int, int]  # device, inode, size, mtime_ns, ctime_ns
Marks = tuple[tuple[str, Identity], ...]  # paths of this machine, and what they led to


@dataclass(frozen=True, slots=True)
class Location:
    """The source part of a request. `path` is what follows the scheme's colon."""

    scheme: str
    path: str
    revision: str | None
    namespace: str
    credentials: str | None
    endpoint: str | None = None
    secret: Secret | None = field(default=None, repr=False)  # what `credentials` names, once it has been read

    @property
    def options(self) -> tuple[str, ...]:
        """The optional fields that the request sets, by their names in a manifest."""
        given = {"revision": self.revision, "endpoint": self.endpoint, "credentialsRef": self.credentials}
        return tuple(name for name, value in given.items() if value)


class Files(Protocol):
    """Named files that can be read: a source's snapshot, a copy, or blobs."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Plain file names -> bytes."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open one of them; the caller closes it. Raises Refused, Unavailable; so does reading."""
        ...


class Snapshot(Files, Protocol):
    """One state of a source."""

    @property
    def signature(self) -> str | None:
        """Equal signatures mean equal contents; None where the source cannot promise that now."""
        ...

    @property
    def marks(self) -> Marks | None:
        """While all of these are as they were, so is the source; None where that takes more than `stat` calls."""
        ...

    @property
    def expected_sha256(self) -> Mapping[str, str]:
        """File name -> hex SHA-256 of its content, where the source gives it beforehand."""
        ...

    def unchanged(self, but_links: bool = False, /) -> bool:
        """Whether everything read so far was of the state this snapshot was opened at. Raises Unavailable.

        `but_links`: a file may have got or lost a hard link, or have another owner or mode.
        """
        ...


class ArtifactSource(Protocol):
    """One scheme. Methods block and are called from worker threads."""

    @property
    def accepted_options(self) -> frozenset[str]:
        """Which of `Location.options` apply here; the others are refused."""
        ...

    @property
    def remote(self) -> bool:
        """Whether a listing costs another service something: then an unchanged source is not listed all the time."""
        ...

    def host(self, location: Location) -> str:
        """What hangs as one: the share, the claim or the service behind a location. Never raises."""
        ...

    def open(self, location: Location, file_filter: FileFilter) -> AbstractContextManager[Snapshot]:
        """The files that `file_filter` asks for, by name.

        Raises Refused (BadURI, SourceNotFound, SourceForbidden, SecretInvalid, EndpointNotAllowed, TooLarge),
        Unavailable.
        """
        ...


def location_of(request: ResolveRequest) -> Location:
    """The URI of a request, `scheme:rest`, and what goes with it. Raises Refused(BadURI)."""
    uri = request.uri
    scheme, colon, path = uri.partition(":")
    if not colon or not scheme.isascii() or not scheme.isalnum() or not scheme.islower():
        raise Refused(Reason.BAD_URI, f"{uri[:200]!r} is no URI; write for example file:adapters/upper")
    if len(uri) > MAX_URI_CHARS:
        raise Refused(Reason.BAD_URI, f"a URI of {len(uri)} characters, the limit is {MAX_URI_CHARS}")
    options = request.revision or None, request.namespace, request.credentials or None, request.endpoint or None
    return Location(scheme, path, *options)


def source_of(sources: Mapping[str, ArtifactSource], location: Location) -> ArtifactSource:
    """The source of a location's scheme. Raises Refused: SchemeNotAllowed, BadURI for an option it does not take."""
    source = sources.get(location.scheme)
    if source is None:
        raise Refused(Reason.SCHEME_NOT_ALLOWED, _not_allowed(location.scheme, sources))
    for option in location.options:
        if option not in source.accepted_options:
            taken = ", ".join(sorted(source.accepted_options)) or "no option"
            raise Refused(Reason.BAD_URI, f"{location.scheme}: takes no {option}; remove it (it takes {taken})")
    return source


def relative_parts(path: str, uri: str) -> tuple[str, ...]:
    """`a/b` -> its parts. Raises Refused(BadURI) for what could lead elsewhere or deceive a reader."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or not path.isprintable() or "\\" in path:
        raise Refused(Reason.BAD_URI, f"{quoted(uri, 200)} holds '..', '.', an empty part or an unprintable sign")
    return tuple(parts)


def _not_allowed(scheme: str, sources: Mapping[str, ArtifactSource]) -> str:
    allowed = ", ".join(f"{name}:" for name in sorted(sources)) or "none"
    needs = {"file": "--file-root", "pvc": "--pvc-root", "https": "--https-hosts"}.get(scheme)
    how = f" (the depot has no {needs})" if needs else ""
    return f"{quoted(scheme, 40)} sources are not allowed here{how}; allowed: {allowed}"
