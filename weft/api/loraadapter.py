"""LoRAAdapter: a tenant's adapter, where it comes from, and the pool that serves it."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from weft.api.fields import ApiModel, DigestText, Label, ModelName, Timestamp, VersionName
from weft.api.meta import Conditions, Resource, is_empty
from weft.api.source import Artifact


class PoolRef(ApiModel):
    """The ServingPool that serves the adapter."""

    name: Label
    """Of the pool."""
    namespace: Label | None = None
    """Of the pool; the adapter's own when unset. Another one needs the pool's allowedNamespaces."""


class AdapterSource(Artifact):
    """Where the adapter's files are: adapter_config.json and adapter_model.safetensors, as PEFT writes them."""


class LoRAAdapterSpec(ApiModel):
    """What is wanted. Never written by a controller."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "has(self.baseModel) == has(oldSelf.baseModel) && "
                    "(!has(self.baseModel) || self.baseModel == oldSelf.baseModel)",
                    "message": "cannot change; delete the adapter and create it again",
                    "fieldPath": ".baseModel",
                }
            ]
        }
    )

    pool_ref: PoolRef
    """The pool that serves it."""
    base_model: ModelName | None = None
    """Asserts the model name of the pool's base. Immutable. Needed where training knew the base by another name."""
    model_name: ModelName | None = None
    """What clients send as `model`; <namespace>/<name> when unset. The older object wins a conflict."""
    source: AdapterSource
    """Where the files are."""
    max_rank: Annotated[int, Field(strict=True, ge=1, le=256)] | None = None
    """Asserts that no module's rank is larger; else RankTooLarge."""
    pinned: Annotated[bool, Field(strict=True)] = False
    """Keeps the adapter on the device of every runner of the pool, so that no request waits for it to load. A pool
    that sets lora.maxAdapters takes one less of them."""
    tier: Literal["Remote", "Disk", "Host"] = "Remote"
    """The least that every ready runner holds it in: Host (memory), Disk, or Remote (fetched when first asked for)."""
    version: VersionName | None = None
    """A name for the content of the source, by which requests pin it: `model@version`. The newest content that is
    published under a name has it. Without a name a request pins a content by its digest: `model@sha256:...`."""
    revision_history_limit: Annotated[int, Field(strict=True, ge=0, le=100)] = 1
    """How many earlier contents are served to requests that pin them. The others go once their streams have ended, or
    after the pool's drain time."""


class PublishedContent(ApiModel):
    """A content that the adapter has, or has had, on the present base model."""

    digest: DigestText
    """The identity of the content."""
    name: VersionName | None = None
    """Of spec.version when it was published."""
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The largest rank of any module."""
    size_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """Of all its files."""
    base_digest: DigestText | None = None
    """The base model that this content was checked against."""
    publish_time: Timestamp
    """When it was first published."""


class LoRAAdapterStatus(ApiModel):
    """What is observed."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The generation that the status is about."""
    digest: DigestText | None = None
    """The identity of the content that is served."""
    pool: Annotated[str, Field(max_length=127)] | None = None
    """`namespace/name` of the ServingPool that this content was checked for."""
    base_digest: DigestText | None = None
    """The base model that this content was checked against."""
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The largest rank of any module."""
    alpha: float | None = None
    """The adapter's lora_alpha."""
    target_modules: Annotated[tuple[str, ...], Field(max_length=64)] | None = None
    """The projections it changes."""
    size_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """Of all its files."""
    dtype: str | None = None
    """Of its weights."""
    model_name: str | None = None
    """What clients send as `model`."""
    unavailable_runners: Annotated[int, Field(strict=True, ge=0)] | None = None
    """Ready runners of its pool that do not serve it: they have not got it yet, or failed to load it."""
    versions: Annotated[
        tuple[PublishedContent, ...],
        Field(
            max_length=101,
            exclude_if=lambda value: not value,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["digest"]},
        ),
    ] = ()
    """The content that is served, then the earlier ones that requests may pin, the newest first."""
    conditions: Conditions = ()
    """Accepted, Validated, Fetched, Ready."""


class LoRAAdapter(Resource):
    """A LoRA adapter served by a ServingPool. Ready when validated, fetched and in the route table."""

    kind: Literal["LoRAAdapter"] = "LoRAAdapter"
    spec: LoRAAdapterSpec
    status: Annotated[LoRAAdapterStatus, Field(exclude_if=is_empty)] = LoRAAdapterStatus()

    @property
    def immutables(self) -> dict[str, object]:
        return {"spec.baseModel": self.spec.base_model}
