"""Conversations that come back: the same prompt by every API, with what earlier answers held; the model is played."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from .conftest import HELLO, World, serving
from .test_gateway_batches import batched
from .test_gateway_messages import TOOL as BLOCK_TOOL
from .test_gateway_messages import USE, events_of, message_of
from .test_gateway_responses import TOOL as FLAT_TOOL
from .test_gateway_tools import WEATHER

WEI = 19876543210987654321
CALL = f'<tool_call>\n{{"arguments": {{"city": {WEI}}}, "name": "weather"}}\n</tool_call>'
BROKEN = ['{"value": ', "[1, 2]", '"text"', "null", "5", "  ", "{'a': 1}"]


def shows_all(reasoning: str = "reasoning", arguments: str = "c.function.arguments | tojson") -> str:
    """Make a chat template: `reasoning`: the name that it reads."""
    return (
        "{% for m in messages %}<|{{ m.role }}|>{% if m." + reasoning + " %}<think>{{ m." + reasoning + " }}</think>"
        "{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ "
        + arguments
        + " }}</tool_call>{% endfor %}{% endfor %}{{ tools | tojson if tools }}<|assistant|><think>\n"
    )


def serve(parts: World, template: str) -> None:
    parts.serve_model(template)
    parts.scheduler.routes.pools[0].max_context_tokens = 1 << 14


async def answered(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
async def test_one_conversation_is_one_prompt_by_every_api(parts: World, tmp_path: Path, name: str) -> None:
    serve(parts, shows_all(name))
    async with batched(parts, tmp_path) as made, made.world.http() as http:
        world = made.world

        async def prompt_of(path: str, body: dict[str, Any]) -> list[int]:
            await answered(http, path, body)
            return list((await world.runner.next("start")).prompt)

        world.runner.answer = lambda _: world.tokens(f"PLAN</think>Well.{CALL}")
        chat, flat = {"tools": [WEATHER]}, {"tools": [FLAT_TOOL | {"strict": None}]}
        blocks = {"tools": [BLOCK_TOOL], "max_tokens": 500}
        message = (await answered(http, "/v1/chat/completions", {"messages": HELLO, **chat}))["choices"][0]["message"]
        response = await answered(http, "/v1/responses", {"input": "hello", **flat})
        first = await answered(http, "/v1/messages", {"messages": HELLO, **blocks})
        starts = [list((await world.runner.next("start")).prompt) for _ in range(3)]
        assert starts[1:] == starts[:1] * 2

        (call,), (use,) = message["tool_calls"], first["content"][2:]
        assert message["reasoning"] == message["reasoning_content"] == "PLAN"
        assert (call["function"]["arguments"], use["input"]) == (f'{{"city":{WEI}}}', {"city": WEI})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "21"}
        output = {"type": "function_call_output", "call_id": response["output"][2]["call_id"], "output": "21"}
        said = [*HELLO, message, {"role": "tool", "tool_call_id": call["id"], "content": "21"}]
        expected = await prompt_of("/v1/chat/completions", {"messages": said, **chat})
        shown = world.tokenizer.decode(expected, skip_special_tokens=False)
        assert f'<think>PLAN</think>Well.<tool_call>weather{{"city": {WEI}}}</tool_call>' in shown

        bare = {key: value for key, value in message.items() if "reasoning" not in key}
        for key in ("reasoning", "reasoning_content", "thinking"):
            history = [said[0], bare | {key: "PLAN"}, said[2]]
            assert await prompt_of("/v1/chat/completions", {"messages": history, **chat}) == expected
        items = [*HELLO, *response["output"], output]
        assert await prompt_of("/v1/responses", {"input": items, **flat}) == expected
        summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "PLAN"}], "encrypted_content": "x"}
        items = [*HELLO, summary, *response["output"][1:], output]
        assert await prompt_of("/v1/responses", {"input": items, **flat}) == expected
        continued = {"input": [output], "previous_response_id": response["id"], **flat}
        assert await prompt_of("/v1/responses", continued) == expected
        secret = {"type": "redacted_thinking", "data": "x"}
        turns = [{"role": "assistant", "content": [secret, *first["content"]]}, {"role": "user", "content": [result]}]
        assert await prompt_of("/v1/messages", {"messages": [*HELLO, *turns], **blocks}) == expected


async def test_reasoning_has_both_names_in_each_part_of_a_stream(parts: World, tmp_path: Path) -> None:
    serve(parts, shows_all())
    async with serving(parts, parts.settings(tmp_path)) as world:
        world.runner.answer = lambda _: world.tokens("PLAN</think>Well.")
        stream = await world.client().chat.completions.create(model="tiny", messages=HELLO, stream=True)
        deltas = [chunk.choices[0].delta.to_dict() async for chunk in stream]
        texts = [
            "".join(str(delta.get(name, "")) for delta in deltas)
            for name in ("reasoning", "reasoning_content", "content")
        ]
        assert texts == ["PLAN", "PLAN", "Well."]


async def test_a_broken_call_ends_no_conversation(parts: World, tmp_path: Path) -> None:
    serve(parts, shows_all(arguments="c.function.arguments | items | list"))
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        for text in BROKEN:
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
            result = {"role": "tool", "tool_call_id": "c", "content": "no"}
            chat = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
            items = [
                *HELLO,
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": text},
                {"type": "function_call_output", "call_id": "c", "output": "no"},
            ]
            await answered(http, "/v1/chat/completions", {"messages": chat})
            await answered(http, "/v1/responses", {"input": items})
            prompts = [await world.prompt() for _ in range(2)]
            assert prompts == ["hello<tool_call>f[]</tool_call><|tool|>no<think>"] * 2


async def test_integers_beyond_64_bits_keep_their_digits_wherever_they_go(parts: World, tmp_path: Path) -> None:
    serve(parts, shows_all())
    wide: Any = {"type": "object", "properties": {"city": {"type": "integer", "maximum": WEI}}}
    tool, use = FLAT_TOOL | {"parameters": wide}, USE | {"input": {"city": WEI}}
    async with batched(parts, tmp_path) as made, made.world.http() as http:
        world = made.world
        world.runner.answer = lambda _: world.tokens(f"</think>{CALL}")
        asked = {"input": [{**HELLO[0], "unknown": WEI}], "tools": [tool]}
        whole = await answered(http, "/v1/responses", asked)
        streamed = await http.post("/v1/responses", json={"model": "tiny", "stream": True, **asked})
        assert streamed.text.count(f'"maximum":{WEI}') == 3, "created, in_progress and completed"
        read = (await http.get(f"/v1/responses/{whole['id']}")).json()
        (item,) = (await http.get(f"/v1/responses/{whole['id']}/input_items")).json()["data"]
        assert (whole["tools"], read["tools"], item["unknown"]) == ([tool], [tool], WEI)
        assert f'"maximum": {WEI}' in await world.prompt()

        blocks = {"tools": [BLOCK_TOOL], "max_tokens": 500}
        blocks["messages"] = [*HELLO, {"role": "assistant", "content": [use]}]
        message = await answered(http, "/v1/messages", blocks)
        events = events_of((await http.post("/v1/messages", json={"model": "tiny", "stream": True, **blocks})).text)
        for answer in (message, message_of(events)):
            assert answer["content"][-1]["input"] == {"city": WEI}
        forced = {"prompt": "a", "structured_outputs": {"json": {"enum": [WEI]}}}
        refused = (await http.post("/v1/completions", json={"model": "tiny", **forced})).json()["error"]
        assert (refused["param"], str(WEI) in refused["message"]) == ("structured_outputs.json", True)
