"""The chat template for chats with a model."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from weft.api.fields import ApiModel, DigestText, ObjectName, Rule

MAX_INLINE = 1 << 18  # characters; the limit of every template


class ConfigMapRef(ApiModel):
    """A ConfigMap in the namespace of the object. Only the depot reads it."""

    name: ObjectName
    """The name of the ConfigMap. Its entry chat_template.jinja is the chat template. If the entry is missing or may not
    be read, the condition ChatTemplate says so, and the last text stays in use. Without an earlier text chats are
    refused."""


class ChatTemplateSource(ApiModel):
    """The source of the chat template for chats with an adapter."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "inline",
            "set inline with from: Inline, and only then",
            "has(self.inline) == (self.from == 'Inline')",
            lambda source: (source.inline is not None) == (source.from_ == "Inline"),
        ),
        Rule(
            "configMapRef",
            "set configMapRef with from: ConfigMap, and only then",
            "has(self.configMapRef) == (self.from == 'ConfigMap')",
            lambda source: (source.config_map_ref is not None) == (source.from_ == "ConfigMap"),
        ),
    )

    from_: Annotated[Literal["Auto", "Adapter", "Base", "Inline", "ConfigMap"], Field(alias="from")] = "Auto"
    """The source of the chat template. Auto is the adapter's template if its files have a template
    (chat_template.jinja, or chat_template of its tokenizer_config.json, as training writes them). Otherwise it is the
    pool's. Adapter is the adapter's template. Without a template chats are refused. Base is always the pool's. Inline
    and ConfigMap are a text in the spec, for every content of the adapter. The special tokens come from the adapter."""
    inline: Annotated[str, Field(min_length=1, max_length=MAX_INLINE)] | None = None
    """The chat template, with from: Inline. A change does not restart anything."""
    config_map_ref: ConfigMapRef | None = None
    """The ConfigMap of the chat template, with from: ConfigMap. A change takes effect within a minute, without a
    restart."""

    @property
    def is_supplied(self) -> bool:
        """Whether the spec gives the text, not the files."""
        return self.from_ in ("Inline", "ConfigMap")


class PoolChatTemplateSource(ChatTemplateSource):
    """The source of the chat template for chats with a base model, and with adapters without a template."""

    from_: Annotated[Literal["Auto", "Base", "Inline", "ConfigMap"], Field(alias="from")] = "Auto"  # pyright: ignore[reportIncompatibleVariableOverride] (it is frozen)
    """The source of the chat template. Auto and Base are the base model's files. Inline and ConfigMap are a text in the
    spec, for a base model without a chat template or in place of its template."""


class ChatTemplateStatus(ApiModel):
    """The source of the chat template in use, and its fault."""

    from_: Annotated[Literal["Adapter", "Base", "None"], Field(alias="from")]
    """The files with the chat template: the adapter's or the base model's. None: chats are refused for want of a chat
    template."""
    fault: Annotated[str, Field(max_length=512)] | None = None
    """The reason if the template cannot render chats."""


class SuppliedTemplateStatus(ApiModel):
    """A chat template given by the spec, as last read."""

    from_: Annotated[Literal["Inline", "ConfigMap"], Field(alias="from")]
    """The source of the text."""
    digest: DigestText
    """The digest of its artifact in the depot."""
    fault: Annotated[str, Field(max_length=512)] | None = None
    """The reason if the template cannot render chats."""
