"""Errors of artifacts, by the caller's remedy.

ArtifactError            every error here: a `reason` (API, CamelCase) and a message with the remedy
|- Refused               correct the source, the artifact or the request: a retry does not help
|  |- BadDigest          a text is not a digest (also a ValueError)
|  |- Damaged            a blob on this disk does not match its digest: drop it, fetch it again
|  `- UnknownDigest      the folder or depot has no blob with this digest
`- Unavailable           try again later: the source or the depot does not answer
   `- DepotFull          the depot's own disk is full
"""

from weft.domain.model.errors import ArtifactError, Reason, Refused


class Unavailable(ArtifactError):
    """The source or the depot does not answer now. A later retry may help.

    `retry_after_s`: the wait that it asks for, in seconds; 0: unspecified.
    """

    def __init__(self, message: str, reason: Reason = Reason.SOURCE_UNREACHABLE, *, retry_after_s: int = 0) -> None:
        super().__init__(reason, message)
        self.retry_after_s = retry_after_s


class DepotFull(Unavailable):
    """The depot's disk is full now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Reason.DEPOT_FULL)


class BadDigest(Refused, ValueError):
    """A text other than `sha256:` followed by 64 lower-case hex digits."""

    def __init__(self, text: str) -> None:
        super().__init__(
            Reason.DIGEST_MISMATCH, f"{text[:100]!r} is not a digest; expected 'sha256:' and 64 lower-case hex digits"
        )


class Damaged(Refused):
    """A blob on this disk does not match its digest. `difference` describes how."""

    def __init__(self, digest: str, difference: str) -> None:
        super().__init__(Reason.DIGEST_MISMATCH, f"the blob {digest} is damaged: {difference}")
        self.digest, self.difference = digest, difference


class UnknownDigest(Refused):
    """The folder or depot has no blob with this digest."""

    def __init__(self, digest: str, folder: str) -> None:
        super().__init__(Reason.SOURCE_NOT_FOUND, f"{folder} does not hold {digest}")
        self.digest = digest
