"""One whole stack, asked by the official `openai` client in every way, and with the requests of vLLM's tests.

Both are of one file because a stack costs more than all that is asked of it here.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from harness.quickstart import DEMO, Case
from harness.vllm_requests import CHECKS
from harness.vllm_requests.checks import SECONDS, Check, Server
from weft_stage.stack import Stack


@pytest.fixture(scope="module")
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_models_lists_the_base_and_each_adapter_with_its_parent(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {case.model for case in DEMO}
    base = DEMO[0].model
    assert all(m.model_extra["parent"] == base for name, m in models.items() if name != base)
    assert client.models.retrieve(DEMO[1].model).id == DEMO[1].model


@pytest.mark.parametrize("case", DEMO, ids=lambda c: c.model)
def test_completions(client: openai.OpenAI, case: Case) -> None:
    answer = client.completions.create(model=case.model, prompt=case.prompt, temperature=0, max_tokens=200)
    assert answer.choices[0].text == case.expect
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(case.expect)  # a character is a token


async def test_all_models_at_once_from_the_async_client_in_every_way(stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client:
        ways = (completion, streamed_completion, chat, streamed_chat)
        asked = [(case, way) for case in DEMO for way in ways]
        texts = await asyncio.gather(*(way(client, case) for case, way in asked))
    assert texts == [case.expect for case, _ in asked]


async def completion(client: openai.AsyncOpenAI, case: Case) -> str:
    answer = await client.completions.create(model=case.model, prompt=case.prompt, temperature=0, max_tokens=200)
    return answer.choices[0].text


async def streamed_completion(client: openai.AsyncOpenAI, case: Case) -> str:
    stream = await client.completions.create(
        model=case.model, prompt=case.prompt, temperature=0, max_tokens=200, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


async def chat(client: openai.AsyncOpenAI, case: Case) -> str | None:
    messages = [{"role": "user", "content": case.prompt}]
    answer = await client.chat.completions.create(model=case.model, messages=messages, temperature=0)
    return answer.choices[0].message.content


async def streamed_chat(client: openai.AsyncOpenAI, case: Case) -> str:
    messages = [{"role": "user", "content": case.prompt}]
    stream = await client.chat.completions.create(model=case.model, messages=messages, temperature=0, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_a_text_is_as_likely_as_a_prompt_as_it_was_as_an_answer(client: openai.OpenAI) -> None:
    """What evaluations ask: the log probabilities of a given text, without an answer."""
    ids = {"return_token_ids": True}
    for case in DEMO[:3]:
        answer = client.completions.create(
            model=case.model, prompt=case.prompt, temperature=0, max_tokens=200, logprobs=1, extra_body=ids
        )
        (choice,) = answer.choices
        assert choice.model_extra is not None
        tokens = choice.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
        whole = client.completions.create(model=case.model, prompt=tokens, echo=True, logprobs=1, max_tokens=0)
        (scored,) = whole.choices
        assert scored.finish_reason == "length"
        assert scored.text.endswith(choice.text)
        assert choice.logprobs is not None
        assert scored.logprobs is not None
        made, found = choice.logprobs.token_logprobs, scored.logprobs.token_logprobs
        assert made is not None
        assert found is not None
        assert found[-len(made) :] == pytest.approx(made, abs=0.05)  # a prompt is computed in other sums than a token
        assert (found[0], len(found)) == (None, len(tokens))
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 0
        one = client.completions.create(model=case.model, prompt=tokens, echo=True, logprobs=1, max_tokens=1)
        assert one.choices[0].logprobs is not None
        cut = (one.choices[0].logprobs.token_logprobs or [])[:-1]  # as lm_eval does; the model would end here
        assert cut[1:] == pytest.approx(found[1:], abs=0.05)


# ---- structured outputs

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", [DEMO[0].model, DEMO[1].model])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_json_schema_holds_for_every_model_streamed_and_whole(client: openai.OpenAI, model, temperature) -> None:
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "a person"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        "temperature": temperature,
        "seed": 7,
        "max_tokens": 400,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    person = json.loads(whole.message.content)
    assert re.fullmatch("[a-z]{1,8}", person["name"])
    assert isinstance(person["age"], int)
    assert person["age"] <= 99
    chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True) if c.choices]
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].finish_reason == "stop"


def test_choices_and_regular_expressions_beside_a_free_answer(client: openai.OpenAI) -> None:
    free = DEMO[0]
    asked = {"model": free.model, "prompt": free.prompt, "temperature": 0, "max_tokens": 200}
    chosen = client.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.choices[0].text in ("yes", "no")
    streamed = client.completions.create(
        **asked, stream=True, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2,4}"}}
    )
    assert re.fullmatch("[0-9]{3}-[a-z]{2,4}", "".join(chunk.choices[0].text for chunk in streamed))
    assert client.completions.create(**asked).choices[0].text == free.expect


def test_a_form_that_does_not_compile_is_refused_by_its_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refused:
        client.completions.create(
            model=DEMO[0].model, prompt="x", extra_body={"structured_outputs": {"json": {"not": {}}}}
        )
    assert refused.value.param == "structured_outputs.json"
    with pytest.raises(openai.BadRequestError, match="Token range end too large") as impossible:
        client.completions.create(  # this model has no such token
            model=DEMO[0].model, prompt="x", extra_body={"structured_outputs": {"grammar": 'start: "a" <[300]>'}}
        )
    assert impossible.value.code == "grammar_failed"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_tool_holds_where_a_call_is_not_required(client: openai.OpenAI, stream: bool) -> None:
    """The model repeats the user's text."""
    wrong = '<tool_call>{"name": "other", "arguments": {"b": 1}}</tool_call>'
    messages: Any = [{"role": "user", "content": wrong}]
    bound: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for strict, name, keys in ((False, "other", {"b"}), (True, "w", {"a"})):
        tool = {"type": "function", "function": {"name": "w", "parameters": bound, "strict": strict}}
        asked: Any = {
            "model": DEMO[0].model,
            "messages": messages,
            "tools": [tool],
            "max_tokens": 200,
            "temperature": 0,
        }
        if stream:
            with client.chat.completions.stream(**asked) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", name)
        assert json.loads(call.function.arguments).keys() == keys


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_tool_is_called_where_the_request_asks_for_it(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": DEMO[1].model, "messages": [{"role": "user", "content": "hello"}], "temperature": 1.0}
    asked |= {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "seed": 5, "max_tokens": 200}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    for answer in (whole, streamed):
        (call,) = answer.message.tool_calls or ()
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, answer.message.content or "") == ("weather", "")
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert whole.message.tool_calls[0].function.arguments == streamed.message.tool_calls[0].function.arguments


def test_the_responses_api_answers_with_calls_too(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    answer = client.responses.create(
        model=DEMO[1].model, input="hello", tools=[tool], tool_choice="required", max_output_tokens=200
    )
    assert answer.output[0].type == "function_call"
    assert json.loads(answer.output[0].arguments)["city"] in ("Rome", "Oslo")
    assert client.responses.retrieve(answer.id).output == answer.output
    output = {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "sunny"}
    more = client.responses.create(model=DEMO[1].model, input=[output], previous_response_id=answer.id, tools=[tool])  # type: ignore[list-item]
    assert more.previous_response_id == answer.id
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=DEMO[1].model, input="hello", previous_response_id=answer.id)


def test_embeddings_of_a_base_and_of_its_adapters(client: openai.OpenAI) -> None:
    """The same text has the same vector by any neighbour, another one by other weights."""
    texts = ["hello world", "hello", "hello world"]
    by_model = {case.model: client.embeddings.create(model=case.model, input=texts).data for case in DEMO}
    for found in by_model.values():
        assert found[0].embedding == found[2].embedding != found[1].embedding
        assert sum(x * x for x in found[0].embedding) == pytest.approx(1.0, abs=1e-5)
    assert len({tuple(found[0].embedding) for found in by_model.values()}) == len(DEMO)


# ---- vLLM's tests as requests


@pytest.fixture(scope="module")
def server(stack: Stack) -> Iterator[Server]:
    (runner,) = stack.names("runner")
    with httpx2.Client(timeout=SECONDS) as client:
        yield Server(stack.url, f"http://{stack.components()[runner]['probes']}/metrics", client)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.test)
def test_a_request_of_vllms_tests_is_answered_as_listed(server: Server, check: Check) -> None:
    """What vLLM's test asserts holds, or the reply is what the list says instead."""
    check.run(server)
