"""Objects of earlier forms of v1alpha1 -> objects as this version has them."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from weft.api.fields import names_of
from weft.api.manifests import parse_object
from weft.api.servingpool import ServingPoolSpec

Fields = Mapping[str, Any]

# Where the fields of a pool's spec are now, by the path that they had below spec.
PLACES = {
    "chatTemplate": "model.chatTemplate",
    "generationDefaults": "model.generationDefaults",
    "maxOutputTokens": "model.maxOutputTokens",
    "kvCache.memoryFraction": "memory.fraction",
    "kvCache.pages": "advanced.kvPages",
    "lora.maxAdapters": "advanced.maxAdapters",
    "offload.deviceBytes": "memory.offload.deviceBytes",
    "offload.diskBytes": "memory.offload.diskBytes",
    "offload.diskPath": "memory.offload.diskPath",
    "offload.hostBytes": "memory.offload.hostBytes",
    "offload.kv": "memory.offload.kv",
    "offload.sparseAttention": "advanced.sparseAttention",
    "offload.weights": "memory.offload.weights",
    "phases.kvAcrossClasses": "advanced.kvAcrossClasses",
    "scheduler.consolidation": "advanced.consolidation",
    "scheduler.fairness": "fairness",
    "scheduler.maxBatchTokens": "advanced.maxBatchTokens",
    "scheduler.maxQueue": "advanced.maxQueue",
    "scheduler.maxSequences": "advanced.maxSequences",
    "scheduler.queue": "advanced.queue",
    "scheduler.reservation": "advanced.reservation",
    "scheduler.tokenTimeMs": "slo.tokenTimeMs",
}


class Gone(NamedTuple):
    """A field without a successor. `default`: what it was by default, which nobody chose."""

    default: object
    advice: str = "its default was right for nearly every pool, and holds now"


# Fields of both kinds that have no successor, by the path that they had below spec.
GONE = {
    "autoscaling.wakeSeconds": Gone(300, "the platform's gateway.holdSeconds bounds the wait for a runner"),
    "canary.source.pollInterval": Gone(None, "the platform's poll-seconds says how often sources are read"),
    "chatTemplate.configMapRef.key": Gone("chat_template.jinja", "the ConfigMap's entry has to be chat_template.jinja"),
    "kvCache.pageTokens": Gone(16),
    "model.pollInterval": Gone(None, "the platform's poll-seconds says how often sources are read"),
    "offload.cpuAttention": Gone("Off"),
    "phases.minPrompt": Gone(1),
    "phases.minToken": Gone(1),
    "rollout.minReadySeconds": Gone(0),
    "scheduler.agingSeconds": Gone(600),
    "scheduler.consolidationSeconds": Gone(10),
    "scheduler.fairness.mode": Gone("Tenant"),
    "scheduler.maxMoves": Gone(8),
    "scheduler.maxPrefills": Gone(None),
    "scheduler.placement": Gone("punica"),
    "scheduler.prefetch": Gone("never"),
    "scheduler.starvationBound": Gone(None),
    "source.pollInterval": Gone(None, "the platform's poll-seconds says how often sources are read"),
}
OLDER_TOKEN_TIME_MS = 100  # default of scheduler.tokenTimeMs, which was written out: no objective that anybody chose


class Conversion(NamedTuple):
    """An object in today's form. `lost`: what it asked for that has no successor, a sentence each."""

    obj: Fields
    lost: tuple[str, ...]


def convert(obj: Fields) -> Conversion:
    """An object of any earlier form of this version, as people or API servers write it -> one of today's form.

    What is in today's form already stays as it is. The result may still be wrong where the object was.
    """
    spec = obj.get("spec")
    if not isinstance(spec, dict):
        return Conversion(obj, ())
    spec, lost = cast("dict[str, Any]", spec), list[str]()
    for path, removed in GONE.items():
        spec, value = _taken(spec, *path.split("."))
        if value not in (None, removed.default):
            lost.append(f"spec.{path}: {value!r} has no successor: {removed.advice}")
    return Conversion({**obj, "spec": _in_place(spec) if obj.get("kind") == "ServingPool" else spec}, tuple(lost))


def with_defaults(obj: Fields) -> dict[str, Any]:
    """A stored object as this version's API server gives it: a field that its writer did not know has its default.

    Raises ManifestError where this version takes it no more.
    """
    converted = convert(obj).obj
    resource = parse_object({name: value for name, value in converted.items() if name != "status"})
    return {**converted, "spec": resource.to_dict()["spec"]}


def _in_place(spec: dict[str, Any]) -> dict[str, Any]:
    """Move each field of a pool's spec to its place of today. Of two for one place, the one already there counts."""
    spec, mode = _taken(spec, "offload", "mode")
    if mode in ("Off", False):  # YAML's Off is a truth value
        spec, _ = _taken(spec, "offload")
    for path, place in PLACES.items():
        spec, value = _taken(spec, *path.split("."))
        if value is not None and (path, value) != ("scheduler.tokenTimeMs", OLDER_TOKEN_TIME_MS):
            spec = _given(spec, value, *place.split("."))
    if isinstance(allowed := spec.get("allowedNamespaces"), dict):
        spec = {**spec, "allowedNamespaces": list(_namespaces(cast("dict[str, Any]", allowed)))}
    emptied = {path.partition(".")[0] for path in PLACES}
    order = {name: number for number, name in enumerate(names_of(ServingPoolSpec))}
    names = (name for name, value in spec.items() if value != {} or name not in emptied)
    return {name: spec[name] for name in sorted(names, key=lambda name: order.get(name, len(order)))}


def _namespaces(allowed: Fields) -> Iterator[str]:
    if allowed.get("from") == "All":
        yield "*"
    elif allowed.get("from") == "List":
        yield from allowed.get("names") or ()


def _taken(value: Any, name: str, *below: str) -> tuple[Any, Any]:
    """Remove the field at a path. Returns the fields without it, and its value; None: there was none."""
    if not isinstance(value, dict) or name not in value:
        return value, None
    fields = dict(cast("dict[str, Any]", value))
    field = fields.pop(name)
    if not below:
        return fields, field
    rest, removed_value = _taken(field, *below)
    return fields | {name: rest}, removed_value


def _given(fields: dict[str, Any], value: Any, name: str, *below: str) -> dict[str, Any]:
    """Set the field at a path, unless it is set already."""
    if not below:
        return {**fields, name: fields.get(name, value)}
    inner = fields.get(name)
    return {**fields, name: _given(cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}, value, *below)}
