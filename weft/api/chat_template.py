"""Which chat template renders the chats of a model."""

from typing import Annotated, Literal

from pydantic import Field

from weft.api.fields import ApiModel


class ChatTemplateStatus(ApiModel):
    """Whose chat template counts, and its fault."""

    from_: Annotated[Literal["Adapter", "Base", "None"], Field(alias="from")]
    """The files that it comes from, which are the adapter's own or the base model's. None: there is no chat template,
    and chats are refused."""
    fault: Annotated[str, Field(max_length=512)] | None = None
    """The reason for which it renders no chats."""
