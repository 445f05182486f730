"""Epochs, runner ids and names, both ways."""

from weft.wire.bounds import check_epoch
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2 as cpb
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb
from weft_scheduler.core.values import (
    Epoch,
    RunnerId,
    Tier,
)


def epoch_of(m: cpb.Epoch) -> Epoch:
    """Raises PeerError."""
    check_epoch(m)
    return Epoch(m.term, m.counter)


def to_epoch(epoch: Epoch) -> cpb.Epoch:
    return cpb.Epoch(term=epoch.term, counter=epoch.counter)


def runner_id_of(m: cpb.RunnerId) -> RunnerId:
    return RunnerId(m.uuid, m.incarnation)


def to_runner_id(runner: RunnerId) -> cpb.RunnerId:
    return cpb.RunnerId(uuid=runner.uuid, incarnation=runner.incarnation)


TIERS = {
    Tier.UNSPECIFIED: spb.AdapterState.TIER_UNSPECIFIED,
    Tier.REMOTE: spb.AdapterState.REMOTE,
    Tier.DISK: spb.AdapterState.DISK,
    Tier.HOST: spb.AdapterState.HOST,
    Tier.DEVICE: spb.AdapterState.DEVICE,
}
_TIERS_IN = {number: tier for tier, number in TIERS.items()}


def tier_of(m: pb.AdapterDesired) -> Tier:
    """The least tier that every Ready runner should hold it in. Raises PeerError."""
    tier = _TIERS_IN.get(m.tier)
    if tier is None or tier is Tier.DEVICE:
        raise PeerError(f"adapter {m.uid}: tier {m.tier} is none that can be asked for (the device is `pinned`)")
    return tier


def named(name: str) -> str:
    if not name:
        raise PeerError("a message without the id of what it speaks of")
    return name
