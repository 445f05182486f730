"""Where the files of a base model or an adapter come from."""

import re
from typing import Annotated, ClassVar

from pydantic import Field

from weft.api.fields import ApiModel, DigestText, DurationText, Endpoint, ObjectName, Rule, Uri, duration_s

POLL_LEAST_S = 10
# of a Hugging Face hub, as people write it: ORG/NAME[@REVISION]
REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


class SecretRef(ApiModel):
    """A Secret of the object's own namespace; only the depot reads it."""

    name: ObjectName
    """The name of the Secret. It has to have these keys: `token` for hf:; `accessKeyId`, `secretAccessKey` and, for
    temporary credentials, `sessionToken` for s3:; `username` and `password`, or `.dockerconfigjson`, for oci:.
    Otherwise Fetched is False with reason SecretMissing or SecretInvalid."""


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
            "credentialsRef is for hf:, s3: and oci: sources; the others need none",
            "!has(self.credentialsRef) || self.uri.startsWith('hf:') || self.uri.startsWith('s3:')"
            " || self.uri.startsWith('oci:')",
            lambda source: source.credentials_ref is None or source.uri.startswith(("hf:", "s3:", "oci:")),
        ),
        Rule(
            "digest",
            "an https: source needs a digest: its content has no other version",
            "has(self.digest) || !self.uri.startsWith('https:')",
            lambda source: source.digest is not None or not source.uri.startswith("https:"),
        ),
        Rule(
            "pollInterval",
            "pollInterval is for hf:, s3: and oci: sources that can change: without a digest, and not of a commit",
            "!has(self.pollInterval) || ((self.uri.startsWith('hf:') || self.uri.startsWith('s3:')"
            " || self.uri.startsWith('oci:')) && !has(self.digest) && !self.uri.contains('@sha256:')"
            " && !(has(self.revision) && self.revision.matches('^[0-9a-f]{40}$')))",
            lambda source: source.poll_interval is None or source.can_be_polled,
        ),
        Rule(
            "pollInterval",
            f"pollInterval has to be at least {POLL_LEAST_S}s",
            f"!has(self.pollInterval) || duration(self.pollInterval) >= duration('{POLL_LEAST_S}s')",
            lambda source: source.poll_interval is None or duration_s(source.poll_interval) >= POLL_LEAST_S,
        ),
    )

    uri: Uri
    """The address of the files: file:PATH below the depot's file root, pvc:CLAIM/PATH, hf:ORG/NAME,
    s3://BUCKET/PREFIX, oci://HOST/REPOSITORY:TAG (files as `oras push` writes them), https://HOST/FOLDER, or
    depot:sha256:... for an adapter that was uploaded with `weft push`. A scheme that the platform does not allow is
    refused with reason SchemeNotAllowed."""
    revision: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """The branch, tag or commit of an hf: source. It defaults to main. A branch or tag is followed where
    pollInterval is set: a new commit becomes a new content."""
    digest: DigestText | None = None
    """The digest of the content that is expected. Any other content is refused with reason DigestMismatch. An
    https: source needs it."""
    credentials_ref: SecretRef | None = None
    """The Secret whose credentials read an hf:, s3: or oci: source. Without it the source has to be public."""
    endpoint: Endpoint | None = None
    """The server of an s3: source that is not AWS, for example https://minio.example.com:9000. The platform names
    the servers that are allowed; another one is refused with reason EndpointNotAllowed."""
    poll_interval: DurationText | None = None
    """How often the source is asked for a new content, for example 5m: an hf: branch or tag, an s3: prefix, an oci:
    tag. At least 10s. Without it the source is read once, and again when the object changes or the depot has lost
    the content. It is not for sources with a digest or of a commit. Files of file: and pvc: sources are noticed
    when they change."""

    @property
    def can_be_polled(self) -> bool:
        """Whether asking again may give another content."""
        remote = self.uri.startswith(("hf:", "s3:", "oci:")) and "@sha256:" not in self.uri
        return remote and self.digest is None and not (self.revision and COMMIT.fullmatch(self.revision))
