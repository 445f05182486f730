"""vLLM's tests of `/v1/chat/completions`: chats, forms of answers, tools."""

import json
import re
from typing import Any

from harness.vllm_requests.checks import (
    BASE,
    CHATS,
    MODELS,
    VOCABULARY,
    Check,
    Expected,
    Reply,
    absent,
    at_least,
    chat,
    completion,
    differs,
    finishes_apart,
    last_chunk_has_text,
    message,
    no_usage,
    ok,
    post,
    refused,
    some,
    streams_as_whole,
    usage_adds_up,
    usage_last,
)  # fmt: skip
from harness.vllm_requests.completions import FINISH

FILE = "entrypoints/openai/chat_completion/test_chat.py"
OLDER = "entrypoints/openai/test_completion.py"
CHOICES = ["Python", "Java", "Rust", "C plus plus"]
ADDRESS = r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
TALK = [
    message("You are a helpful assistant.", "system"),
    message("Who won?"),
    message("They did.", "assistant"),
    message("Where?"),
]


def fits_schema(value: Any, schema: Any) -> bool:
    """True where a value fits the keywords that stand in this list's schemas."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema.get("type", "object"):
        case "object":
            own, known = set(value), schema.get("properties", {})
            allowed = schema.get("additionalProperties", True) or own <= known.keys()
            return (
                set(schema.get("required", ())) <= own
                and allowed
                and all(fits_schema(value[name], known[name]) for name in own & known.keys())
            )
        case "array":
            return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
                fits_schema(one, schema["items"]) for one in value
            )
        case "integer":
            return isinstance(value, int) and schema["minimum"] <= value <= schema["maximum"]
        case _:
            return isinstance(value, str) and len(value) <= schema["maxLength"]


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "of the weather", "parameters": schema}}


WEATHER = tool("get_current_weather", city={"type": "string", "maxLength": 8}, unit={"enum": ["celsius", "fahrenheit"]})
FORECAST = tool(
    "get_forecast", city={"type": "string", "maxLength": 8}, days={"type": "integer", "maximum": 7, "minimum": 1}
)
PROFILE = {"type": "function", "function": {"name": "dummy_function_name", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "get_current_weather"}}
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "get_current_time", "arguments": "{}"}}


def _called(*names: str) -> Expected:
    """Calls of these tools, with arguments that their schemas allow."""

    def calls(reply: Reply) -> bool:
        made = reply.json["choices"][0]["message"]["tool_calls"]
        return [one["function"]["name"] for one in made] == list(names) and _arguments_fit(
            reply, [one["function"] for one in made]
        )

    return calls


def _some_call(reply: Reply) -> bool:
    made = reply.json["choices"][0]["message"]["tool_calls"]
    ids = all(one["type"] == "function" and len(one["id"]) >= 9 for one in made)
    return ids and bool(made) and _arguments_fit(reply, [one["function"] for one in made])


def _streams_calls(reply: Reply) -> bool:
    """The calls of the whole answer; one finish; no content beside them."""
    whole = reply.again(stream=False).json["choices"][0]
    finishes = [one["finish_reason"] for one in reply.streamed_choices if one["finish_reason"]]
    made = [one["function"] for one in whole["message"]["tool_calls"]]
    same, streamed = (
        [one | {"arguments": json.loads(one["arguments"])} for one in calls] for calls in (made, reply.streamed_calls())
    )
    return streamed == same != [] and finishes == [whole["finish_reason"]] and not reply.streamed_text().strip()


def _arguments_fit(reply: Reply, calls: list[Any]) -> bool:
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in reply.sent["tools"]}
    for call in calls:
        assert fits_schema(json.loads(call["arguments"]), schemas[call["name"]]), call
    return True


def _no_calls(reply: Reply) -> bool:
    choice = reply.json["choices"][0]
    return (
        choice["message"]["content"]
        and not choice["message"].get("tool_calls")
        and choice["finish_reason"] != "tool_calls"
    )


def _of_schema(schema: Any) -> Expected:
    def fits(reply: Reply) -> None:
        for choice in reply.json["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert fits_schema(json.loads(text), schema), text

    return fits


def _all_texts(fits: Any) -> Expected:
    def texts_fit(reply: Reply) -> bool:
        found = [one["text"] if "text" in one else one["message"]["content"] for one in reply.json["choices"]]
        return bool(found) and all(map(fits, found))

    return texts_fit


def _rising_usage(reply: Reply) -> bool:
    used = [event["usage"] for event in reply.events]
    counts = [one["completion_tokens"] for one in used]
    return counts == sorted(counts) and counts[-1] == 10 and all(one["prompt_tokens"] > 0 for one in used)


def _alternatives_by_number(reply: Reply) -> bool:
    one, two = reply.json["prompt_logprobs"], reply.again(prompt_logprobs=2).json["prompt_logprobs"]
    return all(len(top) <= 2 for top in one[1:]) and all(2 <= len(top) <= 3 for top in two[1:])


def _same_with_parts(reply: Reply) -> bool:
    one, *others = reply.sent["messages"]
    parts = reply.again(messages=[{**one, "content": [{"type": "text", "text": one["content"]}]}, *others])
    return parts.json["choices"] == reply.json["choices"]


def _goes_on(*, echo: bool) -> Expected:
    def continues(reply: Reply) -> bool:
        text, said = reply.json["choices"][0]["message"]["content"], reply.sent["messages"][-1]["content"]
        return (said in text) is echo and reply.json["choices"][0]["message"]["role"] == "assistant"

    return continues


def _n_contents(reply: Reply) -> bool:
    texts = [choice["message"]["content"] for choice in reply.json["choices"]]
    in_turn = [choice["index"] for choice in reply.json["choices"]] == list(range(reply.sent["n"]))
    return in_turn and all(texts) and len(set(texts)) > 1


def _streams_two(reply: Reply) -> bool:
    """Both choices end, each once. Drawn without a seed, one of them may be empty."""
    ended = [choice["index"] for choice in reply.streamed_choices if choice["finish_reason"]]
    return sorted(ended) == [0, 1]


# The model is sure of what it repeats, and not of how a message goes on.
ODD: dict[str, Any] = {
    "messages": [message("qzx")],
    "temperature": 2.0,
    "continue_final_message": True,
    "add_generation_prompt": False,
}
SESSION = (
    {"id": some, "#choices": 1, "choices.0.finish_reason": "length", "usage.completion_tokens": 5,
     "#choices.0.message.content": at_least(5), "choices.0.message.role": "assistant"}, usage_adds_up,
    lambda reply: reply.again(messages=[*reply.sent["messages"], reply.json["choices"][0]["message"], message("in json")]),
)  # fmt: skip
CHAT_CHECKS = [
    *(chat(f"{FILE}::test_no_logprobs_chat [{model}]", {"choices.0.logprobs": absent}, model=model, max_completion_tokens=5, logprobs=False)
        for model in MODELS),
    *(chat(f"{FILE}::test_zero_logprobs_chat [{model}]", {"#choices.0.logprobs.content.0.top_logprobs": 0},
        model=model, max_completion_tokens=5, logprobs=True, top_logprobs=0) for model in MODELS),
    *(chat(f"{FILE}::test_some_logprobs_chat [{model}]", {"#choices.0.logprobs.content.0.top_logprobs": 5},
        model=model, max_completion_tokens=5, logprobs=True, top_logprobs=5) for model in MODELS),
    *(chat(f"{FILE}::test_too_many_chat_logprobs [{model}, {count}, stream {stream}]", refused(),
        lambda reply: bool(reply.again(logprobs=None, top_logprobs=None, stream=False)),
        model=model, max_completion_tokens=10, logprobs=True, top_logprobs=count, stream=stream)
        for model in MODELS for count, stream in ((21, True), (30, False))),
    *(chat(f"{FILE}::test_prompt_logprobs_chat [{count}]", {"prompt_logprobs": some}, messages=TALK, prompt_logprobs=count) for count in (1, 0)),
    chat(f"{FILE}::test_prompt_logprobs_chat [-1]", refused("prompt_logprobs"), messages=TALK, prompt_logprobs=-1),
    chat(f"{FILE}::test_prompt_logprobs_chat [None]", {"prompt_logprobs": absent}, messages=TALK),
    chat(f"{FILE}::test_more_than_one_prompt_logprobs_chat", _alternatives_by_number, messages=TALK, prompt_logprobs=1),
    *(chat(f"{FILE}::test_single_chat_session [{model}]", *SESSION, model=model, max_completion_tokens=5, logprobs=True, top_logprobs=5)
        for model in MODELS),
    *(chat(f"{FILE}::test_chat_streaming [{model}]", streams_as_whole, model=model, max_completion_tokens=10, stream=True) for model in MODELS),
    differs(FINISH, chat(f"{FILE}::test_chat_streaming [the last chunk's text]", last_chunk_has_text, max_completion_tokens=10, stream=True),
        finishes_apart),
    chat(f"{FILE}::test_chat_completion_stream_options [no usage]", no_usage, max_completion_tokens=10, stream=True,
        stream_options={"include_usage": False}),
    chat(f"{FILE}::test_chat_completion_stream_options [usage]", usage_last, max_completion_tokens=10, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": False}),
    *(chat(f"{FILE}::test_chat_completion_stream_options [not streamed, {value}]", refused("stream_options"), max_completion_tokens=10, stream=False,
        stream_options={"include_usage": value}) for value in (None, True)),
    chat(f"{FILE}::test_chat_completion_stream_options [usage in each chunk]", _rising_usage, max_completion_tokens=10, min_tokens=10, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}),
    differs("A parameter that nobody knows is refused by name: left out in silence it would change what the request means.",
        chat(f"{FILE}::test_chat_completion_stream_options [an unknown parameter]", ok, max_completion_tokens=10, min_characters=10, stream=True),
        refused("min_characters")),
    *(chat(f"{FILE}::test_structured_outputs_choice_chat [{turn}]", _all_texts(CHOICES.__contains__), messages=messages, max_completion_tokens=12,
        temperature=0.7, structured_outputs={"choice": CHOICES})
        for turn, messages in (("first", TALK[:2]), ("second", [*TALK[:2], message("Rust", "assistant"), message("I disagree")]))),
    chat(f"{FILE}::test_structured_outputs_json_chat", _of_schema(SCHEMA), max_completion_tokens=500, structured_outputs={"json": SCHEMA}),
    chat(f"{FILE}::test_structured_outputs_regex_chat", _all_texts(re.compile(ADDRESS).fullmatch), max_completion_tokens=20,
        structured_outputs={"regex": ADDRESS}),
    chat(f"{FILE}::test_structured_outputs_type_error", refused("regex"), structured_outputs={"regex": {"1": "Python", "2": "C++"}}),
    chat(f"{FILE}::test_structured_outputs_choice_chat_logprobs",
        lambda reply: all(top["logprob"] >= -9999 for top in reply.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]),
        max_completion_tokens=12, logprobs=True, top_logprobs=5, structured_outputs={"choice": CHOICES}),
    chat(f"{FILE}::test_response_format_json_object", _of_schema({"type": "object"}), model="initech/json",
        messages=[message("what is one and one")], response_format={"type": "json_object"}),
    chat(f"{FILE}::test_response_format_json_schema", _of_schema({"type": "object", "required": ["result"]}), max_completion_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "foo_test", "schema": {
            "type": "object", "properties": {"result": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["result"],
            "additionalProperties": False}}}),
    chat(f"{FILE}::test_response_format_text", {"choices.0.message.content": some}, max_completion_tokens=10, response_format={"type": "text"}),
    chat(f"{FILE}::test_extra_fields_allowed", {"choices.0.message.content": some}, messages=[message("what is 1+1?") | {"extra_field": "0"}], seed=0),
    chat(f"{FILE}::test_complex_message_content", {"choices.0.message.content": "one and one"},
        messages=[message([{"type": "text", "text": "one and one"}])], seed=0),
    chat(f"{FILE}::test_custom_role", _same_with_parts, messages=[message("what is 1+1?", "my-custom-role"), message("hello")], seed=0),
    *(chat(f"{FILE}::test_long_seed [{seed}]", refused("seed"), seed=seed) for seed in (-(2**63) - 1, 2**63)),
    chat(f"{FILE}::test_chat_completion_n_parameter_non_streaming", _n_contents, max_completion_tokens=20, n=3, seed=1, **ODD),
    chat(f"{FILE}::test_chat_completion_n_parameter_streaming", _streams_two,
        max_completion_tokens=15, n=2, stream=True, **ODD),
    chat(f"{FILE}::test_chat_completion_n_with_seed", _n_contents, max_completion_tokens=10, n=2, seed=42, **ODD),
    chat(f"{FILE}::test_chat_completion_n_equals_1", {"#choices": 1, "choices.0.index": 0, "choices.0.message.content": some},
        max_completion_tokens=10, n=1),
    *(chat(f"entrypoints/openai/chat_completion/test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message [{echo}]", _goes_on(echo=echo),
        {"id": some, "#choices": 1}, messages=[message("tell me a common saying", "assistant"), message("An apple a day")],
        echo=echo, continue_final_message=True, add_generation_prompt=False, max_tokens=20) for echo in (True, False)),
    chat("entrypoints/openai/chat_completion/test_chat_error.py::test_json_schema_response_format_missing_schema", refused("json_schema"),
        response_format={"type": "json_schema"}),
    *(chat(f"entrypoints/openai/chat_completion/test_chat_error.py::test_system_message_accepts_text{kind}", ok,
        messages=[message(content, "system"), message("hello")])
        for kind, content in (("", "You are helpful."), ("_array", [{"type": "text", "text": "You are helpful."}]))),
    chat("entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_valid", {"choices.0.message.content": some},
        max_tokens=5, logit_bias={str(VOCABULARY - 1): 1.0}),
    *(chat(f"entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_{name}", refused(*words), max_tokens=5, logit_bias=biases)
        for name, biases, words in (
            ("invalid", {str(VOCABULARY + 1): 1.0}, (str(VOCABULARY + 1), str(VOCABULARY))),
            ("non_integer_key", {"not_a_token_id": 50}, ("not_a_token_id", "logit_bias")),
            ("non_numeric_value", {"1": "not_a_number"}, ("logit_bias",)),
            ("multiple_non_integer_keys", {"bad1": 50.0, "bad2": 20.0}, ("bad1", "bad2")),
        )),
    chat("entrypoints/openai/chat_completion/test_chat_stop_token_ids_validation.py::test_chat_stop_token_ids_valid", ok, max_tokens=5,
        stop_token_ids=[VOCABULARY - 1]),
    chat("entrypoints/openai/chat_completion/test_chat_stop_token_ids_validation.py::test_chat_stop_token_ids_out_of_vocab",
        refused(str(VOCABULARY + 1), str(VOCABULARY)), max_tokens=5, stop_token_ids=[VOCABULARY + 1]),
    chat("entrypoints/openai/chat_completion/test_chat_stop_token_ids_validation.py::test_chat_stop_token_ids_negative", refused(), max_tokens=5, stop_token_ids=[-1]),
    differs("Runners report the sampled and the likeliest tokens, no others.",
        chat("entrypoints/openai/chat_completion/test_logprob_token_ids.py::test_logprob_token_ids_returns_requested_ids", ok, max_tokens=1, logprobs=True,
            top_logprobs=3, logprob_token_ids=[10, 20, 30], return_tokens_as_token_ids=True), refused("logprob_token_ids")),
    chat("entrypoints/openai/chat_completion/test_logprob_token_ids.py::test_logprob_token_ids_default_behavior_unchanged",
        lambda reply: all(top["logprob"] <= 0 for top in reply.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]),
        {"#choices.0.logprobs.content.0.top_logprobs": 5}, max_tokens=1, logprobs=True, top_logprobs=5),
    *(post(f"entrypoints/openai/chat_completion/test_non_object_body_validation.py::test_chat_completion_request_rejects_non_object_body [{body}]",
        CHATS, body.encode(), refused()) for body in ('"this is not valid json{{{"', '["not", "an", "object"]', "42", "null")),
    chat("entrypoints/openai/chat_completion/test_non_object_body_validation.py::test_chat_completion_request_cache_salt_still_validated_on_dict",
        refused("cache_salt"), cache_salt=""),
    completion("entrypoints/pooling/test_cache_salt_validation.py::test_pooling_matches_completions_on_empty_cache_salt [completions]",
        refused("cache_salt"), cache_salt=""),
    *(check(f"entrypoints/openai/chat_completion/test_thinking_token_budget_validation.py::{kind} [{value}]", refused("thinking_token_budget"), thinking_token_budget=value)
        for check, kind, values in ((chat, "test_chat_completion_request_rejects_invalid_thinking_token_budget", (-2, 0.6, 10.5)),
            (completion, "test_completion_request_rejects_invalid_thinking_token_budget", (0.6, 3.14, -2))) for value in values),
    *(check(f"entrypoints/openai/chat_completion/test_thinking_token_budget_validation.py::{kind}_accepts_{name}", ok, thinking_token_budget=value)
        for check, kind in ((chat, "test_chat_completion_request"), (completion, "test_completion_request"))
        for name, value in (("minus_one_as_unlimited", -1), ("valid_thinking_token_budget", 10))),
    *(completion(f"{OLDER}::test_echo_stream_completion [echo {echo}]", lambda reply: ("Hello, my name is" in reply.json["choices"][0]["text"]) is reply.sent["echo"],
        {"choices.0.finish_reason": "length"}, max_tokens=10, echo=echo) for echo in (False, True)),
    *(completion(f"{OLDER}::test_echo_stream_completion [echo {echo}, streamed]", streams_as_whole,
        lambda reply: ("Hello, my name is" in reply.streamed_text()) is reply.sent["echo"], max_tokens=10, echo=echo, stream=True)
        for echo in (False, True)),
    completion(f"{OLDER}::test_logits_bias [exclusive]", lambda reply: len(set(reply.json["choices"][0]["token_ids"])) == 1,
        max_tokens=5, seed=42, logit_bias={"20": 100}, return_token_ids=True),
    completion(f"{OLDER}::test_logits_bias [ban]", lambda reply: reply.again(logit_bias={
        str(token): -100 for token in reply.json["choices"][0]["token_ids"]}).json["choices"][0]["text"] != reply.json["choices"][0]["text"],
        max_tokens=5, return_token_ids=True),
    completion(f"{OLDER}::test_allowed_token_ids", lambda reply: reply.json["choices"][0]["token_ids"][0] in (20, 21, 22),
        {"#choices.0.logprobs.tokens": 1}, max_tokens=1, seed=42, allowed_token_ids=[20, 21, 22], logprobs=1, return_token_ids=True),
]  # fmt: skip


# ---- many chats in one request

BATCH = CHATS + "/batch"
TWO = [[message("alpha")], [message("beta")]]


def _many(test: str, *asserts: Expected, **body: Any) -> Check:
    name = f"entrypoints/openai/chat_completion/test_batched_chat_completions.py::{test}"
    return post(name, BATCH, {"model": BASE, "messages": TWO, "temperature": 0, **body}, *asserts)


def _tokens_are(ids: bool) -> Expected:
    def are(reply: Reply) -> bool:
        entries = reply.json["choices"][0]["logprobs"]["content"]
        names = [one["token"] for entry in entries for one in (entry, *entry["top_logprobs"])]
        return bool(names) and all(name.startswith("token_id:") is ids for name in names)

    return are


BATCHED = [
    _many("test_batched_chat_completions", {"#choices": 2, "choices.0.message.content": "alpha", "choices.1.message.content": "beta",
        "choices.0.index": 0, "choices.1.index": 1}),
    _many("test_batched_chat_completions_with_json_schema", {"#choices": 2}, _of_schema({"required": ["answer"]}), response_format={
        "type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": {
            "type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"], "additionalProperties": False}}}),
    _many("test_batched_chat_completions_logprobs_not_token_id_placeholders", _tokens_are(False), messages=TWO[:1], logprobs=True, top_logprobs=1,
        return_token_ids=True),
    _many("test_batched_chat_completions_return_tokens_as_token_ids", _tokens_are(True), messages=TWO[:1], logprobs=True, top_logprobs=1,
        return_tokens_as_token_ids=True),
    differs("Runners report the sampled and the likeliest tokens, no others.",
        _many("test_batched_chat_completions_logprob_token_ids", ok, messages=TWO[:1], max_tokens=1, logprobs=True, top_logprobs=5,
            logprob_token_ids=[10, 20, 30], return_tokens_as_token_ids=True), refused("logprob_token_ids")),
    _many("test_batched_echo_does_not_prepend_user_prompt", {"choices.0.message.content": "alpha"}, messages=TWO[:1], echo=True),
    _many("test_batched_echo_prepends_matching_assistant_prefix", lambda reply: reply.json["choices"][0]["message"]["content"].startswith("PREFIX "),
        messages=[[message("hello", "assistant"), message("PREFIX ")]], echo=True, add_generation_prompt=False, continue_final_message=True),
]  # fmt: skip

# ---- tools: the demo's model repeats the question, so that a question in the form of a call is answered by this call

ASKING = [
    message("Hi! How are you?"),
    message("I am doing well!", "assistant"),
    message("the weather in Berlin and the forecast"),
]
ONE_CALL = (
    '<tool_call>\n{"name": "get_current_weather", "arguments": {"city": "Dallas", "unit": "celsius"}}\n</tool_call>'
)
BARE_CALL = '<tool_call>{"name": "get_current_weather", "arguments": {}}</tool_call>'
TWO_CALLS = f"{BARE_CALL} {BARE_CALL}"
BARE = {
    "type": "function",
    "function": {"name": "get_current_weather", "parameters": {"type": "object", "properties": {}}},
}
RESULT = [message("hello"), {"role": "assistant", "content": "", "tool_calls": [CALL]},
          {"role": "tool", "tool_call_id": CALL["id"], "content": "98"}, message("it is 98")]  # fmt: skip
RESULTS = [*RESULT[:3], {"role": "tool", "tool_call_id": "call_1123456789", "content": "78"}, RESULT[3]]
TWO_WAYS: list[tuple[str, Any, dict[str, Any]]] = [
    ("whole", _no_calls, {}),
    ("streamed", streams_as_whole, {"stream": True}),
]
USES = "entrypoints/openai/chat_completion/test_completion_with_function_calling.py"
RULES = "tool_use/test_chat_completion_request_validations.py"
NULLS = "entrypoints/openai/chat_completion/test_tool_choice_null.py"


def _tools(test: str, *asserts: Expected, **body: Any) -> Check:
    return chat(test, *asserts, **{"messages": ASKING, "tools": [WEATHER, FORECAST], "max_tokens": 200, **body})


NOTHING = (
    "What asks for nothing is taken as absent: clients send `tools: []` or `tool_choice: auto` where there is no tool."
)
TOOL_CHECKS = [
    *(_tools(f"{USES}::test_function_tool_use [{name}{how}]", check, tool_choice=choice, messages=messages, **more)
        for name, choice, messages in (("auto", "auto", [message(ONE_CALL)]), ("required", "required", ASKING), ("named", NAMED, ASKING))
        for how, check, more in (("", _some_call, {}), (", streamed", _streams_calls, {"stream": True}))),
    *(chat(f"{USES}::test_no_args_tool_call [{arguments!r}]", {"choices.0.message.content": some}, max_completion_tokens=128, messages=[
        message("What time is it now?"), {"role": "assistant", "content": None, "tool_calls": [
            {**CALL, "function": {"name": "get_current_time", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "12 o'clock"}]) for arguments in ("{}", "")),
    _tools(f"{USES}::test_named_tool_use [whole]", _called("dummy_function_name"), {"choices.0.message.content": lambda text: not text},
        tools=[PROFILE], tool_choice={"type": "function", "function": {"name": "dummy_function_name"}}, max_tokens=500),
    _tools(f"{USES}::test_named_tool_use [streamed]", _streams_calls, stream=True,
        tools=[PROFILE], tool_choice={"type": "function", "function": {"name": "dummy_function_name"}}, max_tokens=500),
    *(_tools(f"{USES}::test_inconsistent_tool_choice_and_tools [{name}]", refused("tool_choice"), tools=tools, tool_choice=choice)
        for name, tools, choice in (("no tools", None, NAMED), ("another tool", [PROFILE], NAMED), ("nothing", [PROFILE], {}))),
    *(_tools(f"{USES}::test_max_tokens_with_tool_choice_required [{name}]",
        {"choices.0.finish_reason": "length", "choices.0.message.content": lambda text: not text, "choices.0.message.tool_calls": lambda calls: not calls},
        tool_choice=choice, max_tokens=None, max_completion_tokens=1) for name, choice in (("required", "required"), ("named", NAMED))),
    chat(f"{RULES}::test_chat_completion_request_with_no_tools [absent]", _no_calls),
    chat(f"{RULES}::test_chat_completion_request_with_no_tools [null]", _no_calls, tools=None),
    differs(NOTHING,
        chat(f"{RULES}::test_chat_completion_request_with_no_tools [empty]", refused("tools"), tools=[]), _no_calls),
    *(chat(f"{RULES}::test_chat_completion_request_with_tool_choice_but_no_tools [required{name}]", refused("tool_choice"),
        tool_choice="required", **more) for name, more in (("", {}), (", null", {"tools": None}))),
    *(differs(NOTHING, chat(f"{RULES}::test_chat_completion_request_with_tool_choice_but_no_tools [auto{name}]", refused("tool_choice"),
        tool_choice="auto", **more), _no_calls) for name, more in (("", {}), (", null", {"tools": None}))),
    chat(f"{RULES}::test_reasoning_content_normalized_to_reasoning", ok, messages=[
        message("What is 2+2?"), message("4", "assistant") | {"reasoning_content": "2+2 is 4"}, message("Are you sure?")]),
    chat(f"{RULES}::test_reasoning_takes_precedence_over_reasoning_content", ok, messages=[
        message("What is 2+2?"), message("4", "assistant") | {"reasoning_content": "a", "reasoning": "b"}]),
    _tools(f"{RULES}::test_structured_outputs_with_named_tool_choice_rejected", refused(), tool_choice=NAMED, structured_outputs={"json": {"type": "object"}}),
    _tools(f"{RULES}::test_structured_outputs_with_auto_tool_choice_allowed", ok, tool_choice="auto", structured_outputs={"json": SCHEMA}),
    chat(f"{RULES}::test_multiple_structured_outputs_rejected", refused(), structured_outputs={"json": {"type": "object"}, "regex": ".*"}),
    chat(f"{RULES}::test_invalid_structured_outputs_type_rejected", refused("structured_outputs"), structured_outputs=3),
    _tools(f"{NULLS}::test_null_tool_choice_defaults_to_auto_like_an_absent_one", _some_call, messages=[message(ONE_CALL)], tool_choice=None),
    chat(f"{NULLS}::test_null_tool_choice_without_tools_matches_an_absent_one", _no_calls, tool_choice=None),
    chat(f"{NULLS}::test_null_tool_choice_does_not_conflict_with_structured_outputs", _of_schema(SCHEMA), max_tokens=500,
        structured_outputs={"json": SCHEMA}, tool_choice=None),
    _tools(f"{NULLS}::test_invalid_tool_choice_is_still_rejected [bogus]", refused("tool_choice"), tool_choice="bogus"),
    _tools(f"{NULLS}::test_explicit_none_tool_choice_is_untouched", lambda reply: not reply.json["choices"][0]["message"].get("tool_calls"),
        messages=[message(ONE_CALL)], tool_choice="none"),
    _tools("tool_use/test_tool_calls.py::test_tool_call_and_choice [whole]", _called("get_current_weather"),
        {"choices.0.finish_reason": "tool_calls", "choices.0.message.role": "assistant"}, messages=[message(ONE_CALL)]),
    _tools("tool_use/test_tool_calls.py::test_tool_call_and_choice [streamed]", _streams_calls, messages=[message(ONE_CALL)], stream=True),
    *(_tools(f"tool_use/{name}_with_results [{kind}]", check, messages=messages, **more)
        for name, messages in (("test_tool_calls.py::test_tool_call", RESULT), ("test_parallel_tool_calls.py::test_parallel_tool_calls", RESULTS))
        for kind, check, more in TWO_WAYS),
    _tools("tool_use/test_parallel_tool_calls.py::test_parallel_tool_calls [whole]", _called("get_current_weather", "get_current_weather"),
        {"choices.0.finish_reason": "tool_calls"}, messages=[message(TWO_CALLS)], tools=[BARE], max_tokens=300),
    _tools("tool_use/test_parallel_tool_calls.py::test_parallel_tool_calls [streamed]", _streams_calls, messages=[message(TWO_CALLS)],
        tools=[BARE], max_tokens=300, stream=True),
    *(chat(f"tool_use/test_chat_completions.py::test_chat_completion_{name} [{kind}]", check, max_completion_tokens=150, **tools, **more)
        for name, tools in (("without_tools", {}), ("with_tools", {"tools": [WEATHER]})) for kind, check, more in TWO_WAYS),
    _tools("tool_use/test_structured_outputs_tool_calling.py::test_tool_calling_survives_strict_structured_outputs", _called("get_current_weather"),
        {"choices.0.finish_reason": "tool_calls"}, tool_choice="required", parallel_tool_calls=False,
        tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]),
    _tools("tool_use/test_tool_choice_required_json_schema.py::test_guided_json", _some_call, tool_choice="required"),
    *(_tools(f"tool_use/test_tool_choice_required_json_schema.py::test_guided_json_without_parameters [{name}]",
        {"choices.0.message.tool_calls.0.function.arguments": lambda text: json.loads(text) == {}}, tool_choice="required", parallel_tool_calls=False,
        tools=[{"type": "function", "function": {"name": "get_current_weather", "parameters": given}}]) for name, given in (("null", None), ("empty", {}))),
]  # fmt: skip
CHECKS = [*CHAT_CHECKS, *BATCHED, *TOOL_CHECKS]
