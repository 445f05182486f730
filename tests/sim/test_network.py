"""Streams, their faults, and the processes at their ends, with machines that only write down what they hear."""

import pytest

from harness.toy_machines import Town
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received
from weft_sim.hosts import Costs
from weft_sim.process import GIVEN_UP_S, RECONNECT_S, LawBroken


def test_a_stream_begins_with_the_hello_keeps_its_order_and_answers() -> None:
    town = Town()
    town.start()
    assert town.kinds("right") == town.kinds("left") == ["Connected"]
    assert [e.hello for _, _, e in town.log if isinstance(e, Connected)] == ["hello", None]
    for n in (2, 0, 0):
        town.send(town.left, n)
    town.run(1.0)
    assert town.messages("right") == [2, 0, 0, 0]
    assert town.messages("left") == [1]


def test_a_broken_stream_loses_what_is_on_the_way_and_is_opened_again() -> None:
    town = Town()
    town.start()
    town.send(town.left, "lost")
    ((stream, _),) = town.left.streams.values()
    town.network.break_stream(stream, notice_s=(0.0, 5.0))
    town.run(RECONNECT_S + 0.1)
    assert town.kinds("left")[1:] == ["Closed", "Connected"]
    assert town.kinds("right")[1:] == ["Connected"]  # the server had not noticed: the newer stream takes its place
    town.run(10.0)
    assert town.messages("right") == []
    assert town.kinds("right")[1:] == ["Connected"]


def test_a_partition_holds_messages_back_until_it_is_healed() -> None:
    town = Town()
    town.start()
    town.network.partition(("left", "right"))
    town.send(town.left, 0)
    town.run(1.0)
    assert town.messages("right") == []
    town.network.heal(("left", "right"))
    town.run(0.01)
    assert town.messages("right") == [0]


def test_a_message_that_breaks_the_contract_ends_its_stream_and_nothing_else() -> None:
    town = Town()
    town.start()
    town.send(town.left, "bad")
    town.run(0.05)
    assert town.kinds("right")[1:] == ["Closed"]
    assert town.kinds("left")[1:] == ["Closed"]
    assert town.network.peer_errors == [(Peer(Kind.GATEWAY, "left#1"), "it says bad")]
    town.run(1.0)
    assert town.kinds("right")[2:] == ["Connected"]


def test_a_crash_closes_the_streams_and_the_next_start_is_another_peer() -> None:
    town = Town()
    town.start()
    town.right.crash()
    town.run(1.0)
    assert "Closed" in town.kinds("left")
    town.right.start()
    town.run(1.0)
    peers = [e.peer.name for _, who, e in town.log if who.startswith("left") and isinstance(e, Connected)]
    assert peers == ["right#1", "right#2"]
    assert not [e for _, who, e in town.log if who == "right#2" and isinstance(e, Closed)]


def test_a_stream_to_a_process_that_stands_still_is_given_up_and_a_new_one_is_answered_afterwards() -> None:
    town = Town()
    town.start()
    town.right.pause(GIVEN_UP_S + 1.0)
    town.run(GIVEN_UP_S + 0.9)
    assert town.kinds("left")[1:] == ["Closed"]
    assert town.kinds("right")[1:] == []
    town.run(0.2)
    assert town.kinds("left")[1:] == ["Closed", "Connected"]
    assert town.kinds("right")[1:] == ["Closed", "Tick", "Connected"]
    town.send(town.left, 0)
    town.run(0.1)
    assert town.messages("right") == [0]


def test_duplicates_arrive_in_order_and_a_pause_delays_without_loss() -> None:
    town = Town()
    town.start()
    town.network.duplicate = 1.0
    town.right.pause(2.0)
    town.send(town.left, 0)
    town.run(1.0)
    assert town.messages("right") == []
    town.run(1.5)
    assert town.messages("right") == [0, 0]


def test_deadlines_tick_and_one_that_never_passes_is_found() -> None:
    town = Town(deadlines=[0.5, 0.7])
    town.start()
    town.run(1.0)
    assert [time for time, who, e in town.log if e is TICK and who == "left#1"] == [0.5, 0.7]
    town = Town(deadlines=[0.5] * 2000)
    town.start()
    with pytest.raises(LawBroken, match="does not pass"):
        town.run(1.0)


def test_events_queue_behind_each_other_on_the_cores_of_their_host() -> None:
    costs = Costs({(Kind.SCHEDULER, "int"): 0.25})
    town = Town(costs=costs)
    town.start()
    for _ in range(3):
        town.send(town.left, 0)
    town.run(2.0)
    times = [time for time, who, e in town.log if who == "right#1" and isinstance(e, Received)]
    assert times == pytest.approx([0.351, 0.601, 0.851])
    assert town.right.host.busy_s == pytest.approx(0.75)
