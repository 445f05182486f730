"""OpenAI's Responses API by the official client: whole, streamed, tools; the model is played."""

import asyncio
import json
import threading
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import openai
import orjson
import pytest
from openai.types.responses import ResponseInputMessageItem

from harness.spans import in_memory
from weft.domain.batch import MAX_CONVERSATION_BYTES
from weft_gateway.openai import MAX_STORED_VALUES, MAX_VALUES
from weft_gateway.shell import THREAD_BYTES

from .conftest import World, serving, soon
from .test_gateway_batches import batched
from .test_gateway_bounds import wide_context
from .test_gateway_refusals import refused
from .test_gateway_tools import CALL, WEATHER

DEEP: Any = reduce(lambda inner, _: {"inner": inner}, range(300), {})  # orjson writes 254 levels, and reads 1,024
USER = {"role": "user", "content": "hello"}
TOOL: Any = {"type": "function", "strict": False, **WEATHER["function"]}


async def test_a_text_is_answered_whole_and_streamed_alike(world: World) -> None:
    client = world.client()
    world.runner.answer = lambda _: world.tokens("dear reader")
    whole = await client.responses.create(model="tiny", input="hello", instructions="Be brief.", metadata={"a": "b"})
    assert (whole.output_text, whole.status, whole.metadata) == ("dear reader", "completed", {"a": "b"})
    assert whole.usage.output_tokens == len(world.tokens("dear reader"))
    start = await world.runner.next("start")
    assert len(start.prompt) == whole.usage.input_tokens
    assert world.tokenizer.decode(start.prompt).startswith("Be brief.")
    async with client.responses.stream(model="tiny", input="hello") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "dear reader"
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")][:2] == [0, 1]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "dear reader"
    cut = await client.responses.create(model="tiny", input="hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_calls_are_items_and_their_outputs_go_back(parts: World, tmp_path: Path) -> None:
    wide_context(parts)
    async with serving(parts, parts.settings(tmp_path)) as world:
        client = world.client()
        world.runner.answer = lambda _: world.tokens("Well. " + CALL)
        whole = await client.responses.create(model="tiny", input="hello", tools=[TOOL])
        async with client.responses.stream(model="tiny", input="hello", tools=[TOOL]) as stream:
            streamed = await stream.get_final_response()
        for answer in (whole, streamed):
            message, call = answer.output
            assert (message.type, call.type, answer.output_text) == ("message", "function_call", "Well. ")
            assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
        world.runner.answer = lambda _: world.tokens("sunny")
        (_, call) = whole.output
        assert call.type == "function_call"
        back: Any = [{"role": "user", "content": "hello"}, *whole.output]
        back.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"})
        after = await client.responses.create(model="tiny", input=back, tools=[TOOL])
        assert after.output_text == "sunny"
        prompts = [await world.prompt() for _ in range(3)]
        assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompts[2]
        assert prompts[2].endswith("21 degrees")


async def test_a_response_is_continued_read_and_forgotten(parts: World, tmp_path: Path) -> None:
    wide_context(parts)
    async with batched(parts, tmp_path) as made:
        client, world = made.world.client(), made.world
        world.gateway.tracer, spans = in_memory(ratio=1.0)
        world.runner.answer = lambda _: world.tokens("dear reader")
        first = await client.responses.create(model="tiny", input="hello", instructions="Be brief.")
        async with client.responses.stream(
            model="tiny", input=[{"role": "user", "content": "again"}], previous_response_id=first.id
        ) as stream:
            second = await stream.get_final_response()
        third = await client.responses.create(model="tiny", input="once more", previous_response_id=second.id)
        alone = await client.responses.create(model="tiny", input="hello", store=False)
        stored = [first.model_dump()["store"], second.model_dump()["store"], alone.model_dump()["store"]]
        assert stored == [True, True, False]
        await world.settled()
        conversations = [(span.attributes or {}).get("gen_ai.conversation.id") for span in spans.get_finished_spans()]
        assert conversations == [first.id, first.id, first.id, None]
        prompts = [await world.prompt() for _ in range(4)]
        assert prompts[1] == "hello" + "dear reader" + "again"  # instructions are of one request
        assert prompts[2] == prompts[1] + "dear reader" + "once more"
        assert (third.previous_response_id, first.previous_response_id) == (second.id, None)
        read = await client.responses.retrieve(second.id)
        assert (read.id, read.output_text, read.usage) == (second.id, second.output_text, second.usage)
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        referred = await client.responses.create(model="tiny", input=[reference, {"role": "user", "content": "!"}])
        after = await client.responses.create(model="tiny", input="?", previous_response_id=referred.id)
        assert after.status == "completed"
        prompts = [await world.prompt() for _ in range(2)]
        assert prompts == ["dear reader!", "dear reader!dear reader?"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="tiny", input=[reference])
        for gone in (first.id, third.id, alone.id, "resp_never"):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await client.responses.create(model="tiny", input="and", previous_response_id=gone)


async def test_the_items_of_an_input_are_listed_by_pages(parts: World, tmp_path: Path) -> None:
    wide_context(parts)
    async with batched(parts, tmp_path) as made:
        client = made.world.client()
        first = await client.responses.create(model="tiny", input="hello")
        call: Any = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
        back: Any = [
            {"role": "system", "content": "Be brief."},
            first.output[0],
            first.output[0],  # twice the same id
            call,
            {"type": "function_call_output", "call_id": "1", "output": "sunny"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "again"}]},
        ]
        second = await client.responses.create(model="tiny", input=back, previous_response_id=first.id)
        (text,) = (await client.responses.input_items.list(first.id, include=["reasoning.encrypted_content"])).data
        assert isinstance(text, ResponseInputMessageItem)
        assert (text.role, text.content[0].type, text.content[0].to_dict()["text"]) == ("user", "input_text", "hello")
        forward = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.type for item in forward] == ["message"] * 3 + ["function_call", "function_call_output", "message"]
        assert len({item.id for item in forward}) == len(back)
        assert forward[1].id == first.output[0].id
        backward = await client.responses.input_items.list(second.id)
        assert ([item.id for item in backward.data], backward.has_more) == ([one.id for one in forward][::-1], False)
        for wrong in ({"after": "msg_never"}, {"limit": 101}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await client.responses.input_items.list(second.id, **wrong)  # type: ignore[arg-type]
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list("resp_never")


async def test_an_answer_that_cannot_be_kept_is_given_and_says_so(parts: World, tmp_path: Path) -> None:
    async with batched(parts, tmp_path) as made:
        made.batch.refuses = grpc.StatusCode.UNAVAILABLE, "no store"
        whole = await made.world.client().responses.create(model="tiny", input="hello")
        assert (whole.status, whole.model_dump()["store"]) == ("completed", False)
        async with made.world.client().responses.stream(model="tiny", input="hello") as stream:
            final = await stream.get_final_response()
        assert (final.output_text, final.model_dump()["store"]) == (whole.output_text, False)


async def test_an_answer_of_more_bytes_than_a_conversation_may_have_is_given_and_not_kept(
    parts: World, tmp_path: Path
) -> None:
    wide_context(parts)
    async with batched(parts, tmp_path, max_body_bytes=2 * MAX_CONVERSATION_BYTES) as made:
        reasoning = {"type": "reasoning", "encrypted_content": "x" * MAX_CONVERSATION_BYTES}
        asked: Any = [reasoning, {"role": "user", "content": "hello"}]
        whole = await made.world.client().responses.create(model="tiny", input=asked)
        assert (whole.status, whole.model_dump()["store"], made.batch.responses) == ("completed", False, {})


async def test_what_is_stored_is_read_and_written_beside_the_loop(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_context(parts)
    in_loop = list[str]()

    def noted(work: Any) -> Any:
        def call(value: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and "the stored text" in str(value):
                in_loop.append(work.__name__)
            return work(value)

        return call

    names = {name: getattr(orjson, name) for name in ("Fragment", "JSONEncodeError")}
    json_module = SimpleNamespace(loads=noted(orjson.loads), dumps=noted(orjson.dumps), **names)
    async with batched(parts, tmp_path) as made:
        for module in ("openai.responses", "exact_json"):
            monkeypatch.setattr(f"weft_gateway.{module}.orjson", json_module)
        client = made.world.client()
        long = "the stored text " * (THREAD_BYTES // 10)
        call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": json.dumps([long])}
        asked: Any = [{"role": "user", "content": long}, call]
        first = await client.responses.create(model="tiny", input=asked)
        reference: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "and"}]
        await client.responses.create(model="tiny", input=reference, previous_response_id=first.id)
        await client.responses.retrieve(first.id)
        assert len((await client.responses.input_items.list(first.id)).data) == 2
    assert in_loop == []


async def test_a_conversation_that_is_too_long_is_refused_before_it_is_parsed(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batched(parts, tmp_path) as made:
        client, batch = made.world.client(), made.batch
        first = await client.responses.create(model="tiny", input="hello")
        second = await client.responses.create(model="tiny", input="again", previous_response_id=first.id)
        key, kept = ("", first.id), batch.responses["", first.id].body

        async def refusal(status: int = 400, **changes: Any) -> Any:
            wanted = {"model": "tiny", "input": "and", "previous_response_id": second.id} | changes
            async with made.world.http() as http:
                for path in ("/v1/responses", "/v1/responses/input_tokens"):
                    answer = await http.post(path, json=wanted)
                    assert answer.status_code == status, answer.text
            return answer.json().get("error")

        def store(text: str) -> None:
            message = {"role": "user", "content": text}
            body = orjson.dumps({**orjson.loads(kept), "input": [message]})
            batch.responses[key].body = body + b" not JSON"  # it is not parsed: what is newer is too long already

        newer = batch.responses["", second.id]
        tokenizer = made.world.gateway.tokenizers.get(made.world.base_digest)
        assert tokenizer
        text = "x" * (tokenizer.max_chars(512) + 1)
        newer.body = orjson.dumps({**orjson.loads(newer.body), "input": [{"role": "user", "content": text}]})
        store("hello")
        error = await refusal()
        assert (error["code"], error["param"]) == ("context_length_exceeded", "previous_response_id")
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, ")
        newer.body = b"[{}," * (MAX_STORED_VALUES // 3 + 1)  # no JSON either
        assert "JSON values" in (await refusal())["message"]
        reference = [{"type": "item_reference", "id": second.output[0].id}]
        assert "JSON values" in (await refusal(previous_response_id=None, input=reference))["message"]
        newer.body = b" " * (MAX_CONVERSATION_BYTES + 1)
        assert "bytes" in (await refusal(previous_response_id=None, input=reference))["message"]
        batch.refuses = grpc.StatusCode.FAILED_PRECONDITION, "the conversation is too long"
        error = await refusal()
        assert (error["code"], error["param"]) == ("context_length_exceeded", "previous_response_id")


async def test_without_a_batch_service_nothing_is_kept(world: World) -> None:
    whole = await world.client().responses.create(model="tiny", input="hello", store=True)
    assert whole.model_dump()["store"] is False
    with pytest.raises(openai.APIStatusError, match="no batch service"):
        await world.client().responses.create(model="tiny", input="hello", previous_response_id=whole.id)


async def test_where_storing_is_switched_off_nothing_is_kept(parts: World, tmp_path: Path) -> None:
    async with batched(parts, tmp_path, store_responses=False) as made:
        whole = await made.world.client().responses.create(model="tiny", input="hello", store=True)
        assert (whole.model_dump()["store"], made.batch.responses) == (False, {})


async def test_an_error_behind_the_first_byte_is_an_event(parts: World, tmp_path: Path) -> None:
    parts.runner.autopilot = parts.scheduler.autopilot = False
    async with serving(parts, parts.settings(tmp_path)) as world:
        asked = world.client().responses.create(model="tiny", input="hello", stream=True)
        posted = asyncio.create_task(asked)
        world.scheduler.assign((await world.scheduler.next("submit")).request_id)
        world.runner.step(await world.runner.next("start"), 0, world.tokens("a"))
        stream = await soon(posted)
        world.runner.break_sessions()
        await world.scheduler.next("failed")
        world.skip_hold()
        events = [event async for event in stream]
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None


BAD = [
    ({"input": []}, "input"),
    ({"input": [{"type": "image"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_1"}]}, "input[1]"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"tools": [{"type": "unknown"}]}, "tools[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}], "instructions": "a"}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": [0]}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "why"}, USER]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}, USER]}, "input[0].summary"),
    ({"input": [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]}, "input[1].arguments"),
    ({"input": [USER, {"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[1].call_id"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"unknown": "detailed"}}, "reasoning.unknown"),
    ({"text": {"unknown": "low"}}, "text.unknown"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "x": 0}}}, "text.format.x"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 512}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {"k": 1}}, "metadata"),
    ({"metadata": {"k": DEEP}}, "metadata"),
    ({"input": [{"type": "reasoning", "content": DEEP}, USER]}, "input"),
    ({"input": [{"type": "reasoning", "content": [0] * MAX_VALUES}, USER], "stream": True}, "input"),
    ({"input": [{**USER, "unknown": DEEP}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "", "unknown": DEEP}, USER]}, "input"),
    ({"tool_choice": {"type": "function", "name": "weather", "unknown": DEEP}, "tools": [TOOL]}, "tool_choice"),
    ({"tools": [{**TOOL, "parameters": DEEP}]}, "tools"),
    ({"text": {"format": {"type": "text", "unknown": DEEP}}}, "text.format"),
]


async def test_what_is_not_served_is_refused_by_name(world: World) -> None:
    async with world.http() as http:
        for changes, param in BAD:
            response = await http.post("/v1/responses", json={"model": "tiny", "input": "hello"} | changes)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_a_conversation_beyond_the_context_is_refused_as_one_of_chats(world: World) -> None:
    async with world.http() as http:
        response = await http.post("/v1/responses", json={"model": "tiny", "input": "hello " * 600})
    refused(response, 400, "context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError):
        await world.client().responses.create(model="acme/absent", input="hello")
