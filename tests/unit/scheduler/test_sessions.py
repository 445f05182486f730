"""One stream for each peer: what an older one delivers is dropped once a newer is there."""

from typing import Any, cast

import pytest

from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.request import Cancel, GatewayHello, ResubmitComplete
from weft.domain.routes import MAX_ENTRIES, RegistryChange, RegistryHello, Route, Routes
from weft.wire.codec import registry, scheduling
from weft.wire.errors import PeerError
from weft_scheduler.core import Event
from weft_scheduler.sessions import Session, Sessions

GATEWAY, REGISTRY = Peer(Kind.GATEWAY, "g"), Peer(Kind.REGISTRY, "r1")


class Streams:
    """Sessions of one kind, and the events that they feed."""

    def __init__(self, kind: Kind, name: str = "") -> None:
        self.events: list[Event] = []
        self.sessions = Sessions()
        self.kind, self.name = kind, name

    def open(self) -> Session:
        return Session(self.kind, self.sessions, self.events.append, name=self.name)


def envelope(message: Any) -> Any:
    return scheduling.GATEWAY_TO_SCHEDULER.encode(message)


def test_what_an_older_stream_still_delivers_is_dropped() -> None:
    streams = Streams(Kind.GATEWAY)
    older, newer = streams.open(), streams.open()
    older.on_message(envelope(GatewayHello("g")))
    newer.on_message(envelope(GatewayHello("g")))
    assert older.outbox.closed
    older.on_message(envelope(Cancel("r")))
    older.on_message(envelope(ResubmitComplete()))
    older.on_close()
    assert streams.events == [Connected(GATEWAY, GatewayHello("g"))] * 2
    newer.on_message(envelope(ResubmitComplete()))
    newer.on_close()
    newer.on_close()
    assert streams.events[2:] == [Received(GATEWAY, ResubmitComplete()), Closed(GATEWAY)]


def test_a_registry_says_its_term_with_its_first_message() -> None:
    streams, change = Streams(Kind.REGISTRY, "r1"), RegistryChange(True, term=4)
    streams.open().on_message(registry.REGISTRY_TO_SCHEDULER.encode(change))
    assert streams.events == [Connected(REGISTRY, RegistryHello(None)), Received(REGISTRY, change)]


def test_a_stream_without_a_hello_ends_unnoticed_and_may_send_nothing_else() -> None:
    streams = Streams(Kind.GATEWAY)
    session = streams.open()
    with pytest.raises(PeerError):
        session.on_message(envelope(Cancel("r")))
    session.on_close()
    assert not streams.events


def test_a_message_to_several_peers_is_encoded_once() -> None:
    streams = Streams(Kind.GATEWAY)
    opened = [streams.open() for _ in "gh"]
    for session, name in zip(opened, "gh", strict=True):
        session.on_message(envelope(GatewayHello(name)))
    table = Routes(7, True)
    for name in "gh":
        streams.sessions.send(Peer(Kind.GATEWAY, name), table)
    streams.sessions.send(Peer(Kind.GATEWAY, "unknown"), table)
    one, two = cast(list[Any], [session.outbox._queue.get_nowait() for session in opened])  # pyright: ignore[reportPrivateUsage]
    assert one is two
    assert one.routes.version == 7


def test_a_table_is_sent_in_bounded_parts() -> None:
    streams = Streams(Kind.GATEWAY)
    session = streams.open()
    session.on_message(envelope(GatewayHello("g")))
    routes = tuple(Route(f"m{i}", "ns", "ns/p", "d") for i in range(2 * MAX_ENTRIES + 1))
    streams.sessions.send(Peer(Kind.GATEWAY, "g"), Routes(7, True, routes=routes))
    sent: list[Any] = [session.outbox._queue.get_nowait() for _ in range(3)]  # pyright: ignore[reportPrivateUsage]
    assert [len(one.routes.routes) for one in sent] == [MAX_ENTRIES, MAX_ENTRIES, 1]
    assert [one.routes.more for one in sent] == [True, True, False]
