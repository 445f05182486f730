"""What people are told as Events: transitions, found by comparing the stored status with the one about to be written.

Steps on the way (reading, fetching, publishing) are no news, a cause that shows in several conditions is told once.
"""

from collections.abc import Iterator
from typing import Literal

from weft_operator.actions import Announce
from weft_operator.resources import Adapter, Object, Pool

HEADLINES = ("Ready", "Available")  # the conditions whose being True is news by itself
STEPS = frozenset(("Resolving", "Publishing", "BaseNotReady", "NoReadyRunner", "Converging"))
EXPECTED = frozenset(("ScaledToZero", "Deleting", "RunnersReady"))


EventType = Literal["Normal", "Warning"]


def announcements(resource: Pool | Adapter, status: Object) -> list[Announce]:
    """Events of writing this status."""
    told: dict[tuple[EventType, str], str] = {}
    for kind, reason, message in _news(resource.status, status):
        told.setdefault((kind, reason), message)
    meta = resource.meta
    return [Announce(meta.ref, meta.uid, kind, reason, message) for (kind, reason), message in told.items()]


def _news(before: Object, after: Object) -> Iterator[tuple[EventType, str, str]]:
    old = {condition["type"]: condition for condition in before.get("conditions", ())}
    for condition in after.get("conditions", ()):
        was = old.get(condition["type"])
        reason, message = condition["reason"], condition["message"]
        if was is not None and (was["status"], was["reason"]) == (condition["status"], reason):
            continue
        if condition["status"] == "True":
            recovered = was is not None and was["status"] == "False" and reason not in STEPS
            if condition["type"] in HEADLINES or recovered:
                yield "Normal", reason, message
        elif condition["status"] == "False" and reason not in STEPS:
            yield "Normal" if reason in EXPECTED else "Warning", reason, message
    yield from _role_changes(before.get("phases"), after.get("phases"))
    if (scaled := after.get("lastScale")) and scaled != before.get("lastScale"):
        yield "Normal", "Scaled", f"from {scaled['from']} to {scaled['to']} runners: {scaled['reason']}"


def _role_changes(before: Object | None, after: Object | None) -> Iterator[tuple[EventType, str, str]]:
    """Where as many runners as before are in other roles: the scheduler reports that at most once a minute."""
    roles = ("prompt", "token", "mixed")
    if before is None or after is None or sum(before[role] for role in roles) != sum(after[role] for role in roles):
        return
    if any(before[role] != after[role] for role in roles):
        was, now = (", ".join(f"{of[role]} {role}" for role in roles) for of in (before, after))
        yield "Normal", "RolesChanged", f"from {was} to {now}: {after['message']}"
