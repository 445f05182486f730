"""Several choices of one request: each is placed, moved and finished by itself, and they make one answer."""

import asyncio
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from weft.wire.v1 import common_pb2, runner_pb2, scheduler_pb2

from .conftest import HELLO, World, opened, serving, soon, until
from .test_gateway_bounds import stalled
from .test_gateway_refusals import SHAPE

ANSWERS = ["one", "two words", "and three, no: four"]
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "n": 3, "max_tokens": 40}


@pytest.fixture
def three(world: World) -> World:
    """Each choice has its own answer."""
    world.runner.answer = lambda start: world.tokens(ANSWERS[start.sampling.choice])
    return world


async def started(world: World, n: int) -> list[runner_pb2.Start]:
    """The starts of `n` choices, by choice."""
    starts = [await world.runner.next("start") for _ in range(n)]
    return sorted(starts, key=lambda start: start.sampling.choice)


async def test_a_whole_answer_has_every_choice_in_order_and_counts_the_prompt_once(three: World) -> None:
    answer: Any = await three.client().chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ANSWERS
    starts = await started(three, 3)
    assert answer.usage.prompt_tokens == len(starts[0].prompt)
    assert answer.usage.completion_tokens == sum(len(three.tokens(text)) for text in ANSWERS)


async def test_the_tokens_that_the_first_choice_reused_are_the_cached_ones_of_its_prompt(three: World) -> None:
    """Choices after the first choice reuse its prompt."""
    three.runner.reused = lambda start: (1 if start.request_id.endswith(".1/2") else 2) + start.sampling.choice % 2
    client, body = three.client(), BODY | {"prompt": ["hello", "dear"]}
    whole: Any = await client.completions.create(**body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [chunk async for chunk in await client.completions.create(**body, stream=True, stream_options=options)]
    found = [answer.usage.prompt_tokens_details.cached_tokens for answer in (whole, chunks[-1], chunks[-2])]
    assert found == [2 + 1] * 3


async def test_the_choices_of_a_stream_carry_their_index_and_each_has_its_finish(three: World) -> None:
    stream = await three.client().chat.completions.create(
        model="tiny", messages=HELLO, n=3, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks.pop()
    assert (usage.choices, usage.usage and usage.usage.completion_tokens) == (
        [],
        sum(min(3, len(three.tokens(text))) for text in ANSWERS),
    )
    texts, roles, finishes = ["", "", ""], Counter[int](), dict[int, str]()
    for (choice,) in (chunk.choices for chunk in chunks):
        assert choice.index not in finishes, "nothing follows a finish"
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        if choice.finish_reason:
            finishes[choice.index] = choice.finish_reason
    cut = [three.tokenizer.decode(three.tokens(text)[:3]) for text in ANSWERS]
    assert texts == cut
    assert roles == {0: 1, 1: 1, 2: 1}
    lengths = [len(three.tokens(text)) for text in ANSWERS]
    assert finishes == {i: "length" if length >= 3 else "stop" for i, length in enumerate(lengths)}


async def test_every_choice_draws_from_the_same_seed_under_its_own_number_and_has_its_own_outcome(three: World) -> None:
    await three.client().completions.create(**BODY, seed=7)
    starts = await started(three, 3)
    assert [(start.sampling.seed, start.sampling.choice) for start in starts] == [(7, 0), (7, 1), (7, 2)]
    await three.settled()
    outcomes = three.scheduler.outcomes
    assert {start.request_id for start in starts} == set(outcomes)
    assert [outcomes[start.request_id].completion_tokens for start in starts] == [
        len(three.tokens(text)) for text in ANSWERS
    ]
    assert three.predictor.batches == [[starts[0].request_id.removesuffix("/0")]], "one prompt is predicted once"
    metrics = three.gateway.registry.get_sample_value("weft_gateway_prompt_tokens_total", {"model": "tiny"})
    assert metrics == len(starts[0].prompt)
    requests = {"model": "tiny", "status": "200"}
    assert three.gateway.registry.get_sample_value("weft_gateway_requests_total", requests) == 1


async def test_without_n_the_only_sequence_has_the_requests_own_id(world: World) -> None:
    async with world.http() as http:
        response = await http.post("/v1/completions", json=BODY | {"n": 1}, headers={"x-request-id": "mine"})
        many = await http.post("/v1/completions", json=BODY, headers={"x-request-id": "x" * 128})
    start = await world.runner.next("start")
    assert response.json()["id"] == f"cmpl-{start.request_id}"
    ids = [start.request_id for start in await started(world, 3)]
    assert [id_.removeprefix(many.json()["id"].removeprefix("cmpl-")) for id_ in ids] == ["/0", "/1", "/2"]
    assert all(len(id_) <= 128 for id_ in ids), "what the store keeps"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_choice_that_is_refused_before_the_first_byte_is_the_requests_error(world: World, stream: bool) -> None:
    world.scheduler.autopilot = False
    asked = asyncio.create_task(world.client().completions.create(**BODY, stream=stream))
    submits = [await world.scheduler.next("submit") for _ in range(3)]
    waiting = {"model_name": "tiny", "reason": "capacity"}
    assert world.gateway.registry.get_sample_value("vllm:num_requests_waiting_by_reason", waiting) == 3
    reject = scheduler_pb2.Reject(
        request_id=submits[1].request_id, reason=scheduler_pb2.Reject.QUEUE_FULL, retry_after_ms=2500
    )
    world.scheduler.send(reject=reject)
    with pytest.raises(openai.RateLimitError) as caught:
        await soon(asked)
    headers = caught.value.response.headers
    assert caught.value.code == "queue_full"
    assert [headers[name] for name in ("retry-after", "retry-after-ms", "x-should-retry")] == ["3", "2500", "true"]
    await world.settled()
    rejections = {"model_name": "tiny", "reason": "max_num_queued_reqs"}
    assert world.gateway.registry.get_sample_value("vllm:admission_rejections_total", rejections) == 1
    assert world.gateway.registry.get_sample_value("vllm:num_requests_waiting_by_reason", waiting) == 0
    outcomes = [world.scheduler.outcomes[submit.request_id] for submit in submits]
    cancelled, failed = common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_FAILED
    assert [(one.error, one.finish) for one in outcomes] == [("", cancelled), ("queue_full", failed), ("", cancelled)]
    assert all(one.censored for one in outcomes)
    left = {(await world.scheduler.next("cancel")).request_id for _ in range(2)}
    assert left == {submits[0].request_id, submits[2].request_id}


async def test_a_choice_that_fails_later_ends_the_stream_with_its_error_and_the_others_with_it(world: World) -> None:
    world.runner.autopilot = False
    async with world.http() as http:
        posted = asyncio.create_task(opened(http, BODY | {"stream": True}))
        first, second, third = await started(world, 3)
        world.runner.step(first, 0, world.tokens("a"))
        response = await soon(posted)
        world.runner.step(second, 0, world.tokens("b"), common_pb2.FINISH_REASON_EOS)
        reject = scheduler_pb2.Reject(request_id=third.request_id, reason=scheduler_pb2.Reject.TOO_MANY_MIGRATIONS)
        world.scheduler.send(reject=reject)
        body = (await soon(response.aread())).decode()
    assert "[DONE]" not in body
    error = orjson.loads(body.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert (set(error), error["code"]) == (SHAPE, "too_many_migrations")
    assert {(await world.runner.next("stop")).request_id for _ in range(2)} == {first.request_id, third.request_id}
    await world.settled()
    assert len(world.scheduler.outcomes) == 3
    outcome = world.scheduler.outcomes[third.request_id]
    assert (outcome.error, outcome.completion_tokens, outcome.censored) == ("too_many_migrations", 0, True)


async def test_a_choice_that_fails_ends_the_others_though_the_client_reads_nothing(world: World) -> None:
    world.runner.autopilot = False
    routes = world.routes(version=2)
    routes.pools[0].max_context_tokens = 10_000
    world.scheduler.send_routes(routes)
    await until(lambda: world.gateway.machine.routes.version == routes.version)
    host, port = world.url.removeprefix("http://").split(":")
    body = orjson.dumps(BODY | {"stream": True, "logprobs": 20, "max_tokens": 8000})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(client, f"{head}\r\n\r\n".encode() + body)
        first, second, third = await started(world, 3)
        (connection,) = world.server.server_state.connections
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        world.runner.step(first, 0, [7] * 4000)
        await until(lambda: stalled(world))
        world.runner.step(first, 4000, [7])  # the answer waits with this one
        reject = scheduler_pb2.Reject(request_id=third.request_id, reason=scheduler_pb2.Reject.TOO_MANY_MIGRATIONS)
        world.scheduler.send(reject=reject)
        stopped = {(await world.runner.next("stop")).request_id for _ in range(3)}
        assert stopped == {first.request_id, second.request_id, third.request_id}
        assert stalled(world), "all the while"
    await world.settled()


async def test_a_choice_counts_as_a_request_at_the_bound(parts: World, tmp_path: Path) -> None:
    parts.runner.autopilot = False
    async with serving(parts, parts.settings(tmp_path, max_in_flight=4)) as world, world.http() as http:
        never = await http.post("/v1/completions", json=BODY | {"n": 5})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        posted = asyncio.create_task(http.post("/v1/completions", json=BODY))
        starts = await started(world, 3)
        assert world.gateway.machine.admission.in_flight == 3
        refused = await http.post("/v1/completions", json=BODY | {"n": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert world.gateway.machine.admission.in_flight == 3, "what was refused counts no more"
        rejections = {"model_name": "-", "reason": "max_num_queued_reqs"}
        assert world.gateway.registry.get_sample_value("vllm:admission_rejections_total", rejections) == 1
        fits = asyncio.create_task(http.post("/v1/completions", json=BODY | {"n": 1}))
        starts.append(await world.runner.next("start"))
        for start in starts:
            world.runner.step(start, 0, world.tokens("a"), common_pb2.FINISH_REASON_EOS)
        assert [(await soon(task)).status_code for task in (posted, fits)] == [200, 200]
        await world.settled()


@pytest.mark.parametrize("seed", range(4))
async def test_however_the_steps_of_choices_mix_each_reads_its_own_text(world: World, seed: int) -> None:
    world.runner.autopilot = False
    draw = random.Random(seed)
    n = 16
    texts = ["".join(draw.choices("helo wrdü", k=draw.randint(0, 12))) for _ in range(n)]

    async def read() -> list[str]:
        stream = await world.client().completions.create(model="tiny", prompt="hello", n=n, stream=True)
        found = [""] * n
        async for chunk in stream:
            found[chunk.choices[0].index] += chunk.choices[0].text
        return found

    reading = asyncio.create_task(read())
    starts = await started(world, n)
    steps = [(start, world.tokens(text)) for start, text in zip(starts, texts, strict=True)]
    order = [i for i, (_, tokens) in enumerate(steps) for _ in range(len(tokens) + 1)]
    draw.shuffle(order)
    at = [0] * n
    for i in order:
        start, tokens = steps[i]
        finish = 0 if at[i] < len(tokens) else common_pb2.FINISH_REASON_EOS
        world.runner.step(start, at[i], tokens[at[i] : at[i] + 1], finish)
        at[i] += 1
    assert await soon(reading) == texts


async def test_what_comes_while_the_status_line_is_sent_is_not_lost(three: World) -> None:
    """A client that does not read holds up the first send; all choices may have ended when it goes through."""
    body, sent = orjson.dumps({**BODY, "stream": True}), list[dict[str, Any]]()
    asked = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(asked, None) or await asyncio.Future[dict[str, Any]]()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await until(lambda: not three.gateway.machine.admission.in_flight)
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await soon(three.server.config.loaded_app(scope, receive, send))
    events = b"".join(message.get("body", b"") for message in sent).decode().split("\n\n")
    chunks = [orjson.loads(line.removeprefix("data: ")) for line in events if line not in {"", "data: [DONE]"}]
    texts, finishes = ["", "", ""], dict[int, str]()
    for (choice,) in (chunk["choices"] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    assert (texts, finishes) == (ANSWERS, {0: "stop", 1: "stop", 2: "stop"})
