"""Messages over a socket pair or TCP: whole, in order, with files; an end that is closed or silent has a name."""

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator

import pytest

from harness.ports import tcp_pair
from harness.waiting import PATIENCE_S
from weft_runner.parallel import Channel, ChannelLost, MessageRefused, pack_message

FIRST, LAST = ("clear", 3), ("clear", 4)


@pytest.fixture(params=["socket pair", "TCP"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, tcp_pair() if request.param == "TCP" else socket.socketpair())
    one.set_patience(PATIENCE_S)
    other.set_patience(PATIENCE_S)
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_whole_and_in_order_and_a_file_with_its_message(ends):
    one, other = ends
    large = [*range(1 << 20)]  # more than a socket holds
    file = os.memfd_create("test")
    os.write(file, b"content")
    sending = threading.Thread(target=lambda: [one.send(FIRST), one.send(("clear_pages", large), file), one.send(LAST)])
    sending.start()
    assert [other.receive(), other.receive()] == [FIRST, ("clear_pages", large)]
    received = other.receive_file()
    assert os.pread(received, 100, 0) == b"content"
    assert not os.get_inheritable(received)
    assert other.receive() == LAST
    sending.join()
    os.close(file)
    os.close(received)


@pytest.mark.usefixtures("anything_is_sent")
def test_a_message_that_is_refused_is_told_to_both_ends(ends):
    one, other = ends
    one.send("decimal.Decimal")
    for end in (other, one):
        with pytest.raises(MessageRefused, match=r"decimal\.Decimal', which no rank sends"):
            end.receive()


@pytest.fixture
def anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have sent it, or one that is at fault."""

    def pack(message: object) -> bytes:
        return json.dumps([message]).encode() if isinstance(message, str) else pack_message(message)

    monkeypatch.setattr("weft_runner.parallel.channel.pack_message", pack)


def test_a_closed_end_is_told_to_both_and_to_who_waits_for_it(ends):
    one, other = ends
    waiting = threading.Thread(target=other.wait_for_end)
    waiting.start()
    one.send(FIRST)
    assert other.has_data(PATIENCE_S)
    assert waiting.is_alive()
    one.close()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert other.receive() == FIRST
    assert other.has_data(PATIENCE_S)
    with pytest.raises(ChannelLost, match="the other end closed"):
        other.receive()
    with pytest.raises(ChannelLost, match="sending"):
        send_on(other)


def send_on(end: Channel) -> None:
    while True:  # TCP learns only by its first message that nobody reads it
        end.send(LAST)


def test_a_descriptor_is_closed_by_the_last_thread_that_uses_it(ends, monkeypatch: pytest.MonkeyPatch):
    """The descriptor's number may be another file's a moment later, which a thread before its read would read."""
    one, _ = ends
    inside, closed, seen = threading.Event(), threading.Event(), list[os.stat_result]()

    def read_slowly(end: socket.socket, *_: int) -> bytes:
        inside.set()
        assert closed.wait(PATIENCE_S)
        seen.append(os.fstat(end.fileno()))
        raise OSError

    def receive() -> None:
        with pytest.raises(ChannelLost):
            one.receive()

    monkeypatch.setattr(socket.socket, "recv", read_slowly)
    reading = threading.Thread(target=receive)
    reading.start()
    assert inside.wait(PATIENCE_S)
    one.close()
    closed.set()
    reading.join(PATIENCE_S)
    assert stat.S_ISSOCK(seen[0].st_mode)
    for late in (lambda: one.send(LAST), one.receive, lambda: one.has_data(PATIENCE_S)):
        with pytest.raises(ChannelLost, match="this end is closed"):
            late()
    one.wait_for_end()


def test_a_thread_that_waits_is_woken_by_a_close_of_its_own_end(ends):
    one, _ = ends
    lost: list[ChannelLost] = []

    def wait() -> None:
        try:
            one.receive()
        except ChannelLost as error:
            lost.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.close()
    waiting.join(PATIENCE_S)
    assert len(lost) == 1


def test_one_who_is_silent_or_does_not_listen_is_lost_after_that_time(ends):
    one, _ = ends
    one.set_patience(0.05)
    with pytest.raises(ChannelLost, match="receiving: timed out"):
        one.receive()
    with pytest.raises(ChannelLost, match="sending: timed out"):
        one.send(("clear_pages", [0] * (8 << 20)))
