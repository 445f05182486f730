"""Object metadata and conditions as in Kubernetes, and rules between two versions of an object."""

from typing import Annotated, Any, Literal

from pydantic import Field

from weft.api.fields import ApiModel, Label, Timestamp
from weft.domain.text import sanitize

GROUP = "serving.weft.dev"
VERSION = "v1alpha1"
API_VERSION = "serving.weft.dev/v1alpha1"
ApiVersion = Literal["serving.weft.dev/v1alpha1"]
MAX_MESSAGE_CHARS = 4096
_EMPTY_IS_ABSENT: Any = Field(exclude_if=lambda value: not value)


class ObjectMeta(ApiModel):
    """The metadata of an object. Users write name, namespace, labels and annotations. The server writes the rest, and
    it is kept as read."""

    name: Label
    namespace: Label = "default"
    labels: Annotated[dict[str, str], _EMPTY_IS_ABSENT] = Field(default_factory=dict)
    annotations: Annotated[dict[str, str], _EMPTY_IS_ABSENT] = Field(default_factory=dict)
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    deletion_grace_period_seconds: int | None = None
    finalizers: Annotated[tuple[str, ...], _EMPTY_IS_ABSENT] = ()
    generate_name: str | None = None
    self_link: str | None = None
    owner_references: Annotated[tuple[dict[str, Any], ...], _EMPTY_IS_ABSENT] = ()
    managed_fields: Annotated[tuple[dict[str, Any], ...], Field(exclude=True)] = ()


class Condition(ApiModel):
    """An observation of an object. Reasons are CamelCase and API (`weft.api.reasons`)."""

    type: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]*$", max_length=316)]
    """The type of the condition, for example Ready."""
    status: Literal["True", "False", "Unknown"]
    """The status of the condition: True, False or Unknown."""
    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The metadata.generation described by the condition."""
    last_transition_time: Timestamp
    """The time at which the status last changed."""
    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]*$", max_length=1024)]
    """The reason of the status, a CamelCase word for programs."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """The reason of the status and the remedy, for people."""


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=16,
        exclude_if=lambda value: not value,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


def sanitize_message(message: str) -> str:
    """Return a message for storage: printable, and at most MAX_MESSAGE_CHARS."""
    text = sanitize(message[: MAX_MESSAGE_CHARS + 1])
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


class Resource(ApiModel):
    """The common part of LoRAAdapter, ServingPool and APIKey."""

    api_version: ApiVersion = API_VERSION
    metadata: ObjectMeta

    @property
    def key(self) -> str:
        """`namespace/name`"""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def immutables(self) -> dict[str, object]:
        """The fields that cannot change after creation: path -> value."""
        return {}


def is_empty(value: ApiModel) -> bool:
    """Return whether nothing is set, as in a status before its first write."""
    return value == type(value)()


def immutable_changes(old: Resource, new: Resource) -> list[str]:
    """Return messages for forbidden changes between two versions. CEL rules make the API server refuse the same
    changes."""
    old_fields, new_fields = old.immutables, new.immutables
    return [
        f"{path}: cannot change (it is {old_fields[path]!r}); delete the object and create it again"
        for path in old_fields
        if old_fields[path] != new_fields[path]
    ]
