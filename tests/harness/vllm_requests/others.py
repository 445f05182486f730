"""vLLM's tests of models, tokenizers, operations, errors, responses and messages."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from harness.vllm_requests.chats import ONE_CALL, SCHEMA, WEATHER
from harness.vllm_requests.checks import (
    ADAPTER,
    BASE,
    CHATS,
    CONTEXT,
    Check,
    Expected,
    Reply,
    Server,
    absent,
    at_least,
    chat,
    completion,
    differs,
    get,
    message,
    ok,
    post,
    refused,
    some,
)  # fmt: skip
from harness.vllm_requests.completions import NO_BEAMS
from harness.waiting import wait_until

ADAPTERS = ("acme/upper", "acme/reverse-words", "globex/initials", "globex/digits", "initech/json", "initech/cipher")
PROMPTS = ["hello there", "foo bar bazz buzz"]


def _lineage(reply: Reply) -> bool:
    models = {one["id"]: one for one in reply.json["data"]}
    base = models.pop(BASE)
    return (
        base["parent"] is None and set(models) == set(ADAPTERS) and {one["parent"] for one in models.values()} == {BASE}
    )


def _adapters_at_once(reply: Reply) -> bool:
    """Three times each, at once: as many answers as prompts."""

    def asked(model: str) -> list[int]:
        return [len(reply.again(model=model).json["choices"]) for _ in range(3)]

    with ThreadPoolExecutor(len(ADAPTERS)) as pool:
        return all(counts == [2, 2, 2] for counts in pool.map(asked, ADAPTERS))


MODEL_CHECKS = [
    get("entrypoints/serve/lora/test_lora_adapters.py::test_static_lora_lineage [parents]", "/v1/models", _lineage),
    get("entrypoints/serve/lora/test_lora_adapters.py::test_static_lora_lineage [root]", "/v1/models", lambda reply: all(one["root"] for one in reply.json["data"])),
    completion("entrypoints/serve/lora/test_lora_adapters.py::test_multiple_lora_adapters", _adapters_at_once, prompt=PROMPTS, max_tokens=5),
    differs(NO_BEAMS, completion("entrypoints/serve/lora/test_lora_adapters.py::test_beam_search_with_lora_adapters", {"#choices": 2}, model=ADAPTER,
        prompt=PROMPTS, max_tokens=5, use_beam_search=True), refused("use_beam_search")),
    get("entrypoints/pooling/embed/test_online.py::test_basic", "/v1/models", {"data.0.id": BASE}),
]  # fmt: skip

# ---- tokenizers

FILE = "entrypoints/serve/tokenize/test_tokenization.py"
TALK = [message("Hi there!"), message("Nice to meet you!", "assistant"), message("Can I ask a question? vllm1")]


def _tokens_of(text: str) -> Expected:
    """A character is a token of the demo's model; `<s>` stands before a text with special tokens."""

    def are(reply: Reply) -> bool:
        plain = reply.server.send("POST", "/detokenize", {"model": BASE, "tokens": reply.json["tokens"]}).json["prompt"]
        return _counted(reply) and text in plain

    return are


def _counted(reply: Reply) -> bool:
    found = reply.json
    return (
        found["count"] == len(found["tokens"]) > 0 and found["max_model_len"] == CONTEXT and found["token_strs"] is None
    )


def _is_typed(reply: Reply) -> bool:
    kinds: dict[str, Any] = {"add_bos_token": bool, "bos_token": str, "eos_token": str, "pad_token": str, "chat_template": str,
        "model_max_length": int, "additional_special_tokens": list, "added_tokens_decoder": dict}  # fmt: skip
    return ok(reply) and all(
        isinstance(reply.json[name], kind) for name, kind in kinds.items() if reply.json.get(name) is not None
    )


def _strings(reply: Reply) -> bool:
    return len(reply.json["token_strs"]) == reply.json["count"] and "This is a token" in "".join(
        reply.json["token_strs"]
    )


def _tokenize(test: str, *asserts: Expected, **body: Any) -> Check:
    return post(f"{FILE}::{test}", "/tokenize", {"model": BASE, **body}, *asserts)


CHAT_FORMS = [
    (add, special, go_on) for add, special, go_on in itertools.product((False, True), repeat=3) if not (add and go_on)
]
TOKEN_CHECKS = [
    *(_tokenize(f"test_tokenize_completions [special {special}]", _tokens_of("This is a test prompt."), prompt="This is a test prompt.",
        add_special_tokens=special) for special in (False, True)),
    *(_tokenize(f"test_tokenize_chat [generation {add}, special {special}, continue {go_on}]", _counted, add_generation_prompt=add,
        add_special_tokens=special, continue_final_message=go_on, messages=[*TALK, message("Sure,")] if go_on else TALK)
        for add, special, go_on in CHAT_FORMS),
    *(_tokenize(f"test_tokenize_chat_with_tools [generation {add}, special {special}, continue {go_on}]", _counted, add_generation_prompt=add,
        add_special_tokens=special, continue_final_message=go_on, messages=[*TALK, message("Sure,")] if go_on else TALK,
        tools=[WEATHER]) for add, special, go_on in CHAT_FORMS),
    _tokenize("test_tokenize_with_return_token_strs", _strings, prompt="This is a token", return_token_strs=True),
    post(f"{FILE}::test_detokenize", "/detokenize", {"model": BASE, "tokens": [20, 21, 22]},
        lambda reply: reply.server.send("POST", "/tokenize", {"model": BASE, "prompt": reply.json["prompt"], "add_special_tokens": False})
        .json["tokens"] == [20, 21, 22]),
    get(f"{FILE}::test_tokenizer_info_basic", "/tokenizer_info", {"tokenizer_class": some}),
    get(f"{FILE}::test_tokenizer_info_schema", "/tokenizer_info", _is_typed),
    get(f"{FILE}::test_tokenizer_info_consistency_with_tokenize", "/tokenizer_info",
        lambda reply: (reply.json.get("model_max_length") or CONTEXT) >= CONTEXT),
    get(f"{FILE}::test_tokenizer_info_chat_template", "/tokenizer_info", {"chat_template": some}),
]  # fmt: skip

# ---- operations and errors

NAMES = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits num_preemptions_total
prompt_tokens_total generation_tokens_total request_success_total request_prompt_tokens_bucket request_generation_tokens_bucket
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_inference_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket iteration_tokens_total
cache_config_info request_params_max_tokens_bucket""".split()


def _has_metrics(names: list[str]) -> Expected:
    return lambda reply: all(f"vllm:{name}" in reply.response.text for name in names)


def _sample(server: Server, name: str) -> float:
    text = server.send("GET", "{metrics}").response.text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


def _counts_ten(reply: Reply) -> bool:
    """Ten requests of ten tokens more."""
    names = ["request_success_total", "generation_tokens_total"]
    names += ["time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"]
    before = {name: _sample(reply.server, name) for name in names}
    prompts = [reply.again().json["usage"]["prompt_tokens"] for _ in range(10)]
    return bool(prompts) and [_sample(reply.server, name) - before[name] for name in names] == [10, 100, 10, 10]


def _ends_what_is_left(reply: Reply) -> bool:
    """Clients that give up leave nothing behind that runs to its end: not all of their tokens are made."""
    server, clients, tokens = reply.server, 20, 900
    before = _sample(server, "generation_tokens_total")

    def gives_up(_: int) -> bool:
        """Leave at the first line of an answer: by no clock, which a busy machine would decide."""
        asked = {**reply.sent, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", server.url + CHATS, json=asked, timeout=60.0) as answer:
            return answer.status_code == 200 and any(answer.iter_lines())

    with ThreadPoolExecutor(clients) as pool:
        left = all(pool.map(gives_up, range(clients)))
    wait_until(lambda: _sample(server, "num_requests_running") == 0, "nothing runs any more")
    made = _sample(server, "generation_tokens_total") - before
    return left and made < clients * tokens and len(reply.again().json["choices"]) == 1


def _bounded(reply: Reply) -> bool:
    return reply.status == 400 and len(reply.response.content) < 32_000


def _no_allowance(reply: Reply) -> bool:
    return "access-control-allow-origin" not in reply.response.headers


PARAMETER = "A parameter is named as the caller wrote it, as OpenAI does; vLLM puts `body.` before it."
HANDLER = "entrypoints/serve/exception_handling/test_validation_exception_handler.py"
OPERATIONS = [
    get("entrypoints/instrumentator/test_basic.py::test_show_version", "/version", {"version": some}),
    get("entrypoints/instrumentator/test_basic.py::test_check_health", "/health", ok),
    chat("entrypoints/instrumentator/test_basic.py::test_request_cancellation", _ends_what_is_left, max_tokens=10),
    post("entrypoints/instrumentator/test_basic.py::test_request_wrong_content_type", CHATS, {"model": BASE, "messages": TALK},
        lambda reply: reply.status >= 400, content_type="application/x-www-form-urlencoded"),
    get("entrypoints/instrumentator/test_basic.py::test_server_load", "/load", {"server_load": 0}),
    get("entrypoints/instrumentator/test_metrics.py::test_metrics_exist", "{metrics}", _has_metrics(NAMES)),
    differs("A runner runs sequences: it does not know how many choices their request has.",
        get("entrypoints/instrumentator/test_metrics.py::test_metrics_exist [n]", "{metrics}", _has_metrics(["request_params_n_bucket"])), ok),
    completion("entrypoints/instrumentator/test_metrics.py::test_metrics_counts", _counts_ten, max_tokens=10, ignore_eos=True),
    get("entrypoints/serve/middleware/test_x_request_id.py::test_response_has_one_request_id [provided]", "/health",
        lambda reply: reply.response.headers.get_list("x-request-id") == ["caller"], x_request_id="caller"),
    get("entrypoints/serve/middleware/test_x_request_id.py::test_response_has_one_request_id [generated]", "/health",
        lambda reply: len(reply.response.headers.get_list("x-request-id")) == 1),
    get("entrypoints/serve/middleware/test_cors_middleware.py::test_default_origins_prevent_cross_origin_reads_and_json_requests [read]", "/v1/models",
        ok, _no_allowance, origin="http://attacker.example"),
    Check("entrypoints/serve/middleware/test_cors_middleware.py::test_default_origins_prevent_cross_origin_reads_and_json_requests [preflight]", "OPTIONS",
        CHATS, None, (lambda reply: reply.status >= 400, _no_allowance), {"origin": "http://attacker.example", "access-control-request-method": "POST"}),
    *(differs(PARAMETER, post(f"{HANDLER}::test_param_falls_back_to_loc [{name}]", CHATS, {"model": BASE, **body},
        lambda reply: reply.json["error"]["param"] == "body.messages"),
        refused(), lambda reply: reply.json["error"]["param"] == "messages")
        for name, body in (("missing-field", {}), ("wrong-type", {"messages": "not-a-list"}))),
    chat(f"{HANDLER}::test_handler_strips_endpoint_file_context", refused("messages"), lambda reply: ".py" not in reply.response.text,
        messages="not-a-list"),
    post(f"{HANDLER}::test_many_errors_are_capped", "/v1/responses", {"model": BASE, "input": [{"type": "input_text", "text": 1}] * 500}, _bounded),
    chat(f"{HANDLER}::test_container_input_is_described_not_echoed", _bounded, lambda reply: "payload" not in reply.response.text,
        max_tokens=[{"text": "payload"}] * 300),
    chat(f"{HANDLER}::test_long_string_input_is_truncated", _bounded, lambda reply: len(reply.response.text) < 4000, max_tokens="A" * 100_000),
]  # fmt: skip

# ---- responses

PATH = "/v1/responses"
BASIC, SIMPLE = "v1/entrypoints/openai/serving_responses/test_basic.py", "entrypoints/openai/responses/test_simple.py"
STATE, FUNCTIONS = "entrypoints/openai/responses/test_stateful.py", "entrypoints/openai/responses/test_function_call.py"
RULES = "tool_use/test_responses_request_validations.py"
FLAT = {"type": "function", "name": "get_current_weather", "parameters": WEATHER["function"]["parameters"]}
NAMED_FLAT = {"type": "function", "name": "get_current_weather"}
COMPLETED = {"status": "completed"}
BACKGROUND = "A response is answered while its caller waits; `/v1/batches` works in the background."


def _respond(test: str, *asserts: Expected, **body: Any) -> Check:
    return post(test, PATH, {"model": BASE, "input": "hello", "temperature": 0, **body}, *asserts)


def _says(text: str) -> Expected:
    return lambda reply: reply.json["output"][-1]["content"][0]["text"] == text


def _event_kinds(reply: Reply) -> list[str]:
    return [event["type"] for event in reply.events]


def _events_are_whole(reply: Reply) -> bool:
    text = "".join(event["delta"] for event in reply.events if event["type"] == "response.output_text.delta")
    first, last = reply.events[0], reply.events[-1]
    final = "".join(
        part["text"] for item in last["response"]["output"] if item["type"] == "message" for part in item["content"]
    )
    return first["type"] == "response.created" and last["type"] == "response.completed" and text == final != ""


def _events_nest(reply: Reply) -> bool:
    """What is opened (`added`, the first `delta`) is closed by its `done`, the innermost first."""
    opened = list[str]()
    for kind in _event_kinds(reply):
        stem, _, what = kind.rpartition(".")
        if what in ("added", "created"):
            opened.append(stem)
        elif what == "delta" and opened[-1] != kind:
            opened.append(kind)
        elif (what == "done" and opened[-1] == f"{stem}.delta") or (
            what in ("done", "completed") and opened[-1] == stem
        ):
            opened.pop()
    return opened == [] and len(reply.events) > 3


def _streamed_call(reply: Reply) -> bool:
    added = [event["item"] for event in reply.events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in reply.events if event["type"] == "response.output_item.done"]
    parts = "".join(
        event["delta"] for event in reply.events if event["type"] == "response.function_call_arguments.delta"
    )
    call, last = (next(item for item in items if item["type"] == "function_call") for items in (added, done))
    return (
        call["name"] == last["name"] == "get_current_weather"
        and parts == last["arguments"]
        and "city" in json.loads(parts)
    )


def _calls(reply: Reply) -> bool:
    calls = [item for item in reply.json["output"] if item["type"] == "function_call"]
    return bool(calls) and all("city" in json.loads(call["arguments"]) for call in calls)


def _goes_on_after_a_call(reply: Reply) -> bool:
    call = reply.json["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}
    other = reply.again(input=[message("the weather"), call, result], tools=None, tool_choice=None)
    return _calls(reply) and other.json["output"][-1]["content"][0]["text"]


def _kept(reply: Reply) -> Reply:
    return reply.server.send("GET", f"{PATH}/{reply.json['id']}")


def _cannot_be_cancelled(reply: Reply) -> bool:
    return reply.server.send("POST", f"{PATH}/{reply.json['id']}/cancel", {}).status == 400


def _is_continued(reply: Reply) -> bool:
    first, second = (reply.again(input=text, previous_response_id=reply.json["id"]).json for text in ("one", "two"))
    third = reply.again(input="three", previous_response_id=first["id"]).json
    return [one["output"][-1]["content"][0]["text"] for one in (first, second, third)] == ["one", "two", "three"]


def _streamed_logprobs(reply: Reply) -> bool:
    deltas = [event for event in reply.events if event["type"] == "response.output_text.delta"]
    found = [one for event in deltas for one in event["logprobs"]]
    return (
        bool(deltas)
        and all(event["logprobs"] for event in deltas)
        and all(one["logprob"] <= 0 and 0 < len(one["top_logprobs"]) <= 3 for one in found)
    )


HISTORY = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "be short"}]}]
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
REASONED = {"type": "reasoning", "summary": [], "encrypted_content": None}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
RESPONSES = [
    _respond(f"{BASIC}::test_simple_input", COMPLETED, {"output.0.type": "message"}, _says("hello")),
    _respond(f"{BASIC}::test_instructions", COMPLETED, _says("hello"), instructions="Finish with QED."),
    _respond(f"{BASIC}::test_chat", COMPLETED, _says("by two"), input=[message("QED.", "system"), message("5 * 3?"), message("15.", "assistant"), message("by two")]),
    _respond(f"{BASIC}::test_chat_with_input_type", COMPLETED, input=[message([{"type": "input_text", "text": "Hello!"}])]),
    _respond(f"{BASIC}::test_logprobs", {"#output.0.content.0.logprobs.0.top_logprobs": 5}, top_logprobs=5, **LOGPROBS),
    _respond(f"{BASIC}::test_streaming", _events_are_whole, stream=True),
    _respond(f"{SIMPLE}::test_basic", {"status": "completed", "incomplete_details": absent}, reasoning={"effort": "none"}),
    differs("The tokens of prompts and answers are those of `return_token_ids`, in chats and completions.",
        _respond(f"{SIMPLE}::test_enable_response_messages", {"input_messages": some}, enable_response_messages=True), refused("enable_response_messages")),
    _respond(f"{SIMPLE}::test_reasoning_item", COMPLETED, input=[message("hello"), REASONED | {"id": "lol", "content": [
        {"type": "reasoning_text", "text": "We need to respond."}]}]),
    _respond(f"{SIMPLE}::test_input_history_openai_shape_e2e", COMPLETED, input=[
        *HISTORY, SAID | {"id": "msg_1", "status": "completed"}, REASONED | {"id": "rs_1", "status": "completed"}, *HISTORY]),
    _respond(f"{SIMPLE}::test_input_history_openresponses_shape_e2e", COMPLETED, input=[*HISTORY, SAID, REASONED, *HISTORY]),
    _respond(f"{SIMPLE}::test_multiturn_history_replay_without_ids_e2e", COMPLETED, lambda reply: reply.again(
        input=[*HISTORY, reply.json["output"][0], REASONED, *HISTORY]).json["status"] == "completed"),
    _respond(f"{SIMPLE}::test_streaming_output_consistency", _events_are_whole, stream=True, input="say hello"),
    _respond(f"{SIMPLE}::test_streaming_logprobs", _streamed_logprobs, stream=True, top_logprobs=3, **LOGPROBS),
    _respond(f"{SIMPLE}::test_max_tokens", {"status": "incomplete", "incomplete_details.reason": "max_output_tokens"}, reasoning={"effort": "low"},
        input="the first words of a long book", max_output_tokens=5),
    _respond(f"{SIMPLE}::test_extra_sampling_params", {"output.0.content.0.text": some}, max_output_tokens=50, temperature=0.7, top_p=0.9, top_k=40,
        repetition_penalty=1.2, seed=42),
    _respond(f"{SIMPLE}::test_streaming_types", _events_nest, reasoning={"effort": "low"}, tools=[], stream=True, background=False),
    _respond(f"{STATE}::test_store [kept]", lambda reply: _kept(reply).json["status"] == "completed"),
    _respond(f"{STATE}::test_store [not kept]", {"status": "completed"}, lambda reply: _kept(reply).status == 404,
        store=False),
    differs(BACKGROUND, _respond(f"{STATE}::test_background", {"status": "queued"}, background=True), refused("background")),
    _respond(f"{STATE}::test_background_error", refused("background"), background=True, store=False),
    differs(BACKGROUND, _respond(f"{STATE}::test_background_cancel", {"status": "queued"}, background=True), refused("background")),
    _respond(f"{STATE}::test_cancel_completed", _cannot_be_cancelled),
    _respond(f"{STATE}::test_previous_response_id", _is_continued, instructions="Remember."),
    _respond(f"{STATE}::test_two_responses_with_same_prev_id", _is_continued),
    _respond("entrypoints/openai/responses/test_structured_output.py::test_structured_output", lambda reply: set(json.loads(
        reply.json["output"][-1]["content"][0]["text"])) == {"name", "age", "skills"}, max_output_tokens=500,
        text={"format": {"type": "json_schema", "name": "profile", "schema": SCHEMA, "strict": True, "description": "A profile."}}),
    _respond(f"{FUNCTIONS}::test_function_tool_use [auto]", _calls, input=[message(ONE_CALL)], tools=[FLAT], tool_choice="auto"),
    _respond(f"{FUNCTIONS}::test_function_tool_use [required]", _calls, tools=[FLAT], tool_choice="required", max_output_tokens=300),
    _respond(f"{FUNCTIONS}::test_max_tokens_with_tool_choice_required", {"incomplete_details.reason": "max_output_tokens", "output": lambda items: all(
        item["type"] != "function_call" for item in items)}, tools=[FLAT], tool_choice="required", max_output_tokens=10),
    _respond(f"{FUNCTIONS}::test_named_tool_use", _goes_on_after_a_call, input=[message("the weather")], tools=[FLAT], tool_choice=NAMED_FLAT,
        max_output_tokens=300),
    _respond(f"{FUNCTIONS}::test_function_calling_with_streaming_expected_arguments", _streamed_call, input=ONE_CALL, tools=[FLAT], stream=True),
    _respond(f"{FUNCTIONS}::test_function_calling_with_streaming_types", _events_nest, input=ONE_CALL, tools=[FLAT], stream=True),
    *(_respond(f"{RULES}::test_responses_request_{name}", COMPLETED, **body) for name, body in (
        ("with_no_tools [absent]", {}), ("with_no_tools [empty]", {"tools": []}), ("no_tools_tool_choice_none", {"tool_choice": "none"}),
        ("no_tools_tool_choice_auto", {"tool_choice": "auto"}), ("with_tools_default_tool_choice", {"tools": [FLAT]}),
        ("with_tools_tool_choice_none", {"tools": [FLAT], "tool_choice": "none"}), ("with_tools_tool_choice_auto", {"tools": [FLAT], "tool_choice": "auto"}),
        ("named_tool_choice_matching", {"tools": [FLAT], "tool_choice": NAMED_FLAT}), ("with_tools_tool_choice_required", {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False}),
        ("empty_tools_tool_choice_none", {"tools": [], "tool_choice": "none"}), ("empty_tools_tool_choice_auto", {"tools": [], "tool_choice": "auto"}),
        ("parallel_tool_calls_null_accepted", {"parallel_tool_calls": None}))),
    *(_respond(f"{RULES}::test_responses_request_{name}", refused("tool_choice"), **body) for name, body in (
        ("required_without_tools [absent]", {"tool_choice": "required"}), ("required_without_tools [empty]", {"tools": [], "tool_choice": "required"}),
        ("named_tool_choice_without_tools", {"tool_choice": NAMED_FLAT}),
        ("named_tool_choice_not_matching", {"tools": [FLAT], "tool_choice": {"type": "function", "name": "nonexistent"}}),
        ("named_tool_choice_missing_name [absent]", {"tools": [FLAT], "tool_choice": {"type": "function"}}),
        ("named_tool_choice_missing_name [empty]", {"tools": [FLAT], "tool_choice": {"type": "function", "name": ""}}),
        ("empty_tools_named_tool_choice", {"tools": [], "tool_choice": NAMED_FLAT}))),
    *(_respond(f"{RULES}::test_responses_response_parallel_tool_calls_null_resolves_to_default [{value}]", {"parallel_tool_calls": expected},
        parallel_tool_calls=value) for value, expected in ((True, True), (False, False), (None, True))),
    post("entrypoints/openai/responses/test_count_tokens.py::test_count_responses_input_tokens", "/v1/responses/input_tokens", {"model": BASE, "input": "hello"},
        {"input_tokens": at_least(5)}),
]  # fmt: skip

# ---- messages

MESSAGES = "entrypoints/anthropic/test_messages.py"
TOOLS = [{"name": "get_current_weather", "description": "of a city", "input_schema": WEATHER["function"]["parameters"]}]


def _message(test: str, *asserts: Expected, **body: Any) -> Check:
    return post(
        f"{MESSAGES}::{test}",
        "/v1/messages",
        {"model": BASE, "max_tokens": 500, "temperature": 0, "messages": [message("how are you!")], **body},
        *asserts,
    )


EVENTS = "message_start content_block_start content_block_delta content_block_stop message_delta message_stop".split()


def _has_all_events(reply: Reply) -> bool:
    return set(EVENTS) <= set(_event_kinds(reply))


MESSAGE_CHECKS = [
    _message("test_simple_messages", {"stop_reason": "end_turn", "role": "assistant", "content.0.text": "how are you!"}),
    _message("test_system_message", {"stop_reason": "end_turn", "role": "assistant"}, system="you are a helpful assistant"),
    _message("test_anthropic_streaming", _has_all_events, stream=True),
    _message("test_anthropic_tool_call", {"stop_reason": "tool_use", "role": "assistant"}, tools=TOOLS, messages=[message(ONE_CALL)]),
    _message("test_anthropic_tool_call_streaming", _has_all_events, tools=TOOLS, messages=[message(ONE_CALL)], stream=True),
]  # fmt: skip
CHECKS = [*MODEL_CHECKS, *TOKEN_CHECKS, *OPERATIONS, *RESPONSES, *MESSAGE_CHECKS]
