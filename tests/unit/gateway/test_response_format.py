"""Bodies and chunks as OpenAI's own client types read them."""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import orjson
import pytest

from weft.domain.request import FinishReason, TokenLogprob
from weft_gateway.core.events import Emit, End, TokenLogprobOut
from weft_gateway.core.routes import ANY_NAMESPACE
from weft_gateway.openai import (
    LEAST,
    Call,
    CallUsage,
    ChatEncoder,
    Common,
    CompletionEncoder,
    CompletionRequest,
    Prompt,
    ResponseEncoder,
    StreamOptions,
)
from weft_gateway.shell import Ids, ModelTokenizer

USAGE = CallUsage(3, 5)
DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def client() -> ModuleType:
    """OpenAI's types, whose import takes longer than all tests here: in the worker that runs them alone."""
    return import_module("openai.types")


class Names:
    """Token 0 is special, 9 is unknown, the others are their bytes."""

    BYTES = (b"", b"hi", "é".encode()[:1], "é".encode()[1:], b" \xf0\x9f")

    def bytes_of(self, token: int) -> bytes:
        return self.BYTES[token] if token < len(self.BYTES) else b""

    def name_of(self, token: int) -> str | None:
        return "</s>" if token == 0 else None if self.bytes_of(token) else f"token_id:{token}"


def called(*prompts: tuple[tuple[int, ...], str]) -> Call:
    """A call whose prompts are tokenised: the tokens of each, and what answers repeat of it."""
    call, names = Call(Ids("c", "r1"), ANY_NAMESPACE, 7_000), Names()
    call.digest, call.tokenizer = DIGEST, cast("ModelTokenizer", names)
    call.prompts = [Prompt("", lambda *_: [], echo, tokens) for tokens, echo in prompts]
    return call


def meta(n: int = 1, alternatives: int | None = None, **more: Any) -> tuple[Common, Call]:
    params = CompletionRequest(model="m", prompt="p", n=n, logprobs=alternatives, **more)
    return params, called(((1, 2, 3), ""))


def out(token: int, top: Sequence[tuple[int, float]] = (), start: int = 0) -> TokenLogprobOut:
    return TokenLogprobOut(token, TokenLogprob(-0.5, tuple(top)), start)


def events(data: bytes) -> list[Any]:
    return [orjson.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]


@pytest.mark.parametrize("make", [ChatEncoder, CompletionEncoder])
def test_a_chunk_is_the_same_by_template_and_made_whole(make: type[Any]) -> None:
    text = 'quote " hole \x00text\x00 \N{SLIGHTLY SMILING FACE}'
    plain, with_logprobs = make(*meta(3)), make(*meta(3, alternatives=0))
    for index in range(3):
        (fast,) = events(plain.chunk(index, Emit("r", text)))
        (whole,) = events(with_logprobs.chunk(index, Emit("r", text)))
        assert fast["choices"][0]["logprobs"] is None
        whole["choices"][0]["logprobs"] = None
        assert fast == whole
        assert fast["choices"][0]["index"] == index


def test_a_chat_of_several_choices_is_a_chat_to_the_client(client: ModuleType) -> None:
    encoder: ResponseEncoder = ChatEncoder(*meta(2))
    ended = [(Emit("r", "a"), End(FinishReason.EOS)), (Emit("r", "b"), End(FinishReason.LENGTH))]
    body = encoder.body(ended, USAGE)
    chat = client.chat.ChatCompletion.model_validate_json(body)
    assert [(c.index, c.message.content, c.finish_reason) for c in chat.choices] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]
    assert chat.usage.total_tokens == 8
    chunk = client.chat.ChatCompletionChunk
    roles = [chunk.model_validate(event).choices[0] for event in events(encoder.first_chunk())]
    assert [(role.index, role.delta.role) for role in roles] == [(0, "assistant"), (1, "assistant")]


def test_parts_of_characters_special_and_unknown_tokens_are_spelled_by_name(client: ModuleType) -> None:
    emit = Emit("r", "hié", tuple(out(token) for token in (1, 2, 3, 4, 0, 9)))
    body = ChatEncoder(*meta(alternatives=0)).body([(emit, End(FinishReason.EOS))], USAGE)
    logprobs = client.chat.ChatCompletion.model_validate_json(body).choices[0].logprobs
    assert logprobs.content is not None
    assert [(one.token, one.bytes) for one in logprobs.content] == [
        ("hi", [104, 105]),
        ("\\xc3", [0xC3]),
        ("\\xa9", [0xA9]),
        (" \\xf0\\x9f", [32, 0xF0, 0x9F]),
        ("</s>", None),
        ("token_id:9", None),
    ]
    (event,) = events(CompletionEncoder(*meta(alternatives=0)).chunk(0, emit))
    names = ["hi", "bytes:\\xc3", "bytes:\\xa9", "bytes: \\xf0\\x9f", "</s>", "token_id:9"]
    assert event["choices"][0]["logprobs"]["tokens"] == names


def test_alternatives_are_as_many_as_asked_for_and_a_completion_adds_the_sampled_one(client: ModuleType) -> None:
    emit = Emit("r", "hi", (out(1, [(0, -0.1), (2, -0.2), (3, -0.3)], start=4),))
    (chat,) = events(ChatEncoder(*meta(alternatives=2)).chunk(0, emit))
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert [(one["token"], one["logprob"]) for one in entry["top_logprobs"]] == [("</s>", -0.1), ("\\xc3", -0.2)]
    assert (entry["top_logprobs"][0]["bytes"], entry["top_logprobs"][1]["bytes"]) == (None, [0xC3])
    (none,) = events(ChatEncoder(*meta(alternatives=0)).chunk(0, emit))
    assert none["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    (none,) = events(CompletionEncoder(*meta(alternatives=0)).chunk(0, emit))
    assert none["choices"][0]["logprobs"]["top_logprobs"] == [{"hi": -0.5}]
    body = CompletionEncoder(*meta(alternatives=2)).body([(emit, End(FinishReason.STOP))], USAGE)
    logprobs = client.Completion.model_validate_json(body).choices[0].logprobs
    assert logprobs.top_logprobs == [{"</s>": -0.1, "bytes:\\xc3": -0.2, "hi": -0.5}]
    assert logprobs.text_offset == [4]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1e30])
def test_a_number_that_json_does_not_have_is_openais_stand_in(value: float) -> None:
    emit = Emit("r", "hi", (TokenLogprobOut(1, TokenLogprob(value, ((1, value),)), 0),))
    (event,) = events(ChatEncoder(*meta(alternatives=1)).chunk(0, emit))
    entry = event["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (LEAST, LEAST)


def test_a_completions_prompt_is_echoed_before_each_of_its_answers_and_token_ids_stand_beside_the_text(
    client: ModuleType,
) -> None:
    params = CompletionRequest(model="m", prompt="p", n=2, echo=True, return_token_ids=True)
    encoder = CompletionEncoder(params, called(((5,), "a:"), ((6, 7), "b:")))
    ended = [(Emit("r", str(i), (), 1, (i,)), End(FinishReason.STOP)) for i in range(4)]
    body = orjson.loads(encoder.body(ended, USAGE))
    assert [choice["text"] for choice in body["choices"]] == ["a:0", "a:1", "b:2", "b:3"]
    assert [choice["token_ids"] for choice in body["choices"]] == [[0], [1], [2], [3]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[5], [5], [6, 7], [6, 7]]
    first = [event["choices"][0] for event in events(encoder.first_chunk())]
    assert [(one["index"], one["text"], one["prompt_token_ids"]) for one in first] == [
        (0, "a:", [5]), (1, "a:", [5]), (2, "b:", [6, 7]), (3, "b:", [6, 7]),
    ]  # fmt: skip
    client.Completion.model_validate(body)


def test_every_chunk_has_the_tokens_used_so_far_where_the_client_asks_for_it() -> None:
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    encoder = CompletionEncoder(*meta(2, stream=True, stream_options=options))
    chunks = [encoder.chunk(0, Emit("r", "a", (), 2)), encoder.chunk(1, Emit("r", "b", (), 3))]
    chunks.append(encoder.finish_chunk(0, End(FinishReason.EOS)))
    assert [event["usage"] for chunk in chunks for event in events(chunk)] == [
        CallUsage(3, tokens).of_choices() for tokens in (2, 5, 5)
    ]


def test_an_echoed_prompt_has_its_log_probabilities_before_the_answers_and_offsets_go_on() -> None:
    params = CompletionRequest(model="m", prompt="p", echo=True, logprobs=1)
    encoder = CompletionEncoder(params, called(((0, 2, 3, 1), "éhi")))
    of_prompt = [None, *(TokenLogprob(-i, ((1, -0.25),)) for i in (1, 2, 3))]
    emit = Emit("r", "hi", (out(1),), 1, (), of_prompt)
    (choice,) = orjson.loads(encoder.body([(emit, End(FinishReason.LENGTH))], USAGE))["choices"]
    assert choice["text"] == "éhihi"
    assert choice["logprobs"] == {
        "tokens": ["</s>", "bytes:\\xc3", "bytes:\\xa9", "hi", "hi"],
        "token_logprobs": [None, -1, -2, -3, -0.5],
        "top_logprobs": [
            None, {"hi": -0.25, "bytes:\\xc3": -1}, {"hi": -0.25, "bytes:\\xa9": -2}, {"hi": -0.25}, {"hi": -0.5},
        ],
        "text_offset": [0, 0, 0, 1, 3],
    }  # fmt: skip


def test_prompt_log_probabilities_are_by_token_id_and_a_chats_stand_beside_its_choices() -> None:
    of_prompt = [None, TokenLogprob(-3.0, ((1, -0.25), (2, -0.5))), TokenLogprob(-0.25, ((3, -0.25), (1, -1.0)))]
    params = CompletionRequest(model="m", prompt="p", n=2, prompt_logprobs=1)
    ended = [(Emit("r", "a", (), 1, (), of_prompt), End(FinishReason.EOS))] * 2
    expected = [
        None,
        {
            "4": {"logprob": -3.0, "rank": None, "decoded_token": "bytes: \\xf0\\x9f"},
            "1": {"logprob": -0.25, "rank": 1, "decoded_token": "hi"},
        },
        {"3": {"logprob": -0.25, "rank": 1, "decoded_token": "bytes:\\xa9"}},
    ]  # fmt: skip
    call = called(((0, 4, 3), ""))
    text = orjson.loads(CompletionEncoder(params, call).body(ended, USAGE))
    assert [choice["prompt_logprobs"] for choice in text["choices"]] == [expected, expected]
    chat = orjson.loads(ChatEncoder(params, call).body(ended, USAGE))
    assert chat["prompt_logprobs"] == expected
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])
