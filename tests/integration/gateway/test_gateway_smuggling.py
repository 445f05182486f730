"""One connection, bytes as no library sends them: what a proxy before the gateway could take for another request."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from .conftest import ANSWER, World, serving, soon
from .test_gateway_bounds import connected
from .test_gateway_refusals import TEXT, with_keys

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
START = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = b"0\r\n\r\n" + SMUGGLED
LENGTH = b"content-length: %d\r\n" % len(CHUNKED)


async def sent(world: World, request: bytes) -> bytes:
    """Everything that is answered until the gateway closes the connection."""
    reader, writer = await connected(world)
    try:
        writer.write(request)
        with suppress(ConnectionError):
            return await soon(reader.read())
        return b""
    finally:
        writer.close()


AMBIGUOUS = [
    LENGTH + b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked\r\n" + LENGTH,
    b"content-length: 5\r\ncontent-length: %d\r\n" % len(CHUNKED),
    b"content-length: 5, 5\r\n",
    b"content-length: +5\r\n",
    b"content-length: -5\r\n",
    b"content-length: 0x5\r\n",
    b"content-length: 5 5\r\n",
    b"content-length: 99999999999999999999999\r\n",
    b"transfer-encoding: xchunked\r\n",
    b"transfer-encoding: chunked, identity\r\n",
    b"transfer-encoding: identity\r\ntransfer-encoding: chunked, x\r\n",
    b"transfer-encoding : chunked\r\n",
    b"content-length : 5\r\n",
    b" content-length: 5\r\n",
    b"x: y\n\r\n",
    b"x: y\r\ncontent-length: 5\r",
    b"x\x00y: 5\r\n",
    b"x: a\x00b\r\n",
    b": 5\r\n",
]


async def test_an_ambiguous_length_is_no_request_and_ends_the_connection(world: World) -> None:
    for head in AMBIGUOUS:
        answer = await sent(world, START + head + b"\r\n" + CHUNKED)
        statuses = re.findall(rb"HTTP/1\.1 (\d{3})", answer)
        assert statuses == [b"400"], (head, answer)
        assert b"smuggled" not in answer, head


async def test_a_chunk_without_a_plain_size_ends_the_connection(world: World) -> None:
    for size in (b"0x5", b"-5", b"+5", b"5 ", b" 5", b"5_0", b"fffffffffffffffff", b"5\n", b""):
        answer = await sent(world, START + b"transfer-encoding: chunked\r\n\r\n" + size + b"\r\nabcde\r\n" + CHUNKED)
        assert len(re.findall(rb"HTTP/1\.1 ", answer)) <= 1, (size, answer)
        assert b" 200 " not in answer, size


async def test_requests_sent_ahead_are_answered_in_their_order_each_its_own(world: World) -> None:
    """HTTP pipelining: no answer is another request's, and an error in the middle ends none of the others."""
    bodies: list[dict[str, Any]] = [TEXT, TEXT | {"model": "acme/upper"}, TEXT | {"model": "nothing"}, TEXT]
    requests = b""
    for body in bodies:
        content = orjson.dumps(body)
        requests += START + b"content-length: %d\r\n\r\n" % len(content) + content
    requests += b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answers = (await sent(world, requests)).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"404", b"200", b"200"]
    found = [orjson.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers[:4]]
    assert [one.get("model") for one in found] == ["tiny", "acme/upper", None, "tiny"]
    assert [one["choices"][0]["text"] for one in (found[0], found[1], found[3])] == [ANSWER] * 3


async def test_thousands_of_requests_sent_ahead_are_all_answered(world: World) -> None:
    count = 5000
    reader, writer = await connected(world)
    sending = asyncio.create_task(_write(writer, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * count))
    answered = 0
    while answered < count:
        answered += (await soon(reader.readuntil(b"\r\n\r\n"))).count(b" 200 ")
    await soon(sending)
    writer.close()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


NO_REQUESTS: list[tuple[bytes, list[bytes]]] = [  # what is sent, the statuses that are answered before the end
    (b"GET /healthz HTTP/3.9\r\nhost: x\r\n\r\n", [b"400"]),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [b"400"]),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32), [b"400"]),
    (b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\nconnection: close\r\n\r\n", [b"400"]),
    (b"TRACE /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", [b"405"]),
    (b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-folded: a\r\n b\r\nconnection: close\r\n\r\n", [b"400"]),
    (b"GET http://x/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", [b"200"]),
]


@pytest.mark.parametrize(("request_bytes", "statuses"), NO_REQUESTS)
async def test_other_protocols_and_forms_of_a_request_have_one_plain_answer(
    world: World, request_bytes: bytes, statuses: list[bytes]
) -> None:
    answer = await sent(world, request_bytes)
    assert re.findall(rb"HTTP/1\.1 (\d{3})", answer) == statuses, answer


async def test_requests_of_tenants_on_one_connection_have_each_its_own_answer(parts: World, tmp_path: Path) -> None:
    """A proxy may send requests of many clients over one connection."""
    parts.scheduler.routes = with_keys(parts)
    callers = {"acme": b"200", "rival": b"404", "nobody": b"401"}
    order = ["acme", "rival", "nobody", "acme", "rival", "acme"]
    content = orjson.dumps(TEXT | {"model": "acme/upper"})
    requests = b"".join(
        START + f"authorization: Bearer key-of-{name}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
        for name in order
    )
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        answers = await sent(world, requests + b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    statuses = re.findall(rb"HTTP/1\.1 (\d{3})", answers)
    assert statuses == [*(callers[name] for name in order), b"200"]
    assert answers.count(ANSWER.encode()) == order.count("acme")


@pytest.mark.parametrize("head", [b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n"])
async def test_a_refusal_without_a_key_asks_for_no_body_and_the_next_request_is_answered(
    parts: World, tmp_path: Path, head: bytes
) -> None:
    body = b"{}{}{" if b"length" in head else b"5\r\n{}{}{\r\n0\r\n\r\n"
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        request = START + head + b"expect: 100-continue\r\n\r\n" + body
        answer = await sent(world, request + b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d{3})", answer) == [b"401", b"200"], answer
