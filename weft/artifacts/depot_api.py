"""Requests to a depot and its answers: `POST /v1/resolve` and `GET /v1/operations/ID`, by their JSON field names.

The operator makes requests from admitted objects. The depot does not trust callers and checks the fields' bounds when
it parses a request (`parse`).
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

INLINE, CONFIG_MAP = "inline:", "configmap:"  # of templates: the text is in `text`, or in an entry of a ConfigMap
REMOTE = ("hf:", "s3:", "oci:", "https:", CONFIG_MAP)  # a ConfigMap is served by the API server
Text = Annotated[str, Field(max_length=4096)]
DigestText = Annotated[str, AfterValidator(parse_digest)]
State = Literal["Pending", "Validated", "Fetched", "Failed"]
FINISHED: tuple[State, ...] = ("Fetched", "Failed")
Verdict = Mapping[str, Any]
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _refuse(_: object) -> None:
    raise ValueError("the depot does not accept this field: leave it out")


@with_config(extra="forbid", alias_generator=to_camel)
@dataclass(frozen=True, slots=True)
class BaseRef:
    """The base model of an adapter. Without a name only shapes decide. `aliases` are further names of the base."""

    digest: DigestText
    name: Text | None = None
    aliases: Annotated[tuple[Text, ...], Field(max_length=16)] = ()


@with_config(extra="forbid", alias_generator=to_camel)
@dataclass(frozen=True, slots=True)
class CredentialsRef:
    """A secret in the namespace of the request."""

    name: Text


@with_config(extra="forbid", alias_generator=to_camel)
@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """A request to resolve a source. Equal requests have equal answers while the source does not change."""

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
    # The caller's name of the content.
    version: Annotated[str | None, Field(exclude=True), BeforeValidator(_refuse)] = None

    @staticmethod
    def parse(body: bytes) -> "ResolveRequest":
        """Parse the body of a request. Raises pydantic.ValidationError."""
        return _REQUEST.validate_json(body)

    def body(self) -> dict[str, Any]:
        """Return the body as JSON types, without absent fields."""
        return _REQUEST.dump_python(self, mode="json", by_alias=True, exclude_defaults=True)

    @property
    def key(self) -> str:
        """A short key, equal for equal bodies. It is short because the depot remembers many."""
        text = digest_of(self.text.encode()) if self.text is not None else ""
        return _REQUEST.dump_json(self, exclude={"text"}).decode() + text

    @property
    def source(self) -> str:
        """The source and the namespace that reads it. A namespace never gets content read by another namespace by its
        name."""
        return source_key(self.uri, self.namespace, self.revision, self.endpoint, self.credentials)

    @property
    def scheme(self) -> str:
        return self.uri.partition(":")[0]

    @property
    def path(self) -> str:
        """The part of the URI after the scheme's colon."""
        return self.uri.partition(":")[2]

    @property
    def credentials(self) -> str | None:
        """The name of a Secret in the request's namespace."""
        return self.credentials_ref.name if self.credentials_ref else None

    @property
    def base_digest(self) -> str | None:
        return self.base.digest if self.base else None

    @property
    def remote(self) -> bool:
        """Whether a foreign service serves the source."""
        return self.uri.startswith(REMOTE)

    @property
    def watched_by_digest(self) -> bool:
        """Whether only its content's digest identifies the source's state: a change shows only after a read."""
        return self.remote or self.digest is not None

    @property
    def fixed(self) -> bool:
        """Whether the content of the source can never change."""
        return self.digest is not None or "@sha256:" in self.uri or bool(_COMMIT.fullmatch(self.revision or ""))

    @model_validator(mode="after")
    def _template_is_whole(self) -> Self:
        of_template, is_template = self.uri.startswith((INLINE, CONFIG_MAP)), self.kind == "template"
        if is_template != of_template or (is_template and self.base is None):
            raise ValueError(f"kind template needs a base and a URI {INLINE} or {CONFIG_MAP}; other kinds do not")
        if (self.text is not None) != self.uri.startswith(INLINE):
            raise ValueError(f"text is required with {INLINE}, and not allowed otherwise")
        return self


_REQUEST = TypeAdapter(ResolveRequest)


def source_key(
    uri: str, namespace: str, revision: str | None = None, endpoint: str | None = None, secret: str | None = None
) -> str:
    """Return a key of the source and of the namespace that reads it. `secret`: the name of a Secret in the
    namespace."""
    return json.dumps([uri, revision, endpoint, namespace, secret])


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """The state of an operation of the depot. A failed operation keeps its verdict if it had one."""

    state: State = "Pending"
    digest: str | None = None
    verdict: Verdict | None = None
    reason: str = ""
    message: str = ""
    watch: str | None = None  # while the depot knows it as unchanged, the answer is valid
    retry_after_s: float = 0.0  # the wait that the source's server asks for

    @property
    def finished(self) -> bool:
        return self.state in FINISHED
