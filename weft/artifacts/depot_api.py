"""Requests to a depot and its answers: `POST /v1/resolve` and `GET /v1/operations/ID`, by their fields' names in JSON.

The operator makes requests of objects that were admitted; the depot, which trusts nobody, checks the fields' bounds
where it reads them (`parse`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, model_validator, with_config
from pydantic.alias_generators import to_camel

from weft.artifacts.digest import Kind, digest_of, parse_digest
from weft.chat_template import MAX_SOURCE

INLINE, CONFIG_MAP = "inline:", "configmap:"  # of templates: `text` has it, or an entry of a ConfigMap
REMOTE = ("hf:", "s3:", "oci:", "https:", CONFIG_MAP)  # a ConfigMap is served by the API server
Text = Annotated[str, Field(max_length=4096)]
DigestText = Annotated[str, AfterValidator(parse_digest)]
State = Literal["Pending", "Validated", "Fetched", "Failed"]
FINISHED: tuple[State, ...] = ("Fetched", "Failed")
Verdict = Mapping[str, Any]
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _refuse(_: object) -> None:
    raise ValueError("no depot is told that: leave it out")


@with_config(extra="forbid", alias_generator=to_camel)
@dataclass(frozen=True, slots=True)
class BaseRef:
    """The base an adapter has to fit. Without a name only shapes decide; `aliases` are further names it goes by."""

    digest: DigestText
    name: Text | None = None
    aliases: Annotated[tuple[Text, ...], Field(max_length=16)] = ()


@with_config(extra="forbid", alias_generator=to_camel)
@dataclass(frozen=True, slots=True)
class CredentialsRef:
    """A secret of the same namespace."""

    name: Text


@with_config(extra="forbid", alias_generator=to_camel)
@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """A source to resolve. Equal requests have equal answers while the source stays as it is."""

    kind: Kind
    uri: Annotated[str, Field(max_length=8192)]
    namespace: Text
    revision: Text | None = None
    digest: DigestText | None = None
    credentials_ref: CredentialsRef | None = None
    endpoint: Text | None = None
    base: BaseRef | None = None
    max_rank: Annotated[int, Field(ge=1, le=16384)] | None = None
    text: Annotated[str, Field(max_length=MAX_SOURCE)] | None = None  # the chat template of a URI `inline:`
    # The name that its asker gives the content.
    version: Annotated[str | None, Field(exclude=True), BeforeValidator(_refuse)] = None

    @staticmethod
    def parse(body: bytes) -> "ResolveRequest":
        """Read a request's body. Raises pydantic.ValidationError."""
        return _REQUEST.validate_json(body)

    def body(self) -> dict[str, Any]:
        """Make the body as JSON; absent fields are left out."""
        return _REQUEST.dump_python(self, mode="json", by_alias=True, exclude_defaults=True)

    @property
    def key(self) -> str:
        """A short key, equal for equal bodies: many are remembered."""
        text = digest_of(self.text.encode()) if self.text is not None else ""
        return _REQUEST.dump_json(self, exclude={"text"}).decode() + text

    @property
    def source(self) -> str:
        """The source and the namespace that reads it: what one was given is never handed to another by name."""
        return source_key(self.uri, self.namespace, self.revision, self.endpoint, self.credentials)

    @property
    def scheme(self) -> str:
        return self.uri.partition(":")[0]

    @property
    def path(self) -> str:
        """What follows the scheme's colon."""
        return self.uri.partition(":")[2]

    @property
    def credentials(self) -> str | None:
        """The name of a Secret of its namespace."""
        return self.credentials_ref.name if self.credentials_ref else None

    @property
    def base_digest(self) -> str | None:
        return self.base.digest if self.base else None

    @property
    def remote(self) -> bool:
        """Whether others serve the source."""
        return self.uri.startswith(REMOTE)

    @property
    def watched_by_digest(self) -> bool:
        """Whether the source's state is known by its content's digest alone: a change shows only when it is read."""
        return self.remote or self.digest is not None

    @property
    def fixed(self) -> bool:
        """Whether the source has one content for ever."""
        return self.digest is not None or "@sha256:" in self.uri or bool(_COMMIT.fullmatch(self.revision or ""))

    @model_validator(mode="after")
    def _template_is_whole(self) -> Self:
        of_template, is_template = self.uri.startswith((INLINE, CONFIG_MAP)), self.kind == "template"
        if is_template != of_template or (is_template and self.base is None):
            raise ValueError(f"a template has a base and is {INLINE} or {CONFIG_MAP}, and nothing else is")
        if (self.text is not None) != self.uri.startswith(INLINE):
            raise ValueError(f"text is for {INLINE}, which needs it")
        return self


_REQUEST = TypeAdapter(ResolveRequest)


def source_key(
    uri: str, namespace: str, revision: str | None = None, endpoint: str | None = None, secret: str | None = None
) -> str:
    """The source that is read, and the namespace that reads it. `secret`: the name of one of that namespace."""
    return json.dumps([uri, revision, endpoint, namespace, secret])


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """The state of one operation at the depot. A Failed one keeps its verdict if it had one."""

    state: State = "Pending"
    digest: str | None = None
    verdict: Verdict | None = None
    reason: str = ""
    message: str = ""
    watch: str | None = None  # while the depot knows it as unchanged, so is this answer
    retry_after_s: float = 0.0  # how long the source's server asks to wait

    @property
    def finished(self) -> bool:
        return self.state in FINISHED
