"""The chat template that renders the chats of a model."""

from typing import Annotated, Literal

from pydantic import Field

from weft.api.fields import ApiModel


class ChatTemplateSource(ApiModel):
    """Whose chat template renders the chats of an adapter."""

    from_: Annotated[Literal["Auto", "Adapter", "Base"], Field(alias="from")] = "Auto"
    """The files whose chat template counts. Auto is the adapter's own where it has one (chat_template.jinja, or
    chat_template of its tokenizer_config.json, as training writes them), and the base model's otherwise. Adapter is
    the adapter's own, without which chats are refused. Base is the base model's, whatever the adapter has."""


class ChatTemplateStatus(ApiModel):
    """Whose chat template counts, and its fault."""

    from_: Annotated[Literal["Adapter", "Base", "None"], Field(alias="from")]
    """The files that it comes from, which are the adapter's own or the base model's. None: there is no chat template,
    and chats are refused."""
    fault: Annotated[str, Field(max_length=512)] | None = None
    """The reason for which it renders no chats."""
