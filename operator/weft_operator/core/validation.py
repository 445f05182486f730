"""Rules between objects, checked before an object is stored: a change that breaks existing objects is refused. Pure.

The schema has judged the object by itself already. These rules depend on other objects: names, slots, namespaces,
bases. The webhook and the local API call the same function, so both refuse with the same words.

- Objects may come in any order: a missing object refuses nothing. An adapter without its pool is stored, with a warning
  and the condition PoolNotFound.
- An update is refused only if it makes a conflict worse. An edited label meets no old conflict. An object in deletion,
  or with an unchanged spec, always passes.
- Only accepted objects (`acceptance`) hold a name, a slot or a place: a refused object blocks nothing.
- Two objects reviewed at the same moment both pass; the planner then gives the younger its condition.
- A pool's owner may withdraw a right in use (a namespace), with a warning. A change that is more likely a slip is
  refused: fewer slots than pinned adapters, a rank below a served rank.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from weft.domain.model.errors import Reason
from weft_operator.core.acceptance import (
    VOLUME_NOT_ALLOWED,
    accepted_by_name,
    describe_owner,
    is_in_own_namespace,
    name_owner,
    pinned_max,
)
from weft_operator.core.resources import AdapterObject, Malformed, Object, PoolObject, parse
from weft_operator.core.state import DesiredState

MAX_NAMED_OBJECTS = 3
# Fields set by a server, for an object not stored yet.
_UNSTORED = {"uid": "", "generation": 0, "resourceVersion": "", "creationTimestamp": "9999-12-31T00:00:00Z"}


@dataclass(frozen=True, slots=True)
class Violation:
    """An objection to an object. `reason` is API, as in conditions; `field` is a path."""

    reason: str
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class Review:
    """The review of a proposed object: any objection refuses it, warnings do not."""

    objections: tuple[Violation, ...] = ()
    warnings: tuple[str, ...] = ()


def validate(proposed: Object, previous: Object | None, desired: DesiredState) -> Review:
    """Judge a proposed object, in place of `previous` if present, against all existing objects."""
    if proposed["metadata"].get("deletionTimestamp") or (previous is not None and previous["spec"] == proposed["spec"]):
        return Review()
    new, old = _parsed(proposed), _parsed(previous) if previous is not None else None
    if isinstance(new, Malformed):
        return Review((Violation("InvalidSpec", "spec", new.message),))
    if isinstance(new, PoolObject):
        return _review_pool(new, old if isinstance(old, PoolObject) else None, desired)
    return _review_adapter(new, old if isinstance(old, AdapterObject) else None, desired)


# --------------------------------------------------------------------------------------------- adapters


def _review_adapter(new: AdapterObject, old: AdapterObject | None, desired: DesiredState) -> Review:
    pool = desired.pools.get(new.pool)
    if pool is None or pool.meta.deleting:
        waits = f"ServingPool {new.pool} does not exist yet: the adapter waits for it (PoolNotFound)"
        return Review(tuple(_name_objections(new, old, desired)), (waits,))
    known_adapters = (
        set(_adapter_objections(old, pool, desired)) if old is not None and old.pool == new.pool else set[Violation]()
    )
    objections = (*_name_objections(new, old, desired), *_adapter_objections(new, pool, desired))
    return Review(tuple(objection for objection in objections if objection not in known_adapters))


def _adapter_objections(adapter: AdapterObject, pool: PoolObject, desired: DesiredState) -> Iterator[Violation]:
    """Yield objections to an adapter in this pool, beyond its name."""
    namespace, ref = adapter.meta.ref.namespace, pool.meta.ref
    if not pool.permits(namespace):
        message = (
            f"ServingPool {ref} does not admit adapters of namespace {namespace}; its owner can, with allowedNamespaces"
        )
        yield Violation("NotPermitted", "spec.poolRef", message)
    if adapter.spec.base_model not in (None, pool.model_name):
        message = f"ServingPool {ref} serves {pool.model_name!r}, not {adapter.spec.base_model!r}"
        yield Violation(Reason.BASE_MISMATCH, "spec.baseModel", message)
    if adapter.spec.max_rank is not None and adapter.spec.max_rank > pool.spec.lora.max_rank:
        message = f"ServingPool {ref} takes ranks up to {pool.spec.lora.max_rank}, not {adapter.spec.max_rank}"
        yield Violation(Reason.RANK_TOO_LARGE, "spec.maxRank", message)
    max_pinned = pinned_max(pool)
    if adapter.spec.pinned and max_pinned is not None:
        pinned = _accepted(pool, desired, lambda rival: rival.spec.pinned and rival.meta.ref != adapter.meta.ref)
        if len(pinned) >= max_pinned:
            pinned_names = [
                rival for rival in pinned if rival.meta.ref.namespace == namespace
            ]  # names in foreign namespaces are not disclosed
            yield Violation("NoSlots", "spec.pinned", _full(pool, pinned_names))


def _name_objections(new: AdapterObject, old: AdapterObject | None, desired: DesiredState) -> Iterator[Violation]:
    if old is not None and old.model_name == new.model_name:
        return
    if holder := _holder(new, desired):
        yield Violation("NameConflict", "spec.modelName", _taken_message(new, holder))


# ------------------------------------------------------------------------------------------------ pools


def _review_pool(new: PoolObject, old: PoolObject | None, desired: DesiredState) -> Review:
    if not desired.serves(new.meta.ref.namespace):
        served = ", ".join(sorted(desired.policy.pool_namespaces or ())) or "no namespace"
        namespace = new.meta.ref.namespace
        message = f"pools are served in {served}, not in {namespace} (NamespaceNotServed)"
        return Review(warnings=(message,))
    if old is None:
        return Review((*_foreign_folder(new, desired), *_renamed(new, desired)), tuple(_too_few_to_split(new)))
    objections = (
        *(_foreign_folder(new, desired) if new.spec.model_cache != old.spec.model_cache else ()),
        *(_renamed(new, desired) if new.model_name != old.model_name else ()),
        *(_asserted(new, desired) if new.model_name != old.model_name else ()),
        *(_fewer_slots(new, desired) if _has_fewer_slots(new, old) else ()),
        *(_smaller_rank(new, desired) if new.spec.lora.max_rank < old.spec.lora.max_rank else ()),
    )
    return Review(objections, (*_no_longer_permitted(new, desired), *_too_few_to_split(new)))


def _too_few_to_split(new: PoolObject) -> Iterator[str]:
    """Yield a warning about the number of runners in the spec. The number may change later, so nothing is refused."""
    replicas = new.spec.replicas
    if new.spec.phases.mode == "Split" and replicas is not None and replicas < 2:
        yield "phases: mode Split needs a runner for each phase; a single runner does both"


def _foreign_folder(new: PoolObject, desired: DesiredState) -> Iterator[Violation]:
    if refusal := desired.folder_refusal(new):
        yield Violation(VOLUME_NOT_ALLOWED, "spec.modelCache", refusal)


def _renamed(new: PoolObject, desired: DesiredState) -> Iterator[Violation]:
    if holder := _holder(new, desired):
        yield Violation("NameConflict", "spec.model.name", _taken_message(new, holder))


def _asserted(new: PoolObject, desired: DesiredState) -> Iterator[Violation]:
    """Yield objections of adapters with a declared base."""
    if relying := _accepted(new, desired, lambda adapter: adapter.spec.base_model not in (None, new.model_name)):
        says = relying[0].spec.base_model
        message = f"baseModel of {_named(relying)} says {says!r}; delete them first, or create another pool"
        yield Violation(Reason.BASE_MISMATCH, "spec.model.name", message)


def _has_fewer_slots(new: PoolObject, old: PoolObject) -> bool:
    now, old_limit = new.spec.advanced.max_adapters, old.spec.advanced.max_adapters
    return now is not None and (old_limit is None or now < old_limit)


def _fewer_slots(new: PoolObject, desired: DesiredState) -> Iterator[Violation]:
    max_pinned, pinned = pinned_max(new), _accepted(new, desired, lambda adapter: adapter.spec.pinned)
    if max_pinned is not None and len(pinned) > max_pinned:
        yield Violation("NoSlots", "spec.advanced.maxAdapters", _full(new, pinned))


def _smaller_rank(new: PoolObject, desired: DesiredState) -> Iterator[Violation]:
    if larger := _accepted(new, desired, lambda adapter: int(adapter.status.get("rank") or 0) > new.spec.lora.max_rank):
        message = f"{_named(larger)} of rank {max(int(a.status['rank']) for a in larger)} would not be served any more"
        yield Violation(Reason.RANK_TOO_LARGE, "spec.lora.maxRank", message)


def _no_longer_permitted(new: PoolObject, desired: DesiredState) -> Iterator[str]:
    if lost := _accepted(new, desired, lambda adapter: not new.permits(adapter.meta.ref.namespace)):
        yield f"{_named(lost)} will not be served any more: allowedNamespaces leaves out their namespaces"


# ------------------------------------------------------------------------------------ who holds what now


def _holder(new: PoolObject | AdapterObject, desired: DesiredState) -> PoolObject | AdapterObject | None:
    """Return the object served under this name now. Deleted objects do not count."""
    owner = name_owner(new.model_name, desired)
    if owner is None or owner.meta.ref == new.meta.ref or owner.meta.deleting or _gives_way(owner, new):
        return None
    return owner


def _gives_way(holder: PoolObject | AdapterObject, new: PoolObject | AdapterObject) -> bool:
    """Return whether the holder of a name gives way: a name with a namespace at its beginning belongs to this namespace
    (`acceptance`).
    """
    return (
        isinstance(holder, AdapterObject)
        and isinstance(new, AdapterObject)
        and is_in_own_namespace(new)
        and not is_in_own_namespace(holder)
    )


def _accepted(
    pool: PoolObject, desired: DesiredState, concerned: Callable[[AdapterObject], bool]
) -> list[AdapterObject]:
    """Return the concerned adapters that the stored pool serves or will serve."""
    concerned_adapters = (adapter for adapter in desired.adapters_of(pool.meta.ref) if concerned(adapter))
    accepted = (adapter for adapter in accepted_by_name(concerned_adapters, desired) if not adapter.meta.deleting)
    return sorted(accepted, key=lambda adapter: adapter.meta.ref)


def _parsed(obj: Object) -> AdapterObject | PoolObject | Malformed:
    return parse({**obj, "metadata": {**_UNSTORED, **obj["metadata"]}})


# ------------------------------------------------------------------------------------------------- words


def _taken_message(new: PoolObject | AdapterObject, holder: PoolObject | AdapterObject) -> str:
    return f"the name {new.model_name!r} {describe_owner(new, holder)}; choose another"


def _full(pool: PoolObject, pinned: list[AdapterObject]) -> str:
    slots = pool.spec.advanced.max_adapters
    bound = f"advanced.maxAdapters {slots} pins at most {pinned_max(pool)}: one slot is never pinned"
    pinned_text = f" (pinned: {_named(pinned)})" if pinned else ""
    return (
        f"ServingPool {pool.meta.ref} with {bound}{pinned_text}; "
        "unpin an adapter, or raise or unset advanced.maxAdapters"
    )


def _named(adapters: Iterable[AdapterObject]) -> str:
    names = sorted(str(adapter.meta.ref) for adapter in adapters)
    rest = f" and {len(names) - MAX_NAMED_OBJECTS} more" if len(names) > MAX_NAMED_OBJECTS else ""
    return f"LoRAAdapter{'s' if len(names) > 1 else ''} {', '.join(names[:MAX_NAMED_OBJECTS])}{rest}"
