"""Values that several contracts share, with their bounds.

Bounds are generous: they keep out nonsense, not large users.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from weft.domain.ids import MAX_TERM, Epoch, RunnerId
from weft.domain.request import Priority
from weft.domain.text import quoted
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2

MAX_ID = 320  # characters of a name, an id, "namespace/name" or an address
MAX_MODEL = 1_000  # of a served model's name
MAX_DETAIL = 1_000  # of a reason: it goes into statuses and logs. Longer ones are cut
MAX_TOKENS = 1 << 31  # in one request
MAX_WAITED_MS = 1 << 40  # 35 years
MAX_PAGES = 1 << 31
MAX_RANK = 1 << 16
MAX_EOS_TOKENS = 16  # of one adapter

PRIORITY = {
    Priority.INTERACTIVE: common_pb2.PRIORITY_INTERACTIVE,
    Priority.BATCH: common_pb2.PRIORITY_BATCH,
}
P = TypeVar("P", bound=Enum)


def text(value: str, what: str, most: int = MAX_ID) -> str:
    """Raises PeerError."""
    if len(value) > most:
        raise PeerError(f"{what} has {len(value)} characters, at most {most} are allowed")
    return value


def named(value: str, what: str, most: int = MAX_ID) -> str:
    """A text that may not be empty. Raises PeerError."""
    if 0 < len(value) <= most:
        return value
    if not value:
        raise PeerError(f"{what} is empty")
    return text(value, what, most)


def texts(values: Iterable[str], what: str) -> tuple[str, ...]:
    """Raises PeerError."""
    return tuple([named(value, what) for value in values])


def number(value: int, what: str, most: int, least: int = 0) -> int:
    """Raises PeerError."""
    if not least <= value <= most:
        raise PeerError(f"{what} is {value}, not within {least}..{most}")
    return value


def term(value: int) -> int:
    """Raises PeerError: there has to be a term above every term that a peer names."""
    return number(value, "a term", MAX_TERM - 1)


def epoch(message: common_pb2.Epoch) -> Epoch:
    """Raises PeerError."""
    value = message.term
    return Epoch(value if value < MAX_TERM else term(value), message.counter)


def fill_epoch(value: Epoch, message: common_pb2.Epoch) -> None:
    message.term, message.counter = value


def runner_id(message: common_pb2.RunnerId) -> RunnerId:
    """Raises PeerError."""
    return RunnerId(
        named(message.uuid, "a runner's uuid", 128), named(message.incarnation, "a runner's incarnation", 128)
    )


def fill_runner_id(value: RunnerId, message: common_pb2.RunnerId) -> None:
    message.uuid, message.incarnation = value


def enum(table: Mapping[int, P], value: int, what: str) -> P:
    """The domain's value for a number of the contract. Raises PeerError."""
    if (found := table.get(value)) is None:
        raise PeerError(f"{what} {quoted(value)} is unknown")
    return found


def priority(value: common_pb2.Priority) -> Priority:
    """Raises PeerError."""
    return enum(_PRIORITIES, value, "a priority")


def same_named(value: Any, *others: str) -> Any:
    """The fields of a dataclass as arguments of a message that names them the same; `others` it does not."""
    names, values_of = _fields(type(value), others)
    return dict(zip(names, values_of(value), strict=True))


@cache
def _fields(of: type, others: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[[Any], Any]]:
    names = tuple([field.name for field in fields(of) if field.name not in others])
    return names, attrgetter(*names)


def inverted(table: Mapping[P, int]) -> dict[int, P]:
    return {number: value for value, number in table.items()}


_PRIORITIES = inverted(PRIORITY)
