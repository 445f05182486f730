"""The depot's remaining HTTP bodies as types. An invalid body is answered with 400 and every wrong field."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from weft.artifacts.depot_api import DigestText

MAX_RETAINED = 200_000


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RetainRequest(_Body):
    """`POST /v1/retain`: the complete list of artifacts to keep."""

    digests: Annotated[tuple[DigestText, ...], Field(max_length=MAX_RETAINED)]


class ChangedRequest(_Body):
    """`POST /v1/changed`: watches, as named by operations."""

    watches: Annotated[tuple[Annotated[str, Field(max_length=71)], ...], Field(max_length=MAX_RETAINED)]
