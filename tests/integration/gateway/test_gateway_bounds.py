"""What one client can cost the others: large bodies, endless headers, answers that are not read, foreign pages."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from weft.wire.v1 import scheduler_pb2, supervisor_pb2
from weft_gateway.core.refusal_pacing import HOLD_S
from weft_gateway.shell import BoundedTurnstile, RequestTurns, bounded_http

from .conftest import ANSWER, HELLO, PATIENCE_S, TEMPLATE, World, key_route, serving, soon, until
from .test_gateway_refusals import CHAT, TEXT, half_a_body, refused, with_keys

LENGTH, MEDIA = "context_length_exceeded", "unsupported_media_type"
MIN_TURNS = 10  # of the loop beside a thread's work: two at most where a call keeps the interpreter
PROMPT = "word <s " * 100_000  # 0.8 MB


async def turn_beside_threads(monkeypatch: pytest.MonkeyPatch, turns: list[int]) -> None:
    """Turns the loop and counts, for each piece of work in a thread, the turns beside it."""
    in_thread, turned = BoundedTurnstile.in_thread, 0

    async def counted(self: BoundedTurnstile, tenant: str, work: Callable[[], Any], is_gone: Any = None) -> Any:
        began = turned
        try:
            return await in_thread(self, tenant, work, is_gone)
        finally:
            turns.append(turned - began)

    monkeypatch.setattr(BoundedTurnstile, "in_thread", counted)
    while True:
        await asyncio.sleep(0)
        turned += 1


def wide_context(world: World) -> None:
    """A context that the large prompts may fit by their characters, and spellings as large vocabularies have them."""
    world.serve_model(TEMPLATE, *(f"<|reserved_{i}|>" for i in range(250)))
    world.scheduler.routes.pools[0].max_context_tokens = 1 << 17


LARGE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", TEXT | {"prompt": PROMPT}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), LARGE, ids=["text", "chat", "count"])
async def test_the_loop_goes_on_beside_a_large_request(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    wide_context(parts)
    async with serving(parts, parts.settings(tmp_path)) as world, httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        turns: list[int] = []
        turning = asyncio.create_task(turn_beside_threads(monkeypatch, turns))
        response = await http.post(f"{world.url}{path}", json=body)
        turning.cancel()
        if path.endswith("count_tokens"):
            assert response.json()["input_tokens"] > len(PROMPT) / 2
        else:
            refused(response, 400, LENGTH, "prompt" if "prompt" in body else "messages")
        assert len(turns) == 2, "parsed and encoded in threads"
        assert turns[1] >= MIN_TURNS


@pytest.mark.parametrize(
    ("path", "body", "threads"),
    [
        ("/v1/completions", TEXT, 0),
        ("/v1/completions", TEXT | {"prompt": [5] * 8}, 0),
        ("/v1/completions", TEXT | {"prompt": "ab " * 400}, 1),
        ("/v1/completions", TEXT | {"prompt": ["ab " * 200] * 2}, 1),
        ("/v1/chat/completions", CHAT, 1),
    ],
    ids=["short", "ids", "long", "many", "chat"],
)
async def test_a_thread_encodes_what_is_long_or_has_a_template(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], threads: int
) -> None:
    encode, works = RequestTurns.encode, list[Any]()

    async def counted(self: RequestTurns, tenant: str, work: Any, is_gone: Any = None) -> Any:
        works.append(work)
        return await encode(self, tenant, work, is_gone)

    monkeypatch.setattr(RequestTurns, "encode", counted)
    async with world.http() as http:
        await http.post(path, json=body)
    assert len(works) == threads


@pytest.mark.parametrize("prompt", ["x" * 9000, [5] * 600], ids=["text", "ids"])
async def test_what_cannot_fit_is_refused_by_prompt_and_context_without_encoding(
    world: World, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    encoded: list[Any] = []
    monkeypatch.setattr("weft_gateway.shell.tokenizer._encode", lambda *args, **_: encoded.append(args) or [[5]])
    async with world.http() as http:
        error = refused(await http.post("/v1/completions", json=TEXT | {"prompt": prompt}), 400, LENGTH, "prompt")
        assert str(len(prompt)) in error["message"]
        assert "maximum context length is 512 tokens" in error["message"]
        if isinstance(prompt, str):
            chat = CHAT | {"messages": [{"role": "user", "content": prompt}]}
            refused(await http.post("/v1/chat/completions", json=chat), 400, LENGTH, "messages")
    assert not encoded


# ---------------------------------------------------------------- hostile tokenizers


async def test_a_panic_in_a_tokenizer_is_that_requests_500_and_the_next_is_served(parts: World, tmp_path: Path) -> None:
    spec = json.loads(parts.tokenizer.to_str()) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    routes = parts.routes()
    digest = parts.depot.add_model({"tokenizer.json": json.dumps(spec).encode()})
    routes.pools.add(name="team/odd", base_digest=digest, base_model_name="odd", max_context_tokens=512)
    routes.routes.add(model_name="odd", namespace="team", pool="team/odd")
    parts.scheduler.routes = routes
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        await until(lambda: len(world.gateway.tokenizers) == 2)
        error = refused(await http.post("/v1/completions", json=TEXT | {"model": "odd"}), 500, "internal_error")
        assert "tokenizer" in error["message"]
        assert (await http.post("/v1/completions", json=TEXT)).json()["choices"][0]["text"] == ANSWER


async def test_a_tokenizer_that_panics_while_it_loads_is_named_and_not_waited_for(parts: World, tmp_path: Path) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    spec = json.loads(parts.tokenizer.to_str()) | {"normalizer": broken}
    parts.base_digest = parts.depot.add_model({"tokenizer.json": json.dumps(spec).encode()})
    parts.scheduler.routes = parts.routes()
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        error = refused(await http.post("/v1/completions", json=TEXT), 503, "model_not_ready")
        assert "tokenizer.json cannot be loaded" in error["message"]


# ---------------------------------------------------------------- heads


async def connected(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = world.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    "start",
    [
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: ",
        b"GET /",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-trailer: ",
    ],
    ids=["a header", "a path", "a trailer"],
)
async def test_an_endless_head_is_refused_and_the_connection_closed(world: World, start: bytes) -> None:
    reader, writer = await connected(world)
    writer.write(start)
    with suppress(ConnectionError):
        for _ in range(12):
            writer.write(b"x" * 8192)
            await writer.drain()
    with suppress(ConnectionResetError):
        answer = await soon(reader.read())
        assert b" 431 " in answer.partition(b"\r\n")[0] or b"trailer" in start
        if b"trailer" not in start:
            assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    await until(reader.at_eof if not reader.exception() else lambda: True)
    writer.close()


async def test_a_large_head_within_the_bound_and_a_large_body_pass(world: World) -> None:
    async with world.http() as http:
        response = await http.post("/v1/completions", json=TEXT | {"stop": ["x" * 500]}, headers={"x-a": "y" * 40_000})
        assert response.status_code == 200
        large = await http.post("/v1/completions", json=TEXT | {"prompt": "x" * 300_000})
        assert large.json()["error"]["code"] == "context_length_exceeded"


async def test_a_connection_without_a_request_is_closed_after_the_time_that_is_set(
    parts: World, tmp_path: Path
) -> None:
    """Longer than proxies hold theirs by default: 60 s, and 90 s of Go's clients."""
    assert parts.settings(tmp_path).keep_alive_seconds > 90
    async with serving(parts, parts.settings(tmp_path, keep_alive_seconds=1)) as world:
        reader, writer = await connected(world)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await soon(reader.readline())
        answered = time.monotonic()
        await asyncio.wait_for(reader.read(), 50.0)
        assert time.monotonic() - answered > 0.9
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT"], ids=["nothing", "half a head"])
async def test_a_head_that_never_ends_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_SECONDS", 0.05)
    reader, writer = await connected(world)
    writer.write(sent)
    answer = await soon(reader.read())
    assert b" 408 " in answer.partition(b"\r\n")[0]
    writer.close()


async def test_an_answer_under_way_outlives_the_heads_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.runner.autopilot = False
    healthz = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    (reader, writer), (other_reader, other_writer) = await connected(world), await connected(world)
    other_writer.write(healthz)
    assert await soon(other_reader.readuntil(b"ok\n"))
    body = orjson.dumps(TEXT)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    start = await world.runner.next("start")
    monkeypatch.setattr(bounded_http, "HEAD_SECONDS", 0.0)
    writer.write(healthz[:15])  # a head ahead of its turn
    await until(lambda: any(each._answering and each._head_bytes for each in world.server.server_state.connections))
    other_writer.write(healthz)  # the loop has turned behind the deadline when this is answered
    assert await soon(other_reader.readuntil(b"ok\n"))
    world.runner.answer_whole(start)
    assert b" 200 " in await soon(reader.readline())
    assert b" 408 " in await soon(reader.read())
    other_writer.close()
    writer.close()


# ---------------------------------------------------------------- answers that are not read


async def test_a_client_that_stops_reading_is_cut_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "STALL_SECONDS", 0.05)
    cut, stalled_for = list[Any](), bounded_http.BoundedHttp._stalled

    def noted(self: Any, before: int) -> None:
        stalled_for(self, before)
        cut.append(self.transport.is_closing())

    monkeypatch.setattr(bounded_http.BoundedHttp, "_stalled", noted)
    world.runner.answer = lambda start: [7] * start.max_tokens
    host, port = world.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        request = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 2000  # answered one after the other, never read
        with suppress(ConnectionError):  # it may be cut off before it has asked for all of them
            await asyncio.get_running_loop().sock_sendall(client, request)
        await until(lambda: cut and cut[-1])
        await until(lambda: not world.server.server_state.connections)


# ---------------------------------------------------------------- crowds

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
FEW = 16


async def answers_health(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    """Whether /healthz is answered on this connection."""
    connection[1].write(HEALTH)
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        return b" 200 " in await soon(connection[0].readuntil(b"\r\n\r\n"))
    return False


async def crowd(world: World, count: int, sent: bytes, address: str = "127.0.0.1") -> list[Any]:
    """Open `count` connections from an address, oldest first; the gateway has read what each has sent."""
    host, port = world.url.removeprefix("http://").split(":")
    made = list[Any]()
    for _ in range(count):
        before, total = set(world.server.server_state.connections), world.server.server_state.total_requests
        made.append(await asyncio.open_connection(host, int(port), local_addr=(address, 0)))
        made[-1][1].write(sent)
        (connection,) = await until(lambda before=before: set(world.server.server_state.connections) - before)
        await until(
            lambda one=connection, total=total: (
                not sent or one.server_state.total_requests > total or one._head_bytes == len(sent)
            )
        )
    return made


async def test_beyond_the_bound_the_connection_that_is_idle_longest_gives_way(parts: World, tmp_path: Path) -> None:
    async with serving(parts, parts.settings(tmp_path), connections=FEW) as world:
        idle = [await connected(world) for _ in range(FEW)]
        await until(lambda: len(world.server.server_state.connections) == FEW)
        first, second, third, *_ = idle
        assert await answers_health(first), "idle since now"
        await until(lambda: all(len(one._bound._idle) == FEW for one in world.server.server_state.connections))
        late = [await connected(world) for _ in range(2)]
        assert all([await answers_health(one) for one in late])
        assert not await soon(second[0].read())
        assert not await soon(third[0].read())
        assert await answers_health(first)
        for _, writer in (*idle, *late):
            writer.close()


# What a crowd sends on each connection, with keys and without: nothing of it is a request that could be answered.
MADE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
CROWDS = [b"", b"G", HEALTH[:-2], MADE, MADE + b"x"]


@pytest.mark.parametrize(
    "sent", CROWDS, ids=["nothing", "a byte", "half a head", "a 401", "a 401 and a byte of its body"]
)
async def test_who_makes_no_request_gives_way_to_who_asks(parts: World, tmp_path: Path, sent: bytes) -> None:
    """`/healthz` is answered at the bound, five times of five, and so it is on a connection in use."""
    async with serving(parts, parts.settings(tmp_path, auth=True), connections=FEW) as world:
        used = await connected(world)
        made = await crowd(world, FEW - 1, sent)
        assert await answers_health(used)
        late = list[Any]()
        for _ in range(5):
            late.append(await connected(world))
            assert await answers_health(late[-1])
        assert await answers_health(used)
        for reader, _ in made[:5]:
            await soon(reader.read())
        assert [reader.at_eof() for reader, _ in made] == [True] * 5 + [False] * (FEW - 6), "the oldest went"
        for _, writer in (used, *made, *late):
            writer.close()


async def test_the_oldest_unfinished_head_of_the_peer_with_most_gives_way_first(parts: World, tmp_path: Path) -> None:
    """A slow client stays beside a crowd of another address, and whoever is idle stays beside both."""
    async with serving(parts, parts.settings(tmp_path), connections=FEW) as world:
        idle = [await connected(world) for _ in range(4)]
        assert all([await answers_health(one) for one in idle])
        slow = await crowd(world, 2, HEALTH[:-2])
        hostile = await crowd(world, FEW - 6, b"G", "127.0.0.2")
        late = [await connected(world) for _ in range(3)]
        assert all([await answers_health(one) for one in late])
        for reader, _ in hostile[:3]:
            assert not await soon(reader.read())
        assert not any(reader.at_eof() for reader, _ in (*idle, *slow, *hostile[3:]))
        for reader, writer in slow:
            writer.write(HEALTH[-2:])
            assert b" 200 " in await soon(reader.readuntil(b"\r\n\r\n"))
        for _, writer in (*idle, *slow, *hostile, *late):
            writer.close()


async def test_with_no_idle_connection_a_new_one_is_a_503_and_the_others_go_on(parts: World, tmp_path: Path) -> None:
    async with serving(parts, parts.settings(tmp_path), connections=FEW) as world:
        busy = [await half_a_body(world) for _ in range(FEW)]
        await until(lambda: world.gateway.machine.admission.arriving == FEW)
        late = await connected(world)
        answer = await soon(late[0].read())
        assert b" 503 " in answer.partition(b"\r\n")[0]
        assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for reader, writer in busy:
            writer.write(b" " * 91)
            assert b" 400 " in await soon(reader.readuntil(b"\r\n\r\n"))
        for _, writer in (*busy, late):
            writer.close()


def stalled(world: World) -> list[Any]:
    """Connections whose client reads nothing."""
    connections: list[Any] = list(world.server.server_state.connections)
    return [one for one in connections if one.flow.write_paused]


# ---------------------------------------------------------------- foreign pages, hidden names


async def test_a_body_that_is_not_declared_as_json_is_a_415_with_what_to_send(world: World) -> None:
    kinds = None, "text/plain", "application/x-www-form-urlencoded", "text/plain;application/json"
    async with world.http() as http:
        for kind, (path, body) in product(kinds, (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT))):
            headers = {"content-type": kind} if kind else {}
            error = refused(await http.post(path, content=orjson.dumps(body), headers=headers), 415, MEDIA)
            assert "Content-Type: application/json" in error["message"]
        declared = {"content-type": "Application/JSON; charset=utf-8"}
        answer = await http.post("/v1/completions", content=orjson.dumps(TEXT), headers=declared)
        assert answer.status_code == 200


async def test_with_keys_metrics_name_only_what_the_caller_may_use(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = with_keys(parts)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        for name, model in (("acme", "acme/upper"), ("rival", "rival/secret")):
            await world.client(api_key=f"key-of-{name}").completions.create(model=model, prompt="hello")
        await world.settled()
        keys = (None, "wrong", "key-of-acme")
        headers = [{"authorization": f"Bearer {key}"} if key else {} for key in keys]
        anonymous, wrong, acme = [(await http.get("/metrics", headers=one)).text for one in headers]
    assert all("weft_gateway_in_flight 0.0" in text for text in (anonymous, wrong, acme))
    assert not [name for name in ("acme/upper", "rival/secret", "team/base") if name in anonymous + wrong]
    assert 'weft_gateway_requests_total{model="acme/upper",status="200"} 1.0' in acme
    assert "rival/secret" not in acme


async def test_a_platform_key_sees_every_metric_and_asks_no_model(parts: World, tmp_path: Path) -> None:
    routes = with_keys(parts)
    routes.keys.append(key_route("platform", scope=supervisor_pb2.KEY_SCOPE_PLATFORM))
    parts.scheduler.routes = routes
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        await world.client(api_key="key-of-rival").completions.create(model="rival/secret", prompt="hello")
        await world.settled()
        headers = {"authorization": "Bearer platform"}
        assert 'model="rival/secret"' in (await http.get("/metrics", headers=headers)).text
        assert {"acme/upper", "rival/secret"} <= {
            model["id"] for model in (await http.get("/v1/models", headers=headers)).json()["data"]
        }
        for path in ("/v1/completions", "/tokenize"):
            answer = await http.post(path, json=TEXT, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
        assert (await http.get("/v1/files", headers=headers)).status_code == 403


ASKED = TEXT | {"model": "acme/upper", "max_tokens": 20}
RIVAL = {"authorization": "Bearer key-of-rival", "content-type": "application/json"}


def with_limits(world: World, *rules: dict[str, Any]) -> scheduler_pb2.Routes:
    routes = with_keys(world)
    for rule in rules:
        routes.keys[0].limits.add(subject="namespace/acme", **rule)
    return routes


async def test_beyond_a_limit_a_caller_reads_when_to_come_back(parts: World, tmp_path: Path) -> None:
    rule = {"requests_per_minute": 2, "tokens_per_minute": 600}
    parts.scheduler.routes, parts.stopped_at_s = with_limits(parts, rule), 1000.0
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        key = {"authorization": "Bearer key-of-acme"}
        for remaining in ("1", "0"):
            answer = await http.post("/v1/completions", json=ASKED, headers=key)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == remaining
            assert 500 < int(answer.headers["x-ratelimit-remaining-tokens"]) <= 600 - 20
            await world.settled()
        refusal = await http.post("/v1/completions", json=ASKED, headers=key)
        error = refused(refusal, 429, "rate_limit_exceeded")
        assert error["type"] == "requests"
        assert "on requests per minute: Limit 2, Used 2, Requested 1" in error["message"]
        after_ms = int(refusal.headers["retry-after-ms"])
        assert after_ms == 30_000
        assert (refusal.headers["retry-after"], refusal.headers["x-should-retry"]) == (
            str(-(-after_ms // 1000)),
            "true",
        )
        assert refusal.headers["x-ratelimit-remaining-requests"] == "0"
        too_long = ASKED | {"prompt": "hello " * 10_000}
        refused(await http.post("/v1/completions", json=too_long, headers=key), 429, "rate_limit_exceeded")
        rival = {"authorization": "Bearer key-of-rival"}
        other = await http.post("/v1/completions", json=ASKED | {"model": "rival/secret"}, headers=rival)
        assert other.status_code == 200, "another namespace has its own"


async def test_who_is_over_a_limit_is_refused_by_its_key_and_path_alone(parts: World, tmp_path: Path) -> None:
    """Nothing is read of a body: it is no JSON, and has not even come. Each API has its own form."""
    parts.scheduler.routes = with_limits(parts, {"model": "*", "requests_per_minute": 1})
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        key = {"authorization": "Bearer key-of-acme", "content-type": "application/json"}
        assert (await http.post("/v1/completions", json=ASKED, headers=key)).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/v2/rerank"):
            refused(await http.post(path, content=b"{", headers=key), 429, "rate_limit_exceeded")
        anthropic = await http.post("/v1/messages", content=b"{", headers={"x-api-key": "key-of-acme"})
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")
        assert (await http.get("/v1/models", headers=key)).status_code == 200
        unknown = await http.post("/v1/completions", content=b"{", headers={"authorization": "Bearer nobody's"})
        assert refused(unknown, 401, "invalid_api_key")
        assert unknown.headers["www-authenticate"] == "Bearer"
        refused(await http.post("/v1/completions", content=b"{", headers=RIVAL), 400, "invalid_json")


async def test_a_connection_goes_on_behind_a_body_that_nobody_wants(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal comes before the body. Behind one that is held nothing is looked at: its connection ends with it."""
    parts.scheduler.routes = with_limits(parts, {"model": "*", "requests_per_minute": 1})
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-of-acme\r\ncontent-length: 9\r\n\r\n"
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        key = {"authorization": "Bearer key-of-acme"}
        assert (await http.post("/v1/completions", json=ASKED, headers=key)).status_code == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
        for _ in range(2):
            writer.write(head)
            assert b" 429 " in await soon(reader.readline())
            length = int((await soon(reader.readuntil(b"content-length: ")) and await soon(reader.readline())).strip())
            await soon(reader.readexactly(2 + length))
            writer.write(b"{" * 9)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await soon(reader.readline())
        await soon(reader.readuntil(b"ok\n"))
        monkeypatch.setattr("weft_gateway.core.refusal_pacing.QUICK_BURST", 0.0)
        monkeypatch.setattr("weft_gateway.core.refusal_pacing.HOLD_S", 3600.0)
        writer.write(2 * (head + b"{" * 9))
        assert (await soon(reader.read())).count(b" 429 ") == 1
        writer.close()


async def test_refusals_of_a_flood_wait_for_each_other_and_nobody_else_does(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft_gateway.core.refusal_pacing.QUICK_BURST", 2.0)
    monkeypatch.setattr("weft_gateway.core.refusal_pacing.QUICK_PER_S", 0.0)
    caplog.set_level(logging.INFO)
    parts.scheduler.routes = with_limits(parts, {"model": "*", "requests_per_minute": 1})
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        key = {"authorization": "Bearer key-of-acme"}
        assert (await http.post("/v1/completions", json=ASKED, headers=key)).status_code == 200

        async def refusal_s() -> float:
            began = time.monotonic()
            refused(await http.post("/v1/completions", json=ASKED, headers=key), 429, "rate_limit_exceeded")
            return time.monotonic() - began

        flood = asyncio.gather(*(refusal_s() for _ in range(6)))
        other = await http.post("/v1/completions", json=ASKED | {"model": "rival/secret"}, headers=RIVAL)
        assert other.status_code == 200
        assert sum(waited >= HOLD_S for waited in await flood) >= 4
        counted = world.gateway.registry.get_sample_value(
            "weft_gateway_requests_total", {"model": "-", "status": "429"}
        )
        assert counted == 6
    assert sum(record.message == "refused" for record in caplog.records) == 2, "the log has those that are quick"


async def test_a_chat_without_max_tokens_keeps_no_other_out_of_its_limit(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = with_limits(parts, {"tokens_per_minute": 3000})
    parts.scheduler.routes.pools[0].max_context_tokens = 1 << 17
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        chat = {"model": "acme/upper", "messages": HELLO}
        key = {"authorization": "Bearer key-of-acme"}
        answer = await http.post("/v1/chat/completions", json=chat, headers=key)
        assert (await world.runner.next("start")).max_tokens > 100_000
        assert 1900 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 2000


async def test_a_spent_quota_ends_requests_and_new_batches_without_a_retry(parts: World, tmp_path: Path) -> None:
    spent = {"tokens_per_day": 10, "spent_until_unix_ms": 1 << 50}
    parts.scheduler.routes = with_limits(parts, spent)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        key = {"authorization": "Bearer key-of-acme"}
        for path in ("/v1/completions", "/v1/batches"):
            refusal = await http.post(path, json=ASKED, headers=key)
            assert (refusal.status_code, refusal.headers["x-should-retry"]) == (429, "false")
            error = refusal.json()["error"]
            assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")


async def test_gateways_report_what_they_used_and_count_what_others_did(parts: World, tmp_path: Path) -> None:
    rule = {"requests_per_minute": 6}
    parts.scheduler.routes = with_limits(parts, rule)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        key = {"authorization": "Bearer key-of-acme"}
        assert (await http.post("/v1/completions", json=ASKED, headers=key)).status_code == 200
        reports = world.scheduler.limit_reports
        await until(lambda: any(use.requests == 1 for report in reports for use in report.uses))
        use = scheduler_pb2.LimitUse(rule={"subject": "namespace/acme", **rule}, requests=6)
        world.scheduler.send(limit_report=scheduler_pb2.LimitReport(gateway="other", uses=[use]))
        answers = [(await http.post("/v1/completions", json=ASKED, headers=key)).status_code for _ in range(5)]
        assert answers[-1] == 429


async def test_two_requests_of_the_same_longest_id_stay_two(world: World) -> None:
    async with world.http() as http:
        for length in (111, 112, 128):
            headers = {"x-request-id": "i" * length}
            for _ in range(2):
                assert (await http.post("/v1/completions", json=TEXT, headers=headers)).status_code == 200
    await world.settled()
    assert len(world.scheduler.outcomes) == 6
    assert len({request_id[:128] for request_id in world.scheduler.outcomes}) == 6, "the store keeps 128 characters"
