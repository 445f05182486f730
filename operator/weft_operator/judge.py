"""What is the case with one object: may it be served, what should the depot be asked, which content serves now.

The rules, in the order in which they are asked:
- A base model's name is reserved: an adapter that wants it is refused however old it is. Otherwise the older object has
  the name; of two equally old ones the one that is already accepted, then the lower uid.
- A pool says which namespaces may use it.
- An adapter is checked against its pool's base, so it is resolved only once that base is there.
- What serves is the last good content. A source that became bad keeps it (conditions tell, streams go on); another
  pool, or a base it does not fit, does not: an adapter is never served on a base that it was not checked against.
"""

from dataclasses import dataclass

from weft_operator.observe import AdapterReport, Desired, Observed, PoolReport, RunnerProcess
from weft_operator.resolution import Good, Request, Resolution, remembered
from weft_operator.resources import Adapter, Pool


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an object is not accepted, as a condition's reason and message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolFacts:
    pool: Pool
    refusal: Refusal | None
    request: Request | None  # None: not accepted
    resolution: Resolution | None  # of that request or of the one before it
    serving: Good | None
    report: PoolReport | None
    runners: tuple[RunnerProcess, ...]
    wanted: int
    adapters_total: int
    adapters_ready: int


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    adapter: Adapter
    refusal: Refusal | None
    mismatch: Refusal | None  # the manifest's own assertion about the base does not hold
    request: Request | None  # None: not accepted, a mismatch, or no base yet
    resolution: Resolution | None
    serving: Good | None
    report: AdapterReport | None
    drain_s: float


def pool_facts(pool: Pool, desired: Desired, observed: Observed, wanted: int) -> PoolFacts:
    """Everything about one pool."""
    refusal = refuse_pool(pool, desired)
    request = None if refusal else Request("model", pool.uri, None, pool.digest, pool.meta.ref.namespace)
    resolution = _resolution(pool, request, observed)
    adapters = list(desired.adapters_of(pool.meta.ref))
    return PoolFacts(
        pool=pool,
        refusal=refusal,
        request=request,
        resolution=resolution,
        serving=resolution.good if resolution and request else None,
        report=observed.pool_reports.get(str(pool.meta.ref)),
        runners=tuple(observed.runners.get(pool.meta.ref, {}).values()),
        wanted=wanted,
        adapters_total=len(adapters),
        adapters_ready=sum(is_ready(adapter) for adapter in adapters),
    )


def adapter_facts(adapter: Adapter, desired: Desired, observed: Observed) -> AdapterFacts:
    """Everything about one adapter."""
    pool = desired.pools.get(adapter.pool)
    refusal = refuse_adapter(adapter, desired)
    mismatch = _mismatch(adapter, pool) if pool and not refusal else None
    base = base_of(pool, desired, observed) if pool and not refusal and not mismatch else None
    request = adapter_request(adapter, pool, base) if pool and base else None
    resolution = _resolution(adapter, request, observed)
    return AdapterFacts(
        adapter=adapter,
        refusal=refusal,
        mismatch=mismatch,
        request=request,
        resolution=resolution,
        serving=_serving(adapter, request, resolution),
        report=observed.adapter_reports.get(adapter.meta.uid),
        drain_s=pool.drain_s if pool else 0.0,
    )


def refuse_pool(pool: Pool, desired: Desired) -> Refusal | None:
    """Why this pool is not accepted; None when it is."""
    rivals = [claimant for claimant in desired.claimants(pool.model_name) if isinstance(claimant, Pool)]
    owner = min(rivals, key=_precedence)
    return None if owner is pool else _conflict(pool.model_name, owner)


def refuse_adapter(adapter: Adapter, desired: Desired) -> Refusal | None:
    """Why this adapter is not accepted; None when it is."""
    pool = desired.pools.get(adapter.pool)
    if pool is None or pool.meta.deleting:
        return Refusal("PoolNotFound", f"there is no ServingPool {adapter.pool}")
    if not pool.permits(adapter.meta.ref.namespace):
        namespace = adapter.meta.ref.namespace
        return Refusal("NotPermitted", f"ServingPool {adapter.pool} does not admit adapters of namespace {namespace}")
    rivals = [rival for rival in desired.claimants(adapter.model_name) if _holds_name(rival, desired, adapter)]
    owner = min(rivals, key=_precedence)
    return None if owner is adapter else _conflict(adapter.model_name, owner)


def base_of(pool: Pool, desired: Desired, observed: Observed) -> Good | None:
    """The pool's base model, once it is there; None for a pool that is not accepted."""
    if refuse_pool(pool, desired):
        return None
    resolution = observed.resolutions.get(pool.meta.uid)
    return resolution.good if resolution else None


def adapter_request(adapter: Adapter, pool: Pool, base: Good) -> Request:
    """What to ask the depot about this adapter in this pool.

    `baseModel` in the manifest names the pool's model itself; then the adapter's own `base_model_name_or_path` is not
    compared and shapes decide.
    """
    return Request(
        kind="adapter",
        uri=adapter.uri,
        revision=adapter.revision,
        digest=adapter.digest,
        namespace=adapter.meta.ref.namespace,
        base_digest=base.digest,
        base_names=() if adapter.base_model else _base_names(pool),
        max_rank=min(pool.max_rank, adapter.max_rank or pool.max_rank),
    )


def is_ready(adapter: Adapter) -> bool:
    """Is this adapter Ready, by its stored status?"""
    return _stored(adapter, "Ready")


def recall(resource: Pool | Adapter, desired: Desired, observed: Observed) -> Resolution | None:
    """The resolution that an object's status tells of, for a controller that starts. Recall pools first."""
    generation, status = resource.meta.generation, resource.status
    if isinstance(resource, Pool):
        request = Request("model", resource.uri, None, resource.digest, resource.meta.ref.namespace)
        return remembered(request, status, generation, None)
    request = adapter_facts(resource, desired, observed).request
    return remembered(request, status, generation, resource.pool) if request else None


def _resolution(resource: Pool | Adapter, request: Request | None, observed: Observed) -> Resolution | None:
    return observed.resolutions.get(resource.meta.uid) if request else None


def _serving(adapter: Adapter, request: Request | None, resolution: Resolution | None) -> Good | None:
    good = resolution.good if resolution and request else None
    if good is None or request is None or resolution is None or good.pool != adapter.pool:
        return None
    refuted = resolution.request == request and resolution.answer.state == "Failed"
    return None if refuted and good.base_digest != request.base_digest else good


def _base_names(pool: Pool) -> tuple[str, ...]:
    """What an adapter may call this base: the served name, or the last part of where it came from."""
    last_part = pool.uri.rstrip("/").replace(":", "/").rpartition("/")[2]
    return (pool.model_name,) if last_part in ("", pool.model_name) else (pool.model_name, last_part)


def _mismatch(adapter: Adapter, pool: Pool) -> Refusal | None:
    if adapter.base_model in (None, pool.model_name):
        return None
    return Refusal(
        "BaseMismatch",
        f"spec.baseModel is {adapter.base_model!r}, ServingPool {adapter.pool} serves {pool.model_name!r}",
    )


def _holds_name(rival: Pool | Adapter, desired: Desired, asking: Adapter) -> bool:
    """A refused object holds no name: it would otherwise keep others from being served."""
    if rival is asking or isinstance(rival, Pool):
        return True
    pool = desired.pools.get(rival.pool)
    return pool is not None and not pool.meta.deleting and pool.permits(rival.meta.ref.namespace)


def _precedence(claimant: Pool | Adapter) -> tuple[bool, float, bool, str]:
    meta = claimant.meta
    return (isinstance(claimant, Adapter), meta.created, not _stored(claimant, "Accepted"), meta.uid)


def _conflict(model_name: str, owner: Pool | Adapter) -> Refusal:
    why = "is the base model of" if isinstance(owner, Pool) else "belongs to the older"
    return Refusal("NameConflict", f"the name {model_name!r} {why} {owner.meta.ref.kind} {owner.meta.ref}")


def _stored(resource: Pool | Adapter, condition: str) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in resource.status.get("conditions", ()))
