"""Epochs, runner ids and names, both ways."""

from weft.wire.v1 import common_pb2 as cpb
from weft_scheduler.core.values import (
    Epoch,
    RunnerId,
)
from weft_scheduler.errors import MessageInvalid


def epoch_of(m: cpb.Epoch) -> Epoch:
    return Epoch(m.term, m.counter)


def to_epoch(epoch: Epoch) -> cpb.Epoch:
    return cpb.Epoch(term=epoch.term, counter=epoch.counter)


def runner_id_of(m: cpb.RunnerId) -> RunnerId:
    return RunnerId(m.uuid, m.incarnation)


def to_runner_id(runner: RunnerId) -> cpb.RunnerId:
    return cpb.RunnerId(uuid=runner.uuid, incarnation=runner.incarnation)


def named(name: str) -> str:
    if not name:
        raise MessageInvalid("a message without the id of what it speaks of")
    return name
