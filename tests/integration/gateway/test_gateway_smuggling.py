"""One connection, bytes as no library sends them: what a proxy before the gateway could take for another request."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from harness.gateway_http import read_requests
from weft_gateway.shell import bounded_http

from .conftest import ANSWER, World, serving, soon, until
from .test_gateway_bounds import connected
from .test_gateway_refusals import CHAT, TEXT, with_keys

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


REST = b"transfer-encoding: chunked\r\n"
AMBIGUOUS = [
    (400, LENGTH + REST),
    (400, REST + LENGTH),
    (400, b"content-length: 5\r\ncontent-length: %d\r\n" % len(CHUNKED)),
    (400, b"content-length: 5, 5\r\n"),
    (400, b"content-length: +5\r\n"),
    (400, b"content-length: -5\r\n"),
    (400, b"content-length: 0x5\r\n"),
    (400, b"content-length: 5 5\r\n"),
    (400, b"content-length: 99999999999999999999999\r\n"),
    (400, b"transfer-encoding : chunked\r\n"),
    (400, b"content-length : 5\r\n"),
    (400, b" content-length: 5\r\n"),
    (400, b"x: y\n\r\n"),
    (400, b"x: y\r\ncontent-length: 5\r"),
    (400, b"x\x00y: 5\r\n"),
    (400, b"x: a\x00b\r\n"),
    (400, b": 5\r\n"),
    # Another coding than chunked, which the parser would ignore, or take for an end of the body without a length.
    (501, b"transfer-encoding: xchunked\r\n"),
    (501, b"transfer-encoding: gzip, chunked\r\n"),
    (501, b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n"),
    (501, b"transfer-encoding: ,chunked\r\n"),
    (501, b"transfer-encoding: chunked\t\r\n"),
    (501, b"transfer-encoding: chunked;q=1\r\n"),
    (501, b"transfer-encoding: identity\r\ntransfer-encoding: x, chunked\r\n"),
    (400, b"transfer-encoding: chunked, identity\r\n"),
    (400, b"transfer-encoding: identity\r\ntransfer-encoding: chunked, x\r\n"),
    (400, REST + REST),
    (501, b"upgrade: h2c\r\nconnection: upgrade\r\ntransfer-encoding: gzip, chunked\r\n"),
]
TWICE = [
    (400, REST + b"host: x\r\n"),
    (400, REST + b"host: y\r\n"),
    (400, REST + b"authorization: Bearer a\r\nauthorization: Bearer a\r\n"),
    (400, REST + b"authorization: Bearer a\r\nx: y\r\nAuthorization: Bearer b\r\n"),
    (400, REST + b"x-api-key: a\r\nx-api-key: b\r\n"),
    (400, REST + b"upgrade: h2c\r\nconnection: upgrade\r\nhost: y\r\n"),
]


@pytest.mark.parametrize("heads", [AMBIGUOUS, TWICE], ids=["lengths", "twice"])
async def test_an_ambiguous_length_is_no_request_and_ends_the_connection(
    world: World, heads: list[tuple[int, bytes]]
) -> None:
    """Nor is what may be there once."""
    for status, head in heads:
        answer = await sent(world, START + head + b"\r\n" + CHUNKED)
        statuses = re.findall(rb"HTTP/1\.1 (\d{3})", answer)
        assert statuses == [b"%d" % status], (head, answer)
        assert b"smuggled" not in answer, head
        assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert b"connection: close\r\n" in answer
    await world.settled()
    assert not world.scheduler.outcomes, "nothing of it was begun"


LINES = [
    (400, b"GET /healthz HTTP/1.1\r\n\r\n"),
    (400, b"GET /healthz HTTP/1.1\r\nx: y\r\nx: host\r\n\r\n"),
    (400, b"GET /healthz HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"),
    (400, b"GET /healthz HTTP/1.1\r\nhost: x, y\r\n\r\n"),
    (400, b"GET /healthz HTTP/1.0\r\nhost: x y\r\n\r\n"),
    (400, b"GET /healthz HTTP/1.1\r\nhost: a@x\r\n\r\n"),
    (400, b"GET /healthz HTTP/1.1\r\nhost: x/y\r\n\r\n"),
    (200, b"GET /healthz HTTP/1.1\r\nhost: [::1%25a]:80 \t\r\nconnection: close\r\n\r\n"),
    (200, b"GET /healthz HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n"),
    (400, b"GET http://x:y/healthz HTTP/1.1\r\nhost: x\r\n\r\n"),
    (400, b"POST http:///healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"),
    (200, b"GET http://y/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"),
    (400, b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n"),
    (400, b"CONNECT /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"),
    (200, b"GET /healthz HTTP/1.0\r\n\r\n"),
    (505, b"GET /healthz\r\n\r\n"),
    (505, b"GET /healthz HTTP/0.9\r\nhost: x\r\n\r\n"),
    (505, b"GET /healthz HTTP/2.0\r\nhost: x\r\n\r\n"),
    (200, b"GET /healthz HTTP/1.0\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"),
]


async def test_a_request_needs_one_host_unless_it_is_of_http_1_0_and_a_target_of_its_own(world: World) -> None:
    for status, head in LINES:
        answer = await sent(world, head + SMUGGLED)
        assert re.findall(rb"HTTP/1\.1 (\d{3})", answer) == [b"%d" % status], (head, answer)


# ---------------------------------------------------------------- offers of other protocols (RFC 9110, 7.8)

JDK = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n"
OFFERS = [
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: YQ==\r\n",
    b"UPGRADE: a, b\r\nCONNECTION: keep-alive, Upgrade\r\n",
    b"upgrade: a\r\nconnection: keep-alive\r\nupgrade: b\r\nconnection: upgrade\r\n",
    JDK,
]
BODY = orjson.dumps(TEXT)


def framed(body: bytes, end: bytes = b"") -> list[bytes]:
    """Return fields and body in each way to say where it ends."""
    chunks = b"%x;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\n" % (5, body[:5], len(body) - 5, body[5:])
    return [
        b"content-length: %d\r\n\r\n" % len(body) + body,
        b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body) + body,
        REST + b"\r\n" + chunks + b"\r\n",
        REST + b"\r\n" + chunks + b"upgrade: x\r\nconnection: upgrade\r\n\r\n",
    ]


async def test_the_body_of_a_request_that_offers_another_protocol_is_its_own(world: World) -> None:
    """The body is read for every content and framing, between two requests."""
    for offer in OFFERS:
        for body, wanted in ((BODY, b"200"), (SMUGGLED * 2, b"400")):
            for rest in framed(body):
                ahead = b"GET /healthz HTTP/1.1\r\nhost: x\r\n%b\r\n" % offer
                last = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
                answer = await sent(world, ahead + START + offer + rest + last)
                statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer.replace(b"HTTP/1.1 100 Continue\r\n", b""))
                assert statuses == [b"200", wanted, b"200"], (offer, rest, answer)
                assert (ANSWER.encode() in answer) is (wanted == b"200")


async def test_a_segment_may_end_at_any_byte_of_an_offer(world: World) -> None:
    """The body in a segment of its own too, as the JDK's client sends it."""
    for offer in OFFERS:
        for rest in framed(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"):
            plain = read_requests(START + rest + SMUGGLED)
            data = START + offer + rest + SMUGGLED
            whole = read_requests(data)
            assert [(one.target, one.body, one.complete) for one in whole] == [
                (one.target, one.body, one.complete) for one in plain
            ]
            for at in range(len(data)):
                assert read_requests(data[:at], data[at:]) == whole, (data, at)
            assert read_requests(*(data[at : at + 1] for at in range(len(data)))) == whole
    for offer in OFFERS:
        reader, writer = await connected(world)
        for segment in (START + offer[:20], offer[20:], b"content-length: %d\r\n\r\n" % len(BODY), BODY):
            writer.write(segment)
            await writer.drain()
        assert b" 200 " in await soon(reader.readline())
        writer.close()


JDK_REQUESTS: list[tuple[str, dict[str, Any] | None, int]] = [
    ("/v1/models", None, 200),
    ("/v1/chat/completions", CHAT, 200),
    ("/v1/chat/completions", CHAT | {"stream": True}, 200),
    ("/v1/completions", TEXT, 200),
    ("/v1/completions", TEXT | {"prompt": "x" * 300_000}, 400),
    ("/v1/responses", {"model": "tiny", "input": "hello", "store": False}, 200),
    ("/v1/messages", CHAT | {"max_tokens": 5}, 200),
    ("/v1/messages/count_tokens", CHAT, 200),
    ("/tokenize", TEXT, 200),
    ("/detokenize", {"model": "tiny", "tokens": [270]}, 200),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="no JDK: apt-get install default-jdk-headless")
async def test_the_jdks_http_client_is_answered_with_its_defaults(world: World, tmp_path: Path) -> None:
    """One request after the other and all at once; bodies of a known length, in chunks, and after a 100."""
    lines = [f"{'POST' if body else 'GET'} {path} {orjson.dumps(body).decode()}" for path, body, _ in JDK_REQUESTS]
    (tmp_path / "requests").write_text("\n".join(lines))
    java = await asyncio.create_subprocess_exec(
        "java", Path(__file__).with_name("JdkClient.java"), world.url, tmp_path / "requests",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, errors = await soon(java.communicate())
    assert java.returncode == 0, errors
    wanted = [status for _, body, status in JDK_REQUESTS for _ in range(3 if body else 1)]
    answers = printed.decode().splitlines()
    assert [int(answer[:3]) for answer in answers] == wanted * 2
    assert all("context_length_exceeded" in answer for answer in answers if answer.startswith("400"))


async def test_trailers_are_no_headers(parts: World, tmp_path: Path) -> None:
    """A key, a type or a host behind the body is not one."""
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        for trailer in (b"authorization: Bearer key-of-acme", b"content-type: application/json"):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + REST
            request = head + b"\r\n%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(BODY), BODY, trailer)
            last = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            statuses = re.findall(rb"HTTP/1\.1 (\d{3})", await sent(world, request + last))
            assert statuses == [b"401", b"200"], trailer
    trailers = b"authorization: a\r\nhost: y\r\nhost: z\r\nexpect: 100-continue\r\n\r\n"
    first, second = read_requests(START + REST + b"\r\n1\r\na\r\n0\r\n" + trailers + SMUGGLED)
    assert [name for name, _ in first.headers] == [b"host", b"content-type", b"transfer-encoding"]
    assert (first.body, second.target, second.headers) == (b"a", b"/smuggled", [(b"host", b"x")])


# ---------------------------------------------------------------- behind a running answer


@pytest.fixture
async def stream(world: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]]:
    """A connection with an answer under way, whose first tokens have come, and its request at the runner."""
    world.runner.autopilot = False
    reader, writer = await connected(world)
    body = orjson.dumps(TEXT | {"stream": True, "max_tokens": 20})
    writer.write(START + b"content-length: %d\r\n\r\n" % len(body) + body)
    start = await world.runner.next("start")
    world.runner.step(start, 0, world.tokens("hello"))
    await soon(reader.readuntil(b"hello"))
    yield reader, writer, start
    writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        SMUGGLED + b"junk\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        START + REST + b"\r\nx\r\n",
    ],
    ids=["no HTTP", "no host", "behind a request", "CONNECT", "no chunk"],
)
async def test_invalid_bytes_behind_a_running_answer_write_nothing_into_it(
    world: World, stream: tuple[asyncio.StreamReader, asyncio.StreamWriter, Any], garbage: bytes
) -> None:
    reader, writer, start = stream
    writer.write(garbage)
    assert b"HTTP/1" not in await soon(reader.read())
    assert (await world.runner.next("stop")).request_id == start.request_id
    await world.settled()


@pytest.mark.parametrize(
    "ahead", [SMUGGLED, START + b"content-length: 300000\r\n\r\n" + b"x" * 30_000], ids=["a request", "half a body"]
)
async def test_a_request_sent_ahead_does_not_hide_that_its_client_has_left(
    world: World, monkeypatch: pytest.MonkeyPatch, ahead: bytes
) -> None:
    """The answer is sent as a whole: no write fails while it is computed."""
    monkeypatch.setattr(bounded_http, "GONE_SECONDS", 0.01)
    world.runner.autopilot = False
    _, writer = await connected(world)
    writer.write(START + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
    start = await world.runner.next("start")
    writer.write(ahead)
    await until(lambda: any(connection.pipeline for connection in connections(world)))
    writer.close()
    assert (await world.runner.next("stop")).request_id == start.request_id
    await world.settled()
    gone = {"model": "tiny", "status": "499"}
    assert world.gateway.registry.get_sample_value("weft_gateway_requests_total", gone) == 1
    await until(lambda: not connections(world))


async def test_of_what_is_sent_ahead_little_is_held(
    world: World, stream: tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]
) -> None:
    """Requests that wait for their turn are few; what follows is not parsed, and then not read."""
    _, writer, start = stream
    writer.transport.set_write_buffer_limits(0)
    sending = asyncio.create_task(_write(writer, SMUGGLED * 300_000))
    await until(lambda: any(connection.flow.read_paused for connection in connections(world)))
    (connection,) = connections(world)
    assert len(connection.pipeline) <= bounded_http._PIECE_BYTES // len(SMUGGLED) + 1
    assert len(connection._unread) <= 1 << 20
    assert not sending.done()
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
    writer.transport.abort()
    assert (await world.runner.next("stop")).request_id == start.request_id


def connections(world: World) -> list[Any]:
    return list(world.server.server_state.connections)


# ---------------------------------------------------------------- bodies and order


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
