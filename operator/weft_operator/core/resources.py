"""The two resources as the planner sees them: parsed once from an admitted object, then trusted.

Admission (the API server's schema, or `local.admission`) has already refused bad fields and filled in defaults. So
parsing only reads. Times are unix seconds. Pools are named by `Ref`, with the text "namespace/name".
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from weft.api.chat_template import ChatTemplateSource
from weft.api.conversion import with_defaults
from weft.api.loraadapter import LoRAAdapterSpec
from weft.api.meta import sanitize_message
from weft.api.servingpool import ServingPoolSpec

Kind = Literal["ServingPool", "LoRAAdapter", "APIKey"]
Tier = Literal["Remote", "Disk", "Host"]
Object = Mapping[str, Any]
Bound = int | str  # a number, or a percentage as text

# possible errors of reading a spec of a different version
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)
API_VERSION = "serving.weft.dev/v1alpha1"
# Fields of a pool's spec that do not shape its runners, in addition to its model's chatTemplate.
NOT_OF_RUNNERS = ("replicas", "autoscaling", "paused", "rollout", "disruptionBudget", "allowedNamespaces")
FINALIZER = "serving.weft.dev/unload"
DEFAULT_GROUP = "runners"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """A reference to an object. `str()` of it is "namespace/name"."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Meta:
    """Identity and age of an object. `created` is unix seconds, with a fraction if the server sends a fraction."""

    ref: Ref
    uid: str
    generation: int
    resource_version: str
    created: float
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    deleted: float | None = None  # when its deletion was requested, unix seconds


@dataclass(frozen=True, slots=True)
class AdapterObject:
    """A LoRAAdapter: its spec in the form of the API, and derived fields. `status` is the last written status."""

    meta: Meta
    pool: Ref
    model_name: str
    spec: LoRAAdapterSpec
    status: Object

    @property
    def chat_template(self) -> ChatTemplateSource:
        return self.spec.chat_template


@dataclass(frozen=True, slots=True)
class Group:
    """A group of equal runners. `template` is complete: the group's, or else the pool's."""

    name: str
    template: Object
    min: int = 0
    max: int | None = None  # None: as many as the pool wants
    phase: Literal["Any", "Prompt", "Token"] = "Any"


@dataclass(frozen=True, slots=True)
class PoolObject:
    """A ServingPool: its spec in the form of the API, and derived fields. `groups` is never empty."""

    meta: Meta
    model_name: str
    groups: tuple[Group, ...]
    shape: str  # a hash of the spec's fields that shape its runners
    spec: ServingPoolSpec
    status: Object

    @property
    def chat_template(self) -> ChatTemplateSource:
        return self.spec.model.chat_template

    @property
    def allowed_namespaces(self) -> tuple[str, ...]:
        """The namespaces in addition to the pool's namespace; "*" allows all namespaces."""
        return self.spec.allowed_namespaces or ()

    def permits(self, namespace: str) -> bool:
        """Return whether adapters of the namespace may use this pool."""
        return not {"*", namespace}.isdisjoint((self.meta.ref.namespace, *self.allowed_namespaces))


@dataclass(frozen=True, slots=True)
class Malformed:
    """An object with a spec unreadable for this version of the operator. `message` is the error."""

    meta: Meta
    message: str
    status: Object


def holds(resource: AdapterObject | PoolObject, condition: str) -> bool:
    """Return whether the condition is True in the stored status."""
    return any(c["type"] == condition and c["status"] == "True" for c in resource.status.get("conditions", ()))


def parse(obj: Object, previous: AdapterObject | PoolObject | None = None) -> AdapterObject | PoolObject | Malformed:
    """Read a stored object of any version of the API: absent fields have their defaults.

    `previous`: the object as it was read before. Most changes are of a status, so a spec is read once per generation.
    """
    if previous is not None:
        meta = parse_meta(obj)
        if (previous.meta.uid, previous.meta.generation) == (meta.uid, meta.generation):
            return replace(previous, meta=meta, status=obj.get("status") or {})
    read = parse_pool if obj["kind"] == "ServingPool" else parse_adapter
    try:
        return read(obj)
    except UNREADABLE:
        pass  # its CustomResourceDefinition is of another version
    try:
        return read(with_defaults(obj))
    except UNREADABLE as error:
        return Malformed(parse_meta(obj), sanitize_message(str(error) or repr(error)), obj.get("status") or {})


def parse_adapter(obj: Object) -> AdapterObject:
    """Read an admitted LoRAAdapter."""
    meta, spec = parse_meta(obj), LoRAAdapterSpec.model_validate(obj["spec"], extra="ignore")
    return AdapterObject(
        meta=meta,
        pool=Ref("ServingPool", spec.pool_ref.namespace or meta.ref.namespace, spec.pool_ref.name),
        model_name=spec.model_name or str(meta.ref),
        spec=spec,
        status=obj.get("status") or {},
    )


def parse_pool(obj: Object) -> PoolObject:
    """Read an admitted ServingPool."""
    meta, spec = parse_meta(obj), ServingPoolSpec.model_validate(obj["spec"], extra="ignore")
    return PoolObject(
        meta=meta,
        model_name=spec.model.name or meta.ref.name,
        groups=_groups(spec, obj["spec"]),
        shape=_shape(obj["spec"]),
        spec=spec,
        status=obj.get("status") or {},
    )


def ref_of(obj: Object) -> Ref:
    return Ref(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"])


def resource_version(obj: Object | None) -> str | None:
    """Return the version of an object as the API server gave it; None without an object."""
    return obj["metadata"].get("resourceVersion") if obj else None


def _shape(spec: Object) -> str:
    model = {name: value for name, value in spec["model"].items() if name != "chatTemplate"}
    made = {name: value for name, value in spec.items() if name not in NOT_OF_RUNNERS} | {"model": model}
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


def parse_meta(obj: Object) -> Meta:
    """Read the metadata filled in by a server."""
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
    """Read a time as the API writes it, in unix seconds."""
    return datetime.fromisoformat(timestamp).timestamp()


def _groups(spec: ServingPoolSpec, stored: Object) -> tuple[Group, ...]:
    """Read the groups. `stored`: the written spec, because its templates go into pods unchanged."""
    default: Object = stored.get("template") or {}
    templates = (group.get("template", default) for group in stored.get("runnerGroups") or ())
    groups = tuple(
        Group(group.name, template, group.min_runners, group.max_runners, group.phase)
        for group, template in zip(spec.runner_groups or (), templates, strict=True)
    )
    return groups or (Group(DEFAULT_GROUP, default),)
