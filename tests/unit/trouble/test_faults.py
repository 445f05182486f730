import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

import pytest

from harness.waiting import eventually, soon
from weft_stage.lines import Origin
from weft_trouble.fault_streams import Difference, Token, difference
from weft_trouble.faults import CELLS, WRONG, lines
from weft_trouble.faults import Run as Strike
from weft_trouble.links import Direction, Links, Quality


def tokens(text: str) -> list[Token]:
    return [Token(char, -1.0) for char in text]


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("abcdef", Difference()),
        ("abef", Difference(lost=2)),
        ("abcbcdef", Difference(repeated=2)),
        ("abXdef", Difference(wrong=1)),
        ("", Difference(lost=6)),
        ("abcdefef", Difference(repeated=2)),
    ],
)
def test_each_token_that_differs_is_counted_as_what_it_is(got: str, expected: Difference) -> None:
    assert difference(tokens("abcdef"), tokens(got)) == expected


def test_another_log_probability_is_a_wrong_token() -> None:
    assert difference(tokens("ab"), [Token("a", -1.0), Token("b", -1.5)]) == Difference(wrong=1)


def test_of_a_stream_that_failed_only_what_it_has_counts() -> None:
    assert difference(tokens("abcdef"), tokens("abc"), failed=True) == Difference()
    assert difference(tokens("abcdef"), tokens("abd"), failed=True) == Difference(wrong=1)


def test_no_two_cells_have_one_name() -> None:
    assert len({str(cell) for cell in CELLS}) == len(CELLS)


class Peer:
    """Sends what it is told to, and sends back what it reads. Listens at `target` inside its block."""

    target = ""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.joined = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.target = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.joined.set()
        with suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)


@asynccontextmanager
async def dialled(links: Links, peer: Peer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Dial as gRPC does through a proxy."""
    host, _, port = links.environment["grpc_proxy"].removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"CONNECT {peer.target} HTTP/1.1\r\nHost: {peer.target}\r\n\r\n".encode())
        assert (await soon(reader.readuntil(b"\r\n\r\n"))).startswith(b"HTTP/1.1 200")
        yield reader, writer
    finally:
        writer.transport.abort()


async def echoed(ends: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes) -> bytes:
    ends[1].write(data)
    return await soon(ends[0].readexactly(len(data)))


async def test_a_cut_lets_half_of_a_message_through_and_the_next_connection_is_whole() -> None:
    async with Links() as links, Peer() as peer, dialled(links, peer) as ends:
        assert await echoed(ends, b"hello") == b"hello"
        cutting = asyncio.create_task(links.cut(peer.target))
        await asyncio.sleep(0)
        peer.writers[0].write(b"12345678")
        assert await read_all(ends[0]) == b"1234"
        await soon(cutting)

        async def is_gone() -> bool:
            return not links.count(peer.target)

        await eventually(is_gone)  # once the task of the connection has seen it
        async with dialled(links, peer) as again:
            assert await echoed(again, b"again") == b"again"


async def test_a_deaf_or_mute_link_passes_what_waited_once_it_goes_on() -> None:
    async with Links() as links, Peer() as peer, dialled(links, peer) as (reader, writer):
        await soon(peer.joined.wait())
        for stalled in ({"back": False}, {"there": False}):  # deaf, mute
            links.stall(peer.target, **stalled)
            writer.write(b"hello")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(100), 0.2)
            links.resume(peer.target)
            assert await soon(reader.readexactly(5)) == b"hello"


async def test_what_is_written_into_an_abandoned_connection_is_gone_and_a_new_one_is_whole() -> None:
    async with Links() as links, Peer() as peer, dialled(links, peer) as (reader, writer):
        assert await echoed((reader, writer), b"hello") == b"hello"
        links.abandon(peer.target)
        writer.write(b"lost")
        async with dialled(links, peer) as again:
            assert await echoed(again, b"again") == b"again"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.2)


@pytest.mark.parametrize(
    ("quality", "due"),
    [
        (Quality(), [0.0, 0.0, 0.0]),
        (Quality(delay_s=0.5), [0.5, 0.5, 0.5]),
        (Quality(bytes_per_s=10.0), [1.0, 2.0, 3.0]),
        (Quality(delay_s=0.5, bytes_per_s=10.0), [1.5, 2.5, 3.5]),
    ],
)
def test_bytes_are_due_as_the_quality_of_a_direction_says(quality: Quality, due: list[float]) -> None:
    direction = Direction()
    direction.quality = quality
    assert [direction.due(10, 0.0, random.Random(0)) for _ in due] == due


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read up to the reset."""
    read: Sequence[bytes] = []
    try:
        while data := await soon(reader.read(100)):
            read = [*read, data]
    except ConnectionResetError:
        return b"".join(read)
    raise AssertionError("it was closed in order")


async def test_a_stalled_link_passes_nothing_until_it_is_released_and_then_everything() -> None:
    async with (
        Links() as links, Peer() as peer, Peer() as other, dialled(links, peer) as ends, dialled(links, other) as beside
    ):  # fmt: skip
        links.stall(peer.target)
        echo = asyncio.create_task(echoed(ends, b"late"))
        assert await echoed(beside, b"beside") == b"beside"
        assert not echo.done()
        links.resume(peer.target)
        assert await soon(echo) == b"late"


def test_figures_of_chosen_cells_stand_beside_those_of_all_cells() -> None:
    kill = [cell for cell in CELLS if cell.kind == "kill"][:2]
    runs = [Strike(cell, 1, 10, Difference(lost=number), 1, (0.5, 2.0), 3.0) for number, cell in enumerate(kill)]
    origin = Origin("weft bench faults", "a machine", "Python")
    every, chosen = list(lines(origin, runs)), list(lines(origin, runs, "kill *"))
    assert {line.case for line in every} == {"kill"}
    assert {line.case for line in chosen} == {"kill, of kill *"}
    assert {line.metric: line.value for line in every} == {
        "runs": 2, "streams struck": 20, WRONG: 3, "longest gap p50": 0.5, "longest gap": 2.0,
        "ready and idle again after": 3.0,
    }  # fmt: skip
    assert [line.met for line in every if line.metric == WRONG] == [False]
