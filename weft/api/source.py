"""Where the files of a base model or an adapter come from."""

from typing import Annotated, ClassVar

from pydantic import Field

from weft.api.fields import ApiModel, DigestText, Endpoint, ObjectName, Rule, Uri


class SecretRef(ApiModel):
    """A Secret of the object's own namespace; only the depot reads it."""

    name: ObjectName
    """Of the Secret. Keys for hf: token. For s3: accessKeyId, secretAccessKey and, where there is one, sessionToken."""


class Artifact(ApiModel):
    """Files by URI; what a scheme does not know is refused, not ignored."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "revision",
            "revision is for hf: sources; the others have no versions",
            "!has(self.revision) || self.uri.startsWith('hf:')",
            lambda source: source.revision is None or source.uri.startswith("hf:"),
        ),
        Rule(
            "endpoint",
            "endpoint is for s3: sources",
            "!has(self.endpoint) || self.uri.startsWith('s3:')",
            lambda source: source.endpoint is None or source.uri.startswith("s3:"),
        ),
        Rule(
            "credentialsRef",
            "credentialsRef is for hf: and s3: sources; the others need none",
            "!has(self.credentialsRef) || self.uri.startsWith('hf:') || self.uri.startsWith('s3:')",
            lambda source: source.credentials_ref is None or source.uri.startswith(("hf:", "s3:")),
        ),
    )

    uri: Uri
    """file:PATH below the depot's file root, pvc:CLAIM/PATH, hf:ORG/NAME, s3://BUCKET/PREFIX, or depot:sha256:... for
    an adapter that was uploaded (`weft push`)."""
    revision: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """A branch, tag or commit of an hf: source; main when unset. A branch or tag is followed."""
    digest: DigestText | None = None
    """The content that is expected; anything else is refused with DigestMismatch."""
    credentials_ref: SecretRef | None = None
    """The Secret to read an hf: or s3: source with; without one the source has to be public."""
    endpoint: Endpoint | None = None
    """The server of an s3: source that is not AWS, for example https://minio.example.com:9000."""
