"""Object metadata as Kubernetes keeps it, and rules between two versions of one object."""

from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from weft.api.fields import ApiModel, Label, Timestamp

GROUP = "serving.weft.dev"
VERSION = "v1alpha1"
API_VERSION = "serving.weft.dev/v1alpha1"
ApiVersion = Literal["serving.weft.dev/v1alpha1"]
_EMPTY_IS_ABSENT: Any = Field(exclude_if=lambda value: not value)


class ObjectMeta(ApiModel):
    """Written by users: name, namespace, labels, annotations. The rest is the server's and is kept as it was read."""

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

    @property
    def key(self) -> str:
        """`namespace/name`"""
        return f"{self.namespace}/{self.name}"


class Resource(ApiModel):
    """What LoRAAdapter and ServingPool share."""

    api_version: ApiVersion = API_VERSION
    metadata: ObjectMeta

    @property
    def key(self) -> str:
        """`namespace/name`"""
        return self.metadata.key


def is_empty(value: ApiModel) -> bool:
    """Nothing is set: a status that was never written."""
    return value == type(value)()


class HasImmutables(Protocol):
    """An object some of whose fields are set once."""

    @property
    def immutables(self) -> dict[str, object]:
        """Field path -> value."""
        ...


def immutable_changes(old: HasImmutables, new: HasImmutables) -> list[str]:
    """The changes that an update must not make, as messages; CEL rules make the API server refuse the same."""
    before, after = old.immutables, new.immutables
    return [
        f"{path}: cannot change (it is {before[path]!r}); delete the object and create it again"
        for path in before
        if before[path] != after[path]
    ]
