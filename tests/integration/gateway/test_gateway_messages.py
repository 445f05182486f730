"""Anthropic's Messages API: texts, tools, events, errors in its form; the model is played."""

import json
from pathlib import Path
from typing import Any

import orjson

from .conftest import World, serving
from .test_gateway_bounds import wide_context
from .test_gateway_tools import CALL, WEATHER

TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER["function"]["parameters"]}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "hello"}]}


def events_of(text: str) -> list[dict[str, Any]]:
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    events = [orjson.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [event["type"] for event in events] == [name.removeprefix("event: ") for name, _ in parts]
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What Anthropic's client makes of a stream."""
    message, inputs = events[0]["message"], dict[int, str]()
    for event in events[1:]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": {"partial_json": text}}:
                inputs[index] = inputs.get(index, "") + text
                message["content"][index]["input"] = inputs[index]
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                kind = delta["type"].removesuffix("_delta")
                message["content"][index][kind] += delta[kind]
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= delta | {"usage": usage}
            case _:
                assert event["type"] in ("content_block_stop", "message_stop")
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


async def test_a_text_is_answered_whole_and_streamed_alike_and_its_tokens_are_counted(world: World) -> None:
    world.runner.answer = lambda _: world.tokens("dear reader")
    text = {"messages": [{"role": "user", "content": "hel\nlo"}]}
    body = ASKED | text | {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}
    async with world.http() as http:
        whole = (await http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})).json()
        blocks = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
        asked = body | {"messages": blocks, "stream": True}
        streamed = message_of(events_of((await http.post("/v1/messages", json=asked)).text))
        counted = (
            await http.post("/v1/messages/count_tokens", json={k: body[k] for k in body if k != "max_tokens"})
        ).json()
        cut = (await http.post("/v1/messages", json=ASKED | {"max_tokens": 1})).json()
    assert whole["content"] == [{"type": "text", "text": "dear reader"}]
    assert (whole["stop_reason"], whole["role"], whole["type"]) == ("end_turn", "assistant", "message")
    assert {k: v for k, v in streamed.items() if k != "id"} == {k: v for k, v in whole.items() if k != "id"}
    start = await world.runner.next("start")
    assert whole["usage"]["input_tokens"] == len(start.prompt) == counted["input_tokens"]
    assert world.tokenizer.decode(start.prompt).startswith("Be brief.")
    assert cut["stop_reason"] == "max_tokens"


async def test_tools_are_used_and_their_results_go_back(parts: World, tmp_path: Path) -> None:
    wide_context(parts)
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        world.runner.answer = lambda _: world.tokens("Well. " + CALL)
        body = ASKED | {"tools": [TOOL]}
        whole = (await http.post("/v1/messages", json=body)).json()
        streamed = message_of(events_of((await http.post("/v1/messages", json=body | {"stream": True})).text))
        for answer in (whole, streamed):
            text, use = answer["content"]
            assert (text["text"], answer["stop_reason"]) == ("Well. ", "tool_use")
            assert (use["name"], use["input"]) == ("weather", {"city": "Paris"})
        world.runner.answer = lambda _: world.tokens("sunny")
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "21 degrees"}]}
        turns = [{"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [result]}]
        after = (await http.post("/v1/messages", json=body | {"messages": [*ASKED["messages"], *turns]})).json()
        assert after["content"] == [{"type": "text", "text": "sunny"}]
        prompts = [await world.prompt() for _ in range(3)]
        assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompts[2]
        assert prompts[2].endswith("21 degrees")


USE: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
BAD = [
    ({"model": "acme/absent"}, 404, "not_found_error"),
    ({"messages": [{"role": "critic", "content": ""}]}, 400, "invalid_request_error"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
    ({"max_tokens": None}, 400, "invalid_request_error"),
    ({"tools": [{"type": "unknown_20250305", "name": "web_search"}]}, 400, "invalid_request_error"),
    ({"thinking": {"type": "sometimes"}}, 400, "invalid_request_error"),
    ({"output_config": {"format": {"type": "regex"}}}, 400, "invalid_request_error"),
    ({"output_config": {"effort": "extreme"}}, 400, "invalid_request_error"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 0}]}]}, 400, "invalid_request_error"),
    ({"tools": [TOOL | {"unknown": False}]}, 400, "invalid_request_error"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "x": 0}}, 400, "invalid_request_error"),
    ({"tool_choice": {"type": "tool", "name": "time"}}, 400, "invalid_request_error"),
]


async def test_the_header_names_what_was_ignored_whole_and_streamed(world: World) -> None:
    world.runner.answer = lambda _: world.tokens("sunny")
    hints = {"context_management": {"edits": [{"type": "x"}]}, "tools": [{"type": "web_search_20250305", "name": "w"}]}
    async with world.http() as http:
        for stream in (False, True):
            plain = await http.post("/v1/messages", json=ASKED | {"stream": stream})
            hinted = await http.post("/v1/messages", json=ASKED | hints | {"stream": stream})
            assert "weft-ignored" not in plain.headers
            assert hinted.headers["weft-ignored"] == "context_management, tools.web_search"
            assert hinted.status_code == 200


async def test_errors_have_anthropics_form(world: World) -> None:
    async with world.http() as http:
        for changes, status, kind in BAD:
            response = await http.post("/v1/messages", json=ASKED | changes)
            answer = response.json()
            assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind), changes
            assert answer["error"]["message"]


async def test_what_is_wrong_in_a_block_is_named_as_the_client_wrote_it(world: World) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}
    kinds = "messages[1].content[1]: must be of type text, tool_use, tool_result or thinking"
    wrong = [
        (USE | {"input": "{"}, "assistant", "messages[1].content[1].input: must be an object"),
        (result, "user", "messages[1].content[1].content: takes text parts only"),
        ({"type": "thinking", "thinking": "why"}, "user", "messages[1].content[1]: must be of type"),
        ({"type": "image", "source": {"type": "url"}}, "user", f"{kinds}; images and files are not served"),
        ({"type": "tool_use", "id": "1", "input": {}}, "assistant", "messages[1].content[1].name: must be a string"),
        ({"type": "tool_result"}, "user", "messages[1].content[1].tool_use_id: must be a string"),
    ]
    text = {"type": "text", "text": "a"}
    async with world.http() as http:
        for block, role, message in wrong:
            messages = [*ASKED["messages"], {"role": role, "content": [text, block]}]
            answer = await http.post("/v1/messages", json=ASKED | {"system": "Be brief.", "messages": messages})
            assert (answer.status_code, answer.json()["error"]["message"][: len(message)]) == (400, message)


async def test_a_stop_sequence_is_named(world: World) -> None:
    world.runner.answer = lambda _: world.tokens("one, two, END")
    async with world.http() as http:
        body = ASKED | {"stop_sequences": ["absent", "END"]}
        whole = (await http.post("/v1/messages", json=body)).json()
        streamed = message_of(events_of((await http.post("/v1/messages", json=body | {"stream": True})).text))
        plain = (await http.post("/v1/messages", json=ASKED)).json()
    for message in (whole, streamed):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert (plain["stop_reason"], plain["stop_sequence"]) == ("end_turn", None)


async def test_a_key_may_come_as_anthropics_clients_send_it(parts: World, tmp_path: Path) -> None:
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        unknown = await http.post("/v1/messages", json=ASKED, headers={"x-api-key": "nobody's"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
        assert "not known" in unknown.json()["error"]["message"]
        none = await http.post("/v1/messages", json=ASKED)
        assert "is needed" in none.json()["error"]["message"]
