"""Registry (the operator, or the controller of `weft up`) <-> scheduler."""

from weft.domain.adapter import Tier
from weft.domain.bounds import MAX_NAME_CHARS
from weft.domain.routes import AdapterSpec, AdapterStatus, PoolSpec, PoolStatus, RegistryChange
from weft.wire.codec.direction import Direction
from weft.wire.codec.pairs import Pair
from weft.wire.codec.values import check_non_empty
from weft.wire.errors import PeerError
from weft.wire.v1 import scheduler_pb2 as pb


def _check_adapter(adapter: AdapterSpec) -> None:
    check_non_empty(adapter.uid, "an adapter's uid")
    if adapter.tier is Tier.DEVICE:
        raise PeerError(f"tier {adapter.tier} cannot be required (the device's is `pinned`)")


_POOL = Pair(PoolSpec, pb.PoolDesired, who=lambda m: f"pool {m.route.name[:MAX_NAME_CHARS]}: ")
_ADAPTER = Pair(
    AdapterSpec, pb.AdapterDesired, check=_check_adapter, who=lambda m: f"adapter {m.route.uid[:MAX_NAME_CHARS]}: "
)
REGISTRY_CHANGE = Pair(RegistryChange, pb.RegistryToScheduler, parts=(_POOL, _ADAPTER))


class RegistryDirection:
    """The registry sends one kind of message, without an envelope."""

    envelope = pb.RegistryToScheduler
    messages = (RegistryChange,)
    encode, decode = REGISTRY_CHANGE.encode, REGISTRY_CHANGE.decode


REGISTRY_TO_SCHEDULER = RegistryDirection()
SCHEDULER_TO_REGISTRY: Direction[pb.SchedulerToRegistry, PoolStatus | AdapterStatus] = Direction(
    pb.SchedulerToRegistry, "scheduler", pool=PoolStatus, adapter=AdapterStatus
)
