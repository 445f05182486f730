"""How slowly an upload may come."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext

import pytest

from harness.waiting import soon
from weft.wire import upload_rate
from weft.wire.upload_rate import UploadTooSlow, at_least_rate


@pytest.mark.parametrize(
    ("chunks", "arrived"),
    [
        ([(0.0, 100)] * 5, 5),
        ([(59.0, 1)], 1),
        ([(61.0, 1)], 0),
        ([(1.0, 64 << 10)] * 500, 500),
        ([(2.0, 64 << 10)] * 100, 59),
        ([(1.0, 1)] * 100, 60),
        ([(0.0, 64 << 20), *[(30.0, 1)] * 3], 3),
    ],
)
async def test_a_sender_that_falls_behind_the_rate_by_more_than_the_grace_is_too_slow(
    chunks: list[tuple[float, int]], arrived: int
) -> None:
    """A fast beginning saves nothing, and the time that the reader takes is not the sender's."""
    clock, sizes = [0.0], list[int]()

    async def body() -> AsyncIterator[bytes]:
        for seconds, size in chunks:
            clock.append(clock[-1] + seconds)
            yield bytes(size)

    too_slow = pytest.raises(UploadTooSlow, match="expected at least 64 KiB a second")
    with too_slow if arrived < len(chunks) else nullcontext():
        async for chunk in at_least_rate(body(), now=lambda: clock[-1]):
            sizes.append(len(chunk))
            clock.append(clock[-1] + 1000.0)
    assert len(sizes) == arrived


async def test_a_sender_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_rate, "GRACE_S", 0.01)

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    async def read() -> list[bytes]:
        return [chunk async for chunk in at_least_rate(body())]

    with pytest.raises(UploadTooSlow, match="got 1 bytes"):
        await soon(read())
