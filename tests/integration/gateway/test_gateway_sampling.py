"""Log probabilities, penalties and biases, from the official client to the runner and back."""

from pathlib import Path
from typing import Any

import pytest

from weft.wire.v1 import scheduler_pb2

from .conftest import ANSWER, HELLO, World, serving, until
from .test_gateway_refusals import TEXT, with_keys


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
    asked: Any = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
    logprobs: Any = (await world.client().chat.completions.create(**asked)).choices[0].logprobs
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


async def test_a_completion_reports_tokens_offsets_and_alternatives_by_name(world: World) -> None:
    logprobs: Any = (await world.client().completions.create(**TEXT, logprobs=2)).choices[0].logprobs
    tokens = world.tokens(ANSWER)
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


async def test_prompts_are_shared_inside_the_callers_namespace_alone(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = with_keys(parts)
    parts.scheduler.routes.pools[0].shared_all = True
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        for namespace in ("acme", "rival"):
            await world.client(api_key=f"key-of-{namespace}").completions.create(**TEXT)
            assert (await world.runner.next("start")).cache_salt == namespace, "of the caller, not of the shared base"


@pytest.mark.parametrize(("sharing", "salts"), [(True, ["\n", "\nmine"]), (False, ["", "\nmine"])])
async def test_without_keys_there_is_one_tenant_unless_sharing_is_off(
    parts: World, tmp_path: Path, sharing: bool, salts: list[str]
) -> None:
    async with serving(parts, parts.settings(tmp_path, prefix_sharing=sharing)) as world:
        for salt, client_salt in zip(salts, (None, "mine"), strict=True):
            await world.client().completions.create(**TEXT, extra_body={"cache_salt": client_salt})
            assert (await world.runner.next("start")).cache_salt == salt


def _is_text(own: bytes) -> bool:
    try:
        own.decode()
    except UnicodeDecodeError:
        return False
    return True
