"""Forms for structured outputs and tools."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class Weather(BaseModel):
    """A form in which whatever a model writes ends soon."""

    city: Literal["Rome", "Oslo"]
    days: Annotated[int, Field(ge=1, le=9)]


class Words(BaseModel):
    """What JSON_MODEL answers without being made to."""

    words: list[str]
