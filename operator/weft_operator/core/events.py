"""Events of an object: transitions, found by comparing the stored status with the one about to be written.

Steps on the way (reading, fetching, publishing) are no news, a cause that shows in several conditions is one Event.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from weft_operator.core.actions import RecordEvent
from weft_operator.core.resources import Adapter, Object, Pool

HEADLINES = ("Ready", "Available", "CanaryPromoted")  # the conditions whose turning True is an Event of its own
STEPS = frozenset(("Resolving", "Publishing", "BaseNotReady", "NoReadyRunner", "Converging"))
CONSEQUENCES = frozenset(("UpdateFailed",))  # Fetched has the cause
EXPECTED = frozenset(("ScaledToZero", "Deleting", "RunnersReady"))


EventType = Literal["Normal", "Warning"]


def events_for(resource: Pool | Adapter, status: Object) -> list[RecordEvent]:
    """Events of writing this status."""
    found: dict[tuple[EventType, str], str] = {}
    for kind, reason, message in _news(resource.status, status):
        found.setdefault((kind, reason), message)
    meta = resource.meta
    return [RecordEvent(meta.ref, meta.uid, kind, reason, message) for (kind, reason), message in found.items()]


def _news(before: Object, after: Object) -> Iterator[tuple[EventType, str, str]]:
    old = {condition["type"]: condition for condition in before.get("conditions", ())}
    for condition in after.get("conditions", ()):
        was = old.get(condition["type"])
        reason, message = condition["reason"], condition["message"]
        if was is not None and (was["status"], was["reason"]) == (condition["status"], reason):
            continue
        if condition["status"] == "True":
            recovered = was is not None and was["status"] == "False" and reason not in STEPS
            if (condition["type"] in HEADLINES or recovered) and reason not in CONSEQUENCES:
                yield "Normal", reason, message
        elif condition["status"] == "False" and reason not in STEPS:
            yield "Normal" if reason in EXPECTED else "Warning", reason, message
    yield from _role_changes(before.get("phases"), after.get("phases"))
    if (scaled := after.get("lastScale")) and scaled != before.get("lastScale"):
        yield "Normal", "Scaled", f"from {scaled['from']} to {scaled['to']} runners: {scaled['reason']}"


def _role_changes(before: Object | None, after: Object | None) -> Iterator[tuple[EventType, str, str]]:
    """Where as many runners as before are in other roles, or wanted in other groups."""
    if before is None or after is None:
        return
    if changed := _other_counts(before, after, ("prompt", "token", "mixed")):
        yield "Normal", "RolesChanged", f"{changed}: {after['message']}"
    groups = before.get("wanted"), after.get("wanted")
    if groups[0] and groups[1] and (changed := _other_counts(groups[0], groups[1], ("prompt", "token", "any"))):
        yield "Normal", "GroupsScaled", f"{changed}: what prompts and tokens demand"


def _other_counts(before: Object, after: Object, names: Sequence[str]) -> str:
    """From what to what, where the counts of as many runners differ; else nothing."""
    counts = [[of[name] for name in names] for of in (before, after)]
    if counts[0] == counts[1] or sum(counts[0]) != sum(counts[1]):
        return ""
    was, now = (", ".join(f"{count} {name}" for count, name in zip(of, names, strict=True)) for of in counts)
    return f"from {was} to {now}"
