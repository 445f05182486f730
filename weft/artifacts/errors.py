"""What can be wrong with an artifact, split by what the caller can do.

ArtifactError            every error here: a `reason` (API, CamelCase) and a message with the remedy
|- Refused               correct the source, the artifact or the request: trying again changes nothing
|  |- BadDigest          a text that is no digest (also a ValueError)
|  |- Damaged            a blob on this disk does not match its digest: drop it, fetch it again
|  `- UnknownDigest      no blob of this digest is held
`- Unavailable           try again later: the source or the depot does not answer
   `- DepotFull          the depot's own disk is full
"""

from weft.domain.model.errors import ArtifactError, Reason, Refused


class Unavailable(ArtifactError):
    """The other side does not answer now; trying again later may help.

    `retry_after_s`: how long it asks to wait; 0: it does not say.
    """

    def __init__(self, message: str, reason: Reason = Reason.SOURCE_UNREACHABLE, *, retry_after_s: int = 0) -> None:
        super().__init__(reason, message)
        self.retry_after_s = retry_after_s


class DepotFull(Unavailable):
    """The depot's own disk is full now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Reason.DEPOT_FULL)


class BadDigest(Refused, ValueError):
    """A text that is not `sha256:` followed by 64 lower-case hex digits."""

    def __init__(self, text: str) -> None:
        super().__init__(
            Reason.DIGEST_MISMATCH, f"{text[:100]!r} is no digest; one is 'sha256:' and 64 lower-case hex digits"
        )


class Damaged(Refused):
    """A blob of this disk does not match its digest; `difference` is how."""

    def __init__(self, digest: str, difference: str) -> None:
        super().__init__(Reason.DIGEST_MISMATCH, f"the blob {digest} is damaged: {difference}")
        self.digest, self.difference = digest, difference


class UnknownDigest(Refused):
    """No blob of this digest is held."""

    def __init__(self, digest: str, folder: str) -> None:
        super().__init__(Reason.SOURCE_NOT_FOUND, f"{folder} does not hold {digest}")
        self.digest = digest
