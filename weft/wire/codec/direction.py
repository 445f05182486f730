"""One direction of a contract: the table of its messages."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from weft.wire.errors import PeerError

M = TypeVar("M")  # the messages of the direction, a union
E = TypeVar("E", bound=Message)  # the envelope: a protobuf message with one `oneof message`


class Entry(NamedTuple):
    """A message: its field of the envelope, its class, and how it is written into and read from the field."""

    field: str
    of: type
    fill: Callable[[Any, Any], None] | None = None  # None: the message has no values
    read: Callable[[Any], Any] | None = None


class Direction(Generic[E, M]):
    """Encoding fills the envelope in place: a step of 32 sequences takes 53 us, with copied submessages 133 us."""

    def __init__(self, envelope: type[E], sender: str, *entries: Entry) -> None:
        self.envelope, self._sender = envelope, sender
        self._by_type = {entry.of: entry for entry in entries}
        self._by_field = {entry.field: entry for entry in entries}

    @property
    def messages(self) -> tuple[type, ...]:
        return tuple(self._by_type)

    def encode(self, message: M) -> E:
        entry = self._by_type[type(message)]
        envelope = self.envelope()
        field = getattr(envelope, entry.field)
        field.SetInParent()  # messages without a value, too
        if entry.fill is not None:
            entry.fill(message, field)
        return envelope

    def decode(self, envelope: E) -> M:
        """Raises PeerError."""
        name = envelope.WhichOneof("message")
        entry = self._by_field.get(name or "")
        if entry is None:
            raise PeerError(f"a {self._sender} sent an unknown message ({name})")
        return entry.of() if entry.read is None else entry.read(getattr(envelope, entry.field))
