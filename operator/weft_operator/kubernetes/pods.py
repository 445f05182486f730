"""A pod as the planner sees it. Pure.

The message of a pod that does not run stays the same while its reason does: it becomes part of a status.
"""

from collections.abc import Iterator
from typing import Any

from weft.domain.text import sanitize
from weft_operator.core.children import GROUP_LABEL, POOL_LABEL, RUNNER_LABEL, template_hash
from weft_operator.core.resources import Object, Ref
from weft_operator.core.state import Pod, RunnerState

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LAST_WORDS_MAX = 300
# The kubelet waits before it tries again, for longer each time: nothing of it will be ready soon.
STUCK = frozenset(
    (
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    )
)


def pool_of(obj: Object) -> Ref | None:
    """The pool whose label an object carries; None: it has none."""
    metadata = obj["metadata"]
    name = (metadata.get("labels") or {}).get(POOL_LABEL)
    return Ref("ServingPool", metadata["namespace"], name) if name else None


def observed_pod(obj: Object) -> Pod:
    """A pod of a pool, as the API server gives it."""
    metadata = obj["metadata"]
    state, message = _state(obj)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        group=(metadata.get("labels") or {}).get(GROUP_LABEL, ""),
        runner=(metadata.get("labels") or {}).get(RUNNER_LABEL, ""),
        state=state,
        template=template_hash(obj),
        message=message,
        cost=_cost((metadata.get("annotations") or {}).get(DELETION_COST)),
    )


def _state(obj: Object) -> tuple[RunnerState, str]:
    status: Any = obj.get("status") or {}
    if obj["metadata"].get("deletionTimestamp") or status.get("phase") in ("Failed", "Succeeded"):
        return "Leaving", ""  # also an evicted pod: its ReplicaSet has made another one
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    if conditions.get("Ready", {}).get("status") == "True":
        return "Ready", ""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return "Unschedulable", _words(scheduled.get("message"))
    return next(_stuck(status), ("Starting", ""))


def _stuck(status: Any) -> Iterator[tuple[RunnerState, str]]:
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason in STUCK:
            yield "CrashLoop", _why(container, reason, waiting)


def _why(container: Any, reason: str, waiting: Any) -> str:
    """`runner: CrashLoopBackOff: exit code 2: no such file`: the container's own words, where it left any."""
    ended = (container.get("lastState") or {}).get("terminated")
    if not ended:
        return ": ".join(part for part in (container["name"], reason, _words(waiting.get("message"))) if part)
    said = _words(ended.get("message")) or str(ended.get("reason") or "")
    return ": ".join(part for part in (container["name"], reason, f"exit code {ended.get('exitCode')}", said) if part)


def _words(text: Any) -> str:
    """The end of what was said counts: that is where errors are."""
    return sanitize(" ".join(str(text or "").split())[-LAST_WORDS_MAX:])


def _cost(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None
