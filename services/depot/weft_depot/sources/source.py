"""A source opens a URI as a snapshot: plain files by name, read through `open`.

It never follows a URI out of its allowed place. After the read it can tell whether all files were of one consistent
state.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.errors import Reason, Refused
from weft.domain.text import quoted
from weft_depot.credentials import Secret
from weft_depot.files import FileFilter, Files

MAX_URI_CHARS = 2048
Identity = tuple[int, int, int, int, int]  # device, inode, size, mtime_ns, ctime_ns
Marks = tuple[tuple[str, Identity], ...]  # local paths, and the files that they led to


class Snapshot(Files, Protocol):
    """A state of a source."""

    @property
    def signature(self) -> str | None:
        """A text, equal only for equal contents; None if the source cannot guarantee it now."""
        ...

    @property
    def marks(self) -> Marks | None:
        """Marks of a state. While all are unchanged, so is the source. None: a check takes more than `stat` calls."""
        ...

    @property
    def expected_sha256(self) -> Mapping[str, str]:
        """The hex SHA-256 of each file's content, by its name, if the source gives it in advance."""
        ...

    def unchanged(self, but_links: bool = False, /) -> bool:
        """Return whether all reads so far were of the state at the opening of the snapshot.

        `but_links`: ignore changes of hard links, owner or mode. Raises Unavailable.
        """
        ...


class ArtifactSource(Protocol):
    """A scheme. Methods block and are called from worker threads."""

    @property
    def accepted_options(self) -> frozenset[str]:
        """The applicable fields among revision, endpoint and credentialsRef. The rest are refused."""
        ...

    @property
    def remote(self) -> bool:
        """Whether a listing costs a remote service something. If so, an unchanged source is not listed repeatedly."""
        ...

    def host(self, request: ResolveRequest, /) -> str:
        """Return the name of the share, the claim or the service of a URI, which hangs as a unit. Never raises."""
        ...

    def open(
        self, request: ResolveRequest, secret: Secret | None, file_filter: FileFilter, /
    ) -> AbstractContextManager[Snapshot]:
        """Open the files selected by `file_filter`, by name. `secret`: of the request's credentials.

        Raises Refused (BadURI, SourceNotFound, SourceForbidden, SecretInvalid, EndpointNotAllowed, TooLarge),
        Unavailable.
        """
        ...


def check_uri(request: ResolveRequest) -> None:
    """Check that the URI is `scheme:rest`, of a bounded length. Raises Refused(BadURI)."""
    uri, scheme = request.uri, request.scheme
    if scheme == uri or not scheme.isascii() or not scheme.isalnum() or not scheme.islower():
        raise Refused(Reason.BAD_URI, f"{uri[:200]!r} is not a URI; write for example file:adapters/upper")
    if len(uri) > MAX_URI_CHARS:
        raise Refused(Reason.BAD_URI, f"a URI of {len(uri)} characters, the limit is {MAX_URI_CHARS}")


def source_of(sources: Mapping[str, ArtifactSource], request: ResolveRequest) -> ArtifactSource:
    """Return the source of a request's scheme. Raises Refused: SchemeNotAllowed; BadURI, also for an unsupported
    option."""
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
    """Split `a/b` into its parts. Raises Refused(BadURI) for parts that lead elsewhere or deceive a reader."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or not path.isprintable() or "\\" in path:
        raise Refused(Reason.BAD_URI, f"{quoted(uri, 200)} has '..', '.', an empty part or an unprintable character")
    return tuple(parts)


def _not_allowed(scheme: str, sources: Mapping[str, ArtifactSource]) -> str:
    allowed = ", ".join(f"{name}:" for name in sorted(sources)) or "none"
    needs = {"file": "--file-root", "pvc": "--pvc-root", "https": "--https-hosts"}.get(scheme)
    hint = f" (the depot has no {needs})" if needs else ""
    return f"{quoted(scheme, 40)} sources are not allowed here{hint}; allowed: {allowed}"
