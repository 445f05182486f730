"""How many runners a pool has: bounds of the built-in autoscaler, and its newest decision."""

from typing import Annotated, ClassVar

from pydantic import Field

from weft.api.fields import ApiModel, Timestamp
from weft.api.rules import Rule

MAX_RUNNERS = 1024
Count = Annotated[int, Field(strict=True, ge=0)]


class Autoscaling(ApiModel):
    """Runners by demand: as many as waiting and running requests need, at once and not one by one."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxReplicas",
            "maxReplicas must be at least minReplicas",
            "self.maxReplicas >= self.minReplicas",
            lambda scaling: scaling.max_replicas >= scaling.min_replicas,
        ),
    )

    min_replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_RUNNERS)] = 1
    """Never fewer runners. 0: none while there are no requests; the gateway holds the first until a runner is ready."""
    max_replicas: Annotated[int, Field(strict=True, ge=1, le=MAX_RUNNERS)]
    """Never more runners."""
    idle_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 60
    """How long runners stay without work before some are given back."""
    wake_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 300
    """How long the gateway holds a request for a pool without runners."""


class LastScale(ApiModel):
    """The newest change of the wanted number of runners."""

    time: Timestamp
    """When it was decided."""
    from_: Annotated[Count, Field(alias="from")]
    """Runners wanted before."""
    to: Count
    """Runners wanted from then on."""
    reason: Annotated[str, Field(max_length=1024)]
    """Why."""
