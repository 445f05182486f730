"""What vLLM's tests of `/v1/chat/completions` assert of a reply: chats, forms of answers, tools."""

import json
import re
from typing import Any

from harness.vllm_requests.checks import Reply, text_of


def _fits_schema(value: Any, schema: Any) -> bool:
    """True where a value fits the keywords that stand in this list's schemas."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema.get("type", "object"):
        case "object":
            names, properties = set(value), schema.get("properties", {})
            allowed = schema.get("additionalProperties", True) or names <= properties.keys()
            fit = all(_fits_schema(value[name], properties[name]) for name in names & properties.keys())
            return set(schema.get("required", ())) <= names and allowed and fit
        case "array":
            sized = schema["minItems"] <= len(value) <= schema["maxItems"]
            return sized and all(_fits_schema(item, schema["items"]) for item in value)
        case "integer":
            return isinstance(value, int) and schema["minimum"] <= value <= schema["maximum"]
        case _:
            return isinstance(value, str) and len(value) <= schema["maxLength"]


def called(reply: Reply, *names: str) -> bool:
    """Calls of these tools, with arguments that their schemas allow."""
    calls = [call["function"] for call in reply.json["choices"][0]["message"]["tool_calls"]]
    return [call["name"] for call in calls] == list(names) and _arguments_fit(reply, calls)


def some_call(reply: Reply) -> bool:
    calls = reply.json["choices"][0]["message"]["tool_calls"]
    ids = all(call["type"] == "function" and len(call["id"]) >= 9 for call in calls)
    return ids and bool(calls) and _arguments_fit(reply, [call["function"] for call in calls])


def streams_calls(reply: Reply) -> bool:
    """The calls of the whole answer; one finish; no content beside them."""
    whole = reply.again(stream=False).json["choices"][0]
    finishes = [choice["finish_reason"] for choice in reply.streamed_choices if choice["finish_reason"]]
    made = [call["function"] for call in whole["message"]["tool_calls"]]
    same, streamed = (
        [call | {"arguments": json.loads(call["arguments"])} for call in calls]
        for calls in (made, reply.streamed_calls())
    )
    return streamed == same != [] and finishes == [whole["finish_reason"]] and not reply.streamed_text().strip()


def _arguments_fit(reply: Reply, calls: list[Any]) -> bool:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in reply.sent["tools"]}
    return all(_fits_schema(json.loads(call["arguments"]), schemas[call["name"]]) for call in calls)


def no_calls(reply: Reply) -> bool:
    choice = reply.json["choices"][0]
    calls = choice["message"].get("tool_calls") or choice["finish_reason"] == "tool_calls"
    return choice["message"]["content"] and not calls


def texts_fit(reply: Reply, schema: Any) -> bool:
    return all(_fits_schema(json.loads(text_of(choice)), schema) for choice in reply.json["choices"])


def texts_match(reply: Reply, pattern: str) -> bool:
    texts = [text_of(choice) for choice in reply.json["choices"]]
    return bool(texts) and all(re.fullmatch(pattern, text) for text in texts)


def rising_usage(reply: Reply) -> bool:
    used = [event["usage"] for event in reply.events]
    counts = [usage["completion_tokens"] for usage in used]
    return counts == sorted(counts) and counts[-1] == 10 and all(usage["prompt_tokens"] > 0 for usage in used)


def alternatives_by_number(reply: Reply) -> bool:
    one, two = reply.json["prompt_logprobs"], reply.again(prompt_logprobs=2).json["prompt_logprobs"]
    return all(len(top) <= 2 for top in one[1:]) and all(2 <= len(top) <= 3 for top in two[1:])


def alternatives_are_likely(reply: Reply) -> bool:
    tops = reply.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return all(-9999 <= top["logprob"] <= 0 for top in tops)


def same_with_parts(reply: Reply) -> bool:
    first, *others = reply.sent["messages"]
    parts = reply.again(messages=[{**first, "content": [{"type": "text", "text": first["content"]}]}, *others])
    return parts.json["choices"] == reply.json["choices"]


def goes_on(reply: Reply) -> bool:
    text, said = reply.json["choices"][0]["message"]["content"], reply.sent["messages"][-1]["content"]
    return (said in text) is reply.sent["echo"] and reply.json["choices"][0]["message"]["role"] == "assistant"


def takes_its_answer_back(reply: Reply) -> bool:
    answer, question = reply.json["choices"][0]["message"], {"role": "user", "content": "in json"}
    return bool(reply.again(messages=[*reply.sent["messages"], answer, question]))


def n_contents(reply: Reply) -> bool:
    texts = [choice["message"]["content"] for choice in reply.json["choices"]]
    in_turn = [choice["index"] for choice in reply.json["choices"]] == list(range(reply.sent["n"]))
    return in_turn and all(texts) and len(set(texts)) > 1


def streams_two(reply: Reply) -> bool:
    """Both choices end, each once. Drawn without a seed, one of them may be empty."""
    ended = [choice["index"] for choice in reply.streamed_choices if choice["finish_reason"]]
    return sorted(ended) == [0, 1]


def has_its_prompt_where_echoed(reply: Reply) -> bool:
    text = reply.streamed_text() if reply.sent.get("stream") else reply.json["choices"][0]["text"]
    return (reply.sent["prompt"] in text) is reply.sent["echo"]


def draws_one_token(reply: Reply) -> bool:
    return len(set(reply.json["choices"][0]["token_ids"])) == 1


def draws_others_where_banned(reply: Reply) -> bool:
    choice = reply.json["choices"][0]
    banned = {str(token): -100 for token in choice["token_ids"]}
    return reply.again(logit_bias=banned).json["choices"][0]["text"] != choice["text"]


def draws_an_allowed_token(reply: Reply) -> bool:
    return reply.json["choices"][0]["token_ids"][0] in reply.sent["allowed_token_ids"]


def tokens_are_ids(reply: Reply, ids: bool) -> bool:
    entries = reply.json["choices"][0]["logprobs"]["content"]
    names = [token["token"] for entry in entries for token in (entry, *entry["top_logprobs"])]
    return bool(names) and all(name.startswith("token_id:") is ids for name in names)
