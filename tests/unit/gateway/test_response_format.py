"""Bodies and chunks as OpenAI's own client types read them."""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from weft_gateway.core.events import Emit, FinishReason, TokenLogprob, TokenLogprobOut
from weft_gateway.openai.logprobs import LEAST
from weft_gateway.openai.response_format import ChatEncoder, CompletionEncoder, ResponseEncoder, ResponseMeta, Usage

USAGE = Usage(3, 5)


class Words:
    """Token 0 is special, 9 is unknown, the others are their bytes."""

    BYTES = (b"", b"hi", "é".encode()[:1], "é".encode()[1:], b" \xf0\x9f")

    def bytes_of(self, token: int) -> bytes:
        return self.BYTES[token] if token < len(self.BYTES) else b""

    def name_of(self, token: int) -> str | None:
        return "</s>" if token == 0 else None if self.bytes_of(token) else f"token_id:{token}"


def about(n: int = 1, alternatives: int | None = None) -> ResponseMeta:
    return ResponseMeta("r1", "m", 7, n, include_usage=False, alternatives=alternatives, words=Words())


def told(token: int, top: Sequence[tuple[int, float]] = (), start: int = 0) -> TokenLogprobOut:
    return TokenLogprobOut(token, TokenLogprob(-0.5, tuple(top)), start)


def events(data: bytes) -> list[Any]:
    return [orjson.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]


@pytest.mark.parametrize("make", [ChatEncoder, CompletionEncoder])
def test_a_chunk_is_the_same_by_template_and_made_whole(make: type[Any]) -> None:
    text = 'quote " hole \x00text\x00 \N{SLIGHTLY SMILING FACE}'
    plain, with_logprobs = make(about(3)), make(about(3, alternatives=0))
    for index in range(3):
        (fast,) = events(plain.chunk(index, Emit(text)))
        (whole,) = events(with_logprobs.chunk(index, Emit(text)))
        assert fast["choices"][0]["logprobs"] is None
        whole["choices"][0]["logprobs"] = None
        assert fast == whole
        assert fast["choices"][0]["index"] == index


def test_a_chat_of_several_choices_is_a_chat_to_the_client() -> None:
    shape: ResponseEncoder = ChatEncoder(about(2))
    body = shape.whole([(Emit("a"), FinishReason.EOS), (Emit("b"), FinishReason.LENGTH)], USAGE)
    chat = ChatCompletion.model_validate_json(body)
    assert [(c.index, c.message.content, c.finish_reason) for c in chat.choices] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]
    assert chat.usage is not None
    assert chat.usage.total_tokens == 8
    roles = [ChatCompletionChunk.model_validate(event).choices[0] for event in events(shape.first())]
    assert [(role.index, role.delta.role) for role in roles] == [(0, "assistant"), (1, "assistant")]


def test_parts_of_characters_special_and_unknown_tokens_are_told_by_name() -> None:
    said = Emit("hié", tuple(told(token) for token in (1, 2, 3, 4, 0, 9)))
    body = ChatEncoder(about(alternatives=0)).whole([(said, FinishReason.EOS)], USAGE)
    logprobs = ChatCompletion.model_validate_json(body).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.bytes) for one in logprobs.content] == [
        ("hi", [104, 105]),
        ("\\xc3", [0xC3]),
        ("\\xa9", [0xA9]),
        (" \\xf0\\x9f", [32, 0xF0, 0x9F]),
        ("</s>", None),
        ("token_id:9", None),
    ]
    (event,) = events(CompletionEncoder(about(alternatives=0)).chunk(0, said))
    names = ["hi", "bytes:\\xc3", "bytes:\\xa9", "bytes: \\xf0\\x9f", "</s>", "token_id:9"]
    assert event["choices"][0]["logprobs"]["tokens"] == names


def test_alternatives_are_as_many_as_asked_for_and_a_completion_adds_the_chosen_one() -> None:
    said = Emit("hi", (told(1, [(0, -0.1), (2, -0.2), (3, -0.3)], start=4),))
    (chat,) = events(ChatEncoder(about(alternatives=2)).chunk(0, said))
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert [(one["token"], one["logprob"]) for one in entry["top_logprobs"]] == [("</s>", -0.1), ("\\xc3", -0.2)]
    body = CompletionEncoder(about(alternatives=2)).whole([(said, FinishReason.STOP)], USAGE)
    logprobs = Completion.model_validate_json(body).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"</s>": -0.1, "bytes:\\xc3": -0.2, "hi": -0.5}]
    assert logprobs.text_offset == [4]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1e30])
def test_what_json_cannot_say_is_said_as_openai_does(value: float) -> None:
    said = Emit("hi", (TokenLogprobOut(1, TokenLogprob(value, ((1, value),)), 0),))
    (event,) = events(ChatEncoder(about(alternatives=1)).chunk(0, said))
    entry = event["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (LEAST, LEAST)
