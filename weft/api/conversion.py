"""Objects of other versions of the API -> objects with every field of this one."""

from collections.abc import Mapping
from typing import Any

from weft.api.manifests import parse_object

OLDER_TOKEN_TIME_MS = 100  # default of scheduler.tokenTimeMs


def with_defaults(obj: Mapping[str, Any]) -> dict[str, Any]:
    """A stored object as this version's API server gives it: a field that its writer did not know has its default.

    Raises ManifestError where this version takes it no more.
    """
    converted = _converted(obj)
    resource = parse_object({name: value for name, value in converted.items() if name != "status"})
    return {**converted, "spec": resource.to_dict()["spec"]}


def _converted(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the fields of today's versions: a pool's `scheduler.tokenTimeMs` became `slo.tokenTimeMs`, and
    `scheduler.placement`, which had one value, `scheduler.prefetch`, whose fetches were mostly in vain, and
    `offload.cpuAttention`, which nobody read, are gone.

    Older versions wrote defaults out. A default that nobody chose is no objective.
    """
    scheduler = obj["spec"].get("scheduler")
    if not isinstance(scheduler, dict):  # the object is no pool
        return obj
    kept = {name: value for name, value in scheduler.items() if name not in ("tokenTimeMs", "placement", "prefetch")}
    spec = {**obj["spec"], "scheduler": kept}
    if isinstance(offload := spec.get("offload"), dict):
        spec["offload"] = {name: value for name, value in offload.items() if name != "cpuAttention"}
    if scheduler.get("tokenTimeMs", OLDER_TOKEN_TIME_MS) != OLDER_TOKEN_TIME_MS:
        spec.setdefault("slo", {"tokenTimeMs": scheduler["tokenTimeMs"]})
    return {**obj, "spec": spec}
