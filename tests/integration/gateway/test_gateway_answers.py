"""The official client, sync and async, against the real gateway."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from weft.wire.v1 import common_pb2

from .conftest import ANSWER, HELLO, World, opened, serving, soon


async def sse(world: World, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Response and parsed events of a stream; "[DONE]" stays a text."""
    async with world.http() as http:
        response = await http.post(path, json=body | {"stream": True})
    lines = response.text.split("\n\n")
    assert lines.pop() == "", "every event ends with a blank line"
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return response, [d if d == "[DONE]" else orjson.loads(d) for d in data]


async def test_a_chat_is_answered_whole(world: World) -> None:
    answer: Any = await world.client().chat.completions.create(model="acme/upper", messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (ANSWER, "assistant", "stop")
    assert (answer.object, answer.model) == ("chat.completion", "acme/upper")
    prompt, tokens = (await world.runner.next("start")).prompt, len(world.tokens(ANSWER))
    assert list(prompt) == world.tokens("<s><|user|>hello</s><|assistant|>")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        len(prompt), tokens, len(prompt) + tokens,
    )  # fmt: skip


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_chat_stream_is_exactly_openais(world: World, include_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    response, events = await sse(world, "/v1/chat/completions", {"model": "tiny", "messages": HELLO, **options})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert events.pop() == "[DONE]"
    if include_usage:
        usage = events.pop()
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(world.tokens(ANSWER)))
        assert all(e.pop("usage") is None for e in events)
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (events[-1]["choices"][0]["delta"], events[-1]["choices"][0]["finish_reason"]) == ({}, "stop")
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    assert all("usage" not in e for e in events)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == ANSWER


async def test_a_completion_takes_text_a_list_of_one_text_and_token_ids(world: World) -> None:
    client, tokens = world.client(), world.tokens("hello")
    for prompt, sent in (("hello", [0, *tokens]), (["hello"], [0, *tokens]), (tokens, tokens)):
        answer = await client.completions.create(model="tiny", prompt=prompt)
        assert (answer.choices[0].text, answer.object) == (ANSWER, "text_completion")
        assert list((await world.runner.next("start")).prompt) == sent


async def test_a_completion_stream_has_texts_a_finish_and_done(world: World) -> None:
    _, events = await sse(world, "/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 3})
    assert events.pop() == "[DONE]"
    assert {e["object"] for e in events} == {"text_completion"}
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    text = "".join(e["choices"][0]["text"] for e in events)
    assert text == world.tokenizer.decode(world.tokens(ANSWER)[:3])


async def test_the_scheduler_gets_prediction_and_lengths_and_one_outcome(world: World) -> None:
    await world.client().chat.completions.create(model="acme/upper", messages=HELLO, max_tokens=100)
    submit = await world.scheduler.next("submit")
    assert (submit.pool, submit.model_name, submit.max_tokens) == ("team/base", "acme/upper", 100)
    assert (submit.p10_tokens, submit.p50_tokens, submit.p90_tokens, submit.p99_tokens) == (3, 7, 21, 40)
    assert submit.emitted_tokens == 0
    await world.settled()
    outcome = world.outcome()
    assert outcome.request_id == submit.request_id
    assert (outcome.finish, outcome.censored) == (common_pb2.FINISH_REASON_EOS, False)
    assert (outcome.completion_tokens, outcome.prompt_tokens) == (len(world.tokens(ANSWER)), submit.prompt_tokens)
    assert (outcome.predicted_p50_tokens, outcome.predicted_p90_tokens, outcome.model_version) == (7, 21, "v1")
    assert outcome.migrations == 0
    assert world.predictor.texts == ["hello"], "the prompt is for the predictor alone"
    assert outcome.total_ms >= outcome.ttft_ms


async def test_without_a_seed_each_request_draws_its_own(world: World) -> None:
    seeds: set[int] = set()
    for _ in range(2):
        await world.client().completions.create(model="tiny", prompt="hello")
        seeds.add((await world.runner.next("start")).sampling.seed)
    assert len(seeds) == 2


CHAT, TEXT = {"messages": HELLO}, {"prompt": [7] * 12}


@pytest.mark.parametrize(
    ("path", "body", "most", "tokens"),
    [
        ("chat/completions", CHAT, 0, 0),
        ("responses", {"input": "hello"}, 0, 0),
        ("chat/completions", CHAT, 40, 40),
        ("chat/completions", CHAT | {"max_tokens": 30}, 40, 30),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20, "n": 128}, 0, 97),
        ("completions", TEXT, 0, 16),
        ("completions", {"prompt": [7] * 500}, 0, 12),
        ("completions", TEXT | {"min_tokens": 20}, 0, 20),
        ("completions", TEXT, 9, 9),
    ],
)
async def test_without_max_tokens_a_chat_may_fill_the_context_and_a_completion_has_16(
    parts: World, tmp_path: Path, path: str, body: dict[str, Any], most: int, tokens: int
) -> None:
    """`most`: the pool's bound; `tokens` 0: as many as the context of 512 holds."""
    parts.scheduler.routes = parts.routes()
    parts.scheduler.routes.pools[0].max_output_tokens = most
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        assert (await http.post(f"/v1/{path}", json={"model": "tiny"} | body)).status_code == 200
        submit, start = await world.scheduler.next("submit"), await world.runner.next("start")
        assert start.max_tokens == (tokens or 512 - len(start.prompt))
        assert submit.open_ended == (path != "completions" and "max_tokens" not in body)
        if most:
            more = await http.post(f"/v1/{path}", json={"model": "tiny"} | body | {"max_tokens": most + 1})
            assert (more.status_code, more.json()["error"]["param"]) == (400, "max_tokens")


async def test_a_stop_string_ends_the_answer_and_what_follows_is_not_billed(world: World) -> None:
    world.runner.answer = lambda _: world.tokens("one, two, END three four")
    answer: Any = await world.client().completions.create(model="tiny", prompt="hello", stop=["absent", "END"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one, two, ", "stop")
    assert answer.choices[0].model_dump()["stop_reason"] == "END"
    billed = answer.usage.completion_tokens
    assert billed < len(world.tokens("one, two, END three four"))
    await world.settled()
    outcome = world.outcome()
    assert (outcome.finish, outcome.censored) == (common_pb2.FINISH_REASON_STOP, False)
    assert outcome.completion_tokens == billed
    stop = await world.runner.next("stop")
    assert stop.request_id == outcome.request_id


async def test_models_lists_bases_and_adapters_with_their_parent(world: World) -> None:
    models = [model async for model in world.client().models.list()]
    assert [model.id for model in models] == ["tiny", "acme/upper", "rival/secret"]
    one = await world.client().models.retrieve("acme/upper")
    digest = "sha256:" + "a" * 64
    assert one.model_dump(exclude_none=True) == {
        "id": "acme/upper", "object": "model", "created": 0, "owned_by": "acme", "root": digest, "parent": "tiny",
        "max_model_len": 512, "versions": [{"name": None, "digest": digest}],
    }  # fmt: skip
    assert (models[0].model_dump()["root"], models[0].model_dump()["parent"]) == ("tiny", None)


async def test_an_idle_stream_gets_comment_pings(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_gateway.openai.answer.PING_S", 0.05)
    world.runner.autopilot = False
    async with world.http() as http:
        posted = asyncio.create_task(opened(http, {"model": "tiny", "prompt": "hello", "stream": True}))
        start = await world.runner.next("start")
        await asyncio.sleep(0.15)
        assert not posted.done(), "no status before a runner has begun"
        world.runner.step(start, 0, world.tokens("a"))
        response = await soon(posted)
        lines = response.aiter_lines()
        seen = [await soon(anext(lines)) for _ in range(6)]
        assert orjson.loads(seen[0].removeprefix("data: "))["choices"][0]["text"] == "a"
        assert seen[2::2] == [": ping", ": ping"]
        world.runner.step(start, 1, [], common_pb2.FINISH_REASON_EOS)
        assert [line async for line in lines if line.startswith("data")][-1] == "data: [DONE]"


async def test_a_request_has_one_line_in_the_log_and_its_way_only_for_who_debugs(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def lines(level: str) -> list[str]:
        caplog.clear()
        caplog.set_level(level, "weft_gateway")
        async with world.http() as http:
            assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})).status_code == 200
        own = [record for record in caplog.records if record.name.startswith("weft_gateway")]
        return [record.message for record in own if "request_id" in vars(record).get("kv", {})]

    await lines("INFO")  # which opens the session
    assert await lines("INFO") == ["finished"]
    assert await lines("DEBUG") == ["submitted", "assigned", "finished"]
