"""Whether an applied object is served or refused, by its conditions."""

from typing import Any


def is_ready(obj: Any) -> bool:
    """Return whether an object is served as desired: an adapter is Ready, a pool is Available or scaled to zero."""
    status = obj.get("status", {})
    condition_type = "Available" if obj["kind"] == "ServingPool" else "Ready"
    current = status.get("observedGeneration") == obj["metadata"]["generation"]
    matches = [c for c in status.get("conditions", ()) if c["type"] == condition_type]
    return current and any(c["status"] == "True" or c["reason"] == "ScaledToZero" for c in matches)


def is_refused(obj: Any) -> bool:
    """Return whether an object is refused: it cannot become ready without a change by a person."""
    status = obj.get("status", {})
    if status.get("observedGeneration") != obj["metadata"]["generation"]:
        return False
    decisive = ("Accepted", "Validated", "Fetched")
    if any(c["reason"] == "PoolNotFound" for c in status["conditions"]):
        return True
    return any(c["type"] in decisive and c["status"] == "False" for c in status["conditions"])


def is_failing(obj: Any) -> bool:
    """Return whether a pool's runners end repeatedly."""
    return any(c["reason"] == "CrashLoop" for c in obj.get("status", {}).get("conditions", ()))


def state_of(obj: Any) -> str:
    """Describe an object by the first condition that keeps it from being served."""
    name = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
    conditions = obj.get("status", {}).get("conditions", ())
    condition = next((c for c in conditions if c["status"] != "True" and c["type"] != "Progressing"), None)
    return f"{name}: {condition['reason']}: {condition['message']}" if condition else f"{name}: nothing known yet"
