"""vLLM's tests of `/v1/completions`, and of tokens and log probabilities wherever they stand."""

from collections.abc import Sequence
from typing import Any

from harness.vllm_requests.checks import (
    BASE,
    MODELS,
    Reply,
    absent,
    at_least,
    chat,
    completion,
    differs,
    finishes_apart,
    last_chunk_has_text,
    no_usage,
    refused,
    some,
    streams_as_whole,
    usage_adds_up,
    usage_last,
    within,
)  # fmt: skip

IDS = [5, 5, 5, 5, 5]
ODD: dict[str, Any] = {"prompt": [85, 94, 92], "temperature": 2.0, "seed": 42}  # the model is sure of what it repeats
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
    },
}
BAD_SCHEMA = {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}, "required": ["brand"]}
BAD_GRAMMAR = 'root ::= select_statementinvalidsyntax\nselect_statement ::= "SELECT " column\ncolumn ::= "a" | "b"'
NO_BEAMS = "Beam search is not served: sequences of one request share no search; `n` and `best_of` sample."
FINISH = "The finish has a chunk of its own, as in OpenAI's streams; the texts joined are the same."


def _unlike_choices(reply: Reply) -> bool:
    choices = reply.json["choices"]
    lengths = {len(choice["logprobs"]["tokens"]) for choice in choices}
    in_turn = [choice["index"] for choice in choices] == list(range(3)) and all(c["finish_reason"] for c in choices)
    return in_turn and len(lengths) > 1 and len({choice["text"] for choice in choices}) == 3


def _unlike_streams(reply: Reply) -> bool:
    finished = [choice["index"] for choice in reply.streamed_choices if choice["finish_reason"]]
    return sorted(finished) == [0, 1, 2] and len({reply.streamed_text(index) for index in range(3)}) == 3


def _usage_in_each(reply: Reply) -> bool:
    used = [event["usage"] for event in reply.events]
    so_far = [one["completion_tokens"] for one in used]
    sums = all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in used)
    return sums and so_far == sorted(so_far) and reply.events[-1]["choices"] == [] and used[-1]["completion_tokens"] > 0


def _alike(reply: Reply) -> bool:
    texts = [choice["text"] for choice in reply.json["choices"]]
    return len(texts) == 2 and texts[0] == texts[1]


def _streamed_alike(reply: Reply) -> bool:
    one_each = all(len(event["choices"]) == 1 for event in reply.events)
    return one_each and reply.streamed_text(0) == reply.streamed_text(1) != ""


def _beams(reply: Reply) -> bool:
    first, second, third, fourth = (choice["text"] for choice in reply.json["choices"])
    return first != second and first == third and second == fourth


def _echoed(logprobs: int) -> Any:
    def echoes(reply: Reply) -> bool:
        choice = reply.json["choices"][0]
        found = choice["logprobs"]
        prompt = reply.sent["prompt"]
        text = prompt if isinstance(prompt, str) else reply.server.send(
            "POST", "/detokenize", {"model": BASE, "tokens": prompt}
        ).json["prompt"]  # fmt: skip
        tops = found["top_logprobs"]
        firsts = found["token_logprobs"][0] is None and tops[0] is None
        sizes = all(max(logprobs, 1) <= len(top) <= logprobs + 1 for top in tops[1:])
        return choice["text"].startswith(text) and firsts and sizes and len(found["tokens"]) == len(tops) > 5

    return echoes


def _offsets_stream_alike(reply: Reply) -> bool:
    whole = reply.again(stream=False).json["choices"][0]["logprobs"]["text_offset"]
    return [at for one in reply.streamed_choices if one["logprobs"] for at in one["logprobs"]["text_offset"]] == whole


def _decoded(reply: Reply, tokens: Sequence[int]) -> str:
    return reply.server.send("POST", "/detokenize", {"model": BASE, "tokens": list(tokens)}).json["prompt"]


def _tokens_are_of_the_texts(reply: Reply) -> bool:
    choice, prompt = reply.json["choices"][0], reply.sent["prompt"]
    prompt_text = _decoded(reply, choice["prompt_token_ids"])
    echoed = prompt if isinstance(prompt, str) else _decoded(reply, prompt)
    return (
        echoed in prompt_text and choice["text"].endswith(_decoded(reply, choice["token_ids"])) and choice["token_ids"]
    )


def _chat_tokens_are_of_the_texts(reply: Reply) -> bool:
    prompt, choice = _decoded(reply, reply.json["prompt_token_ids"]), reply.json["choices"][0]
    return reply.sent["messages"][-1]["content"] in prompt and choice["token_ids"] and choice["message"] is not None


def _token_names_are_ids(reply: Reply) -> bool:
    choice = reply.json["choices"][0]
    ids = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    own, count = choice["token_ids"], len(choice["token_ids"])
    return count < len(ids) and ids[-count:] == own and choice["prompt_logprobs"] and choice["prompt_token_ids"]


def _streamed_ids(reply: Reply) -> bool:
    own = [token for choice in reply.streamed_choices for token in choice.get("token_ids") or ()]
    named = [name for choice in reply.streamed_choices if choice["logprobs"] for name in choice["logprobs"]["tokens"]]
    ids = [int(name.removeprefix("token_id:")) for name in named]
    return bool(reply.streamed_choices[0]["prompt_token_ids"]) and own == ids != []


def _streamed_chat_ids(reply: Reply) -> bool:
    first, *others = reply.events
    ids = [token for choice in reply.streamed_choices for token in choice.get("token_ids") or ()]
    alone = all("prompt_token_ids" not in event for event in others)
    return alone and ids == reply.again(stream=False).json["choices"][0]["token_ids"] and first["prompt_token_ids"]


def _kept(count: int, *, right: bool) -> Any:
    def keeps(reply: Reply) -> bool:
        found = reply.json.get("prompt_token_ids") or reply.json["choices"][0]["prompt_token_ids"]
        whole = reply.again(truncate_prompt_tokens=None, truncation_side=None).json
        full = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
        return found == (full[:count] if right else full[-count:]) and len(full) > count

    return keeps


FILE = "entrypoints/openai/completion/test_completion.py"
OLDER = "entrypoints/openai/test_completion.py"
IDS_FILE = "entrypoints/openai/basic/test_return_token_ids.py"
CHECKS = [
    *(completion(f"{FILE}::test_single_completion [{model}, a text]",
        {"id": some, "#choices": 1, "#choices.0.text": at_least(5), "choices.0.finish_reason": "length", "usage.completion_tokens": 5},
        usage_adds_up, model=model, max_tokens=5) for model in MODELS),
    *(completion(f"{FILE}::test_single_completion [{model}, token ids]",
        {"#choices.0.text": at_least(1), "choices.0.prompt_logprobs": absent}, model=model, prompt=IDS, max_tokens=5)
        for model in MODELS),
    *(completion(f"{FILE}::test_completion_truncation_side_controls_prompt_truncation [{side}]", _kept(4, right=side == "right"),
        prompt=list(range(2, 10)), max_tokens=1, return_token_ids=True, truncate_prompt_tokens=4, truncation_side=side)
        for side in ("right", "left")),
    *(chat(f"entrypoints/openai/chat_completion/test_chat_completion.py::test_chat_completion_truncation_side_controls_prompt_truncation [{side}]",
        _kept(4, right=side == "right"), max_tokens=1, return_token_ids=True, truncate_prompt_tokens=4, truncation_side=side)
        for side in ("right", "left")),
    *(completion(f"{FILE}::test_no_logprobs [{model}]", {"choices.0.logprobs": absent}, model=model, prompt=IDS, max_tokens=5, logprobs=None)
        for model in MODELS),
    *(completion(f"{FILE}::test_zero_logprobs [{model}]",
        {"choices.0.logprobs.token_logprobs": some, "#choices.0.logprobs.top_logprobs.0": 1},
        model=model, prompt=IDS, max_tokens=5, logprobs=0) for model in MODELS),
    *(completion(f"{FILE}::test_some_logprobs [{model}]",
        {"choices.0.logprobs.token_logprobs": some, "#choices.0.logprobs.top_logprobs.0": within(5, 6)},
        model=model, prompt=IDS, max_tokens=5, logprobs=5) for model in MODELS),
    *(completion(f"{FILE}::test_too_many_completion_logprobs [{model}, {count}, stream {stream}]",
        refused(), lambda reply: bool(reply.again(logprobs=None, stream=False)), model=model, prompt=IDS, max_tokens=5, logprobs=count, stream=stream)
        for model in MODELS for count, stream in ((21, False), (30, True))),
    completion(f"{FILE}::test_prompt_logprobs_completion [-1]", refused("prompt_logprobs"), prompt=["A robot may not", "My name is"], prompt_logprobs=-1),
    *(completion(f"{FILE}::test_prompt_logprobs_completion [{count}]",
        {"choices.0.prompt_logprobs": some, "choices.1.prompt_logprobs": some}, prompt=["A robot may not", "My name is"], prompt_logprobs=count)
        for count in (0, 1)),
    completion(f"{FILE}::test_prompt_logprobs_completion [None]", {"choices.0.prompt_logprobs": absent}, prompt=["A robot", "My name is"]),
    *(completion(f"{FILE}::test_completion_streaming [{model}]", streams_as_whole, model=model, max_tokens=5, stream=True) for model in MODELS),
    differs(FINISH, completion(f"{FILE}::test_completion_streaming [the last chunk's text]", last_chunk_has_text, max_tokens=5, stream=True),
        finishes_apart),
    completion(f"{FILE}::test_parallel_no_streaming", _unlike_choices, max_tokens=300, n=3, logprobs=0, **ODD),
    completion(f"{FILE}::test_parallel_streaming", _unlike_streams, max_tokens=300, n=3, stream=True, **ODD),
    *(completion(f"{FILE}::test_completion_stream_options [{options}]", check, max_tokens=5, stream=True, stream_options=options)
        for options, check in (
            ({"include_usage": False, "continuous_usage_stats": False}, no_usage),
            ({"include_usage": False, "continuous_usage_stats": True}, no_usage),
            ({"include_usage": True, "continuous_usage_stats": False}, usage_last),
            ({"include_usage": True, "continuous_usage_stats": True}, _usage_in_each),
            ({}, no_usage),
        )),
    *(completion(f"{FILE}::test_completion_stream_options [not streamed, {options}]", refused("stream_options"),
        max_tokens=5, stream=False, stream_options=options)
        for options in ({"include_usage": None}, {"include_usage": True}, {"continuous_usage_stats": None}, {"continuous_usage_stats": True})),
    *(completion(f"{FILE}::test_batch_completions [{kind}]", _alike, prompt=[prompt] * 2, max_tokens=5)
        for kind, prompt in (("texts", "Hello, my name is"), ("token ids", IDS))),
    *(completion(f"{FILE}::test_batch_completions [{kind}, streamed]", _streamed_alike, prompt=[prompt] * 2, max_tokens=5, stream=True)
        for kind, prompt in (("texts", "Hello, my name is"), ("token ids", IDS))),
    *(differs(NO_BEAMS, completion(f"{FILE}::test_batch_completions [{kind}, beams]", _beams, prompt=[prompt] * 2, n=2, max_tokens=5,
        use_beam_search=True), refused("use_beam_search")) for kind, prompt in (("texts", "Hello, my name is"), ("token ids", IDS))),
    *(completion(f"{FILE}::test_echo_logprob_completion [{kind}, {count}]", _echoed(count), prompt=prompt, max_tokens=5, echo=True, logprobs=count)
        for kind, prompt in (("a text", "Hello, my name is"), ("token ids", IDS)) for count in (1, 0)),
    *(completion(f"{FILE}::test_invalid_{name}", refused(), structured_outputs=form)
        for name, form in (("json_schema", {"json": BAD_SCHEMA}), ("regex", {"regex": "[.*"}), ("grammar", {"grammar": BAD_GRAMMAR}))),
    *(chat(f"entrypoints/openai/chat_completion/test_chat_completion.py::test_invalid_{name}", refused(), structured_outputs=form)
        for name, form in (("json_schema", {"json": BAD_SCHEMA}), ("regex", {"regex": "[.*"}), ("grammar", {"grammar": BAD_GRAMMAR}))),
    chat("entrypoints/openai/chat_completion/test_chat_completion.py::test_empty_grammar", refused(), structured_outputs={"grammar": ""}),
    completion(f"{OLDER}::test_added_lora_tokens_base_model", refused(), prompt=[0, 0, 32000, 32001], echo=True, max_tokens=5),
    completion("entrypoints/openai/completion/test_prompt_validation.py::test_out_of_vocab_token_ids", refused("999999", "vocabulary"), prompt=[999999], max_tokens=5),
    completion("entrypoints/openai/completion/test_prompt_validation.py::test_empty_prompt", refused("prompt"), prompt=None, prompt_embeds=[], max_tokens=5),
    completion("entrypoints/openai/completion/test_empty_prompt_list.py::test_empty_prompt_list_rejected", refused("prompt"), prompt=[]),
    completion("entrypoints/openai/completion/test_empty_prompt_list.py::test_nonempty_prompt_list_ok", {"#choices": 1}, prompt=["hello"]),
    completion("entrypoints/openai/completion/test_completion_error.py::test_json_schema_response_format_missing_schema", refused("json_schema"),
        max_tokens=10, response_format={"type": "json_schema"}),
    completion("entrypoints/openai/completion/test_completion_error.py::test_negative_prompt_token_ids_nested", refused("prompt"), prompt=[[-1]], max_tokens=10),
    completion("entrypoints/openai/completion/test_completion_error.py::test_negative_prompt_token_ids_flat", refused("prompt"), prompt=[-1], max_tokens=10),
    completion("entrypoints/openai/completion/test_completion_text_offset.py::test_stream_text_offset_matches_non_stream_with_stop_holdback",
        _offsets_stream_alike, prompt="abc de!", max_tokens=8, logprobs=0, stop=["\n\n"], stream=True),
    completion("entrypoints/openai/completion/test_token_in_token_out.py::test_token_in_token_out_and_logprobs", _tokens_are_of_the_texts,
        prompt=[20, 21, 22], max_tokens=20, echo=True, return_token_ids=True),
    completion(f"{IDS_FILE}::test_basic_completion_with_emoji [asked]", _tokens_are_of_the_texts, max_tokens=10, logprobs=1, return_token_ids=True),
    completion(f"{IDS_FILE}::test_basic_completion_with_emoji [not asked]", {"choices.0.token_ids": absent, "prompt_token_ids": absent},
        max_tokens=10, logprobs=1, return_token_ids=False),
    chat(f"{IDS_FILE}::test_chat_completion_with_tool_use [asked]", _chat_tokens_are_of_the_texts,
        tools=[TOOL], tool_choice="auto", max_tokens=100, logprobs=True, return_token_ids=True),
    chat(f"{IDS_FILE}::test_chat_completion_with_tool_use [not asked]", {"choices.0.token_ids": absent, "prompt_token_ids": absent},
        tools=[TOOL], tool_choice="auto", max_tokens=100, logprobs=True, return_token_ids=False),
    completion(f"{IDS_FILE}::test_comparison_with_prompt_logprobs_and_logprobs [whole]", _token_names_are_ids, max_tokens=20, echo=True,
        logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, prompt_logprobs=1),
    completion(f"{IDS_FILE}::test_comparison_with_prompt_logprobs_and_logprobs [streamed]", _streamed_ids, max_tokens=30, stream=True,
        logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True),
    chat(f"{IDS_FILE}::test_chat_completion_with_emoji_and_token_ids [whole]", _chat_tokens_are_of_the_texts,
        max_tokens=50, logprobs=True, return_token_ids=True),
    chat(f"{IDS_FILE}::test_chat_completion_with_emoji_and_token_ids [streamed]", _streamed_chat_ids, max_tokens=50, stream=True, return_token_ids=True),
]  # fmt: skip
