"""Calls of tools as the official client and agents see them; the model is played."""

import json
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from .conftest import HELLO, World, serving
from .test_gateway_bounds import wide_context
from .test_gateway_refusals import refused

OBJECT: Any = {"type": "json_object"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
IN_ROME = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
TEMPLATE = (
    "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments.city }}{% endfor %}{% endfor %}<|assistant|>{{ '<think>' if thinks }}</think>"
)


async def test_calls_come_whole_and_streamed_and_can_be_answered(parts: World, tmp_path: Path) -> None:
    wide_context(parts)
    async with serving(parts, parts.settings(tmp_path)) as world:
        world.runner.answer = lambda _: world.tokens("Let me see. " + CALL + "\n" + CALL)
        whole = await world.client().chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER])
        (choice,) = whole.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see. ")
        calls: Any = choice.message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}] * 2
        assert len({call.id for call in calls}) == 2
        async with world.client().chat.completions.stream(model="tiny", messages=HELLO, tools=[WEATHER]) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert (final.finish_reason, final.message.content) == ("tool_calls", "Let me see. ")
        streamed: Any = final.message.tool_calls
        assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]
        one: Any = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "parallel_tool_calls": False}
        first = (await world.client().chat.completions.create(**one)).choices[0]
        async with world.client().chat.completions.stream(**one) as stream:
            final = (await stream.get_final_completion()).choices[0]
        for found in (first, final):
            assert found.finish_reason == "tool_calls"
            assert [json.loads(call.function.arguments) for call in found.message.tool_calls] == [{"city": "Paris"}]
        world.runner.answer = lambda _: world.tokens("dear")
        messages: Any = [*HELLO, choice.message]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
        after = await world.client().chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        assert (after.choices[0].finish_reason, after.choices[0].message.content) == ("stop", "dear")
        assert after.choices[0].message.tool_calls is None


async def test_arguments_of_any_depth_go_out_and_come_back(parts: World, tmp_path: Path) -> None:
    """orjson reads 1,024 levels and writes 254, a chat template 300 or so."""
    wide_context(parts)
    deep = '{"a": ' * 600 + "1" + "}" * 600
    called, reordered = '"name": "weather", "arguments": ' + deep, '"arguments": ' + deep + ', "name": "weather"'
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": json.loads(deep)}
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": deep}}]
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        for fields in (called, reordered):
            world.runner.answer = lambda _, f=fields: world.tokens(f"<tool_call>\n{{{f}}}\n</tool_call>")
            for stream in (False, True):
                asked = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "stream": stream}
                answer = await http.post("/v1/chat/completions", json=asked)
                assert (answer.status_code, "error" in answer.text) == (200, False), answer.text[-300:]
                asked |= {"max_tokens": 9_000, "tools": [tool]}
                answer = await http.post("/v1/messages", json=asked)
                assert (answer.status_code, "error" in answer.text) == (200, False), answer.text[-300:]
        for path, message in (
            ("/v1/chat/completions", {"role": "assistant", "tool_calls": calls}),
            ("/v1/messages", {"role": "assistant", "content": [use]}),
        ):
            asked = {"model": "tiny", "messages": [*HELLO, message], "max_tokens": 2}
            assert (await http.post(path, json=asked)).status_code == 200, path


async def test_a_pools_parser_reads_calls_that_its_template_does_not_show(parts: World, tmp_path: Path) -> None:
    """The template says nothing of calls, which would be Hermes's form."""
    wide_context(parts)
    routes = parts.scheduler.routes
    routes.pools[0].tool_call_parser = "mistral"
    written = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
    async with serving(parts, parts.settings(tmp_path)) as world:
        world.runner.answer = lambda _: world.tokens(written)
        asked: Any = {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}
        whole = (await world.client().chat.completions.create(**asked)).choices[0]
        async with world.client().chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        for choice in (whole, streamed):
            assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
            calls: Any = choice.message.tool_calls
            assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
                ("weather", {"city": "Paris"})
            ]
        assert '\n[{"name": NAME, "arguments": {ARGUMENTS}}]' in await world.prompt()


async def test_a_template_without_tools_gets_them_in_a_system_message(world: World) -> None:
    await world.client().chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER])
    messages: Any = [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "assistant", "tool_calls": IN_ROME}]
    await world.client().chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    await world.client().chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], tool_choice="none")
    texts = [await world.prompt() for _ in range(3)]
    assert texts[0].startswith("You may call functions")
    assert json.dumps(WEATHER) in texts[0]
    assert texts[1].startswith("Be brief.\n\nYou may call functions")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in texts[1]
    assert texts[2] == "hello"


async def test_a_template_with_tools_gets_them_and_the_arguments_of_calls_as_objects(
    parts: World, tmp_path: Path
) -> None:
    parts.serve_model(TEMPLATE)
    async with serving(parts, parts.settings(tmp_path)) as world:
        world.runner.answer = lambda _: world.tokens("why</think>hello")
        messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": IN_ROME}]
        await world.client().chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        assert await world.prompt() == f"<tool_call>{json.dumps(WEATHER)}helloRome</think>"


async def test_reasoning_stands_beside_the_content_where_the_template_has_it(parts: World, tmp_path: Path) -> None:
    thinking = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think></think>' if quick else '<think>\n' }}"
    parts.serve_model(thinking)
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        body = {"model": "tiny", "messages": HELLO}
        world.runner.answer = lambda _: world.tokens("dear </think>\n\nreader")
        message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("dear", "reader")
        world.runner.answer = lambda _: world.tokens("reader")
        quick = body | {"chat_template_kwargs": {"quick": True}}
        message = (await http.post("/v1/chat/completions", json=quick)).json()["choices"][0]["message"]
        assert ("reasoning_content" in message, message["content"]) == (False, "reader")


async def test_each_api_counts_reused_tokens_of_the_prompt_and_tokens_of_the_reasoning(
    parts: World, tmp_path: Path
) -> None:
    """Whole and streamed alike."""
    parts.serve_model("{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' }}")
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        world.runner.answer, world.runner.reused = lambda _: world.tokens("why</think>hello"), lambda _: 4
        n_prompt, n_answer = len(world.tokens("hello<think>")), len(world.tokens("why</think>hello"))
        total = {"total_tokens": n_prompt + n_answer}
        of_chat = total | {"prompt_tokens": n_prompt, "completion_tokens": n_answer}
        of_chat |= {"prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 3}}
        of_response = total | {"input_tokens": n_prompt, "output_tokens": n_answer}
        of_response |= {"input_tokens_details": {"cached_tokens": 4}, "output_tokens_details": {"reasoning_tokens": 3}}
        of_message = {"input_tokens": n_prompt - 4, "output_tokens": n_answer, "cache_creation_input_tokens": 0}
        of_message |= {"cache_read_input_tokens": 4, "output_tokens_details": {"thinking_tokens": 3}}
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, asked, streamed, usage in (
            ("/v1/chat/completions", {"messages": HELLO}, {"stream_options": options}, of_chat),
            ("/v1/responses", {"input": "hello"}, {}, of_response),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 99}, {}, of_message),
        ):
            asked = {"model": "tiny", **asked}
            assert (await http.post(path, json=asked)).json()["usage"] == usage
            lines = (await http.post(path, json=asked | {"stream": True, **streamed})).text.splitlines()
            events = [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]
            used = [of for event in events if (of := event.get("response", event).get("usage"))]
            assert used[-1] == usage, path
            assert not streamed or used[-2] == usage, "of the last chunk with text"
        begun = {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
        assert events[0]["message"]["usage"] == usage | begun


@pytest.mark.parametrize(
    ("files", "rendered"),
    [
        ({"chat_template.jinja": b"{{ bos_token }}[{{ messages[0].content }}]{{ eos_token }}"}, "[hello]"),
        ({"tokenizer_config.json": b'{"chat_template": "{{ messages[0].content }}!", "eos_token": "<no>"}'}, "hello!"),
        ({"chat_template.jinja": b"{% if %}"}, "line 1 of the chat template"),
        ({}, "the adapter's files have no chat template"),
        (None, "is not here yet"),
    ],
)
async def test_chats_of_an_adapter_are_rendered_by_its_own_chat_template(
    parts: World, tmp_path: Path, files: dict[str, bytes] | None, rendered: str
) -> None:
    if files is not None:
        parts.scheduler.routes.routes[1].digest = parts.depot.add_model({"adapter_config.json": b"{}", **files})
    parts.scheduler.routes.routes[1].own_chat_template = True
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        asked: Any = {"model": "acme/upper", "messages": HELLO}
        answer = await http.post("/v1/chat/completions", json=asked)
        if answer.status_code == 200:
            assert await world.prompt() == rendered
        else:
            error = answer.json()["error"]
            wanted = (503, "model_not_ready") if files is None else (400, "chat_template_error")
            assert (answer.status_code, error["code"], rendered in error["message"]) == (*wanted, True), error
        counted = await http.post("/tokenize", json=asked)
        assert counted.status_code == answer.status_code
        await world.client().completions.create(model="acme/upper", prompt="hello")
        await world.client().chat.completions.create(model="tiny", messages=HELLO)
        prompts = [await world.prompt() for _ in range(2)]
        assert prompts == ["hello", "hello"], "completions and the base go on"


@pytest.mark.parametrize(
    ("of_pool", "of_adapter", "rendered"),
    [
        (b"{{ messages[0].content }} reader", None, {"tiny": "hello reader", "acme/upper": "hello reader"}),
        (b"{{ messages[0].content }} reader", b"Oh{{ eos_token }}", {"tiny": "hello reader", "acme/upper": "Oh!"}),
        (None, b"dear {{ messages[0].content }}", {"tiny": "hello", "acme/upper": "dear hello"}),
        (b"{% if %}", b"dear", {"tiny": "line 1 of the chat template", "acme/upper": "dear"}),
        ("ConfigMap team/x", b"dear", {"tiny": "ConfigMap team/x", "acme/upper": "dear"}),
        (None, "ConfigMap team/x", {"tiny": "hello", "acme/upper": "ConfigMap team/x"}),
    ],
)
async def test_a_chat_template_of_a_spec_counts_before_those_of_files(
    parts: World, tmp_path: Path, of_pool: bytes | str | None, of_adapter: bytes | str | None, rendered: dict[str, str]
) -> None:
    """A text in place of a template: why it could not be read."""
    routes = parts.scheduler.routes
    files = {"adapter_config.json": b"{}", "tokenizer_config.json": b'{"eos_token": "!"}'}
    routes.routes[1].digest = parts.depot.add_model({"chat_template.jinja": b"own", **files})
    routes.routes[1].own_chat_template = of_adapter is None and of_pool is None
    for entry, given in ((routes.pools[0], of_pool), (routes.routes[1], of_adapter)):
        if isinstance(given, bytes):
            entry.chat_template = parts.depot.add_model({"chat_template.jinja": given})
        else:
            entry.chat_template_fault = given or ""
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        for model, text in rendered.items():
            asked: Any = {"model": model, "messages": HELLO}
            answer = await http.post("/v1/chat/completions", json=asked)
            if answer.status_code == 200:
                assert await world.prompt() == text
            else:
                error = answer.json()["error"]
                found = answer.status_code, error["code"], text in error["message"]
                assert found == (400, "chat_template_error", True), error
            assert (await http.post("/tokenize", json=asked)).status_code == answer.status_code
            await world.client().completions.create(model=model, prompt="hello")
            assert await world.prompt() == "hello", "completions go on"


HYBRID = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think></think>' if enable_thinking is false }}"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"enable_thinking": False}),
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("/v1/chat/completions", {"reasoning_effort": "none"}),
        ("/v1/responses", {"reasoning": {"effort": "none"}}),
        ("/v1/messages", {"thinking": {"type": "disabled"}}),
    ],
)
async def test_reasoning_that_is_not_wanted_is_left_out_or_the_wish_is_refused_by_name(
    parts: World, tmp_path: Path, path: str, asked: dict[str, Any]
) -> None:
    body = {"model": "tiny", **({"input": "hello"} if "reasoning" in asked else {"messages": HELLO}), **asked}
    body |= {"max_tokens": 9} if "thinking" in asked else {}
    (name, value), *_ = asked.items()
    param = f"{name}.{next(iter(value))}" if name in ("reasoning", "chat_template_kwargs") else name
    for template, prompt in ((HYBRID, "hello<think></think>"), ("{{ messages[0].content }}<think></think>", None)):
        parts.serve_model(template)
        async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
            response = await http.post(path, json=body)
            if prompt is None:
                assert response.status_code == 400
                assert f"{param}: this model's chat template" in response.json()["error"]["message"]
            else:
                assert await world.prompt() == prompt


async def test_a_variable_that_the_template_does_not_read_is_refused_unless_it_asks_for_nothing(world: World) -> None:
    async with world.http() as http:
        for asked, param in (
            ({"reasoning_effort": "high"}, None),
            ({"documents": [{"text": "a"}]}, "documents"),
            ({"chat_template_kwargs": {"style": "brief"}}, "chat_template_kwargs.style"),
            ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
            ({"enable_thinking": False, "reasoning_effort": "none", "chat_template_kwargs": {"a": None}}, None),
        ):
            response = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO} | asked)
            assert response.json().get("error", {"param": None})["param"] == param, asked


async def test_the_grammar_of_a_form_reaches_the_runner_and_no_other_does(world: World) -> None:
    client = world.client()
    await client.chat.completions.create(model="tiny", messages=HELLO, response_format=OBJECT)
    assert '"type":"object"' in (await world.runner.next("start")).sampling.grammar
    await client.completions.create(model="tiny", prompt="hello", extra_body={"structured_outputs": {"regex": "[ab]+"}})
    assert "/[ab]+/" in (await world.runner.next("start")).sampling.grammar
    await client.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "text"})
    assert (await world.runner.next("start")).sampling.grammar == ""


FORMS_OF_TOOLS: dict[str, dict[str, Any]] = {  # by path: a request, and what a tool's schema is called
    "chat/completions": {"messages": HELLO},
    "responses": {"input": "hello"},
    "messages": {"messages": HELLO, "max_tokens": 9},
}


def tool_of(path: str, schema: Any, **more: Any) -> dict[str, Any]:
    if path == "messages":
        return {"name": "weather", "input_schema": schema, **more}
    function = {"name": "weather", "parameters": schema, **more}
    return {"type": "function", **(function if path == "responses" else {"function": function})}


@pytest.mark.parametrize("path", FORMS_OF_TOOLS)
async def test_a_strict_tool_is_bound_by_a_grammar_and_no_other_is(world: World, path: str) -> None:
    schema, other = WEATHER["function"]["parameters"], {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    async with world.http() as http:
        for tool, bound in ((tool_of(path, schema), False), (tool_of(path, schema, strict=True), True)):
            for stream in (False, True):
                asked = {"model": "tiny", "tools": [tool], "stream": stream} | FORMS_OF_TOOLS[path]
                assert (await http.post(f"/v1/{path}", json=asked)).status_code == 200
                assert ("TEXT" in (await world.runner.next("start")).sampling.grammar) is bound
        asked = {"model": "tiny", "tools": [tool_of(path, other, strict=True)]} | FORMS_OF_TOOLS[path]
        error = (await http.post(f"/v1/{path}", json=asked)).json()["error"]
        name = "input_schema" if path == "messages" else "parameters"
        where = f"tools[0] (weather): {name}.properties.a.pattern: look-around"
        assert error["message"].startswith(where), error
        assert error.get("param", "tools[0]") == "tools[0]"


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "string"}}}
ASKS_FOR_JSON = {
    "chat/completions": {
        "messages": HELLO,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    },
    "responses": {"input": "hello", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
}
ANTHROPIC = {"messages": HELLO, "max_tokens": 99, "tool_choice": {"type": "any"}}


async def test_a_form_holds_behind_the_reasoning_whose_marks_are_special_tokens(parts: World, tmp_path: Path) -> None:
    """One prompt ends inside the reasoning, one behind it, one may have some: the grammar says which."""
    thinking = (
        "{% set text = (messages | last)['content'] %}{{ text }}<|assistant|>{% if text == 'hello' %}<think>\n"
        "{% elif text == 'quick' %}<think></think>\n{% endif %}{{ '' if tools }}"
    )
    parts.serve_model(thinking, "<think>", "</think>", "<tool_call>", "</tool_call>")
    begin, end, call = (parts.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>", "<tool_call>"))
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:

        async def asked(path: str, **body: Any) -> tuple[httpx2.Response, str]:
            answer = await http.post(f"/v1/{path}", json={"model": "tiny"} | body)
            return answer, (await world.runner.next("start")).sampling.grammar

        world.runner.answer = lambda _: world.tokens('dear </think>\n\n{"a": "b</think>"}')
        for path, body in ASKS_FOR_JSON.items():
            whole, grammar = await asked(path, **body)
            assert f"lead: reasoning BLANK\\nreasoning: TEXT <[{end}]>\\n" in grammar
            streamed, _ = await asked(path, **body, stream=True)
            parts_of = orjson.loads(whole.content)
            if path == "responses":
                thought, said = (item["content"][0]["text"] for item in parts_of["output"])
                assert '"text":"{\\"a\\": \\"b\\"}"' in streamed.text
            else:
                message = parts_of["choices"][0]["message"]
                thought, said = message["reasoning_content"], message["content"]
                deltas = [orjson.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
                assert "".join(one["choices"][0]["delta"].get("content", "") for one in deltas) == said
            assert (thought, said) == ("dear", '{"a": "b"}')

        world.runner.answer = lambda _: world.tokens("dear</think>" + CALL)
        tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
        whole, grammar = await asked("messages", **ANTHROPIC, tools=[tool])
        assert f"<[{call}]>" in grammar
        thought, use = whole.json()["content"]
        assert (thought["thinking"], use["input"]) == ("dear", {"city": "Paris"})

        world.runner.answer = lambda _: world.tokens("{}")
        chats = [[{"role": "user", "content": text}] for text in ("hello", "quick", "free")]
        body = {"messages": chats, "response_format": {"type": "json_object"}}
        whole, first = await asked("chat/completions/batch", **body)
        rest = [(await world.runner.next("start")).sampling.grammar for _ in range(2)]
        leads = {g.count("lead: reasoning") - g.count(f"lead: (BEFORE <[{begin}]>") for g in (first, *rest)}
        assert leads == {1, 0, -1}
        messages = [choice["message"] for choice in whole.json()["choices"]]
        assert [(one.get("reasoning_content"), one["content"]) for one in messages] == [
            ("{}", ""),
            (None, "{}"),
            (None, "{}"),
        ]


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}[THINK]"
ASKS_FOR_TEXT: dict[str, Any] = {
    "chat/completions": {"messages": HELLO},
    "responses": {"input": "hello"},
    "completions": {"prompt": "hello"},
}


def texts_of(path: str, answer: httpx2.Response) -> list[str]:
    """The reasoning, if there is some, and the text of an answer or of a stream's deltas."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [orjson.loads(line) for line in lines or [answer.content]]
    if path == "responses":
        return [item["content"][0]["text"] for item in events[-1].get("response", events[-1])["output"]]
    found = [choice.get("message") or choice.get("delta") or choice for (choice,) in (one["choices"] for one in events)]
    names = ("reasoning_content", "content", "text")
    return [text for name in names if (text := "".join(one.get(name) or "" for one in found))]


@pytest.mark.parametrize("path", ASKS_FOR_TEXT)
async def test_special_tokens_are_spelled_and_reasoning_is_left_out_where_the_request_says_so(
    parts: World, tmp_path: Path, path: str
) -> None:
    parts.serve_model(THINKS, "[THINK]", "[/THINK]")
    spelled, quiet = {"skip_special_tokens": False}, {"include_reasoning": False}
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        tokens = world.tokens("why[/THINK]dear<|user|>[/THINK].<s>reader")
        world.runner.answer = lambda _: tokens

        async def asked(**more: Any) -> list[str]:
            body = {"model": "tiny"} | ASKS_FOR_TEXT[path] | more
            whole, streamed = [await http.post(f"/v1/{path}", json=body | {"stream": live}) for live in (False, True)]
            if more == quiet:
                usage = whole.json()["usage"]
                assert usage.get("completion_tokens", usage.get("output_tokens")) == len(tokens)
            assert texts_of(path, streamed) == texts_of(path, whole)
            return texts_of(path, whole)

        if path == "completions":
            assert await asked() == ["whydear.reader"]
            assert await asked(**spelled) == ["why[/THINK]dear<|user|>[/THINK].<s>reader"]
            prompt = world.tokens("<|user|>hello")
            assert await asked(prompt=prompt, echo=True, **spelled, stop="[/THINK]") == ["<|user|>hellowhy"]
        else:
            assert await asked() == ["why", "dear.reader"]
            assert await asked(**spelled) == ["why", "dear<|user|>[/THINK].<s>reader"]
            assert await asked(**spelled, stop="<s>") == ["why", "dear<|user|>[/THINK]."]
            assert await asked(**quiet) == ["dear.reader"]


async def test_log_probabilities_and_token_ids_stand_beside_the_parts_of_an_answer(world: World) -> None:
    tokens = world.tokens(CALL)
    world.runner.answer = lambda _: tokens
    body = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "stream": True, "logprobs": True}
    async with world.http() as http:
        response = await http.post("/v1/chat/completions", json=body | {"return_token_ids": True})
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [orjson.loads(event)["choices"][0] for event in events]
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == tokens
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == len(tokens)


ANONYMOUS = {"type": "function", "function": {"description": "of a city"}}


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


BAD: list[tuple[Any, str, str]] = [
    ({"tools": [WEATHER, named("mcp:a")]}, "tools[1]", "tools[1] (mcp:a): name: must be 1 to 64 letters"),
    ({"tools": [named("a" * 65)]}, "tools[0]", f"tools[0] ({'a' * 64}): name: must be 1 to 64 letters"),
    ({"tools": [named("b"), named("a"), named("b")]}, "tools[2]", "tools[2] (b): name: must be another one than that"),
    ({"tools": [named("a", parameters=[])]}, "tools[0]", "tools[0] (a): parameters: must be an object."),
    ({"tools": [named("a", parameters={"type": "array"})]}, "tools[0]", "tools[0] (a): parameters.type: expected"),
    ({"tools": [named("a", strict=1)]}, "tools[0]", "tools[0] (a): strict: must be true or false."),
    ({"tools": [named("a", price=1)]}, "tools[0]", "tools[0] (a): price: is not supported; description, name, "),
    ({"tools": [ANONYMOUS]}, "tools[0]", 'tools[0]: must be {"type": "function", "function": {"name": '),
    ({"tools": [WEATHER] * 129}, "tools", "tools: must be a list of at most 128 functions."),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice asks for a call"),
    ({"tools": [WEATHER], "tool_choice": named("time")}, "tool_choice", "tool_choice asks for a call"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "tool_choice: must be"),
]  # fmt: skip


async def test_tools_that_are_none_are_refused_by_name(world: World) -> None:
    async with world.http() as http:
        for changes, param, message in BAD:
            body = {"model": "tiny", "messages": HELLO} | changes
            error = refused(await http.post("/v1/chat/completions", json=body), 400, "invalid_parameter", param)
            assert error["message"].startswith(message)
        flat, anthropic = '{"type": "function", "name": ', '{"name": "...", "description": '
        for path, kind, form in (("responses", "function", flat), ("messages", "custom", anthropic)):
            asked = {"model": "tiny", "tools": [tool_of(path, {}), {"type": kind}]} | FORMS_OF_TOOLS[path]
            error = (await http.post(f"/v1/{path}", json=asked)).json()["error"]
            assert error["message"].startswith(f"tools[1]: must be {form}")
