"""Frames over a socket pair: whole, in order, with files; an end that is closed or silent has a name."""

import os
import threading
from collections.abc import Iterator

import pytest

from harness.waiting import PATIENCE_S
from weft_runner.parallel.ipc import Channel, ChannelLost, Frame, memfd, pair


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in pair())
    one.set_patience(PATIENCE_S)
    other.set_patience(PATIENCE_S)
    yield one, other
    one.close()
    other.close()


def test_frames_arrive_whole_and_in_order(ends):
    one, other = ends
    large = os.urandom(3 << 20)  # more than a socket holds
    sending = threading.Thread(target=lambda: [one.send(3), one.send(255, large), one.send(1, b"x")])
    sending.start()
    assert [other.receive() for _ in range(3)] == [Frame(3, b""), Frame(255, large), Frame(1, b"x")]
    sending.join()


def test_a_file_comes_with_its_frame(ends):
    one, other = ends
    file = memfd("test")
    os.write(file, b"content")
    one.send(1, b"before")
    one.send(2, b"with", file)
    one.send(3, b"after")
    os.close(file)
    assert other.receive().file is None
    frame = other.receive()
    assert frame.file is not None
    assert os.pread(frame.file, 100, 0) == b"content"
    assert not os.get_inheritable(frame.file)
    os.close(frame.file)
    assert other.receive() == Frame(3, b"after")


def test_a_closed_end_is_told_to_both_and_to_who_waits_for_it(ends):
    one, other = ends
    waiting = threading.Thread(target=other.wait_for_end)
    waiting.start()
    one.send(1, b"said before")
    assert other.has_data(PATIENCE_S)
    assert waiting.is_alive()
    one.close()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert other.receive() == Frame(1, b"said before")
    assert other.has_data(PATIENCE_S)
    with pytest.raises(ChannelLost, match="the other end closed"):
        other.receive()
    with pytest.raises(ChannelLost, match="sending"):
        other.send(1, b"answer")


def test_an_end_that_closes_within_a_frame_is_lost():
    one, other = pair()
    channel = Channel(other)
    one.sendall(b"\x01\x05\x00\x00\x00abc")
    one.close()
    with pytest.raises(ChannelLost, match="within a frame"):
        channel.receive()
    channel.close()


def test_one_who_is_silent_or_does_not_listen_is_lost_after_that_time(ends):
    one, _ = ends
    one.set_patience(0.05)
    with pytest.raises(ChannelLost, match="receiving: timed out"):
        one.receive()
    with pytest.raises(ChannelLost, match="sending: timed out"):
        one.send(1, bytes(16 << 20))
