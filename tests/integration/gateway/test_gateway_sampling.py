"""Log probabilities, penalties and biases, from the official client to the runner and back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from harness.gateway_peers import FakeRunner, runner_server
from weft.wire.v1 import common_pb2, runner_pb2, scheduler_pb2

from .conftest import ANSWER, World, serving, soon, until
from .test_gateway_answers import sse
from .test_gateway_refusals import with_keys

HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hello"}


async def test_penalties_and_biases_reach_the_runner_and_nothing_else_does_by_itself(world: World) -> None:
    client = world.client()
    await client.chat.completions.create(model="tiny", messages=HELLO)
    plain = (await world.runner.next("start")).sampling
    assert (plain.frequency_penalty, plain.presence_penalty, list(plain.logit_bias)) == (0, 0, [])
    assert (plain.logprobs, plain.top_logprobs, plain.choice) == (False, 0, 0)
    await client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        frequency_penalty=-2,
        presence_penalty=0.5,
        logit_bias={"0": -100, "279": 1.5},
        logprobs=True,
        top_logprobs=20,
    )
    sampling = (await world.runner.next("start")).sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-2, 0.5)
    assert {one.token: one.bias for one in sampling.logit_bias} == {0: -100, 279: 1.5}
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 20)


async def test_what_a_request_does_not_say_is_as_the_bases_generation_config_has_it(
    parts: World, tmp_path: Path
) -> None:
    """All forms of the API have them; a request's own value counts, also the API's default, and null is none."""
    defaults = scheduler_pb2.SamplingDefaults(
        temperature=0.75, top_p=0.5, top_k=20, min_p=0.125, repetition_penalty=1.25, max_tokens=7
    )
    parts.scheduler.routes.pools[0].sampling_defaults.CopyFrom(defaults)
    chat, given = {"model": "tiny", "messages": HELLO}, {"temperature": 1, "top_p": 1.0, "top_k": -1}
    own = {"min_p": 0, "repetition_penalty": 1, "max_tokens": 9}

    async def sampled(path: str, body: dict[str, Any]) -> tuple[float, ...]:
        answer = await http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        start = await world.runner.next("start")
        of = start.sampling
        if path == "responses":
            assert (answer.json()["temperature"], answer.json()["top_p"]) == (of.temperature, of.top_p)
        return of.temperature, of.top_p, of.top_k, of.min_p, of.repetition_penalty, start.max_tokens

    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        for path, body in {
            "chat/completions": chat,
            "completions": TEXT,
            "responses": {"model": "tiny", "input": "hello"},
            "messages": {**chat, "max_tokens": 7},
            "chat/completions/batch": {**chat, "messages": [HELLO]},
        }.items():
            assert await sampled(path, body) == (0.75, 0.5, 20, 0.125, 1.25, 7), path
            assert (await sampled(path, {**body, **dict.fromkeys(given), "temperature": 0}))[:3] == (0, 0.5, 20)
            if path != "messages":
                assert (await sampled(path, {**body, **given}))[:3] == (1, 1, 0)
        assert await sampled("completions", {**TEXT, **given, **own}) == (1, 1, 0, 0, 1, 9)


async def test_an_adapters_own_ends_of_sequence_reach_the_runner(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes.routes[1].eos_token_ids.append(5)
    async with serving(parts, parts.settings(tmp_path)) as world:
        for model, ends in (("acme/upper", [5]), ("tiny", [])):
            await world.client().chat.completions.create(model=model, messages=HELLO)
            assert list((await world.runner.next("start")).sampling.eos_token_ids) == ends


async def test_a_chat_reports_each_token_with_its_bytes_and_alternatives(world: World) -> None:
    answer = await world.client().chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.refusal is None
    assert bytes(byte for one in logprobs.content for byte in one.bytes or ()).decode() == ANSWER
    assert [one.logprob for one in logprobs.content] == [-i / 8 for i in range(len(world.tokens(ANSWER)))]
    assert all(len(one.top_logprobs) == 3 for one in logprobs.content)
    first = logprobs.content[0]
    assert (first.token, first.bytes) == (first.top_logprobs[0].token, first.top_logprobs[0].bytes)
    assert [other.logprob for other in first.top_logprobs] == [0, -0.5, -1]
    parts = [one.token for one in logprobs.content if one.bytes and not _is_text(bytes(one.bytes))]
    assert parts, "this answer has characters that are split over tokens"
    assert all("\\x" in part for part in parts)


async def test_without_top_logprobs_a_chat_reports_the_sampled_tokens_alone(world: World) -> None:
    answer = await world.client().chat.completions.create(model="tiny", messages=HELLO, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert all(one.top_logprobs == [] for one in logprobs.content)


async def test_a_special_token_among_the_alternatives_has_a_name_and_no_bytes(world: World) -> None:
    end = world.tokenizer.token_to_id("</s>")
    world.runner.answer = lambda _: [end - 1, end]  # as an alternative, and as a token of the answer
    answer = await world.client().chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(other.token, other.bytes) for other in logprobs.content[0].top_logprobs][1] == ("</s>", None)
    assert (logprobs.content[1].token, logprobs.content[1].bytes) == ("</s>", None)
    assert answer.choices[0].message.content == ""


async def test_a_completion_reports_tokens_offsets_and_alternatives_by_name(world: World) -> None:
    answer = await world.client().completions.create(**TEXT, logprobs=2)
    logprobs = answer.choices[0].logprobs
    tokens = world.tokens(ANSWER)
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs == [-i / 8 for i in range(len(tokens))]
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert all(name in top for name, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)), (
        "with the sampled one"
    )
    assert logprobs.text_offset[0] == 0
    for name, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not name.startswith("bytes:"):
            assert ANSWER[offset:].startswith(name)
    assert any(name.startswith("bytes:\\x") for name in logprobs.tokens)


async def test_a_completion_may_ask_for_no_alternatives(world: World) -> None:
    answer = await world.client().completions.create(**TEXT, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert [list(top) for top in logprobs.top_logprobs] == [[name] for name in logprobs.tokens]


async def test_streamed_log_probabilities_come_with_their_text_and_add_up_to_the_whole(world: World) -> None:
    body = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    _, events = await sse(world, "/v1/chat/completions", body)
    assert events.pop() == "[DONE]"
    entries: list[Any] = []
    text = ""
    for choice in (event["choices"][0] for event in events):
        text += choice["delta"].get("content", "")
        entries += choice["logprobs"]["content"] if choice["logprobs"] else []
        logprobs = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert text.startswith(logprobs), "never ahead of the text"
    async with world.http() as http:
        whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert (text, entries) == (ANSWER, whole["logprobs"]["content"])


async def test_more_log_probabilities_than_an_answer_may_hold_are_refused(world: World) -> None:
    routes = world.routes(version=2)
    routes.pools[0].max_context_tokens = 1 << 20
    world.scheduler.send_routes(routes)
    await until(lambda: world.gateway.machine.routes.version == 2)
    body = TEXT | {"n": 16, "max_tokens": 8000, "logprobs": 20}
    async with world.http() as http:
        refused = await http.post("/v1/completions", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "logprobs")
    assert "2,688,000 log probabilities; at most 524,288" in error["message"]


async def test_what_a_stop_string_holds_back_is_not_sent_and_what_it_ends_never_is(world: World) -> None:
    world.runner.autopilot = False
    body = TEXT | {"logprobs": 0, "stop": "END"}
    reading = asyncio.create_task(sse(world, "/v1/completions", body))
    start = await world.runner.next("start")
    tokens = [world.tokens(char)[0] for char in "ab EN cENDd"]
    for position, token in enumerate(tokens):
        world.runner.step(start, position, [token])
    _, events = await soon(reading)
    assert events.pop() == "[DONE]"
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "ab EN c"
    logprobs = [name for choice in choices if choice["logprobs"] for name in choice["logprobs"]["tokens"]]
    assert "".join(logprobs) == "ab EN c"
    for choice in choices:
        assert not choice["logprobs"] or "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.fixture
async def other() -> AsyncIterator[FakeRunner]:
    async with runner_server(FakeRunner("runner-2")) as runner:
        yield runner


async def test_a_stream_that_migrated_reports_every_token_once(world: World, other: FakeRunner) -> None:
    world.runner.autopilot = False
    other.answer = world.runner.answer
    asked = asyncio.create_task(world.client().completions.create(**TEXT, logprobs=1, stop=["dear you"]))
    start = await world.runner.next("start")
    for position, token in enumerate(world.tokens(ANSWER)[:9]):  # inside what might become the stop string
        world.runner.step(start, position, [token])
    await until(lambda: len(world.gateway.machine.requests[start.request_id].tokens) == 9)
    world.scheduler.runner = other
    world.runner.break_sessions()
    there = await other.next("start")
    assert (there.sampling.logprobs, there.sampling.top_logprobs, len(there.emitted)) == (True, 1, 9)
    choice = (await soon(asked)).choices[0]
    assert choice.text == ANSWER
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [-i / 8 for i in range(len(world.tokens(ANSWER)))]


async def test_a_runner_that_owes_log_probabilities_has_failed_and_another_is_asked(
    world: World, other: FakeRunner
) -> None:
    world.runner.autopilot = False
    other.answer = world.runner.answer
    asked = asyncio.create_task(world.client().completions.create(**TEXT, logprobs=1))
    start = await world.runner.next("start")
    world.scheduler.runner = other
    start.sampling.logprobs = False  # so the fake reports none
    world.runner.step(start, 0, world.tokens("a"))
    failed = await world.scheduler.next("failed")
    assert "1 tokens came with 0 usable log probabilities" in failed.detail
    assert (await soon(asked)).choices[0].text == ANSWER


async def test_a_log_probability_of_nothing_is_openais_least_number(world: World) -> None:
    world.runner.autopilot = False
    asked = asyncio.create_task(world.client().completions.create(**TEXT, logprobs=1))
    start = await world.runner.next("start")
    logprob = runner_pb2.TokenLogprob(logprob=float("-inf"), top_tokens=[9], top_logprobs=[-0.25])
    step = runner_pb2.Step(
        iteration=1,
        request_ids=[start.request_id],
        terms=[start.epoch.term],
        counters=[start.epoch.counter],
        tokens=world.tokens("a"),
        finish_reasons=[common_pb2.FINISH_REASON_EOS],
        logprobs=[runner_pb2.SequenceLogprobs(tokens=[logprob])],
    )
    world.runner.send(step=step)
    logprobs = (await soon(asked)).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-9999.0]


async def test_prompts_are_shared_inside_the_callers_namespace_alone(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = with_keys(parts)
    parts.scheduler.routes.pools[0].shared_all = True
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        for namespace in ("acme", "rival"):
            await world.client(api_key=f"key-of-{namespace}").completions.create(**TEXT)
            assert (await world.runner.next("start")).cache_salt == namespace, "of the caller, not of the shared base"


async def test_without_keys_there_is_one_tenant(world: World) -> None:
    await world.client().completions.create(**TEXT)
    assert (await world.runner.next("start")).cache_salt == ""


def _is_text(own: bytes) -> bool:
    try:
        own.decode()
    except UnicodeDecodeError:
        return False
    return True
