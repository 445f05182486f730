"""One direction of a contract: the table of its messages."""

from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from weft.wire.codec.pairs import ByHand, Pair, plain
from weft.wire.errors import PeerError

M = TypeVar("M")  # the messages of the direction, a union
E = TypeVar("E", bound=Message)  # the envelope: a protobuf message with one `oneof message`


class Direction(Generic[E, M]):
    """The messages of one direction, encoded and decoded.

    Encoding fills the envelope in place: a step of 32 sequences takes 53 us, with copied submessages 133 us.
    """

    def __init__(self, envelope: type[E], sender: str, **messages: type | Pair[Any, Any] | ByHand) -> None:
        """Take the table of messages. `messages`: by their fields of the envelope; values with the message's fields, or
        pairs."""
        self.envelope, self._sender = envelope, sender
        self.pairs: dict[str, Any] = {
            name: plain(message_type, envelope.DESCRIPTOR.fields_by_name[name].message_type)
            if isinstance(message_type, type)
            else message_type
            for name, message_type in messages.items()
        }
        self._fields = {pair.of: (name, pair) for name, pair in self.pairs.items()}

    @property
    def messages(self) -> tuple[type, ...]:
        return tuple(self._fields)

    def encode(self, message: M) -> E:
        name, pair = self._fields[type(message)]
        envelope = self.envelope()
        field = getattr(envelope, name)
        field.SetInParent()  # messages without a value, too
        pair.fill(message, field)
        return envelope

    def decode(self, envelope: E) -> M:
        """Read the message in an envelope. Raises PeerError."""
        name = envelope.WhichOneof("message")
        if (pair := self.pairs.get(name or "")) is None:
            raise PeerError(f"a {self._sender} sent an unknown message ({name})")
        return pair.read(getattr(envelope, name))
