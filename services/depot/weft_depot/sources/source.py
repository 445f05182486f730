"""A source opens a URI as a snapshot: plain files by name, read through `open`.

It never follows where a URI must not lead, and it knows afterwards whether the files that were read were one consistent
state.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.errors import Reason, Refused
from weft.domain.text import quoted
from weft_depot.credentials import Secret

MAX_URI_CHARS = 2048
FileFilter = Callable[[str], bool]
Identity = tuple[int, int, int, int, int]  # device, inode, size, mtime_ns, ctime_ns
Marks = tuple[tuple[str, Identity], ...]  # paths of this machine, and what they led to


class Files(Protocol):
    """Named files that can be read: a source's snapshot, a copy, or blobs."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of each file, by its plain name."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open one of them; the caller closes it. Raises Refused, Unavailable; so does reading."""
        ...


class Snapshot(Files, Protocol):
    """One state of a source."""

    @property
    def signature(self) -> str | None:
        """A text that is equal only for equal contents; None where the source cannot promise that now."""
        ...

    @property
    def marks(self) -> Marks | None:
        """Marks of a state: while all are as they were, so is the source; None: that takes more than `stat` calls."""
        ...

    @property
    def expected_sha256(self) -> Mapping[str, str]:
        """The hex SHA-256 of each file's content, by its name, where the source gives it beforehand."""
        ...

    def unchanged(self, but_links: bool = False, /) -> bool:
        """Whether everything read so far was of the state this snapshot was opened at.

        `but_links`: a file may have got or lost a hard link, or have another owner or mode. Raises Unavailable.
        """
        ...


class ArtifactSource(Protocol):
    """One scheme. Methods block and are called from worker threads."""

    @property
    def accepted_options(self) -> frozenset[str]:
        """The fields of revision, endpoint and credentialsRef that apply here; the others are refused."""
        ...

    @property
    def remote(self) -> bool:
        """Whether a listing costs another service something: then an unchanged source is not listed all the time."""
        ...

    def host(self, request: ResolveRequest, /) -> str:
        """The name of what hangs as one: the share, the claim or the service behind a URI. Never raises."""
        ...

    def open(
        self, request: ResolveRequest, secret: Secret | None, file_filter: FileFilter, /
    ) -> AbstractContextManager[Snapshot]:
        """Open the files that `file_filter` asks for, by name. `secret`: what the request's credentials name.

        Raises Refused (BadURI, SourceNotFound, SourceForbidden, SecretInvalid, EndpointNotAllowed, TooLarge),
        Unavailable.
        """
        ...


def check_uri(request: ResolveRequest) -> None:
    """Check that the URI is `scheme:rest`, of a bounded length. Raises Refused(BadURI)."""
    uri, scheme = request.uri, request.scheme
    if scheme == uri or not scheme.isascii() or not scheme.isalnum() or not scheme.islower():
        raise Refused(Reason.BAD_URI, f"{uri[:200]!r} is no URI; write for example file:adapters/upper")
    if len(uri) > MAX_URI_CHARS:
        raise Refused(Reason.BAD_URI, f"a URI of {len(uri)} characters, the limit is {MAX_URI_CHARS}")


def source_of(sources: Mapping[str, ArtifactSource], request: ResolveRequest) -> ArtifactSource:
    """Find the source of a request's scheme. Raises Refused: SchemeNotAllowed; BadURI, also for an option not taken."""
    check_uri(request)
    source = sources.get(request.scheme)
    if source is None:
        raise Refused(Reason.SCHEME_NOT_ALLOWED, _not_allowed(request.scheme, sources))
    options = {"revision": request.revision, "endpoint": request.endpoint, "credentialsRef": request.credentials}
    for option, value in options.items():
        if value and option not in source.accepted_options:
            accepted = ", ".join(sorted(source.accepted_options)) or "no option"
            raise Refused(Reason.BAD_URI, f"{request.scheme}: takes no {option}; remove it (it takes {accepted})")
    return source


def relative_parts(path: str, uri: str) -> tuple[str, ...]:
    """Split `a/b` into its parts. Raises Refused(BadURI) for what could lead elsewhere or deceive a reader."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or not path.isprintable() or "\\" in path:
        raise Refused(Reason.BAD_URI, f"{quoted(uri, 200)} holds '..', '.', an empty part or an unprintable sign")
    return tuple(parts)


def _not_allowed(scheme: str, sources: Mapping[str, ArtifactSource]) -> str:
    allowed = ", ".join(f"{name}:" for name in sorted(sources)) or "none"
    needs = {"file": "--file-root", "pvc": "--pvc-root", "https": "--https-hosts"}.get(scheme)
    hint = f" (the depot has no {needs})" if needs else ""
    return f"{quoted(scheme, 40)} sources are not allowed here{hint}; allowed: {allowed}"
