"""Logs: bounded on disk, read from the end, followed without polling."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_operator.local import MAX_FOLLOW_BYTES, Follower, LogFile


def test_a_log_takes_at_most_twice_its_limit(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "c.log", limit_bytes=1000)
    for number in range(500):
        log.write(b"%04d\n" % number)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 1000
    assert log.tail(3) == ["0497", "0498", "0499"]
    log.close()


def test_a_tail_reaches_into_the_old_file(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "c.log", limit_bytes=10)
    log.write(b"one\ntwo\n")
    log.write(b"three\n")
    assert log.tail(10) == log.tail(None) == ["one", "two", "three"]
    assert log.tail(2) == ["two", "three"]
    assert log.tail(0) == []
    log.close()


def test_a_restart_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        log = LogFile(tmp_path / "c.log")
        log.write(line)
        log.close()
    again = LogFile(tmp_path / "c.log")
    assert again.tail(10) == ["one", "two"]
    again.close()


def test_a_disk_that_takes_nothing_loses_lines_and_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the log has to be made or turned over just then."""
    log, write, opened = LogFile(tmp_path / "logs" / "c.log", limit_bytes=100), os.write, os.open

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with log.follow() as news:
        for step in range(3):
            monkeypatch.setattr(os, "write", full)
            monkeypatch.setattr(os, "open", full)
            log.write(b"lost\n" * 10)
            monkeypatch.setattr(os, "write", write)
            monkeypatch.setattr(os, "open", opened)
            log.write(b"kept %d\n" % step)
            missing, kept = log.tail(2)
            assert missing == "--- 50 bytes of this log are lost: No space left on device"
            assert kept == f"kept {step}"
        assert news._bytes == 3 * len(b"lost\n" * 10 + b"kept 0\n"), "who follows misses nothing"
    log.close()
    assert max(path.stat().st_size for path in (tmp_path / "logs").iterdir()) <= 200


def test_what_a_disk_takes_in_pieces_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    log = LogFile(tmp_path / "c.log")
    log.write(b"one line in pieces\n")
    assert log.tail(1) == ["one line in pieces"]
    log.close()


async def test_a_follower_receives_what_is_written_and_the_end(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "c.log")
    log.write(b"before\n")
    with log.follow() as news:
        waiting = asyncio.create_task(news.get())
        await asyncio.sleep(0)
        log.write(b"after\n")
        assert await waiting == b"after\n"
        log.close()
        assert await news.get() is None


@given(st.lists(st.integers(1, MAX_FOLLOW_BYTES // 2), min_size=1, max_size=12))
async def test_a_slow_follower_keeps_the_newest_and_is_bounded(sizes: list[int]) -> None:
    follower = Follower()
    chunks = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    for chunk in chunks:
        follower.put(chunk)
    follower.put(None)
    got: list[bytes] = []
    while (data := await follower.get()) is not None:
        got.append(data)
    assert got == chunks[len(chunks) - len(got) :]
    assert sum(map(len, got)) <= MAX_FOLLOW_BYTES
