"""Decisions about one object: whether it may be served, the request to the depot, the serving content.

The rules, in order of their application:

- A base model's name is reserved: an adapter that claims it is refused, however old it is. A name that begins with
  NAMESPACE/ is reserved for the namespace, so no foreign namespace takes a tenant's names. Otherwise the older object
  has the name. Among equally old objects the accepted object has it, then the object with the lower uid.
- A pool names the namespaces allowed to use it.
- A slot of each runner is never pinned; otherwise no unpinned adapter would ever be served. If too many adapters are
  pinned for the remaining slots, the older adapters are accepted.
- An adapter is checked against its pool's base, so it is resolved only after the base.
- The last good content serves, on the base of its check. It goes on serving when its source becomes bad (conditions
  have the reason). A moving adapter stays in its previous pool until the new pool takes requests, also while the new
  pool is missing or refuses the adapter.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from weft.artifacts.depot_api import BaseRef, CredentialsRef, ResolveRequest
from weft.domain.routes import AdapterStatus, PoolStatus
from weft_operator.core.artifacts import Resolution, VerifiedArtifact, from_status, served_content
from weft_operator.core.canary import CanaryView, as_adapter, canary_view, promoted_content, resolution_of_canary
from weft_operator.core.chat_templates import TemplateView, template_from_status, template_view
from weft_operator.core.children import RUNNER_KINDS, child_names, is_adoptable
from weft_operator.core.resources import AdapterObject, PoolObject, Ref, holds
from weft_operator.core.scaling import Bounds
from weft_operator.core.state import ClusterState, DesiredState, Pod, RunnerProcess, runner_pods

UNPINNED_SLOTS = 1  # of a runner
NAME_CONFLICT, VOLUME_NOT_ALLOWED = "NameConflict", "VolumeNotAllowed"
POD_NAME = re.compile(r'pods? "[^"]*"')


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why an object is not accepted, as a condition's reason and message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolFacts:
    pool: PoolObject
    rejection: Rejection | None
    request: ResolveRequest | None  # None: not accepted
    resolution: Resolution | None  # of the present or the previous request
    serving: VerifiedArtifact | None
    report: PoolStatus | None
    runners: tuple[RunnerProcess | Pod, ...]  # without leaving runners
    blocking_error: Rejection | None  # the reason why the children are not as they should be
    bounds: Bounds
    wanted_runners: int
    adapters_total: int
    adapters_ready: int
    rollout: str = ""  # the awaited step of a replacement of runners
    template: TemplateView | None = None  # None: the spec gives no chat template, or the pool is not accepted


@dataclass(frozen=True, slots=True)
class AdapterView:
    adapter: AdapterObject
    rejection: Rejection | None
    mismatch: Rejection | None  # the manifest asserts a different base
    request: ResolveRequest | None  # None: not accepted, a mismatch, or no base yet
    resolution: Resolution | None
    serving: VerifiedArtifact | None
    report: AdapterStatus | None
    canary: CanaryView | None  # None: none, or the adapter is not accepted
    canary_kept: bool  # the spec has no canary any more, and the promoted content still serves
    template: TemplateView | None = None  # None: the spec gives no chat template


def pool_view(pool: PoolObject, state: ClusterState, bounds: Bounds, wanted_runners: int, now: float) -> PoolFacts:
    """Gather everything about one pool."""
    rejection = reject_pool(pool, state.desired)
    request = None if rejection else pool_request(pool)
    resolution = _resolution(pool, request, state)
    adapters_total, adapters_ready = state.desired.counts(pool.meta.ref)
    serving = resolution.verified if resolution and request else None
    return PoolFacts(
        pool=pool,
        rejection=rejection,
        request=request,
        resolution=resolution,
        serving=serving,
        report=state.observed.pool_reports.get(str(pool.meta.ref)),
        runners=_runners(pool.meta.ref, state),
        blocking_error=_blocking_error(pool, state, now),
        bounds=bounds,
        wanted_runners=wanted_runners,
        adapters_total=adapters_total,
        adapters_ready=adapters_ready,
        template=None if rejection else template_view(pool, serving, state),
    )


def adapter_view(adapter: AdapterObject, state: ClusterState, now: float) -> AdapterView:
    """Gather everything about one adapter."""
    pool = state.desired.pools.get(adapter.pool)
    rejection = reject_adapter(adapter, state.desired)
    mismatch = _mismatch(adapter, pool) if pool and not rejection else None
    base = base_artifact(pool, state) if pool and not rejection and not mismatch else None
    request = adapter_request(adapter, pool, base) if pool and base else None
    resolution, report = _resolution(adapter, request, state), state.observed.adapter_reports.get(adapter.meta.uid)
    serving = _serving(adapter, rejection or mismatch, request, resolution, state)
    canary, retained = None, None
    if (canary_spec := adapter.spec.canary) and pool and base:
        source = as_adapter(adapter, canary_spec)
        canary_request, counts = adapter_request(source, pool, base), report.canary if report else None
        canary = canary_view(
            adapter, canary_spec, canary_request, _resolution(source, canary_request, state), serving, counts, now
        )
        stays = serving is not None and serving.pool != adapter.pool  # in its previous pool
        serving = canary.content if canary.phase == "Promoted" and not stays else serving
    elif request is not None:
        retained = _promoted_before(adapter, request, resolution)
    template = template_view(adapter, base, state)
    if template and template.is_held:
        serving = None
    return AdapterView(
        adapter=adapter,
        rejection=rejection,
        mismatch=mismatch,
        request=request,
        resolution=resolution,
        serving=retained or serving,
        report=report,
        canary=canary,
        canary_kept=retained is not None,
        template=template,
    )


def reject_pool(pool: PoolObject, desired: DesiredState) -> Rejection | None:
    """Explain why this pool is not accepted; None when it is."""
    namespace = pool.meta.ref.namespace
    if not desired.serves(namespace):
        namespaces = ", ".join(sorted(desired.policy.pool_namespaces or ())) or "no namespace"
        message = f"pools are served in {namespaces}: create it there, or ask the platform to serve {namespace} too"
        return Rejection("NamespaceNotServed", message)
    owner = name_owner(pool.model_name, desired)
    return _conflict(pool, owner) if owner is not None and owner is not pool else None


def reject_adapter(adapter: AdapterObject, desired: DesiredState) -> Rejection | None:
    """Explain why this adapter is not accepted; None when it is."""
    return reject_by_name(adapter, desired) or (_reject_pin(adapter, desired) if adapter.spec.pinned else None)


def pinned_max(pool: PoolObject) -> int | None:
    """Return the maximum number of pinned adapters of this pool; None: bounded only by its runners' memory."""
    slots = pool.spec.advanced.max_adapters
    return None if slots is None else slots - UNPINNED_SLOTS


def name_owner(model_name: str, desired: DesiredState) -> PoolObject | AdapterObject | None:
    """Return the owner of a name: the first by the rules above. Claimants rejected for other reasons do not count."""
    claimants = (claimant for claimant in desired.claimants(model_name) if _may_hold(claimant, desired))
    return min(
        claimants,
        key=lambda c: (isinstance(c, AdapterObject), not is_in_own_namespace(c), _precedence(c)),
        default=None,
    )


def accepted_by_name(adapters: Iterable[AdapterObject], desired: DesiredState) -> Iterator[AdapterObject]:
    """Yield the adapters with an accepted name. Each name is looked at only once."""
    owners: dict[str, PoolObject | AdapterObject | None] = {}
    for adapter in adapters:
        if adapter.model_name not in owners:
            owners[adapter.model_name] = name_owner(adapter.model_name, desired)
        if owners[adapter.model_name] is adapter:
            yield adapter


def reject_by_name(adapter: AdapterObject, desired: DesiredState) -> Rejection | None:
    """Explain why this adapter is not accepted, whether it may be pinned aside."""
    pool = desired.pools.get(adapter.pool)
    if pool is None or pool.meta.deleting:
        return Rejection("PoolNotFound", f"there is no ServingPool {adapter.pool}")
    if not pool.permits(adapter.meta.ref.namespace):
        namespace = adapter.meta.ref.namespace
        return Rejection("NotPermitted", f"ServingPool {adapter.pool} does not admit adapters of namespace {namespace}")
    owner = name_owner(adapter.model_name, desired)
    return _conflict(adapter, owner) if owner is not None and owner is not adapter else None


def _reject_pin(adapter: AdapterObject, desired: DesiredState) -> Rejection | None:
    """Explain why an adapter with an accepted name may not be pinned; None when it may."""
    pool = desired.pools[adapter.pool]
    max_pinned, precedence = pinned_max(pool), _precedence(adapter)
    if max_pinned is None:
        return None
    older = (
        rival for rival in desired.adapters_of(adapter.pool) if rival.spec.pinned and _precedence(rival) < precedence
    )
    if sum(1 for _ in islice(accepted_by_name(older, desired), max_pinned)) < max_pinned:
        return None
    bound = f"advanced.maxAdapters {pool.spec.advanced.max_adapters} pins at most {max_pinned} adapters"
    advice = "unpin an adapter, or raise or unset advanced.maxAdapters"
    return Rejection("NoSlots", f"ServingPool {adapter.pool} with {bound}, and older adapters fill it; {advice}")


def base_artifact(pool: PoolObject, state: ClusterState) -> VerifiedArtifact | None:
    """Return the resolved base model of a pool; None before, or for a pool that is not accepted."""
    if reject_pool(pool, state.desired):
        return None
    resolution = state.observed.resolutions.get(pool.meta.uid)
    return resolution.verified if resolution else None


def pool_request(pool: PoolObject) -> ResolveRequest:
    """Make the request to the depot about this pool's base model."""
    model = pool.spec.model
    return ResolveRequest(
        kind="model",
        uri=model.uri,
        revision=model.revision,
        digest=model.digest,
        namespace=pool.meta.ref.namespace,
        credentials_ref=CredentialsRef(model.credentials_ref.name) if model.credentials_ref else None,
        endpoint=model.endpoint,
    )


def adapter_request(adapter: AdapterObject, pool: PoolObject, base: VerifiedArtifact) -> ResolveRequest:
    """Make the request to the depot about this adapter in this pool.

    If the manifest names the pool's model in `baseModel`, the depot does not compare the adapter's
    `base_model_name_or_path`: then only the shapes decide.
    """
    source = adapter.spec.source
    return ResolveRequest(
        kind="adapter",
        uri=source.uri,
        revision=source.revision,
        digest=source.digest or (source.uri.removeprefix("depot:") if source.uri.startswith("depot:") else None),
        namespace=adapter.meta.ref.namespace,
        base=_base(pool, base.digest, named=not adapter.spec.base_model),
        max_rank=min(pool.spec.lora.max_rank, adapter.spec.max_rank or pool.spec.lora.max_rank),
        credentials_ref=CredentialsRef(source.credentials_ref.name) if source.credentials_ref else None,
        endpoint=source.endpoint,
        version=adapter.spec.version,
    )


def is_ready(adapter: AdapterObject) -> bool:
    """Whether this adapter is Ready, by its stored status."""
    return holds(adapter, "Ready")


def resolution_from_status(resource: PoolObject | AdapterObject, state: ClusterState, now: float) -> Resolution | None:
    """Return the resolution implied by an object's status, for a controller at its start. Pools first."""
    generation, status = resource.meta.generation, resource.status
    if isinstance(resource, PoolObject):
        return from_status(pool_request(resource), status, generation, None, now)
    request = adapter_view(resource, state, now).request
    if request is None or promoted_content(resource):  # the digest of the status is the canary's
        return None
    return from_status(request, status, generation, resource.pool, now)


def canary_from_status(adapter: AdapterObject, state: ClusterState, now: float) -> Resolution | None:
    """Return the resolution of an adapter's canary from the adapter's status, for a controller at its start."""
    view = adapter_view(adapter, state, now)
    return resolution_of_canary(adapter, view.canary.request, now) if view.canary else None


def supplied_template_from_status(
    resource: PoolObject | AdapterObject, state: ClusterState, now: float
) -> Resolution | None:
    """Return the resolution of the spec's chat template from the object's status, for a controller at its start."""
    pool = resource if isinstance(resource, PoolObject) else state.desired.pools.get(resource.pool)
    base = base_artifact(pool, state) if pool and resource.chat_template.is_supplied else None
    return template_from_status(resource, base.digest, now) if base else None


def _resolution(
    resource: PoolObject | AdapterObject, request: ResolveRequest | None, state: ClusterState
) -> Resolution | None:
    return state.observed.resolutions.get(resource.meta.uid) if request else None


def _serving(
    adapter: AdapterObject, rejection: Rejection | None, request: ResolveRequest | None, resolution: Resolution | None,
    state: ClusterState,
) -> VerifiedArtifact | None:  # fmt: skip
    """Return the serving content: in the adapter's pool, or, until this pool takes requests, in its previous pool."""
    if rejection:
        return _in_previous_pool(adapter, state) if rejection.reason != NAME_CONFLICT else None
    verified = resolution.verified if resolution and request else None
    if verified and verified.pool != adapter.pool:
        verified = None  # checked for another pool
    if verified and request and resolution and resolution.request == request:
        refuted = resolution.answer.state == "Failed" and verified.base_digest != request.base_digest
        verified = None if refuted else verified
    if verified and takes_requests(state.desired.pools[adapter.pool], state):
        return verified
    return _in_previous_pool(adapter, state) or verified


def _promoted_before(
    adapter: AdapterObject, request: ResolveRequest, resolution: Resolution | None
) -> VerifiedArtifact | None:
    """Return the promoted canary, until the new source of the adapter is known: nobody goes back meanwhile."""
    stored = served_content(adapter.status) if promoted_content(adapter) else None
    answered = resolution is not None and resolution.request == request and resolution.answer.finished
    if stored is None or answered or (stored.pool, stored.base_digest) != (adapter.pool, request.base_digest):
        return None
    return stored


def takes_requests(pool: PoolObject, state: ClusterState) -> bool:
    """Whether a request to this pool is served, or wakes it."""
    report = state.observed.pool_reports.get(str(pool.meta.ref))
    wakes = pool.spec.autoscaling is not None and pool.spec.autoscaling.min_replicas == 0
    return wakes or (report is not None and report.ready_runners > 0)


def _in_previous_pool(adapter: AdapterObject, state: ClusterState) -> VerifiedArtifact | None:
    """Return the content of a Ready adapter in its previous pool, while the previous pool may still serve it."""
    previous = _previous(adapter)
    pool = state.desired.pools.get(previous.pool) if previous and previous.pool else None
    if previous is None or pool is None or not _admits(pool, adapter):
        return None
    base = base_artifact(pool, state)
    return previous if base and base.digest == previous.base_digest else None


def _previous(adapter: AdapterObject) -> VerifiedArtifact | None:
    """Return the content of a Ready adapter in a pool other than the pool in its spec."""
    previous = served_content(adapter.status) if is_ready(adapter) else None
    return previous if previous and previous.pool != adapter.pool else None


def _admits(pool: PoolObject | None, adapter: AdapterObject) -> bool:
    return pool is not None and not pool.meta.deleting and pool.permits(adapter.meta.ref.namespace)


def _base(pool: PoolObject, digest: str, *, named: bool) -> BaseRef:
    """Return the base for an adapter's check, with its names: the served name, and the last part of its URI."""
    if not named:
        return BaseRef(digest)
    last_part = pool.spec.model.uri.rstrip("/").replace(":", "/").rpartition("/")[2]
    return BaseRef(digest, pool.model_name, () if last_part in ("", pool.model_name) else (last_part,))


def _mismatch(adapter: AdapterObject, pool: PoolObject) -> Rejection | None:
    if adapter.spec.base_model in (None, pool.model_name):
        return None
    return Rejection(
        "BaseMismatch",
        f"spec.baseModel is {adapter.spec.base_model!r}, ServingPool {adapter.pool} serves {pool.model_name!r}",
    )


def _may_hold(claimant: PoolObject | AdapterObject, desired: DesiredState) -> bool:
    """Whether an object may hold a name. A rejected object may not, because it would block servable objects.

    A pool holds its name while it may be served. An adapter moving to a pool that does not admit it holds its name
    through its previous pool.
    """
    if isinstance(claimant, PoolObject):
        return desired.serves(claimant.meta.ref.namespace)
    if _admits(desired.pools.get(claimant.pool), claimant):
        return True
    previous = _previous(claimant)
    return previous is not None and previous.pool is not None and _admits(desired.pools.get(previous.pool), claimant)


def _runners(ref: Ref, state: ClusterState) -> tuple[RunnerProcess | Pod, ...]:
    members = (*state.observed.runners.get(ref, {}).values(), *runner_pods(state.observed.pods.get(ref, {}).values()))
    return tuple(runner for runner in members if runner.state != "Leaving")


def _blocking_error(pool: PoolObject, state: ClusterState, now: float) -> Rejection | None:
    """Return the error that keeps a pool's runners from starting; None without an error.

    The errors: a forbidden folder, a child refused by the API server, a name taken by a foreign object, refused pods of
    a Deployment.
    """
    ref, names = pool.meta.ref, child_names(pool)
    if refusal := state.desired.folder_refusal(pool):
        return Rejection(VOLUME_NOT_ALLOWED, f"spec.modelCache: {refusal}; its runners stay as they are")
    for key, failure in sorted(state.expectations.apply_failures.get(ref, {}).items()):
        is_of_pool = key.name in names or key.kind in RUNNER_KINDS
        is_tried_again = now >= failure.again_at  # if it is still wanted
        if is_of_pool and not is_tried_again:
            return Rejection("ChildRefused", failure.message)
    for key, foreign in sorted(state.observed.foreign.get(ref, {}).items()):
        if now < foreign.again_at and not is_adoptable(foreign.obj, pool.meta):
            advice = "give it another name, or delete it; it is looked at again"
            return Rejection("ChildConflict", f"{key.kind} {key.name} is there and is not this pool's: {advice}")
    for key, obj in sorted(state.observed.children.get(ref, {}).items()):
        for condition in (obj.get("status") or {}).get("conditions") or ():
            if key.kind == "Deployment" and (condition["type"], condition["status"]) == ("ReplicaFailure", "True"):
                # The message names the refused pod, a new pod at each attempt: a status should not follow it.
                return Rejection("PodsRefused", POD_NAME.sub("pods", condition.get("message") or "pods are refused"))
    return None


def is_in_own_namespace(claimant: PoolObject | AdapterObject) -> bool:
    """Whether an object's model name begins with the object's namespace, as it does by default."""
    return claimant.model_name.startswith(f"{claimant.meta.ref.namespace}/")


def _precedence(claimant: PoolObject | AdapterObject) -> tuple[bool, float, bool, str]:
    meta = claimant.meta
    return (isinstance(claimant, AdapterObject), meta.created, not holds(claimant, "Accepted"), meta.uid)


def _conflict(asking: PoolObject | AdapterObject, owner: PoolObject | AdapterObject) -> Rejection:
    return Rejection(NAME_CONFLICT, f"the name {asking.model_name!r} {describe_owner(asking, owner)}")


def describe_owner(asking: PoolObject | AdapterObject, owner: PoolObject | AdapterObject) -> str:
    """Describe the owner of a name. Tenants do not learn adapter names of foreign namespaces."""
    if isinstance(owner, PoolObject):
        return f"is the base model of ServingPool {owner.meta.ref}"
    if isinstance(asking, AdapterObject) and asking.meta.ref.namespace != owner.meta.ref.namespace:
        return "belongs to an adapter of another namespace"
    return f"belongs to LoRAAdapter {owner.meta.ref}"
