"""Fields that select the nodes for a runner's pod, with Kubernetes' names and meaning (core/v1)."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from weft.api.fields import ApiModel

LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"

ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}

LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=317)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN, max_length=63)]
Labels = Annotated[dict[str, LabelValue], Field(max_length=32)]
# Stored as written. The API server judges it when it gets the pods: a strict apply refuses unknown fields.
Unparsed = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]


class Toleration(ApiModel):
    """A tolerated taint of nodes."""

    key: LabelKey | None = None
    """The key of the taint. Without it, operator Exists tolerates every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """The comparison of the value: Equal needs an equal value, Exists accepts any value."""
    value: LabelValue | None = None
    """The value of the taint, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect of the taint. Without it every effect is tolerated."""
    toleration_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] | None = None
    """The seconds for which a NoExecute taint is tolerated. Without it the taint is tolerated indefinitely."""
