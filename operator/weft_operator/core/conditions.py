"""Facts -> conditions, and how conditions are written.

Ready of an adapter is about what is *served*; Validated and Fetched are about the *newest content*. When an edited
source is bad, Fetched turns False with the reason while Ready stays True on the content before it, for UpdateFailed.

Reasons are API. Of a True condition: Accepted, Validated, Fetched, Published and UpdateFailed
(Ready), RunnersReady (Available). Of the
others: those of the depot, and PoolNotFound, NotPermitted, NameConflict, BaseNotReady, NoReadyRunner, Resolving,
Publishing (sent to the scheduler, not yet in its route table), ResolveFailed, LoadFailed, Deleting, ScaledToZero,
Converging (runners start or leave), CrashLoop, Unschedulable, NamespaceNotServed, NoSlots,
ChildConflict, ChildRefused, PodsRefused. Of CanaryPromoted: Promoted, SameContent, RolledBack, Progressing, and those
of the depot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from weft.api.meta import sanitize_message
from weft_operator.core.acceptance import AdapterView, PoolView, Rejection, is_ready
from weft_operator.core.artifacts import OperationStatus, Request, Resolution
from weft_operator.core.resources import Object

Status = Literal["True", "False", "Unknown"]
SHORT_DIGEST = len("sha256:") + 12


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition before it is written: no times, no generation."""

    type: str
    status: Status
    reason: str
    message: str = ""


def merged(before: Sequence[Object], after: Iterable[Condition], generation: int, now: float) -> list[dict[str, Any]]:
    """Conditions as they are stored. `lastTransitionTime` moves only when the status does."""
    old = {condition["type"]: condition for condition in before}
    return [_written(condition, old.get(condition.type), generation, now) for condition in after]


def adapter_conditions(view: AdapterView) -> list[Condition]:
    """Accepted, Validated, Fetched, Ready; with a canary CanaryPromoted."""
    if view.rejection:
        if view.serving is None or view.adapter.meta.deleting:
            return _refused(view.rejection, ("Validated", "Fetched"), "Ready")
        refused = _refused(view.rejection, ("Validated", "Fetched"))
        return [*refused, _ready(view, refused)]
    accepted = Condition("Accepted", "True", "Accepted", f"served by ServingPool {view.adapter.pool}")
    if view.adapter.meta.deleting:
        return [accepted, Condition("Ready", "False", "Deleting", "waiting until no runner holds it")]
    content = _content_of_adapter(view)
    return [accepted, *content, _ready(view, content), *_canary(view)]


def _canary(view: AdapterView) -> list[Condition]:
    if view.canary is None:
        return []
    statuses: dict[str, Status] = {"Promoted": "True", "Failed": "False", "RolledBack": "False"}
    status = "True" if view.canary.reason == "SameContent" else statuses.get(view.canary.phase, "Unknown")
    return [Condition("CanaryPromoted", status, view.canary.reason, view.canary.message)]


def pool_conditions(view: PoolView) -> list[Condition]:
    """Accepted, Fetched, Available, Progressing, Ready."""
    if view.rejection:
        return _refused(view.rejection, ("Fetched",), "Available", "Progressing", "Ready")
    accepted = Condition("Accepted", "True", "Accepted", f"serves {view.pool.model_name!r}")
    fetched = _fetched(view.request, view.resolution)
    available, progressing = _available(view, fetched), _progressing(view, fetched)
    return [accepted, fetched, available, progressing, _pool_ready(view, available, progressing)]


def timestamp(now: float) -> str:
    """Unix seconds as the API writes them."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _content_of_adapter(view: AdapterView) -> list[Condition]:
    if view.mismatch:
        reason, message = view.mismatch.reason, view.mismatch.message
        return [Condition(kind, "False", reason, message) for kind in ("Validated", "Fetched")]
    if view.request is None:
        message = f"the base model of ServingPool {view.adapter.pool} is not there yet"
        return [Condition(kind, "Unknown", "BaseNotReady", message) for kind in ("Validated", "Fetched")]
    return [_validated(view.request, view.resolution), _fetched(view.request, view.resolution)]


def _validated(request: Request, resolution: Resolution | None) -> Condition:
    answer = _answer(request, resolution)
    if answer.verdict is not None:
        return Condition("Validated", "True", "Validated", "configuration, shapes and dtype fit the base")
    if answer.state == "Failed":
        return Condition("Validated", "False", answer.reason, answer.message)
    return Condition("Validated", "Unknown", "Resolving", f"reading {request.uri}")


def _fetched(request: Request | None, resolution: Resolution | None) -> Condition:
    assert request is not None  # only asked for an accepted object
    answer = _answer(request, resolution)
    if answer.state == "Fetched":
        return Condition("Fetched", "True", "Fetched", "the whole content is in the depot")
    if answer.state == "Failed":
        return Condition("Fetched", "False", answer.reason, answer.message)
    return Condition("Fetched", "Unknown", "Resolving", f"fetching {request.uri}")


def _answer(request: Request, resolution: Resolution | None) -> OperationStatus:
    return resolution.answer if resolution and resolution.request == request else OperationStatus()


def _ready(view: AdapterView, content: Sequence[Condition]) -> Condition:
    if view.serving is None:
        blocker = next((c for c in content if c.status != "True"), Condition("", "False", "Resolving"))
        return Condition("Ready", "False", blocker.reason, blocker.message)
    digest = view.serving.digest
    if view.report is None:
        return _ready_unreported(view, digest)
    if not view.report.routed or (view.report.digest != digest and not is_ready(view.adapter)):
        return Condition("Ready", "False", "Publishing", "sent to the scheduler, not yet in its route table")
    if view.report.load_failed:
        return Condition("Ready", "False", "LoadFailed", "no runner can load it: " + "; ".join(view.report.load_errors))
    return _published(view, digest)


def _ready_unreported(view: AdapterView, digest: str) -> Condition:
    """The scheduler has not spoken yet (it or the operator has just started): what was true of this digest stays."""
    status = view.adapter.status
    stored = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), None)
    if (
        stored is not None
        and status.get("digest") == digest
        and stored["reason"] in ("Published", "UpdateFailed", "LoadFailed")
    ):
        return _published(view, digest) if stored["status"] == "True" else _as_stored(stored)
    return Condition("Ready", "False", "Publishing", "sent to the scheduler, not yet in its route table")


def _published(view: AdapterView, digest: str) -> Condition:
    name, short = view.adapter.model_name, digest[:SHORT_DIGEST]
    if refused := view.rejection or view.mismatch:
        message = f"{name!r} still serves {short} in {view.serving.pool if view.serving else ''}: "
        return Condition("Ready", "True", "UpdateFailed", f"{message}{refused.message} ({refused.reason})")
    answer = _answer(view.request, view.resolution) if view.request else OperationStatus()
    if answer.state == "Failed":
        message = f"{name!r} still serves {short}: the newest source is refused ({answer.reason}, see Fetched)"
        return Condition("Ready", "True", "UpdateFailed", message)
    if view.serving and view.serving.pool != view.adapter.pool:
        message = f"{name!r} serves {short} in {view.serving.pool} until ServingPool {view.adapter.pool} takes requests"
        return Condition("Ready", "True", "Published", message)
    return Condition("Ready", "True", "Published", f"{name!r} serves {short}")


def _as_stored(stored: Object) -> Condition:
    return Condition(stored["type"], stored["status"], stored["reason"], stored["message"])


def _available(view: PoolView, fetched: Condition) -> Condition:
    ready = ready_runners(view)
    if view.serving is None:
        return Condition("Available", "False", "BaseNotReady", fetched.message)
    if ready > 0:
        return Condition("Available", "True", "RunnersReady", "requests are served")
    if view.wanted == 0:
        why = "replicas is 0" if view.bounds.max == 0 else "nobody uses it; a request wakes it"
        return Condition("Available", "False", "ScaledToZero", why)
    trouble = _trouble(view)
    return Condition("Available", "False", "NoReadyRunner", trouble.message if trouble else "runners are starting")


def _progressing(view: PoolView, fetched: Condition) -> Condition:
    if view.serving is None:
        status: Status = "True" if fetched.status == "Unknown" else "False"
        return Condition("Progressing", status, fetched.reason, fetched.message)
    if view.pool.paused:
        return Condition("Progressing", "Unknown", "Paused", "spec.paused is true: runners stay as they are")
    if trouble := _trouble(view):
        return Condition("Progressing", "False", trouble.reason, trouble.message)
    if ready_runners(view) == view.wanted == len(view.runners):
        return Condition("Progressing", "False", "RunnersReady", "every wanted runner is ready")
    return Condition("Progressing", "True", "Converging", f"bringing the pool to {view.wanted} runners")


def _pool_ready(view: PoolView, available: Condition, progressing: Condition) -> Condition:
    """True once nothing is left to do, as kstatus and `kubectl wait` read it."""
    if view.serving is not None and ready_runners(view) == view.wanted == len(view.runners):
        if view.wanted == 0:
            return Condition("Ready", "True", available.reason, available.message)
        return Condition("Ready", "True", "RunnersReady", "every wanted runner is ready")
    why = progressing if view.serving is not None else available
    return Condition("Ready", "False", why.reason, why.message)


def ready_runners(view: PoolView) -> int:
    """By the scheduler's report; before there is one, by the stored status. Whoever is on its way out does not count.

    The scheduler learns that a moment later than the cluster, of one that was killed only when its lease ends.
    """
    reported = view.report.ready_runners if view.report else int(view.pool.status.get("readyReplicas", 0))
    return min(reported, len(view.runners))


def _trouble(view: PoolView) -> Rejection | None:
    """What does not come right by itself: a refusal, or a runner that does not come up.

    Of several runners it is the first by name, so that the message does not flap.
    """
    if view.blocking_error:
        return view.blocking_error
    stuck = [runner for runner in view.runners if runner.state in ("CrashLoop", "Unschedulable")]
    first = min(stuck, key=lambda runner: (runner.state, runner.name), default=None)
    return Rejection(first.state, first.message) if first else None


def _refused(rejection: Rejection, unknown: Iterable[str], *false: str) -> list[Condition]:
    reason, message = rejection.reason, rejection.message
    return [
        Condition("Accepted", "False", reason, message),
        *(Condition(kind, "Unknown", reason, "not looked at") for kind in unknown),
        *(Condition(kind, "False", reason, message) for kind in false),
    ]


def _written(condition: Condition, old: Object | None, generation: int, now: float) -> dict[str, Any]:
    moved = old is None or old["status"] != condition.status
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": sanitize_message(condition.message),
        "observedGeneration": generation,
        "lastTransitionTime": timestamp(now) if moved or old is None else old["lastTransitionTime"],
    }
