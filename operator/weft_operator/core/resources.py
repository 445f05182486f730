"""The two resources as the planner sees them: parsed once from an admitted object, then trusted.

Admission (the API server's schema, or `local.admission`) has already refused bad fields and filled in defaults, so
parsing here is reading. Times are unix seconds, pools are named by `Ref`, whose text is "namespace/name".
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple, cast

from weft.api.conversion import with_defaults
from weft.api.loraadapter import LoRAAdapterSpec
from weft.api.meta import sanitize_message
from weft.api.template import amount

Kind = Literal["ServingPool", "LoRAAdapter", "APIKey"]
Tier = Literal["Remote", "Disk", "Host"]
Object = Mapping[str, Any]
Bound = int | str  # a number, or a percentage as text

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)  # what reading a spec of another version may raise
API_VERSION = "serving.weft.dev/v1alpha1"
NOT_OF_RUNNERS = (
    "replicas",
    "autoscaling",
    "paused",
    "rollout",
    "disruptionBudget",
    "allowedNamespaces",
)  # of a pool's spec, and its model's chatTemplate
FINALIZER = "serving.weft.dev/unload"
DEFAULT_GROUP = "runners"


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
    deleted: float | None = None  # when its deletion was requested, unix seconds


class TemplateChoice(NamedTuple):
    """The chat template that counts. `text`, or `config_map` (a name): one that the spec gives."""

    origin: str  # of a spec, `from`
    text: str | None = None
    config_map: str = ""

    @property
    def is_supplied(self) -> bool:
        """Whether the spec gives it, not files."""
        return self.origin in ("Inline", "ConfigMap")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRAAdapter: its spec as the API has it, and what follows from it here. `status` is the last written one."""

    meta: Meta
    pool: Ref
    model_name: str
    chat_template: TemplateChoice
    spec: LoRAAdapterSpec
    status: Object


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Bounds of the built-in autoscaler, in runners and seconds."""

    min: int
    max: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives, in milliseconds. `ttft_ms` 0: none. `reject`: a request that cannot get its first token in time."""

    ttft_ms: int
    token_time_ms: int
    reject: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Runners of one kind. `template` is the whole one that holds: the group's own, else the pool's."""

    name: str
    template: Object
    min: int = 0
    max: int | None = None  # None: as many as the pool wants
    phase: Literal["Any", "Prompt", "Token"] = "Any"


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Where runners keep blobs. Neither claim nor path: in their pods, up to `size_bytes` (None: no limit)."""

    claim: str = ""
    host_path: str = ""
    size_bytes: int | None = None

    @property
    def shared(self) -> bool:
        return bool(self.claim or self.host_path)


@dataclass(frozen=True, slots=True)
class OffloadBudgets:
    """Of each rank. `disk_bytes` None: no limit."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int | None
    disk_path: str
    weights: str
    kv: str


@dataclass(frozen=True, slots=True)
class Pool:
    """A ServingPool. `replicas` and `autoscaling` None: one runner. `groups` is never empty."""

    meta: Meta
    model_name: str
    uri: str
    revision: str | None
    digest: str | None
    credentials: str | None  # a Secret of the pool's namespace
    endpoint: str | None
    replicas: int | None
    autoscaling: Autoscaling | None
    groups: tuple[Group, ...]
    max_adapters: int | None  # None: as many as pages hold
    max_rank: int
    kv_pages: int  # 0: unset, its runners find them
    kv_memory_fraction: float | None
    max_sequences: int  # 0, as the next one: unset, its runners find them
    max_batch_tokens: int
    sparse_attention: bool
    token_time_ms: int
    tensor_parallel: int
    pipeline_parallel: int
    pods_per_runner: int
    offload: OffloadBudgets | None
    model_cache: ModelCache
    max_queue: int
    queue: str
    tenant_weights: tuple[tuple[str, int], ...]
    slo: Slo | None
    reservation: str
    consolidation: str
    tool_call_parser: str  # "": as the chat template shows
    max_output_tokens: int  # 0: no bound
    generation_defaults: bool  # whether those of generation_config.json count
    chat_template: TemplateChoice
    phases: str
    kv_across_classes: bool
    paused: bool
    max_unavailable: Bound
    max_surge: Bound
    max_evicted: int  # ready runners that evictions may take away at a time; 0: a runner is moved before it goes
    shape: str  # a hash of what of the spec its runners are made from
    drain_s: float
    allowed_namespaces: tuple[str, ...]  # beside its own; "*" stands for all
    status: Object

    def permits(self, namespace: str) -> bool:
        """May adapters of that namespace use this pool?"""
        return not {"*", namespace}.isdisjoint((self.meta.ref.namespace, *self.allowed_namespaces))


@dataclass(frozen=True, slots=True)
class Malformed:
    """An object whose spec this version of the operator cannot read, and why."""

    meta: Meta
    message: str
    status: Object


def holds(resource: Adapter | Pool, condition: str) -> bool:
    """Is that condition True, by the stored status?"""
    return any(c["type"] == condition and c["status"] == "True" for c in resource.status.get("conditions", ()))


def parse(obj: Object) -> Adapter | Pool | Malformed:
    """A stored object -> its value, whatever version of the API wrote it: absent fields have their defaults."""
    read = parse_pool if obj["kind"] == "ServingPool" else parse_adapter
    try:
        return read(obj)
    except UNREADABLE:
        pass  # its CustomResourceDefinition is of another version
    try:
        return read(with_defaults(obj))
    except UNREADABLE as error:
        return Malformed(parse_meta(obj), sanitize_message(str(error) or repr(error)), obj.get("status") or {})


def parse_adapter(obj: Object) -> Adapter:
    """An admitted LoRAAdapter -> its value."""
    meta, spec = parse_meta(obj), LoRAAdapterSpec.model_validate(obj["spec"], extra="ignore")
    return Adapter(
        meta=meta,
        pool=Ref("ServingPool", spec.pool_ref.namespace or meta.ref.namespace, spec.pool_ref.name),
        model_name=spec.model_name or str(meta.ref),
        chat_template=_template_choice(obj["spec"].get("chatTemplate") or {}),
        spec=spec,
        status=obj.get("status") or {},
    )


def _template_choice(spec: Object) -> TemplateChoice:
    return TemplateChoice(
        spec.get("from") or "Auto", spec.get("inline"), (spec.get("configMapRef") or {}).get("name", "")
    )


def parse_pool(obj: Object) -> Pool:
    """An admitted ServingPool -> its value."""
    meta, spec = parse_meta(obj), obj["spec"]
    model, memory, advanced, parallelism = spec["model"], spec["memory"], spec["advanced"], spec["parallelism"]
    slo, fairness, rollout = _slo(spec.get("slo")), spec.get("fairness") or {}, spec.get("rollout") or {}
    return Pool(
        meta=meta,
        model_name=model.get("name") or meta.ref.name,
        **_source(model),
        replicas=spec.get("replicas"),
        autoscaling=_autoscaling(spec.get("autoscaling")),
        groups=_groups(spec),
        max_adapters=advanced.get("maxAdapters"),
        max_rank=spec["lora"]["maxRank"],
        kv_pages=advanced.get("kvPages") or 0,
        kv_memory_fraction=memory.get("fraction"),
        max_sequences=advanced.get("maxSequences") or 0,
        max_batch_tokens=advanced.get("maxBatchTokens") or 0,
        sparse_attention=advanced["sparseAttention"] == "TopK",
        token_time_ms=slo.token_time_ms if slo else 0,
        tensor_parallel=parallelism["tensor"],
        pipeline_parallel=parallelism["pipeline"],
        pods_per_runner=parallelism["podsPerRunner"],
        offload=_offload(memory.get("offload")),
        model_cache=_model_cache(spec.get("modelCache") or {}),
        max_queue=advanced["maxQueue"],
        queue=advanced["queue"],
        tenant_weights=tuple(sorted((fairness.get("weights") or {}).items())),
        slo=slo,
        reservation=advanced["reservation"],
        consolidation=advanced["consolidation"],
        tool_call_parser=model.get("toolCallParser") or "",
        max_output_tokens=model.get("maxOutputTokens") or 0,
        generation_defaults=model.get("generationDefaults") != "Ignore",
        chat_template=_template_choice(model.get("chatTemplate") or {}),
        phases=spec["phases"]["mode"].lower(),
        kv_across_classes=advanced["kvAcrossClasses"],
        paused=bool(spec.get("paused")),
        max_unavailable=rollout.get("maxUnavailable", 1),
        max_surge=rollout.get("maxSurge", 0),
        max_evicted=(spec.get("disruptionBudget") or {}).get("maxUnavailable", 1),
        shape=_shape(spec),
        drain_s=float(spec["drainSeconds"]),
        allowed_namespaces=_names(spec["allowedNamespaces"]),
        status=obj.get("status") or {},
    )


def resource_version(obj: Object | None) -> str | None:
    """The version of an object as the API server gave it; None: there is no object."""
    return obj["metadata"].get("resourceVersion") if obj else None


def _shape(spec: Object) -> str:
    model = {name: value for name, value in spec["model"].items() if name != "chatTemplate"}
    made = {name: value for name, value in spec.items() if name not in NOT_OF_RUNNERS} | {"model": model}
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


def _model_cache(cache: Object) -> ModelCache:
    size = (cache.get("emptyDir") or {}).get("sizeLimit")
    return ModelCache(
        claim=(cache.get("persistentVolumeClaim") or {}).get("claimName", ""),
        host_path=(cache.get("hostPath") or {}).get("path", ""),
        size_bytes=None if size is None else int(amount(size)),
    )


def _names(namespaces: object) -> tuple[str, ...]:
    if not isinstance(namespaces, list):
        raise TypeError(f"allowedNamespaces: expected a list, got {type(namespaces).__name__}")
    return tuple(cast("list[str]", namespaces))


def _offload(offload: Object | None) -> OffloadBudgets | None:
    if offload is None:
        return None
    disk = offload.get("diskBytes")
    return OffloadBudgets(
        device_bytes=int(amount(offload["deviceBytes"])),
        host_bytes=int(amount(offload.get("hostBytes") or 0)),
        disk_bytes=None if disk is None else int(amount(disk)),
        disk_path=offload["diskPath"],
        weights=offload["weights"],
        kv=offload["kv"],
    )


def parse_meta(obj: Object) -> Meta:
    """The metadata that a server has filled in."""
    meta = obj["metadata"]
    return Meta(
        ref=Ref(obj["kind"], meta["namespace"], meta["name"]),
        uid=meta["uid"],
        generation=meta["generation"],
        resource_version=meta["resourceVersion"],
        created=unix_s(meta["creationTimestamp"]),
        deleting=meta.get("deletionTimestamp") is not None,
        finalizers=tuple(meta.get("finalizers") or ()),
        deleted=unix_s(meta["deletionTimestamp"]) if meta.get("deletionTimestamp") else None,
    )


def unix_s(timestamp: str) -> float:
    """Of a time as the API writes it."""
    return datetime.fromisoformat(timestamp).timestamp()


def _source(source: Object) -> dict[str, Any]:
    reference = source.get("credentialsRef")
    given = {name: source.get(name) for name in ("uri", "revision", "digest", "endpoint")}
    return {**given, "credentials": reference["name"] if reference else None}


def _autoscaling(spec: Object | None) -> Autoscaling | None:
    if spec is None:
        return None
    return Autoscaling(spec["minReplicas"], spec["maxReplicas"], float(spec["idleSeconds"]))


def _slo(spec: Object | None) -> Slo | None:
    return Slo(spec.get("ttftMs", 0), spec["tokenTimeMs"], spec["admission"] == "Reject") if spec is not None else None


def _groups(spec: Object) -> tuple[Group, ...]:
    default: Object = spec.get("template") or {}
    given = tuple(
        Group(
            group["name"],
            group.get("template", default),
            group["minRunners"],
            group.get("maxRunners"),
            group["phase"],
        )
        for group in spec.get("runnerGroups") or ()
    )
    return given or (Group(DEFAULT_GROUP, default),)
