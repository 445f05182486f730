"""The chat template that renders the chats of a model."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from weft.api.fields import ApiModel, DigestText, ObjectName, Rule

MAX_INLINE = 1 << 18  # characters, as many as any template may have


class ConfigMapRef(ApiModel):
    """A ConfigMap of the object's own namespace; only the depot reads it."""

    name: ObjectName
    """The name of the ConfigMap, whose entry chat_template.jinja is the chat template. Where it is not there or may not
    be read, the condition ChatTemplate says so and the text that was read before stays; without one chats are
    refused."""


class ChatTemplateSource(ApiModel):
    """Whose chat template renders the chats of an adapter."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "inline",
            "inline is given with from: Inline, and only then",
            "has(self.inline) == (self.from == 'Inline')",
            lambda source: (source.inline is not None) == (source.from_ == "Inline"),
        ),
        Rule(
            "configMapRef",
            "configMapRef is given with from: ConfigMap, and only then",
            "has(self.configMapRef) == (self.from == 'ConfigMap')",
            lambda source: (source.config_map_ref is not None) == (source.from_ == "ConfigMap"),
        ),
    )

    from_: Annotated[Literal["Auto", "Adapter", "Base", "Inline", "ConfigMap"], Field(alias="from")] = "Auto"
    """The origin of the chat template. Auto is the adapter's own where it has one (chat_template.jinja, or
    chat_template of its tokenizer_config.json, as training writes them), and the pool's otherwise. Adapter is the
    adapter's own, without which chats are refused. Base is the pool's, whatever the adapter has. Inline and ConfigMap
    are a text that the spec gives, for every content of the adapter; its special tokens are the adapter's."""
    inline: Annotated[str, Field(min_length=1, max_length=MAX_INLINE)] | None = None
    """The chat template, with from: Inline. A change of it restarts nothing."""
    config_map_ref: ConfigMapRef | None = None
    """The ConfigMap that has the chat template, with from: ConfigMap. A change of it is seen within a minute, and
    restarts nothing."""

    @property
    def is_supplied(self) -> bool:
        """Whether the spec gives the text, not files."""
        return self.from_ in ("Inline", "ConfigMap")


class PoolChatTemplateSource(ChatTemplateSource):
    """The chat template that renders the chats of a base model, and of the adapters that have none of their own."""

    from_: Annotated[Literal["Auto", "Base", "Inline", "ConfigMap"], Field(alias="from")] = "Auto"  # pyright: ignore[reportIncompatibleVariableOverride] (it is frozen)
    """The origin of the chat template. Auto and Base are the base model's own files. Inline and ConfigMap are a
    text that the spec gives, for a base model without a chat template or in place of its own."""


class ChatTemplateStatus(ApiModel):
    """Whose chat template counts, and its fault."""

    from_: Annotated[Literal["Adapter", "Base", "None"], Field(alias="from")]
    """The files that it comes from, which are the adapter's own or the base model's. None: there is no chat template,
    and chats are refused."""
    fault: Annotated[str, Field(max_length=512)] | None = None
    """The reason for which it renders no chats."""


class SuppliedTemplateStatus(ApiModel):
    """A chat template that the spec gives, as it was read last."""

    from_: Annotated[Literal["Inline", "ConfigMap"], Field(alias="from")]
    """The origin of the text."""
    digest: DigestText
    """The digest of its artifact in the depot."""
    fault: Annotated[str, Field(max_length=512)] | None = None
    """The reason for which it renders no chats."""
