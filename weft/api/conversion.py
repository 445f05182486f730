"""Objects of other versions of the API -> objects with every field of this one."""

from collections.abc import Mapping
from typing import Any

from weft.api.manifests import parse_object

OLDER_TOKEN_TIME_MS = 100  # default of scheduler.tokenTimeMs
# Fields of earlier versions by their path below spec: objects that have them are read without them.
GONE = (
    "canary.source.pollInterval",
    "kvCache.pageTokens",
    "model.pollInterval",
    "offload.cpuAttention",
    "phases.minPrompt",
    "phases.minToken",
    "rollout.minReadySeconds",
    "scheduler.agingSeconds",
    "scheduler.consolidationSeconds",
    "scheduler.fairness.mode",
    "scheduler.maxMoves",
    "scheduler.placement",
    "scheduler.prefetch",
    "scheduler.starvationBound",
    "scheduler.tokenTimeMs",
    "source.pollInterval",
)


def with_defaults(obj: Mapping[str, Any]) -> dict[str, Any]:
    """A stored object as this version's API server gives it: a field that its writer did not know has its default.

    Raises ManifestError where this version takes it no more.
    """
    converted = _converted(obj)
    resource = parse_object({name: value for name, value in converted.items() if name != "status"})
    return {**converted, "spec": resource.to_dict()["spec"]}


def _converted(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with the fields of today's versions: those that are `GONE` are left out, and
    a pool's `scheduler.tokenTimeMs` is `slo.tokenTimeMs`.

    Older versions wrote defaults out. A default that nobody chose is no objective.
    """
    spec = obj["spec"]
    scheduler = spec.get("scheduler")
    for path in GONE:
        spec = _without(spec, *path.split("."))
    older = scheduler.get("tokenTimeMs", OLDER_TOKEN_TIME_MS) if isinstance(scheduler, dict) else OLDER_TOKEN_TIME_MS
    if older != OLDER_TOKEN_TIME_MS:
        spec = {"slo": {"tokenTimeMs": older}, **spec}
    return {**obj, "spec": spec}


def _without(value: Any, name: str, *within: str) -> Any:
    """What an object's spec, or a part of it, is without a field at that path."""
    if not isinstance(value, dict) or name not in value:
        return value
    fields: dict[str, Any] = {**value}
    field = fields.pop(name)
    return fields | {name: _without(field, *within)} if within else fields
