"""One stream for each peer: what an older one delivers is dropped once a newer is there."""

import asyncio
from typing import Any

import pytest

from harness.waiting import soon
from weft.domain.ids import RunnerId
from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.request import Cancel, GatewayHello, OutcomeReport, ResubmitComplete
from weft.domain.routes import MAX_ENTRIES, RegistryChange, RegistryHello, Route, Routes
from weft.domain.runner import Resync, SupervisorHello
from weft.wire.codec import cluster, registry, scheduling
from weft.wire.errors import PeerError
from weft.wire.streams import unjoined
from weft_scheduler.core.effects import Event
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


async def sent(session: Session) -> list[Any]:
    """What a stream's peer is sent by now."""
    session.outbox.close()
    return [envelope async for envelope in session.outbox]


async def test_a_message_to_several_peers_is_encoded_once() -> None:
    streams = Streams(Kind.GATEWAY)
    opened = [streams.open() for _ in "gh"]
    for session, name in zip(opened, "gh", strict=True):
        session.on_message(envelope(GatewayHello(name)))
    table = Routes(7, True)
    for name in "gh":
        streams.sessions.send(Peer(Kind.GATEWAY, name), table)
    streams.sessions.send(Peer(Kind.GATEWAY, "unknown"), table)
    (one,), (two,) = [await sent(session) for session in opened]
    assert one is two
    assert one.routes.version == 7


async def test_a_table_is_sent_in_bounded_parts() -> None:
    streams = Streams(Kind.GATEWAY)
    session = streams.open()
    session.on_message(envelope(GatewayHello("g")))
    routes = tuple(Route(f"m{i}", "ns", "ns/p", "d") for i in range(2 * MAX_ENTRIES + 1))
    streams.sessions.send(Peer(Kind.GATEWAY, "g"), Routes(7, True, routes=routes))
    parts = await sent(session)
    assert [len(one.routes.routes) for one in parts] == [MAX_ENTRIES, MAX_ENTRIES, 1]
    assert [one.routes.more for one in parts] == [True, True, False]


async def test_outcomes_on_their_way_to_the_store_wait_for_each_other_and_an_order_for_none() -> None:
    streams = Streams(Kind.SUPERVISOR)
    session, peer = streams.open(), Peer(Kind.SUPERVISOR, "s")
    session.on_message(cluster.SUPERVISOR_TO_SCHEDULER.encode(SupervisorHello("s", 0)))
    session.outbox.joins = True
    sending = asyncio.ensure_future(anext(aiter(session.outbox)))
    for i in range(3):
        streams.sessions.send(peer, OutcomeReport(f"r{i}", "n/p", "", 1, False, b"", 0, 0, "", False))
        await asyncio.sleep(0)
    assert not sending.done()
    streams.sessions.send(peer, Resync(RunnerId("u", "i")))
    envelope = await soon(sending)
    kinds = [one.WhichOneof("message") for one in unjoined(envelope)]
    assert kinds == ["outcome_report"] * 3 + ["resync"]
