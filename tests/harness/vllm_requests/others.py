"""What vLLM's tests of models, tokenizers, operations, errors, responses and messages assert of a reply."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from harness.quickstart import DEMO
from harness.vllm_requests.checks import BASE, CONTEXT, Reply, Server
from harness.waiting import wait_until

ADAPTERS = tuple(case.model for case in DEMO[1:])


def lineage(reply: Reply) -> bool:
    parents = {model["id"]: model["parent"] for model in reply.json["data"]}
    return parents == {BASE: None} | dict.fromkeys(ADAPTERS, BASE)


def has_roots(reply: Reply) -> bool:
    return all(model["root"] for model in reply.json["data"])


def adapters_at_once(reply: Reply) -> bool:
    """Three times each, at once: as many answers as prompts."""

    def counts(model: str) -> list[int]:
        return [len(reply.again(model=model).json["choices"]) for _ in range(3)]

    with ThreadPoolExecutor(len(ADAPTERS)) as pool:
        return all(lengths == [2, 2, 2] for lengths in pool.map(counts, ADAPTERS))


# ---- tokenizers


def has_text(reply: Reply) -> bool:
    """A character is a token of the demo's model; `<s>` stands before a text with special tokens."""
    plain = reply.server.send("POST", "/detokenize", {"model": BASE, "tokens": reply.json["tokens"]}).json["prompt"]
    return counted(reply) and reply.sent["prompt"] in plain


def counted(reply: Reply) -> bool:
    tokens = reply.json
    count = tokens["count"] == len(tokens["tokens"]) > 0
    return count and tokens["max_model_len"] == CONTEXT and tokens["token_strs"] is None


def token_strings(reply: Reply) -> bool:
    strings = reply.json["token_strs"]
    return len(strings) == reply.json["count"] and reply.sent["prompt"] in "".join(strings)


def tokenizes_back(reply: Reply) -> bool:
    text = {"model": BASE, "prompt": reply.json["prompt"], "add_special_tokens": False}
    return reply.server.send("POST", "/tokenize", text).json["tokens"] == reply.sent["tokens"]


def has_the_context(reply: Reply) -> bool:
    return (reply.json.get("model_max_length") or CONTEXT) >= CONTEXT


# ---- operations and errors


def has_metrics(reply: Reply, *names: str) -> bool:
    return all(f"vllm:{name}" in reply.response.text for name in names)


def _sample(server: Server, name: str) -> float:
    text = server.send("GET", "{metrics}").response.text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


def counts_ten(reply: Reply) -> bool:
    """Ten requests of ten tokens more."""
    names = ["request_success_total", "generation_tokens_total"]
    names += ["time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"]
    before = {name: _sample(reply.server, name) for name in names}
    for _ in range(10):
        assert reply.again().json["usage"]["prompt_tokens"] is not None
    return [_sample(reply.server, name) - before[name] for name in names] == [10, 100, 10, 10]


def ends_what_is_left(reply: Reply) -> bool:
    """Clients that give up leave nothing behind that runs to its end: not all of their tokens are made."""
    server, clients, tokens = reply.server, 20, 900
    before = _sample(server, "generation_tokens_total")

    def gives_up(_: int) -> bool:
        """Leave at the first line of an answer: by no clock, which a busy machine would decide."""
        body = {**reply.sent, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", server.url + reply.path, json=body, timeout=60.0) as answer:
            return answer.status_code == 200 and any(answer.iter_lines())

    with ThreadPoolExecutor(clients) as pool:
        left = all(pool.map(gives_up, range(clients)))
    wait_until(lambda: _sample(server, "num_requests_running") == 0, "nothing runs any more")
    made = _sample(server, "generation_tokens_total") - before
    return left and made < clients * tokens and len(reply.again().json["choices"]) == 1


def fails(reply: Reply) -> bool:
    return reply.status >= 400


def blames(reply: Reply, parameter: str) -> bool:
    return reply.json["error"]["param"] == parameter


def bounded(reply: Reply, size: int) -> bool:
    return reply.status == 400 and len(reply.response.content) < size


def does_not_say(reply: Reply, text: str) -> bool:
    return text not in reply.response.text


def no_allowance(reply: Reply) -> bool:
    return "access-control-allow-origin" not in reply.response.headers


def has_one_request_id(reply: Reply) -> bool:
    (identity,) = reply.response.headers.get_list("x-request-id")
    return reply.response.request.headers.get("x-request-id", identity) == identity


# ---- responses and messages


def says(reply: Reply, text: str) -> bool:
    return _said(reply) == text


def _said(reply: Reply) -> str:
    return reply.json["output"][-1]["content"][0]["text"]


def says_json_with(reply: Reply, *names: str) -> bool:
    return set(json.loads(_said(reply))) == set(names)


def has_events(reply: Reply, *kinds: str) -> bool:
    return set(kinds) <= {event["type"] for event in reply.events}


def events_are_whole(reply: Reply) -> bool:
    text = "".join(event["delta"] for event in reply.events if event["type"] == "response.output_text.delta")
    first, last = reply.events[0], reply.events[-1]
    messages = [item for item in last["response"]["output"] if item["type"] == "message"]
    final = "".join(part["text"] for item in messages for part in item["content"])
    return first["type"] == "response.created" and last["type"] == "response.completed" and text == final != ""


def events_nest(reply: Reply) -> bool:
    """What is opened (`added`, the first `delta`) is closed by its `done`, the innermost first."""
    opened = list[str]()
    for kind in (event["type"] for event in reply.events):
        stem, _, event = kind.rpartition(".")
        if event in ("added", "created"):
            opened.append(stem)
        elif event == "delta" and opened[-1] != kind:
            opened.append(kind)
        elif (event == "done" and opened[-1] == f"{stem}.delta") or (
            event in ("done", "completed") and opened[-1] == stem
        ):
            opened.pop()
    return opened == [] and len(reply.events) > 3


def streamed_call(reply: Reply) -> bool:
    def items(event: str) -> list[Any]:
        return [made["item"] for made in reply.events if made["type"] == f"response.output_item.{event}"]

    deltas = [event for event in reply.events if event["type"] == "response.function_call_arguments.delta"]
    parts = "".join(event["delta"] for event in deltas)
    call, last = (next(item for item in items(event) if item["type"] == "function_call") for event in ("added", "done"))
    whole = call["name"] == last["name"] == "get_current_weather" and parts == last["arguments"]
    return whole and "city" in json.loads(parts)


def calls(reply: Reply) -> bool:
    made = [item for item in reply.json["output"] if item["type"] == "function_call"]
    return bool(made) and all("city" in json.loads(call["arguments"]) for call in made)


def calls_nothing(reply: Reply) -> bool:
    return all(item["type"] != "function_call" for item in reply.json["output"])


def goes_on_after_a_call(reply: Reply) -> bool:
    call = reply.json["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}
    other = reply.again(input=[*reply.sent["input"], call, result], tools=None, tool_choice=None)
    return calls(reply) and bool(_said(other))


def is_kept(reply: Reply) -> bool:
    kept = reply.server.send("GET", f"{reply.path}/{reply.json['id']}")
    return kept.status == 404 if reply.sent.get("store") is False else kept.json["status"] == "completed"


def cannot_be_cancelled(reply: Reply) -> bool:
    return reply.server.send("POST", f"{reply.path}/{reply.json['id']}/cancel", {}).status == 400


def is_continued(reply: Reply) -> bool:
    first, second = (reply.again(input=text, previous_response_id=reply.json["id"]) for text in ("one", "two"))
    third = reply.again(input="three", previous_response_id=first.json["id"])
    return [_said(answer) for answer in (first, second, third)] == ["one", "two", "three"]


def goes_on_between(reply: Reply, before: list[Any], after: list[Any]) -> bool:
    answer = reply.again(input=[*before, reply.json["output"][0], *after])
    return answer.json["status"] == "completed"


def streamed_logprobs(reply: Reply) -> bool:
    deltas = [event["logprobs"] for event in reply.events if event["type"] == "response.output_text.delta"]
    likely = all(token["logprob"] <= 0 and 0 < len(token["top_logprobs"]) <= 3 for logs in deltas for token in logs)
    return bool(deltas) and all(deltas) and likely
