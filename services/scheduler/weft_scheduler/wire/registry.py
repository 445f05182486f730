"""What the registry says and hears."""

from collections.abc import Iterable

from weft.wire.v1 import scheduler_pb2 as pb
from weft_scheduler.core import effects as ef
from weft_scheduler.core import events as ev
from weft_scheduler.core.values import (
    AdapterSpec,
    PoolSpec,
)
from weft_scheduler.wire.shared import named, tier_of


def registry_event(m: pb.RegistryToScheduler) -> ev.RegistryChange:
    """What the registry wants."""
    return ev.RegistryChange(
        snapshot=m.snapshot,
        pools=tuple(_pool(p) for p in m.pools),
        adapters=tuple(_adapters(m.adapters)),
        removed_pools=tuple(m.removed_pools),
        removed_adapters=tuple(m.removed_adapter_uids),
    )


def _pool(m: pb.PoolDesired) -> PoolSpec:
    """Unset bounds and policies are the schema's defaults."""
    return PoolSpec(
        name=named(m.pool),
        base_digest=m.base_digest,
        base_model_name=m.base_model_name,
        shared_all=m.shared_all,
        shared_namespaces=tuple(m.shared_namespaces),
        max_queue=m.max_queue or 1000,
        max_moves=m.max_moves or 8,
        placement=m.placement or "punica",
        queue=m.queue or "fcfs",
        reservation=m.reservation or "calibrated",
        created_unix_s=m.created_unix_s,
        min_runners=m.min_runners,
        max_runners=m.max_runners,
        idle_s=float(m.idle_s),
        hold_s=m.hold_s,
        drain_s=float(m.drain_s),
        max_context_tokens=m.max_context_tokens,
    )


def _adapters(messages: Iterable[pb.AdapterDesired]) -> Iterable[AdapterSpec]:
    for m in messages:
        yield AdapterSpec(
            uid=named(m.uid),
            namespace=m.namespace,
            name=m.name,
            model_name=m.model_name,
            pool=m.pool,
            digest=m.digest,
            rank=m.rank,
            bytes=m.bytes,
            pinned=m.pinned,
            created_unix_s=m.created_unix_s,
            tier=tier_of(m),
        )


RegistryEffect = ef.PoolStatus | ef.AdapterStatus


def to_registry(effect: RegistryEffect) -> pb.SchedulerToRegistry:
    """The message of an effect for the registry."""
    match effect:
        case ef.PoolStatus():
            return pb.SchedulerToRegistry(
                pool=pb.PoolStatus(
                    pool=effect.pool,
                    ready_runners=effect.ready_runners,
                    wanted_runners=effect.wanted_runners,
                    running=effect.running,
                    queued=effect.queued,
                    victims=effect.victims,
                    max_runners=effect.max_runners,
                    total_pages=effect.total_pages,
                    reserved_pages=effect.reserved_pages,
                    demand_runners=effect.demand_runners,
                )
            )
        case ef.AdapterStatus():
            return pb.SchedulerToRegistry(
                adapter=pb.AdapterStatus(
                    uid=effect.uid,
                    digest=effect.digest,
                    routed=effect.routed,
                    ready_runners=effect.ready_runners,
                    load_errors=effect.load_errors,
                )
            )
