"""Requests: any body is either taken or refused by a named error, never anything else."""

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from weft.domain.strict_json import MAX_CONTAINERS
from weft_gateway.errors import ApiError, BadRequest, ParameterError
from weft_gateway.forms import TemplateForms
from weft_gateway.hints import ANY, HINTS
from weft_gateway.openai import ChatRequest, CompletionRequest, parse, select_form
from weft_gateway.tolerance import NEUTRAL, OFF

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, "user", "x" * 100])
GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hello"}
HINTED = {
    kind: {hint.name for hint in HINTS if {ANY, kind.api} & {*hint.apis}} for kind in (ChatRequest, CompletionRequest)
}
ANYWHERE = {hint.name for hint in HINTS if ANY in hint.apis}


@given(st.binary(max_size=64))
@example(b"[]")
def test_any_bytes_are_refused_by_name(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse(ChatRequest, body)


@given(st.dictionaries(fields, json_values, max_size=5), st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_object_is_taken_or_refused_by_name(changes: dict[str, Any], kind: type[Any]) -> None:
    good = GOOD if kind is ChatRequest else TEXT
    refusal, request = None, None
    try:
        request = parse(kind, orjson.dumps(good | changes))
    except ApiError as error:
        refusal = error
    if refusal:
        assert refusal.status == 400
        assert orjson.loads(refusal.body())["error"]["message"]
    if request:
        given = {name for name, value in changes.items() if value is not None and value not in NEUTRAL.get(name, ())}
        assert given <= set(kind.model_fields) | HINTED[kind], "nothing is ignored"


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        *(("stop", stop, taken) for stop, taken in ((None, ()), ("x", ("x",)), (["x", "y"], ("x", "y")), ([], ()))),
        *((name, number, number) for name in ("temperature", "top_p") for number in (1, 0.5)),
    ],
)
def test_a_value_is_taken_in_each_of_its_spellings(name: str, value: Any, taken: Any) -> None:
    assert getattr(parse(ChatRequest, orjson.dumps(GOOD | {name: value})), name) == taken


def test_an_error_names_the_place_and_cuts_what_the_client_made_up() -> None:
    with pytest.raises(ParameterError) as caught:
        parse(ChatRequest, orjson.dumps(GOOD | {"x" * 5000: 1}))
    assert caught.value.param == "x" * 64
    assert len(caught.value.message) < 1000


def test_many_unknown_names_are_one_error() -> None:
    request = GOOD | {f"unknown{i}": 1 for i in range(1000)}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(request)
    assert caught.value.error_count() == 1
    with pytest.raises(ParameterError, match="unknown0 is not supported"):
        parse(ChatRequest, orjson.dumps(request))


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_what_asks_for_what_happens_anyway_changes_nothing(kind: type[Any]) -> None:
    good = GOOD if kind is ChatRequest else TEXT
    plain = parse(kind, orjson.dumps(good))
    values: list[dict[str, Any]] = [
        {name: value} for name in NEUTRAL.keys() - set(kind.model_fields) for value in NEUTRAL[name]
    ]
    values += [{name: value} for name in OFF - set(kind.model_fields) for value in (False, 0, "", [], {})]
    values += [{name: "mine"} for name in ANYWHERE]
    values += [{name: None} for name in ("anything", "tools", "stop", "user")]
    values += [{"echo": False}, {"structured_outputs": {"json_object": False}}, {"response_format": {"type": "text"}}]
    values += [{"top_k": -1}, {"repetition_penalty": 1.0}, {"min_p": 0}, {"stop": []}, {"priority": 0}, {"n": 1.0}]
    values += [{"stop_token_ids": []}, {"bad_words": []}, {"logit_bias": {}}, {"ignore_eos": False}, {"seed": None}]
    for value in values:
        found = parse(kind, orjson.dumps(good | value))
        kept = {"top_k": plain.top_k, "structured_outputs": None, "response_format": None}
        assert found.model_copy(update=kept).model_dump() == plain.model_dump(), value
        assert select_form(found, TemplateForms.of_template(None), "").output is None, value


PART: dict[str, Any] = {"type": "text", "text": "one "}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {}}
CHOICE = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", **CHOICE}


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": FUNCTION | more}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *(
            ({name: False}, name)
            for name in (
                "detokenize", "do_sample", "separate_reasoning", "stream_reasoning", "cache_prompt", "nobody_knows",
            )
        ),
        *(({"nobody_knows": value}, "nobody_knows") for value in ("", [], {}, 0)),
        ({"guided_json_object": False}, "guided_json_object"),
        ({"n_predict": 0}, "n_predict"),
        ({"stream": True, "stream_options": {"include": False}}, "stream_options.include"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"tools": [tool(examples=[])]}, "tools[0]"),
        ({"tools": [tool(strict="no")]}, "tools[0]"),
        ({"tools": [tool(parameters=False)]}, "tools[0]"),
        ({"tools": [tool() | {"unknown": True}]}, "tools[0]"),
        ({"tools": [tool(), tool() | {"type": "unknown"}]}, "tools[1].type"),
        ({"messages": [{"role": "system", "content": "a", "tools": [tool()]}]}, "messages[0]"),
        ({"tools": [tool()], "tool_choice": CHOICE | {"mode": "auto"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": FUNCTION}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [PART | {"detail": "low"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "reasoning": {"text": "a"}}]}, "messages[0].reasoning"),
        ({"messages": [{"role": "assistant", "thinking": 5}]}, "messages[0].thinking"),
        *(
            ({"messages": [{"role": "assistant", "tool_calls": [CALL, wrong]}]}, "messages[0].tool_calls[1]")
            for wrong in ({}, {"function": "f"}, {"function": {"arguments": "{}"}})
        ),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}, "messages[0]"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name_whatever_its_value(
    changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        parse(ChatRequest, orjson.dumps(GOOD | changes))
    assert caught.value.param == param
    assert param in caught.value.message
    assert "{{" not in caught.value.message


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar", "json_object", "whitespace_pattern"])
def test_vllms_older_parameters_of_a_form_are_refused_with_the_name_they_have_today(name: str) -> None:
    with pytest.raises(ParameterError, match=rf"guided_{name} is not supported: .* structured_outputs\.{name}\."):
        parse(CompletionRequest, orjson.dumps({"model": "m", "prompt": "hello", f"guided_{name}": "x"}))


def test_what_changes_no_text_may_stand_beside_it() -> None:
    parts = [PART | {"cache_control": {"type": "ephemeral"}, "annotations": [], "id": None}]
    parts += [{"type": "thinking", "thinking": "two"}]
    given = tool(strict=True, defer_loading=False) | {"cache_control": {}, "type": None, "defer_loading": False}
    request = parse(
        ChatRequest, orjson.dumps(GOOD | {"messages": [{"role": "user", "content": parts}], "tools": [given]})
    )
    assert (request.messages[0].content, request.tools) == ("one \ntwo", [tool(strict=True)])


def test_our_own_answer_can_be_sent_back_with_what_clients_add_to_it() -> None:
    answer = {"role": "assistant", "content": "HI", "refusal": None, "annotations": [], "audio": None}
    added = {
        "tool_calls": None,
        "provider_specific_fields": {"a": 1},
        "name": None,
        "function_call": None,
        "x" * 100: [1],
    }
    parts = ["one ", {"type": "text", "text": "two"}]
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    messages = [GOOD["messages"][0], answer | added, {"role": "user", "content": parts}, refused]
    request = parse(ChatRequest, orjson.dumps(GOOD | {"messages": messages}))
    assert [message.of_template() for message in request.messages] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "HI"},
        {"role": "user", "content": "one \ntwo"},
        {"role": "assistant", "content": "no"},
    ]


ARGUMENTS: list[tuple[Any, Any]] = [  # of a call in the history; what a template gets
    ('{"x": 1}', {"x": 1}),
    ({"x": 1}, {"x": 1}),
    (f'{{"x": {2**64}}}', {"x": 2**64}),
    *((nothing, {}) for nothing in ("", "  ", "null", None)),
    *((text, text) for text in ('{"value": ', "[1]", '"text"', "5", "{'a': 1}", "[" * 40 + "]" * 40)),
    ([1], "[1]"),
]


def test_a_templates_calls_have_arguments_as_objects_and_what_is_no_object_is_a_text() -> None:
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": given}}
        for i, (given, _) in enumerate(ARGUMENTS)
    ]
    calls.append({"id": "-", "type": "function", "function": {"name": "f"}})
    messages = [GOOD["messages"][0], {"role": "assistant", "content": None, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": "0", "content": "2"}]
    request = parse(ChatRequest, orjson.dumps(GOOD | {"messages": messages}))
    _, assistant, tool = [message.of_template() for message in request.messages]
    expected = [*(shown for _, shown in ARGUMENTS), {}]
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == expected
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "0"}


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [("a", ("a",)), (["a"], ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))],
)
def test_prompts_are_a_text_token_ids_or_a_list_of_either(prompt: Any, taken: Any) -> None:
    assert parse(CompletionRequest, orjson.dumps({"model": "m", "prompt": prompt})).prompt == taken


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", 1], [True], [-1], [[1], "a", 3], {}, 5, ["a"] * 2049])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ParameterError, match="prompt"):
        parse(CompletionRequest, orjson.dumps({"model": "m", "prompt": prompt}))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "best_of": 2}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop_token_ids": "5"}, "stop_token_ids"),
    ],
)
def test_what_cannot_go_together_is_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse(CompletionRequest, orjson.dumps({"model": "m", "prompt": "a"} | changes))
    assert caught.value.param == param


def test_both_limits_of_a_chat_are_equal() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3}
    assert parse(ChatRequest, orjson.dumps(body | {"max_tokens": 3})).limit == 3
    with pytest.raises(ParameterError) as caught:
        parse(ChatRequest, orjson.dumps(body | {"max_tokens": 4}))
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("mark", [b"[],", b"{},"])
def test_a_body_of_too_many_arrays_and_objects_is_refused_before_it_is_parsed(mark: bytes) -> None:
    """Parsing holds the interpreter, and every stream of the gateway with it."""
    body = orjson.dumps({"model": "m", "prompt": "[" * (MAX_CONTAINERS - 1)})
    assert len(parse(CompletionRequest, body).prompt[0]) == MAX_CONTAINERS - 1
    with pytest.raises(BadRequest) as refused:
        parse(CompletionRequest, body + mark + b" no JSON")
    assert refused.value.code == "too_many_values"


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 310, "1e400"])
def test_a_number_beyond_floats_is_refused_by_its_place(number: str) -> None:
    body = '{"model": "m", "messages": [{}, {"tool_calls": [{"x": 0, "wei": NUMBER}]}]}'.replace("NUMBER", number)
    with pytest.raises(ParameterError, match="2\\^1024") as refused:
        parse(ChatRequest, body.encode())
    assert refused.value.param == "messages[1].tool_calls[0].wei"
    for other in (body[:-1], body.replace(number, "NaN"), body.replace(number, "-Infinity")):
        with pytest.raises(BadRequest, match="is not valid JSON") as invalid:
            parse(ChatRequest, other.encode())
        assert invalid.value.code == "invalid_json"


def test_deep_values_for_a_template_are_refused() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ParameterError, match="more than 32 deep"):
        parse(ChatRequest, orjson.dumps(GOOD | {"chat_template_kwargs": {"x": deep}}))


@given(st.dictionaries(st.integers(0, 999_999_999), st.integers(-100, 100) | st.floats(-100, 100), max_size=300))
def test_biases_are_taken_by_token_id(biases: dict[int, float]) -> None:
    body = orjson.dumps(GOOD | {"logit_bias": {str(token): bias for token, bias in biases.items()}})
    assert dict(parse(ChatRequest, body).logit_bias) == biases


@pytest.mark.parametrize("key", ["", "hello", "-1", "+1", " 1", "1 ", "1.0", "01", "1e3", "\u0663", "9999999999"])
def test_a_key_that_is_no_token_id_is_refused(key: str) -> None:
    with pytest.raises(ParameterError, match="logit_bias"):
        parse(ChatRequest, orjson.dumps(GOOD | {"logit_bias": {key: 1}}))


def test_log_probabilities_are_asked_for_as_each_api_has_it() -> None:
    chats = [{}, {"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 4}]
    assert [parse(ChatRequest, orjson.dumps(GOOD | one)).alternatives for one in chats] == [None, None, 0, 4]
    texts = [{}, {"logprobs": 0}, {"logprobs": 20}]
    assert [parse(CompletionRequest, orjson.dumps(TEXT | one)).alternatives for one in texts] == [None, 0, 20]
