"""Views -> the status of an object: its conditions, further fields, and the Events of its transitions. Pure.

Ready of an adapter is about the *served* content; Validated and Fetched are about the *newest* content. While an edited
source is read, and until every gateway serves it, Ready stays True on the previous content, with the previous
observedGeneration. So every waiter for Ready (`kubectl wait`, kstatus) waits for the new content. If an edited source
is bad, Fetched turns False with the reason. Ready then stays True on the previous content, with reason UpdateFailed.

Reasons are API.

- True conditions: Accepted, Validated, Fetched, Published and UpdateFailed (Ready), RunnersReady (Available).
- False and Unknown conditions, an object's part: PoolNotFound, NotPermitted, NameConflict, NamespaceNotServed, NoSlots,
  BaseNotReady, VolumeNotAllowed, Deleting.
- False and Unknown conditions, the content's part: reasons of the depot; Resolving, ResolveFailed, LoadFailed,
  Publishing (sent to the scheduler, not yet in its route table).
- False and Unknown conditions, the runners' part: NoReadyRunner, ScaledToZero, Converging (runners start or leave),
  CrashLoop, Unschedulable, ChildConflict, ChildRefused, PodsRefused.
- CanaryPromoted: Promoted, SameContent, RolledBack, Progressing; reasons of the depot.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from weft.api.meta import sanitize_message
from weft.artifacts.depot_api import OperationStatus, ResolveRequest, Verdict
from weft.domain.adapter import AdapterVersion
from weft_operator.core.acceptance import AdapterView, PoolFacts, Rejection, is_ready
from weft_operator.core.actions import RecordEvent
from weft_operator.core.artifacts import Resolution, VerifiedArtifact
from weft_operator.core.canary import DECIDED
from weft_operator.core.chat_templates import FAULT, TemplateView
from weft_operator.core.children import selector
from weft_operator.core.resources import AdapterObject, Malformed, Object, PoolObject

Status = Literal["True", "False", "Unknown"]
SHORT_DIGEST = len("sha256:") + 12


@dataclass(frozen=True, slots=True)
class UndatedCondition:
    """A condition before it is written, without times. `generation`: its generation, if older than the newest."""

    type: str
    status: Status
    reason: str
    message: str = ""
    generation: int | None = None


def merged(
    previous: Sequence[Object], current: Iterable[UndatedCondition], generation: int, now: float
) -> list[dict[str, Any]]:
    """Merge conditions as they are stored. `lastTransitionTime` moves only when the status does."""
    old = {condition["type"]: condition for condition in previous}
    return [_written(condition, old.get(condition.type), generation, now) for condition in current]


def adapter_conditions(view: AdapterView) -> list[UndatedCondition]:
    """Decide Accepted, Validated, Fetched, ChatTemplate, Ready; with a canary CanaryPromoted."""
    if view.rejection:
        if view.serving is None or view.adapter.meta.deleting:
            return _refused(view.rejection, ("Validated", "Fetched"), "Ready")
        refused = _refused(view.rejection, ("Validated", "Fetched"))
        return [*refused, _ready(view, refused)]
    accepted = UndatedCondition("Accepted", "True", "Accepted", f"served by ServingPool {view.adapter.pool}")
    if view.adapter.meta.deleting:
        return [accepted, UndatedCondition("Ready", "False", "Deleting", "waiting until no runner holds it")]
    content = _content_of_adapter(view)
    template = _template_of_adapter(view)
    return [accepted, *content, *template, _ready(view, [*content, *template]), *_canary(view)]


def has_own_template(adapter: AdapterObject, verdict: Verdict) -> bool:
    """Whether chats of a content are rendered by the chat template in the content's files."""
    is_adapters = (verdict.get("chatTemplate") or {}).get("from") == "Adapter"
    origin = adapter.chat_template.from_
    return origin == "Adapter" or (is_adapters and origin == "Auto")


def _template_of_adapter(view: AdapterView) -> list[UndatedCondition]:
    if view.template:
        return _template_of_spec(view.template)
    template = view.serving and view.serving.verdict.get("chatTemplate")
    if not template:
        return []
    is_adapters, origin = template.get("from") == "Adapter", view.adapter.chat_template.from_
    if origin == "Adapter" and not is_adapters:
        return [
            UndatedCondition(
                "ChatTemplate",
                "False",
                "NoTemplate",
                "chatTemplate.from is Adapter, and the adapter's files have no chat template",
            )
        ]
    if origin == "Base" or template.get("from") == "Base":
        unused = "; the adapter's template is not used: chatTemplate.from is Base" if is_adapters else ""
        message = f"the pool's chat template; see the pool's condition ChatTemplate{unused}"
        return [UndatedCondition("ChatTemplate", "True", "TemplateOfBase", message)]
    return _chat_template(view.serving)


def _template_of_spec(template: TemplateView) -> list[UndatedCondition]:
    """Decide whether chats can be rendered by the supplied template; empty without a base."""
    answer, fault = template.answer, (template.content.verdict.get("fault") if template.content else None)
    match answer.state:
        case "Failed":
            return [UndatedCondition("ChatTemplate", "False", answer.reason, answer.message)]
        case "Fetched" if fault:
            return [UndatedCondition("ChatTemplate", "False", FAULT, fault)]
        case "Fetched":
            return [
                UndatedCondition(
                    "ChatTemplate", "True", "TemplateOfSpec", "the chat template renders the smallest conversation"
                )
            ]
        case _ if template.request:
            return [UndatedCondition("ChatTemplate", "Unknown", "Resolving", "reading the chat template")]
        case _:
            return []


def _chat_template(serving: VerifiedArtifact | None) -> list[UndatedCondition]:
    """Decide whether chats can be rendered by the serving content; empty if an older depot has not checked."""
    match serving.verdict.get("chatTemplate") if serving else None:
        case {"fault": str(fault)}:
            return [UndatedCondition("ChatTemplate", "False", FAULT, fault)]
        case {"from": "None"}:
            return [
                UndatedCondition("ChatTemplate", "False", "NoTemplate", "the base model's files have no chat template")
            ]
        case {"from": str(owner)}:
            return [
                UndatedCondition(
                    "ChatTemplate", "True", f"TemplateOf{owner}", "the chat template renders the smallest conversation"
                )
            ]
        case _:
            return []


def _canary(view: AdapterView) -> list[UndatedCondition]:
    if view.canary is None:
        return []
    statuses: dict[str, Status] = {"Promoted": "True", "Failed": "False", "RolledBack": "False"}
    status = "True" if view.canary.reason == "SameContent" else statuses.get(view.canary.phase, "Unknown")
    return [UndatedCondition("CanaryPromoted", status, view.canary.reason, view.canary.message)]


def pool_conditions(view: PoolFacts) -> list[UndatedCondition]:
    """Decide Accepted, Fetched, ChatTemplate, Available, Progressing, Ready."""
    if view.rejection:
        return _refused(view.rejection, ("Fetched",), "Available", "Progressing", "Ready")
    accepted = UndatedCondition("Accepted", "True", "Accepted", f"serves {view.pool.model_name!r}")
    fetched = _fetched(view.request, view.resolution)
    available, progressing = _available(view, fetched), _progressing(view, fetched)
    ready = _pool_ready(view, available, progressing)
    template = _template_of_spec(view.template) if view.template else _chat_template(view.serving)
    return [accepted, fetched, *template, available, progressing, ready]


def timestamp(now: float) -> str:
    """Write unix seconds as the API does."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _content_of_adapter(view: AdapterView) -> list[UndatedCondition]:
    if view.mismatch:
        reason, message = view.mismatch.reason, view.mismatch.message
        return [UndatedCondition(kind, "False", reason, message) for kind in ("Validated", "Fetched")]
    if view.request is None:
        message = f"the base model of ServingPool {view.adapter.pool} is not there yet"
        return [UndatedCondition(kind, "Unknown", "BaseNotReady", message) for kind in ("Validated", "Fetched")]
    return [_validated(view.request, view.resolution), _fetched(view.request, view.resolution)]


def _validated(request: ResolveRequest, resolution: Resolution | None) -> UndatedCondition:
    answer = _answer(request, resolution)
    if answer.verdict is not None:
        return UndatedCondition(
            "Validated", "True", "Validated", _but("configuration, shapes and dtype fit the base", answer)
        )
    if answer.state == "Failed":
        return UndatedCondition("Validated", "False", answer.reason, answer.message)
    return UndatedCondition("Validated", "Unknown", "Resolving", f"reading {request.uri}")


def _fetched(request: ResolveRequest | None, resolution: Resolution | None) -> UndatedCondition:
    assert request is not None  # only asked for an accepted object
    answer = _answer(request, resolution)
    if answer.state == "Fetched":
        message = "the whole content is in the depot"
        return UndatedCondition(
            "Fetched", "True", "Fetched", _but(message, answer) if request.kind == "model" else message
        )
    if answer.state == "Failed":
        return UndatedCondition("Fetched", "False", answer.reason, answer.message)
    return UndatedCondition("Fetched", "Unknown", "Resolving", f"fetching {request.uri}")


def _but(message: str, answer: OperationStatus) -> str:
    """Add the depot's warnings about unused parts of the files to a message."""
    return "; ".join((message, *((answer.verdict or {}).get("warnings") or ())))


def _answer(request: ResolveRequest, resolution: Resolution | None) -> OperationStatus:
    return resolution.answer if resolution and resolution.request == request else OperationStatus()


def _ready(view: AdapterView, content: Sequence[UndatedCondition]) -> UndatedCondition:
    if view.serving is None:
        blocker = next((c for c in content if c.status != "True"), UndatedCondition("", "False", "Resolving"))
        return UndatedCondition("Ready", "False", blocker.reason, blocker.message)
    digest = view.serving.digest
    if view.report is None:
        return _ready_unreported(view, digest)
    if not view.report.routed or (view.report.digest != digest and not is_ready(view.adapter)):
        return UndatedCondition("Ready", "False", "Publishing", "sent to the scheduler, not yet in its route table")
    if view.report.load_failed:
        return UndatedCondition(
            "Ready", "False", "LoadFailed", "no runner can load it: " + "; ".join(view.report.load_errors)
        )
    return _published(view, digest)


def observed_generation(view: AdapterView) -> int:
    """Return the followed generation of the spec.

    It is the newest generation once its content serves or is refused, or while no content serves.
    """
    adapter, generation = view.adapter, view.adapter.meta.generation
    if view.serving is None or view.rejection or view.mismatch or not is_ready(adapter):
        return generation
    if view.template and not view.template.answer.finished:
        return int(adapter.status.get("observedGeneration", generation))
    answer = _answer(view.request, view.resolution) if view.request else OperationStatus()
    if answer.state == "Failed" or (answer.state == "Fetched" and view.serving.pool == adapter.pool):
        return generation
    return int(adapter.status.get("observedGeneration", generation))


def _is_confirmed(view: AdapterView) -> bool:
    """Whether every gateway serves the published content, by the scheduler's report."""
    if view.report is None or view.serving is None:
        return False
    if view.report.observed_generation == 0:  # an older scheduler
        return view.report.digest == view.serving.digest
    published = view.serving.digest, observed_generation(view)
    return (view.report.digest, view.report.observed_generation) == published


def _is_awaited(view: AdapterView) -> bool:
    """Whether the status stays as it is until the scheduler confirms the serving content.

    The status of an adapter with a canary does not wait: it stores the canary's decisions.
    """
    adapter, report = view.adapter, view.report
    if view.serving is None or view.rejection or view.canary or adapter.meta.deleting or not is_ready(adapter):
        return False
    if report is None:  # it has not spoken yet: it or the operator has just started
        return adapter.status.get("observedGeneration") != observed_generation(view)
    return report.routed and not report.load_failed and not _is_confirmed(view)


def _ready_unreported(view: AdapterView, digest: str) -> UndatedCondition:
    """Decide Ready before the scheduler's first report: the stored state of this digest stays."""
    status = view.adapter.status
    stored = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), None)
    if (
        stored is not None
        and status.get("digest") == digest
        and stored["reason"] in ("Published", "UpdateFailed", "LoadFailed")
    ):
        return _published(view, digest) if stored["status"] == "True" else _as_stored(stored)
    return UndatedCondition("Ready", "False", "Publishing", "sent to the scheduler, not yet in its route table")


def _published(view: AdapterView, digest: str) -> UndatedCondition:
    name, short = view.adapter.model_name, digest[:SHORT_DIGEST]
    if refused := view.rejection or view.mismatch:
        message = f"{name!r} still serves {short} in {view.serving.pool if view.serving else ''}: "
        return UndatedCondition("Ready", "True", "UpdateFailed", f"{message}{refused.message} ({refused.reason})")
    answer = _answer(view.request, view.resolution) if view.request else OperationStatus()
    if answer.state == "Failed":
        message = f"{name!r} still serves {short}: the newest source is refused ({answer.reason}, see Fetched)"
        return UndatedCondition("Ready", "True", "UpdateFailed", message)
    if view.serving and view.serving.pool != view.adapter.pool:
        message = f"{name!r} serves {short} in {view.serving.pool} until ServingPool {view.adapter.pool} takes requests"
    else:
        message = f"{name!r} serves {short}"
    followed = observed_generation(view)
    seen = followed if _is_confirmed(view) else int(view.adapter.status.get("observedGeneration", followed))
    return UndatedCondition("Ready", "True", "Published", message, seen)


def _as_stored(stored: Object) -> UndatedCondition:
    return UndatedCondition(stored["type"], stored["status"], stored["reason"], stored["message"])


def _available(view: PoolFacts, fetched: UndatedCondition) -> UndatedCondition:
    ready = ready_runners(view)
    if view.serving is None:
        return UndatedCondition("Available", "False", "BaseNotReady", fetched.message)
    if ready > 0:
        return UndatedCondition("Available", "True", "RunnersReady", "requests are served")
    if view.wanted_runners == 0:
        message = (
            "replicas is 0" if view.bounds.max == 0 else "no request needs a runner; the next request starts a runner"
        )
        return UndatedCondition("Available", "False", "ScaledToZero", message)
    trouble = _trouble(view)
    return UndatedCondition(
        "Available", "False", "NoReadyRunner", trouble.message if trouble else "runners are starting"
    )


def _progressing(view: PoolFacts, fetched: UndatedCondition) -> UndatedCondition:
    if view.serving is None:
        status: Status = "True" if fetched.status == "Unknown" else "False"
        return UndatedCondition("Progressing", status, fetched.reason, fetched.message)
    if view.pool.spec.paused:
        return UndatedCondition("Progressing", "Unknown", "Paused", "spec.paused is true: runners stay as they are")
    if trouble := _trouble(view):
        return UndatedCondition("Progressing", "False", trouble.reason, trouble.message)
    if view.rollout:
        return UndatedCondition("Progressing", "True", "Converging", view.rollout)
    if ready_runners(view) == view.wanted_runners == len(view.runners):
        return UndatedCondition("Progressing", "False", "RunnersReady", "every wanted runner is ready")
    return UndatedCondition("Progressing", "True", "Converging", f"bringing the pool to {view.wanted_runners} runners")


def _pool_ready(view: PoolFacts, available: UndatedCondition, progressing: UndatedCondition) -> UndatedCondition:
    """Decide Ready of a pool: True once nothing is left to do, as kstatus and `kubectl wait` read it."""
    settled = ready_runners(view) == view.wanted_runners == len(view.runners) and not view.rollout
    if view.serving is not None and settled:
        if view.wanted_runners == 0:
            return UndatedCondition("Ready", "True", available.reason, available.message)
        return UndatedCondition("Ready", "True", "RunnersReady", "every wanted runner is ready")
    reason = progressing if view.serving is not None else available
    return UndatedCondition("Ready", "False", reason.reason, reason.message)


def ready_runners(view: PoolFacts) -> int:
    """Count the ready runners by the scheduler's report, or before a report by the stored status.

    Leaving runners do not count. The scheduler learns of them later than the cluster, of a killed runner only when its
    lease ends.
    """
    reported = view.report.ready_runners if view.report else int(view.pool.status.get("readyReplicas", 0))
    return min(reported, len(view.runners))


def _trouble(view: PoolFacts) -> Rejection | None:
    """Find a lasting fault: a refusal, or a runner that does not start.

    Among several runners the first by name counts, so the message does not flap.
    """
    if view.blocking_error:
        return view.blocking_error
    stuck = [runner for runner in view.runners if runner.state in ("CrashLoop", "Unschedulable")]
    first = min(stuck, key=lambda runner: (runner.state, runner.name), default=None)
    return Rejection(first.state, first.message) if first else None


def _refused(rejection: Rejection, unknown: Iterable[str], *false: str) -> list[UndatedCondition]:
    reason, message = rejection.reason, rejection.message
    return [
        UndatedCondition("Accepted", "False", reason, message),
        *(UndatedCondition(kind, "Unknown", reason, "not checked while Accepted is False") for kind in unknown),
        *(UndatedCondition(kind, "False", reason, message) for kind in false),
    ]


def _written(condition: UndatedCondition, old: Object | None, generation: int, now: float) -> dict[str, Any]:
    moved = old is None or old["status"] != condition.status
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": sanitize_message(condition.message),
        "observedGeneration": generation if condition.generation is None else condition.generation,
        "lastTransitionTime": timestamp(now) if moved or old is None else old["lastTransitionTime"],
    }


MODEL_FACTS = (
    "architecture",
    "eosTokenIds",
    "generationDefaults",
    "chatTemplate",
)  # of the depot's verdict, as it has them


def model_context_tokens(view: PoolFacts) -> int:
    """Return the context of the base model from its status, since the pages of a runner may change meanwhile."""
    verdict = view.serving.verdict if view.serving else {}
    return int(verdict.get("maxContext") or verdict.get("maxContextTokens") or 0)


def pool_status(view: PoolFacts, now: float, *, pods: bool) -> dict[str, Any]:
    """Make the pool's status to store. `pods`: its runners are pods, with a selector."""
    generation = view.pool.meta.generation
    previous = view.pool.status.get("conditions", ())
    is_held = view.template is not None and view.template.is_held  # a digest in the status must have been published
    status = {
        "observedGeneration": generation,
        "baseDigest": view.serving.digest if view.serving and not is_held else None,
        **{name: view.serving.verdict.get(name) if view.serving else None for name in MODEL_FACTS},
        "suppliedChatTemplate": _supplied_template(view.template),
        "maxContextTokens": model_context_tokens(view) or None,
        "kvCache": _kv_cache(view),
        "desiredReplicas": view.wanted_runners,
        "replicas": len(view.runners),
        "readyReplicas": ready_runners(view),
        "selector": selector(view.pool.meta.ref) if pods else None,
        "lastScale": _last_scale(view, now),
        "slo": _slo(view),
        "phases": _phases(view),
        "adapters": {"total": view.adapters_total, "ready": view.adapters_ready},
        "conditions": merged(previous, pool_conditions(view), generation, now),
    }
    return {name: value for name, value in status.items() if value is not None}


def _supplied_template(template: TemplateView | None) -> dict[str, Any] | None:
    if template is None or template.content is None:
        return None
    fields = {name: template.content.verdict.get(name) for name in ("from", "fault")}
    return {"digest": template.content.digest, **{name: value for name, value in fields.items() if value is not None}}


def _kv_cache(view: PoolFacts) -> dict[str, int] | None:
    """Return the KV pages reported by the scheduler, or before a report the stored pages, as after a restart."""
    pages = view.report and view.report.kv_pages
    return {"pages": pages} if pages else view.pool.status.get("kvCache")


def _slo(view: PoolFacts) -> dict[str, int] | None:
    """Return the attainment reported by the scheduler, or before a report the stored attainment, as after a restart."""
    if view.pool.spec.slo is None:
        return None
    if (slo := view.report and view.report.slo) is None:
        return view.pool.status.get("slo")
    attained, ttft, token_time = slo
    return {"attainedPercent": attained, "ttftPercent": ttft, "tokenTimePercent": token_time}


def _phases(view: PoolFacts) -> dict[str, Any] | None:
    """Return the roles reported by the scheduler, or before a report the stored roles, as after a restart."""
    if view.pool.spec.phases.mode == "Unified":
        return None
    report = view.report
    if report is None or report.roles is None:
        return view.pool.status.get("phases")
    prompt, token, mixed, reason = report.roles
    demand = {"wanted": report.wanted._asdict()} if report.wanted is not None else {}
    return {"prompt": prompt, "token": token, "mixed": mixed, "message": reason, **demand}


def _last_scale(view: PoolFacts, now: float) -> dict[str, Any] | None:
    """Note the last change of the number of wanted runners, and its cause."""
    previous, status = view.pool.status.get("desiredReplicas"), view.pool.status
    if previous is None or previous == view.wanted_runners:
        return status.get("lastScale")
    reason = (
        "Replicas" if view.pool.spec.autoscaling is None else "Demand" if view.wanted_runners > previous else "Idle"
    )
    return {"time": timestamp(now), "from": previous, "to": view.wanted_runners, "reason": reason}


def canary_version(view: AdapterView) -> tuple[AdapterVersion, ...]:
    """The canary as the scheduler gets it, while it has a share of the requests."""
    canary, serving = view.canary, view.serving
    if canary is None or canary.content is None or canary.phase != "Progressing":
        return ()
    if serving is None or serving.digest == canary.content.digest:
        return ()
    verdict = canary.content.verdict
    rank, size = int(verdict.get("rank") or 0), int(verdict.get("sizeBytes") or 0)
    name = canary.name if canary.name != serving.version else ""
    eos = tuple(verdict.get("eosTokenIds") or ())
    is_adapters = has_own_template(view.adapter, verdict)
    return (AdapterVersion(canary.content.digest, rank, size, name, canary.canary.weight, eos, is_adapters),)


def earlier_versions(view: AdapterView, serving: VerifiedArtifact) -> list[Object]:
    """Return the contents still open for pins: of the stored status, the newest first, at most the history limit.

    Left out are the serving content, contents of a different base, and contents with too large a rank for the pool.
    """
    max_rank = view.request.max_rank if view.request else None
    canary = {version.digest: version.name for version in canary_version(view)}
    named = {serving.version, *canary.values()}
    retained: list[Object] = [
        version if version.get("name") not in named else {k: v for k, v in version.items() if k != "name"}
        for version in _stored_versions(view)
        if version["digest"] != serving.digest
        and version["digest"] not in canary
        and version.get("baseDigest") == serving.base_digest
        and (max_rank is None or int(version.get("rank") or 0) <= max_rank)
    ]
    return retained[: view.adapter.spec.revision_history_limit]


def _stored_versions(view: AdapterView) -> list[Object]:
    """Return the versions of the stored status, except incomplete versions of a different operator's version."""
    stored: list[Object] = view.adapter.status.get("versions") or []
    return [version for version in stored if {"digest", "publishTime"} <= version.keys()]


def _versions(view: AdapterView, now: float) -> list[Object] | None:
    """Return the serving content and earlier contents. Without a serving content, return the stored list."""
    serving = view.serving
    if serving is None:
        return view.adapter.status.get("versions")
    published = {version["digest"]: version["publishTime"] for version in _stored_versions(view)}
    current = {
        "digest": serving.digest,
        "name": serving.version,
        "rank": serving.verdict.get("rank"),
        "sizeBytes": serving.verdict.get("sizeBytes"),
        "eosTokenIds": serving.verdict.get("eosTokenIds"),
        "chatTemplate": serving.verdict.get("chatTemplate"),
        "baseDigest": serving.base_digest,
        "publishTime": published.get(serving.digest) or timestamp(now),
    }
    return [{k: v for k, v in current.items() if v is not None}, *earlier_versions(view, serving)]


def _canary_status(view: AdapterView) -> dict[str, Any] | None:
    canary, stored = view.canary, view.adapter.status.get("canary")
    if canary is None:
        return stored if view.canary_kept or view.adapter.spec.canary is not None else None
    if canary.content is None and stored and stored.get("phase") in DECIDED:
        return stored  # a decision lasts while the content is unreadable
    content, counts = canary.content, canary.counts
    status: dict[str, Any] = {"phase": canary.phase}
    if content is not None:
        status |= {
            "digest": content.digest,
            "name": content.version,
            "rank": content.verdict.get("rank"),
            "sizeBytes": content.verdict.get("sizeBytes"),
            "eosTokenIds": content.verdict.get("eosTokenIds"),
            "chatTemplate": content.verdict.get("chatTemplate"),
            "baseDigest": content.base_digest,
            "startTime": timestamp(canary.started_at),
            "updateTime": timestamp(canary.updated_at),
            "requests": counts.requests,
            "failedRequests": counts.failed,
            "stableRequests": counts.stable_requests,
            "stableFailedRequests": counts.stable_failed,
        }
    return {name: value for name, value in status.items() if value is not None}


def adapter_status(view: AdapterView, now: float) -> dict[str, Any]:
    """Make the adapter's status to store: the serving content, and the conditions."""
    if _is_awaited(view):
        return dict(view.adapter.status)
    adapter, serving = view.adapter, view.serving
    generation = adapter.meta.generation
    verdict = serving.verdict if serving else {}
    reported = ("rank", "alpha", "targetModules", "sizeBytes", "dtype", "eosTokenIds", "chatTemplate")
    unavailable = view.report.unavailable_runners if view.report else adapter.status.get("unavailableRunners", 0)
    status = {
        "observedGeneration": observed_generation(view),
        "digest": serving.digest if serving else None,
        "pool": str(serving.pool) if serving else None,
        "baseDigest": serving.base_digest if serving else None,
        **{name: verdict.get(name) for name in reported},
        "suppliedChatTemplate": _supplied_template(view.template),
        "modelName": adapter.model_name,
        "unavailableRunners": unavailable if serving else 0,
        "versions": _versions(view, now),
        "canary": _canary_status(view),
        "conditions": merged(adapter.status.get("conditions", ()), adapter_conditions(view), generation, now),
    }
    return {name: value for name, value in status.items() if value is not None}


def malformed_status(broken: Malformed, now: float) -> dict[str, Any]:
    """Keep the stored status, with Accepted False: nothing else is known anew."""
    previous: list[Object] = list(broken.status.get("conditions", ()))
    accepted = merged(
        previous, [UndatedCondition("Accepted", "False", "InvalidSpec", broken.message)], broken.meta.generation, now
    )
    return {**broken.status, "conditions": accepted + [c for c in previous if c["type"] != "Accepted"]}


HEADLINES = ("Ready", "Available", "CanaryPromoted")  # conditions with an Event when they turn True
STEPS = frozenset(("Resolving", "Publishing", "BaseNotReady", "NoReadyRunner", "Converging"))
CONSEQUENCES = frozenset(("UpdateFailed",))  # Fetched has the cause
EXPECTED = frozenset(("ScaledToZero", "Deleting", "RunnersReady", "NoTemplate"))


EventType = Literal["Normal", "Warning"]


def events_for(resource: PoolObject | AdapterObject, status: Object) -> list[RecordEvent]:
    """Make the Events of a written status."""
    events: dict[tuple[EventType, str], str] = {}
    for kind, reason, message in _news(resource.status, status):
        events.setdefault((kind, reason), message)
    meta = resource.meta
    return [RecordEvent(meta.ref, meta.uid, kind, reason, message) for (kind, reason), message in events.items()]


def _news(previous: Object, current: Object) -> Iterator[tuple[EventType, str, str]]:
    old = {condition["type"]: condition for condition in previous.get("conditions", ())}
    for condition in current.get("conditions", ()):
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
    yield from _role_changes(previous.get("phases"), current.get("phases"))
    if (scaled := current.get("lastScale")) and scaled != previous.get("lastScale"):
        yield "Normal", "Scaled", f"from {scaled['from']} to {scaled['to']} runners: {scaled['reason']}"


def _role_changes(previous: Object | None, current: Object | None) -> Iterator[tuple[EventType, str, str]]:
    """Yield Events for changed roles or groups at an unchanged number of runners."""
    if previous is None or current is None:
        return
    if changed := _other_counts(previous, current, ("prompt", "token", "mixed")):
        yield "Normal", "RolesChanged", f"{changed}: {current['message']}"
    was, now = previous.get("wanted"), current.get("wanted")
    if was and now and (changed := _other_counts(was, now, ("prompt", "token", "any"))):
        yield "Normal", "GroupsScaled", f"{changed}: by the demand of prompts and tokens"


def _other_counts(previous: Object, current: Object, names: Sequence[str]) -> str:
    """Describe changed counts with an unchanged sum; else return nothing."""
    counts = [[side[name] for name in names] for side in (previous, current)]
    if counts[0] == counts[1] or sum(counts[0]) != sum(counts[1]):
        return ""
    was, now = (", ".join(f"{count} {name}" for count, name in zip(numbers, names, strict=True)) for numbers in counts)
    return f"from {was} to {now}"
