"""The raw reader of server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from weft_stage import sse
from weft_stage.errors import RequestFailed

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices": []}\n\n', b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 17}}\n\n']
DONE = b"data: [DONE]\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@asynccontextmanager
async def answering(answer: bytes, asked: list[Any]) -> AsyncGenerator[int]:
    """A server on a port of its own that gives every request this answer, a byte at a time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            asked.append(json.loads(await reader.readexactly(length)))
            for i in range(len(answer)):
                writer.write(answer[i : i + 1])
                await writer.drain()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_streams_are_read_to_their_end_over_as_many_connections() -> None:
    asked: list[Any] = []
    async with answering(HEAD + chunked(*EVENTS, DONE), asked) as port:
        done = await sse.run("127.0.0.1", port, [{"prompt": [i]} for i in range(5)], streams=2)
    assert [answer.tokens for answer in done] == [17] * 5
    assert all(answer.start < answer.first <= answer.end for answer in done)
    assert sorted(body["prompt"][0] for body in asked) == list(range(5))
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in asked)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", "429"),
        (b"HTTP/1.1 503 Unavailable\r\nContent-Length: 14\r\n\r\nthe pool waits", "the pool waits"),
        (HEAD + chunked(EVENTS[0], b'data: {"error": {"message": "the runner is gone"}}\n\n'), "runner is gone"),
        (HEAD + chunked(EVENTS[0], DONE), "did not end well"),
    ],
)
async def test_an_answer_that_is_not_a_whole_stream_is_told(answer: bytes, said: str) -> None:
    async with answering(answer, []) as port:
        with pytest.raises(ExceptionGroup) as caught:
            await sse.run("127.0.0.1", port, [{}], streams=1)
    assert said in str(caught.value.exceptions[0])
    assert isinstance(caught.value.exceptions[0], RequestFailed)
