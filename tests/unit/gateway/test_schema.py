"""Requests: any body is either taken or refused by a named error, never anything else."""

from itertools import product
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from pydantic import ValidationError

from weft_gateway.errors import ApiError, ParameterError
from weft_gateway.openai.schema import ChatRequest, CompletionRequest, parse
from weft_gateway.openai.unsupported import advice

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, "user", "x" * 100])
GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_by_name(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse(ChatRequest, body)


@given(st.dictionaries(fields, json_values, max_size=5), st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_object_is_taken_or_refused_by_name(changes: dict[str, Any], kind: type[Any]) -> None:
    good = GOOD if kind is ChatRequest else {"model": "m", "prompt": "hello"}
    refusal, request = None, None
    try:
        request = parse(kind, orjson.dumps(good | changes))
    except ApiError as error:
        refusal = error
    if refusal:
        assert refusal.status == 400
        assert orjson.loads(refusal.body())["error"]["message"]
    if request:
        given = {name for name, value in changes.items() if value is not None}
        assert given <= set(kind.model_fields), "nothing is ignored"
        assert len(request.stop) <= 4


@pytest.mark.parametrize(("stop", "taken"), [(None, ()), ("x", ("x",)), (["x", "y"], ("x", "y")), ([], ())])
def test_stop_is_a_text_or_a_list(stop: Any, taken: tuple[str, ...]) -> None:
    assert parse(ChatRequest, orjson.dumps(GOOD | {"stop": stop})).stop == taken


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    request = parse(ChatRequest, orjson.dumps(GOOD | {"messages": [{"role": "user", "content": parts}]}))
    assert request.messages[0].content == "one two"


def test_whole_numbers_are_taken_for_temperature_and_top_p() -> None:
    request = parse(ChatRequest, orjson.dumps(GOOD | {"temperature": 0, "top_p": 1}))
    assert (request.temperature, request.top_p) == (0, 1)


def test_an_error_names_the_place_and_cuts_what_the_client_made_up() -> None:
    with pytest.raises(ParameterError) as caught:
        parse(ChatRequest, orjson.dumps(GOOD | {"x" * 5000: 1}))
    assert caught.value.param == "x" * 64
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("body", [GOOD, GOOD["messages"][0]], ids=["request", "message"])
def test_many_unknown_names_are_one_error(body: dict[str, Any]) -> None:
    many = body | {f"unknown{i}": 1 for i in range(1000)}
    request = many if "model" in many else GOOD | {"messages": [many]}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(request)
    assert caught.value.error_count() == 1
    with pytest.raises(ParameterError, match="unknown0 is not supported"):
        parse(ChatRequest, orjson.dumps(request))


@pytest.mark.parametrize(("kind", "known"), [(ChatRequest, ChatParams), (CompletionRequest, TextParams)])
def test_every_parameter_of_openais_reference_is_served_or_refused_with_advice(kind: type[Any], known: Any) -> None:
    names = set(known.__annotations__)
    assert {"model", "n", "logit_bias"} <= names
    served = set(kind.model_fields)
    assert served <= names | {"stream"}, "nothing of our own"
    good = GOOD if kind is ChatRequest else {"model": "m", "prompt": "hello"}
    for name in names - served:
        with pytest.raises(ParameterError) as caught:
            parse(kind, orjson.dumps(good | {name: 1}))
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
        assert advice(name), name
        assert advice(name) in caught.value.message


@given(st.dictionaries(st.integers(0, 999_999_999), st.integers(-100, 100) | st.floats(-100, 100), max_size=300))
def test_biases_are_taken_by_token_id(biases: dict[int, float]) -> None:
    body = orjson.dumps(GOOD | {"logit_bias": {str(token): bias for token, bias in biases.items()}})
    assert dict(parse(ChatRequest, body).logit_bias) == biases


@pytest.mark.parametrize("key", ["", "-1", "+1", " 1", "1 ", "1.0", "01", "1e3", "\u0663", "9999999999"])
def test_a_key_that_is_no_token_id_is_refused(key: str) -> None:
    with pytest.raises(ParameterError, match="logit_bias"):
        parse(ChatRequest, orjson.dumps(GOOD | {"logit_bias": {key: 1}}))


def test_log_probabilities_are_asked_for_as_each_api_has_it() -> None:
    def chat(**changes: Any) -> int | None:
        return parse(ChatRequest, orjson.dumps(GOOD | changes)).alternatives

    def text(**changes: Any) -> int | None:
        return parse(CompletionRequest, orjson.dumps({"model": "m", "prompt": "x"} | changes)).alternatives

    assert [chat(), chat(logprobs=False), chat(logprobs=True), chat(logprobs=True, top_logprobs=4)] == [
        None,
        None,
        0,
        4,
    ]
    assert [text(), text(logprobs=0), text(logprobs=20)] == [None, 0, 20]


@pytest.mark.parametrize(("n", "best_of"), [*product([1, 3], [None, 1, 2, 3])])
def test_best_of_is_taken_when_it_changes_nothing(n: int, best_of: int | None) -> None:
    body = orjson.dumps({"model": "m", "prompt": "x", "n": n, "best_of": best_of})
    if best_of in (None, n):
        assert parse(CompletionRequest, body).n == n
    else:
        with pytest.raises(ParameterError, match=f"equals n, here {n}"):
            parse(CompletionRequest, body)
