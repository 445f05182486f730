"""The sources of a base model's or an adapter's files."""

import re
from typing import Annotated, ClassVar

from pydantic import Field

from weft.api.fields import ApiModel, DigestText, Endpoint, ObjectName, Rule, Uri

# of a Hugging Face hub, as people write it: ORG/NAME[@REVISION]
REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)


class SecretRef(ApiModel):
    """A Secret in the namespace of the object. Only the depot reads it."""

    name: ObjectName
    """The name of the Secret. It needs these keys: `token` for hf:; `accessKeyId`, `secretAccessKey` and, for temporary
    credentials, `sessionToken` for s3:; `username` and `password`, or `.dockerconfigjson`, for oci:. Otherwise Fetched
    is False with reason SecretMissing or SecretInvalid."""


class Artifact(ApiModel):
    """Files named by a URI. A field that does not apply to the URI's scheme is refused, not ignored."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "revision",
            "revision is for hf: sources; other schemes have no versions",
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
            "credentialsRef is for hf:, s3: and oci: sources; remove it for other schemes",
            "!has(self.credentialsRef) || self.uri.startsWith('hf:') || self.uri.startsWith('s3:')"
            " || self.uri.startsWith('oci:')",
            lambda source: source.credentials_ref is None or source.uri.startswith(("hf:", "s3:", "oci:")),
        ),
        Rule(
            "digest",
            "an https: source needs a digest: the digest is the only version of its content",
            "has(self.digest) || !self.uri.startsWith('https:')",
            lambda source: source.digest is not None or not source.uri.startswith("https:"),
        ),
    )

    uri: Uri
    """The address of the files: file:PATH below the depot's file root, pvc:CLAIM/PATH, hf:ORG/NAME, s3://BUCKET/PREFIX,
    oci://HOST/REPOSITORY:TAG (files as `oras push` writes them), https://HOST/FOLDER, or depot:sha256:... for an
    adapter uploaded with `weft push`. A scheme that the platform does not allow is refused with reason
    SchemeNotAllowed."""
    revision: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """The branch, tag or commit of an hf: source. The default is main. A branch or tag is read once, and again when the
    object changes. With the operator's setting poll-seconds, a new commit becomes a new content."""
    digest: DigestText | None = None
    """The digest of the expected content. Different content is refused with reason DigestMismatch. An https: source
    needs it."""
    credentials_ref: SecretRef | None = None
    """The Secret with credentials for an hf:, s3: or oci: source. Without it the source has to be public."""
    endpoint: Endpoint | None = None
    """The server of an s3: source outside AWS, for example https://minio.example.com:9000. The platform lists the
    allowed servers. A server outside the list is refused with reason EndpointNotAllowed."""
