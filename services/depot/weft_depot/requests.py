"""The depot's HTTP bodies as types. A body that does not fit is answered with 400 and every wrong field."""

import json
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from weft.artifacts.digest import Kind, digest_of, parse_digest
from weft.chat_template import MAX_SOURCE
from weft_depot.sources import Location, parse_uri

MAX_RETAINED = 200_000
INLINE, CONFIG_MAP = "inline", "configmap"  # schemes of templates: `text` has it, or an entry of a ConfigMap
Text = Annotated[str, Field(max_length=4096)]
DigestText = Annotated[str, AfterValidator(parse_digest)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class BaseRef(_Body):
    """The base an adapter has to fit. Without a name only shapes decide; `aliases` are further names it goes by."""

    digest: DigestText
    name: Text | None = None
    aliases: Annotated[tuple[Text, ...], Field(max_length=16)] = ()


class CredentialsRef(_Body):
    """A secret of the same namespace."""

    name: Text


class ResolveRequest(_Body):
    """`POST /v1/resolve`. `text`: the chat template of a URI `inline:`."""

    kind: Kind
    uri: Annotated[str, Field(max_length=8192)]
    revision: Text | None = None
    digest: DigestText | None = None
    namespace: Text
    credentials_ref: CredentialsRef | None = None
    endpoint: Text | None = None
    base: BaseRef | None = None
    max_rank: Annotated[int, Field(ge=1, le=16384)] | None = None
    text: Annotated[str, Field(max_length=MAX_SOURCE)] | None = None

    @model_validator(mode="after")
    def _template_is_whole(self) -> Self:
        scheme, is_template = self.uri.partition(":")[0], self.kind == "template"
        if is_template != (scheme in (INLINE, CONFIG_MAP)) or (is_template and self.base is None):
            raise ValueError(f"a template has a base and is {INLINE}: or {CONFIG_MAP}:, and nothing else is")
        if (self.text is not None) != (scheme == INLINE):
            raise ValueError(f"text is for {INLINE}:, which needs it")
        return self

    @property
    def key(self) -> str:
        """Equal requests have equal keys, which are short: many are remembered."""
        text = digest_of(self.text.encode()) if self.text is not None else ""
        return self.model_dump_json(exclude={"text"}) + text

    @property
    def source(self) -> str:
        """What is read, and for whom: what one namespace was given is never handed to another by name."""
        secret = self.credentials_ref.name if self.credentials_ref else None
        return source_key(self.uri, self.namespace, self.revision, self.endpoint, secret)

    def location(self) -> Location:
        """Raises Refused(BadURI)."""
        credentials = self.credentials_ref.name if self.credentials_ref else None
        return parse_uri(
            self.uri, revision=self.revision, namespace=self.namespace, credentials=credentials, endpoint=self.endpoint
        )


def source_key(
    uri: str, namespace: str, revision: str | None = None, endpoint: str | None = None, secret: str | None = None
) -> str:
    """What is read, and for whom. `secret`: the name of one of that namespace."""
    return json.dumps([uri, revision, endpoint, namespace, secret])


class RetainRequest(_Body):
    """`POST /v1/retain`: the complete list of artifacts to keep."""

    digests: Annotated[tuple[DigestText, ...], Field(max_length=MAX_RETAINED)]


class ChangedRequest(_Body):
    """`POST /v1/changed`: watches, as operations named them."""

    watches: Annotated[tuple[Annotated[str, Field(max_length=71)], ...], Field(max_length=MAX_RETAINED)]
