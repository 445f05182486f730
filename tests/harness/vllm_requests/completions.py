"""What vLLM's tests of `/v1/completions`, and of tokens and log probabilities in chats, assert of a reply."""

from collections.abc import Sequence

from harness.vllm_requests.checks import BASE, Reply


def unlike_choices(reply: Reply) -> bool:
    choices = reply.json["choices"]
    lengths = {len(choice["logprobs"]["tokens"]) for choice in choices}
    in_turn = [choice["index"] for choice in choices] == list(range(3)) and all(c["finish_reason"] for c in choices)
    return in_turn and len(lengths) > 1 and len({choice["text"] for choice in choices}) == 3


def unlike_streams(reply: Reply) -> bool:
    finished = [choice["index"] for choice in reply.streamed_choices if choice["finish_reason"]]
    return sorted(finished) == [0, 1, 2] and len({reply.streamed_text(index) for index in range(3)}) == 3


def usage_in_each(reply: Reply) -> bool:
    used = [event["usage"] for event in reply.events]
    so_far = [usage["completion_tokens"] for usage in used]
    sums = all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in used)
    return sums and so_far == sorted(so_far) and reply.events[-1]["choices"] == [] and used[-1]["completion_tokens"] > 0


def alike(reply: Reply) -> bool:
    first, second = (choice["text"] for choice in reply.json["choices"])
    return first == second


def streamed_alike(reply: Reply) -> bool:
    one_each = all(len(event["choices"]) == 1 for event in reply.events)
    return one_each and reply.streamed_text(0) == reply.streamed_text(1) != ""


def beams(reply: Reply) -> bool:
    first, second, third, fourth = (choice["text"] for choice in reply.json["choices"])
    return first != second and first == third and second == fourth


def echoes(reply: Reply) -> bool:
    """The prompt and its log probabilities stand before the answer."""
    choice, prompt, logprobs = reply.json["choices"][0], reply.sent["prompt"], reply.sent["logprobs"]
    text = prompt if isinstance(prompt, str) else _decoded(reply, prompt)
    tops = choice["logprobs"]["top_logprobs"]
    firsts = choice["logprobs"]["token_logprobs"][0] is None and tops[0] is None
    sizes = all(max(logprobs, 1) <= len(top) <= logprobs + 1 for top in tops[1:])
    return choice["text"].startswith(text) and firsts and sizes and len(choice["logprobs"]["tokens"]) == len(tops) > 5


def offsets_stream_alike(reply: Reply) -> bool:
    whole = reply.again(stream=False).json["choices"][0]["logprobs"]["text_offset"]
    return [
        at for part in reply.streamed_choices if part["logprobs"] for at in part["logprobs"]["text_offset"]
    ] == whole


def _decoded(reply: Reply, tokens: Sequence[int]) -> str:
    return reply.server.send("POST", "/detokenize", {"model": BASE, "tokens": list(tokens)}).json["prompt"]


def tokens_are_of_the_texts(reply: Reply) -> bool:
    choice, prompt = reply.json["choices"][0], reply.sent["prompt"]
    echoed = prompt if isinstance(prompt, str) else _decoded(reply, prompt)
    ends = choice["text"].endswith(_decoded(reply, choice["token_ids"]))
    return echoed in _decoded(reply, choice["prompt_token_ids"]) and ends and choice["token_ids"]


def chat_tokens_are_of_the_texts(reply: Reply) -> bool:
    prompt, choice = _decoded(reply, reply.json["prompt_token_ids"]), reply.json["choices"][0]
    return reply.sent["messages"][-1]["content"] in prompt and choice["token_ids"] and choice["message"] is not None


def token_names_are_ids(reply: Reply) -> bool:
    choice = reply.json["choices"][0]
    ids = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    count = len(choice["token_ids"])
    sampled = ids[-count:] == choice["token_ids"]
    return count < len(ids) and sampled and choice["prompt_logprobs"] and choice["prompt_token_ids"]


def streamed_ids(reply: Reply) -> bool:
    sampled = [token for choice in reply.streamed_choices for token in choice.get("token_ids") or ()]
    named = [name for choice in reply.streamed_choices if choice["logprobs"] for name in choice["logprobs"]["tokens"]]
    ids = [int(name.removeprefix("token_id:")) for name in named]
    return bool(reply.streamed_choices[0]["prompt_token_ids"]) and sampled == ids != []


def streamed_chat_ids(reply: Reply) -> bool:
    first, *others = reply.events
    ids = [token for choice in reply.streamed_choices for token in choice.get("token_ids") or ()]
    alone = all("prompt_token_ids" not in event for event in others)
    return alone and ids == reply.again(stream=False).json["choices"][0]["token_ids"] and first["prompt_token_ids"]
