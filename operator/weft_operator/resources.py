"""The two resources as the planner sees them: parsed once from an admitted object, then trusted.

Admission (the API server's schema, or `local.admission`) has already refused bad fields and filled in defaults, so
parsing here is reading. Times are unix seconds, pools are named by `Ref`, whose text is "namespace/name".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

Kind = Literal["ServingPool", "LoRAAdapter"]
Object = Mapping[str, Any]

API_VERSION = "serving.weft.dev/v1alpha1"
FINALIZER = "serving.weft.dev/unload"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Which object. `str()` of it is "namespace/name"."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Meta:
    """Identity and age of an object. `created` is unix seconds, with a fraction where the server gives one."""

    ref: Ref
    uid: str
    generation: int
    resource_version: str
    created: float
    deleting: bool = False
    finalizers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRAAdapter. `status` is the stored one, as it was last written."""

    meta: Meta
    pool: Ref
    model_name: str
    uri: str
    revision: str | None
    digest: str | None  # an assertion about the source
    base_model: str | None  # an assertion about the pool
    max_rank: int | None
    pinned: bool
    status: Object


@dataclass(frozen=True, slots=True)
class Pool:
    """A ServingPool. `replicas` None: the backend's own default."""

    meta: Meta
    model_name: str
    uri: str
    digest: str | None
    replicas: int | None
    max_adapters: int
    max_rank: int
    page_tokens: int
    kv_pages: int
    max_sequences: int
    max_batch_tokens: int
    max_queue: int
    max_moves: int
    placement: str
    queue: str
    reservation: str
    drain_s: float
    allowed: Literal["Same", "All", "List"]
    allowed_names: tuple[str, ...]
    status: Object

    def permits(self, namespace: str) -> bool:
        """May adapters of that namespace use this pool?"""
        return (
            self.allowed == "All"
            or namespace == self.meta.ref.namespace
            or (self.allowed == "List" and namespace in self.allowed_names)
        )


def parse(obj: Object) -> Adapter | Pool:
    """An admitted object -> its value."""
    return parse_pool(obj) if obj["kind"] == "ServingPool" else parse_adapter(obj)


def parse_adapter(obj: Object) -> Adapter:
    """An admitted LoRAAdapter -> its value."""
    meta, spec = parse_meta(obj), obj["spec"]
    source, pool = spec["source"], spec["poolRef"]
    return Adapter(
        meta=meta,
        pool=Ref("ServingPool", pool.get("namespace") or meta.ref.namespace, pool["name"]),
        model_name=spec.get("modelName") or str(meta.ref),
        uri=source["uri"],
        revision=source.get("revision"),
        digest=source.get("digest"),
        base_model=spec.get("baseModel"),
        max_rank=spec.get("maxRank"),
        pinned=bool(spec.get("pinned")),
        status=obj.get("status") or {},
    )


def parse_pool(obj: Object) -> Pool:
    """An admitted ServingPool -> its value."""
    meta, spec = parse_meta(obj), obj["spec"]
    model, lora, cache, scheduler = spec["model"], spec["lora"], spec["kvCache"], spec["scheduler"]
    allowed = spec["allowedNamespaces"]
    return Pool(
        meta=meta,
        model_name=model.get("name") or meta.ref.name,
        uri=model["uri"],
        digest=model.get("digest"),
        replicas=spec.get("replicas"),
        max_adapters=lora["maxAdapters"],
        max_rank=lora["maxRank"],
        page_tokens=cache["pageTokens"],
        kv_pages=cache["pages"],
        max_sequences=scheduler["maxSequences"],
        max_batch_tokens=scheduler["maxBatchTokens"],
        max_queue=scheduler["maxQueue"],
        max_moves=scheduler["maxMoves"],
        placement=scheduler["placement"],
        queue=scheduler["queue"],
        reservation=scheduler["reservation"],
        drain_s=float(spec["drainSeconds"]),
        allowed=allowed["from"],
        allowed_names=tuple(allowed.get("names") or ()),
        status=obj.get("status") or {},
    )


def parse_meta(obj: Object) -> Meta:
    """The metadata that a server has filled in."""
    meta = obj["metadata"]
    return Meta(
        ref=Ref(obj["kind"], meta["namespace"], meta["name"]),
        uid=meta["uid"],
        generation=meta["generation"],
        resource_version=meta["resourceVersion"],
        created=datetime.fromisoformat(meta["creationTimestamp"]).timestamp(),
        deleting=meta.get("deletionTimestamp") is not None,
        finalizers=tuple(meta.get("finalizers") or ()),
    )
