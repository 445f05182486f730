"""Objects of earlier forms of v1alpha1 -> objects of the current form."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from weft.api.fields import names_of
from weft.api.manifests import parse_object
from weft.api.servingpool import ServingPoolSpec

Fields = Mapping[str, Any]

# Current paths of the fields of a pool's spec, by their earlier path below spec.
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
    """A field without a successor. `default`: its former default, chosen by nobody."""

    default: object
    advice: str = "its default was right for nearly every pool, and applies now"


# Fields of both kinds without a successor, by their earlier path below spec.
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
OLDER_TOKEN_TIME_MS = 100  # default of scheduler.tokenTimeMs, written out by earlier versions; not a chosen objective


class Conversion(NamedTuple):
    """An object in the current form. `lost`: a sentence for each value without a successor."""

    obj: Fields
    lost: tuple[str, ...]


def convert(obj: Fields) -> Conversion:
    """Convert an object of any earlier form of v1alpha1, as people or API servers write it, to the current form.

    Fields in the current form stay. A faulty object may stay faulty.
    """
    spec = obj.get("spec")
    if not isinstance(spec, dict):
        return Conversion(obj, ())
    spec, lost = cast("dict[str, Any]", spec), list[str]()
    for path, removed in GONE.items():
        spec, value = _part_of(spec, *path.split("."))
        if value not in (None, removed.default):
            lost.append(f"spec.{path}: {value!r} has no successor: {removed.advice}")
    return Conversion({**obj, "spec": _in_place(spec) if obj.get("kind") == "ServingPool" else spec}, tuple(lost))


def with_defaults(obj: Fields) -> dict[str, Any]:
    """Return a stored object as this version's API server gives it, with defaults for fields unknown to its writer.

    Raises ManifestError if this version does not accept the object.
    """
    converted = convert(obj).obj
    resource = parse_object({name: value for name, value in converted.items() if name != "status"})
    return {**converted, "spec": resource.to_dict()["spec"]}


def _in_place(spec: dict[str, Any]) -> dict[str, Any]:
    """Move each field of a pool's spec to its current path. A value already at the path wins."""
    spec, mode = _part_of(spec, "offload", "mode")
    if mode in ("Off", False):  # YAML's Off is a truth value
        spec, _ = _part_of(spec, "offload")
    for path, place in PLACES.items():
        spec, value = _part_of(spec, *path.split("."))
        if value is not None and (path, value) != ("scheduler.tokenTimeMs", OLDER_TOKEN_TIME_MS):
            spec = _set_fields(spec, value, *place.split("."))
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


def _part_of(value: Any, name: str, *below: str) -> tuple[Any, Any]:
    """Remove the field at a path. Return the remaining fields, and its value or None."""
    if not isinstance(value, dict) or name not in value:
        return value, None
    fields = dict(cast("dict[str, Any]", value))
    field = fields.pop(name)
    if not below:
        return fields, field
    rest, removed_value = _part_of(field, *below)
    return fields | {name: rest}, removed_value


def _set_fields(fields: dict[str, Any], value: Any, name: str, *below: str) -> dict[str, Any]:
    """Set the field at a path unless it is set already."""
    if not below:
        return {**fields, name: fields.get(name, value)}
    inner = fields.get(name)
    return {
        **fields,
        name: _set_fields(cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}, value, *below),
    }
