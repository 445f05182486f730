"""Why an artifact is refused, as a value that every process understands.

ArtifactError   every error about an artifact: a `reason` (API, CamelCase) and a message with the remedy
`- Refused      correct the source, the artifact or the request: trying again changes nothing
"""

from enum import StrEnum

from weft.domain.text import sanitize


class Reason(StrEnum):
    """Why an artifact was not taken. Reasons are API: they appear in conditions and never change their meaning."""

    SCHEME_NOT_ALLOWED = "SchemeNotAllowed"  # the URI's scheme is unknown or switched off here
    BAD_URI = "BadURI"  # the URI is malformed or leaves what its scheme may reach
    SOURCE_NOT_FOUND = "SourceNotFound"  # nothing at that URI, or no blob of that digest
    SOURCE_UNREACHABLE = "SourceUnreachable"  # the source did not answer; tried again later
    SOURCE_FORBIDDEN = "SourceForbidden"  # the source refuses these credentials, or has none
    SECRET_MISSING = "SecretMissing"  # noqa: S105 (credentialsRef names no Secret there)
    SECRET_FORBIDDEN = "SecretForbidden"  # noqa: S105 (the depot may not read that Secret)
    SECRET_INVALID = "SecretInvalid"  # noqa: S105 (it lacks a key that the scheme needs)
    CONFIG_MAP_MISSING = "ConfigMapMissing"  # configMapRef names no ConfigMap there, or no text entry of it
    CONFIG_MAP_FORBIDDEN = "ConfigMapForbidden"  # the depot may not read that ConfigMap
    ENDPOINT_NOT_ALLOWED = "EndpointNotAllowed"  # the endpoint, or where it leads, is none this installation allows
    DEPOT_FULL = "DepotFull"  # the depot's disk is full; tried again later
    MISSING_FILE = "MissingFile"  # a file that every artifact of its kind has is not there
    UNSAFE_FORMAT = "UnsafeFormat"  # weights only as pickles (.bin, .pt, .pkl)
    HEADER_TOO_LARGE = "HeaderTooLarge"  # a safetensors header beyond the limit
    HEADER_TRUNCATED = "HeaderTruncated"  # the file ends inside its header
    HEADER_INVALID = "HeaderInvalid"  # a header that is not what safetensors defines
    OFFSETS_INVALID = "OffsetsInvalid"  # tensors overlap, leave holes, or do not end where the file ends
    CONFIG_INVALID = "ConfigInvalid"  # a config that is no JSON object or holds a wrong value
    UNSUPPORTED_ADAPTER = "UnsupportedAdapter"  # DoRA, modules_to_save, bias, not LORA, ...
    RANK_TOO_LARGE = "RankTooLarge"  # above spec.maxRank or the pool's lora.maxRank
    BASE_MISMATCH = "BaseMismatch"  # trained on another base model
    SHAPE_MISMATCH = "ShapeMismatch"  # a tensor is missing or has another shape than the base or the rank asks for
    UNKNOWN_MODULE = "UnknownModule"  # a tensor or target the base model does not have
    DTYPE_NOT_SUPPORTED = "DtypeNotSupported"  # not float32, float16 or bfloat16
    NOT_FINITE = "NotFinite"  # a weight is NaN or infinite
    DIGEST_MISMATCH = "DigestMismatch"  # the content is not the one that was named, or changed while it was read
    TOO_LARGE = "TooLarge"  # beyond the size limit
    UNSUPPORTED_MODEL = "UnsupportedModel"  # an architecture or option the runners do not have


class ArtifactError(Exception):
    """Something is wrong with an artifact. `reason` is API, `message` is for people and always printable: it quotes
    text from outside, and is shown on terminals and in JSON.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason, self.message = reason, sanitize(message)
        super().__init__(f"{reason}: {self.message}")


class Refused(ArtifactError):
    """The artifact, its source or the request has to be corrected; trying again changes nothing."""
