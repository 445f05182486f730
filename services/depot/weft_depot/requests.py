"""The depot's other HTTP bodies as types. A body that does not fit is answered with 400 and every wrong field."""

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
    """`POST /v1/changed`: watches, as operations named them."""

    watches: Annotated[tuple[Annotated[str, Field(max_length=71)], ...], Field(max_length=MAX_RETAINED)]
