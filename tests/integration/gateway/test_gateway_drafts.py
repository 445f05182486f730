"""What a client predicts of an answer is a draft for its runners, and usage tells how it fared."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from harness.gateway_peers import FakeRunner, runner_server

from .conftest import HELLO, World, serving, soon, until

PREDICTION: Any = {"type": "content", "content": [{"type": "text", "text": "one, "}, "two, END four"]}
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO}


@pytest.fixture
async def drafting(parts: World, tmp_path: Path) -> AsyncIterator[World]:
    """A gateway whose pool checks drafts."""
    parts.scheduler.routes.pools[0].checks_drafts = True
    async with serving(parts, parts.settings(tmp_path)):
        yield parts


async def test_usage_counts_the_guesses_of_all_runners_and_none_behind_the_end(drafting: World) -> None:
    world = drafting
    world.runner.autopilot = world.scheduler.autopilot = False
    predicted, tokens = world.tokens("one, two, END four"), world.tokens("one, two, END three")
    async with runner_server(FakeRunner("runner-2")) as other:
        other.autopilot = False
        asked = asyncio.create_task(world.client().chat.completions.create(**CHAT, stop="END", prediction=PREDICTION))
        request_id = (await world.scheduler.next("submit")).request_id
        world.scheduler.assign(request_id)
        start = await world.runner.next("start")
        world.runner.step(start, 0, tokens[:3], draft_use=(2, 4))
        await world.scheduler.next("started")
        world.runner.break_sessions()
        await world.scheduler.next("failed")
        world.scheduler.assign(request_id, other)
        again = await other.next("start")
        other.step(again, 3, tokens[3:], draft_use=(len(tokens) - 3, 1))
        answer = await soon(asked)
    assert list(start.draft) == list(again.draft) == predicted
    assert (list(again.emitted), answer.choices[0].message.content) == (tokens[:3], "one, two, ")
    usage = answer.usage
    used = usage.completion_tokens_details
    assert used.accepted_prediction_tokens == 2 + usage.completion_tokens - 3, "a stop string cuts what follows"
    assert used.accepted_prediction_tokens + used.rejected_prediction_tokens == 2 + 4 + len(tokens) - 3 + 1


async def test_a_stream_has_the_counts_in_its_usage_and_one_without_a_prediction_has_none(drafting: World) -> None:
    client = drafting.client()
    empty = {"type": "content", "content": ""}
    for prediction, expected in ((PREDICTION, (0, 0)), (empty, (0, 0)), (None, (None, None))):
        stream = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}, extra_body={"prediction": prediction}
        )
        *_, last = [chunk async for chunk in stream]
        used = last.usage.completion_tokens_details
        assert used.reasoning_tokens == 0
        assert (used.accepted_prediction_tokens, used.rejected_prediction_tokens) == expected


WRONG: list[tuple[str, Any, str]] = [
    ("chat/completions", "text", "must be {"),
    ("chat/completions", {"type": "content"}, "must be {"),
    ("chat/completions", {"type": "tokens", "content": "text"}, "must be {"),
    ("chat/completions", {"type": "content", "content": "text", "strict": True}, "must be {"),
    ("chat/completions", {"type": "content", "content": [{"type": "image_url"}]}, "takes text parts only"),
    ("chat/completions", {"type": "content", "content": "hello? " * 400}, "However, the prediction has"),
    ("chat/completions", {"type": "content", "content": "hello? " * 10_000}, "maximum context length is 512"),
    ("completions", PREDICTION, "it belongs to POST /v1/chat/completions"),
    ("responses", PREDICTION, "it belongs to POST /v1/chat/completions"),
]


@pytest.mark.parametrize(("path", "prediction", "why"), WRONG)
async def test_a_prediction_that_cannot_be_is_refused_by_name(
    drafting: World, path: str, prediction: Any, why: str
) -> None:
    body = {"chat/completions": CHAT, "completions": {"model": "tiny", "prompt": "hello"}}
    async with drafting.http() as http:
        response = await http.post(
            f"/v1/{path}", json=body.get(path, {"model": "tiny", "input": "hello"}) | {"prediction": prediction}
        )
    error = response.json()["error"]
    assert (response.status_code, error["param"].partition(".")[0]) == (400, "prediction")
    assert why in error["message"], error["message"]


async def test_a_pool_that_checks_no_drafts_refuses_a_prediction_by_name(drafting: World) -> None:
    drafting.scheduler.send_routes(drafting.routes(version=2))
    await until(lambda: drafting.gateway.machine.routes.version == 2)
    async with drafting.http() as http:
        response = await http.post("/v1/chat/completions", json=CHAT | {"prediction": PREDICTION})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "prediction", "unsupported_value")
    assert "Leave it out" in error["message"]
