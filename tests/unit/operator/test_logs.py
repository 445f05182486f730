"""Logs: bounded on disk, read from the end, followed without polling."""

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from weft_operator.local.logs import FOLLOW_BYTES_MAX, Follower, LogFile


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


@given(st.lists(st.integers(1, FOLLOW_BYTES_MAX // 2), min_size=1, max_size=12))
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
    assert sum(map(len, got)) <= FOLLOW_BYTES_MAX
