"""ServingPool: a base model, the runners that serve it, and how requests are scheduled on them."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from weft.api.conditions import Conditions
from weft.api.fields import ApiModel, DigestText, Label, ModelName, Uri
from weft.api.meta import Resource, is_empty


class Model(ApiModel):
    """The base model."""

    name: ModelName | None = None
    """What clients send to talk to the base itself; metadata.name when unset."""
    uri: Annotated[
        Uri,
        Field(
            json_schema_extra={
                "x-kubernetes-validations": [
                    {"rule": "self == oldSelf", "message": "uri cannot change; create another pool"}
                ]
            }
        ),
    ]
    """Where the model is, as transformers writes it (safetensors); for example file:models/tiny. Immutable."""
    digest: DigestText | None = None
    """The content that is expected; anything else is refused with DigestMismatch."""


class LoRASettings(ApiModel):
    """What adapters may need of a runner."""

    max_adapters: Annotated[int, Field(strict=True, ge=1, le=256)] = 8
    """Adapters that are on the device of one runner at the same time. Many more can be served: they take turns."""
    max_rank: Annotated[int, Field(strict=True, ge=1, le=256)] = 64
    """The largest rank of any module of any adapter."""


class KVCache(ApiModel):
    """Key-value memory of one runner: pages x pageTokens tokens."""

    page_tokens: Annotated[int, Field(strict=True, ge=1, le=256)] = 16
    """Tokens in a page."""
    pages: Annotated[int, Field(strict=True, ge=1, le=1_048_576)] = 1024
    """Pages of one runner."""


class SchedulerSettings(ApiModel):
    """Who runs where, and when."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "self.maxBatchTokens >= self.maxSequences",
                    "message": "maxBatchTokens must be at least maxSequences: each sequence adds a token an iteration",
                    "fieldPath": ".maxBatchTokens",
                }
            ]
        }
    )

    placement: Literal["punica"] = "punica"
    """The runner with the largest working set that has room (Punica, section 5.1)."""
    queue: Literal["fcfs"] = "fcfs"
    """First come, first served."""
    reservation: Literal["calibrated"] = "calibrated"
    """Memory reserved by calibrated prediction of the answer's length."""
    max_sequences: Annotated[int, Field(strict=True, ge=1, le=1024)] = 32
    """Sequences in one batch of one runner."""
    max_batch_tokens: Annotated[int, Field(strict=True, ge=1, le=65_536)] = 512
    """Tokens of one iteration of one runner; longer prompts are processed in chunks."""
    max_queue: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1000
    """Requests that may wait; more are answered 429 with a computed retry-after."""
    max_moves: Annotated[int, Field(strict=True, ge=1, le=1000)] = 8
    """Moves of one request before it fails; NoRoom and preemption do not count."""

    @model_validator(mode="after")
    def _a_token_for_each_sequence(self) -> Self:
        if self.max_batch_tokens < self.max_sequences:
            raise ValueError(
                f"maxBatchTokens ({self.max_batch_tokens}) must be at least maxSequences ({self.max_sequences}): "
                "each sequence adds a token an iteration"
            )
        return self


class AllowedNamespaces(ApiModel):
    """Whose adapters the pool serves, and who may call its base model."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "self.from == 'List' ? has(self.names) && size(self.names) > 0 : !has(self.names)",
                    "message": "names is given with from: List, and only then",
                    "fieldPath": ".names",
                }
            ]
        }
    )

    from_: Annotated[Literal["Same", "All", "List"], Field(alias="from")] = "Same"
    """Same: the pool's own namespace. All: every namespace. List: the pool's own and those in names."""
    names: Annotated[tuple[Label, ...], Field(max_length=256)] | None = None
    """Namespaces, with from: List."""

    @model_validator(mode="after")
    def _names_with_list_only(self) -> Self:
        if (self.from_ == "List") != bool(self.names):
            raise ValueError("names is given with from: List, and only then")
        return self


class PoolSpec(ApiModel):
    """What is wanted. Never written by a controller."""

    model: Model
    """The base model."""
    replicas: Annotated[int, Field(strict=True, ge=0, le=10_000)] | None = None
    """Runners. Written by people, or by an autoscaler through /scale; never by a default."""
    lora: LoRASettings = LoRASettings()
    """What adapters may need of a runner."""
    kv_cache: KVCache = KVCache()
    """Key-value memory of one runner."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """Who runs where, and when."""
    drain_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 300
    """How long streams may finish on a runner that is drained, or on an adapter that is replaced or deleted."""
    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """Whose adapters the pool serves."""


class AdapterCounts(ApiModel):
    """Adapters that refer to the pool."""

    total: Annotated[int, Field(strict=True, ge=0)] = 0
    """All of them."""
    ready: Annotated[int, Field(strict=True, ge=0)] = 0
    """Those that clients can call."""


class PoolStatus(ApiModel):
    """What is observed."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The generation that the status is about."""
    base_digest: DigestText | None = None
    """The identity of the base model that is served."""
    replicas: Annotated[int, Field(strict=True, ge=0)] | None = None
    """Runners there are."""
    ready_replicas: Annotated[int, Field(strict=True, ge=0)] | None = None
    """Runners that take requests."""
    adapters: AdapterCounts | None = None
    """Adapters that refer to the pool."""
    conditions: Conditions = ()
    """Accepted, Fetched, Available, Progressing."""


class ServingPool(Resource):
    """Runners that share one base model and serve its adapters."""

    kind: Literal["ServingPool"] = "ServingPool"
    spec: PoolSpec
    status: Annotated[PoolStatus, Field(exclude_if=is_empty)] = PoolStatus()

    @property
    def model_name(self) -> str:
        """What clients send to talk to the base itself."""
        return self.spec.model.name or self.metadata.name

    @property
    def immutables(self) -> dict[str, object]:
        return {"spec.model.uri": self.spec.model.uri}

    def permits(self, namespace: str) -> bool:
        """Whether adapters of this namespace may be served, and its callers use the base."""
        allowed = self.spec.allowed_namespaces
        return allowed.from_ == "All" or namespace in (self.metadata.namespace, *(allowed.names or ()))
