"""Request fields of the official clients and of vLLM: none is accepted and changes nothing without being named.

`harness.client_fields` writes the record of them. Each field is set to values of every kind, through the parsers of
the endpoints: a value changes what the request asks for, or is refused by name, or is ignored by name.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from typing import Any

import orjson
import pytest

from harness.client_fields import RECORD
from weft_gateway.errors import ParameterError
from weft_gateway.openai import (
    CHAT,
    CHATS,
    COMPLETIONS,
    EMBEDDINGS,
    POOLING,
    RERANK,
    SCORE,
    BatchRequest,
    CountRequest,
    DetokenizeRequest,
    LoadRequest,
    MessagesEndpoint,
    ResponsesChat,
    ResponsesEndpoint,
    UnloadRequest,
    UploadForm,
    parse,
    tokenize_request,
)
from weft_gateway.tolerance import NEUTRAL, advice

Json = dict[str, Any]
View = tuple[Any, frozenset[str]]  # what a request asks for, and the hints of it that were ignored
FIELDS: dict[str, dict[str, str]] = json.loads(RECORD.read_text())["fields"]
TEXT: list[Json] = [{"type": "text", "text": "hello"}]
MESSAGES: list[Json] = [{"role": "user", "content": TEXT}]
FUNCTION: Json = {"name": "f", "parameters": {}}
TOOLS: Json = {"tools": [{"type": "function", "function": FUNCTION}]}
CLAUDE: Json = {"system": "Be brief.", "messages": MESSAGES, "tools": [{"name": "f", "input_schema": {}}]}
RESPONSE: Json = {"input": MESSAGES, "tools": [{"type": "function"} | FUNCTION]}
SCORES: list[Json] = [{"text_1": "a", "text_2": "b"}, {"data_1": "a", "data_2": "b"}]
SCORES += [{"queries": "a", "documents": "b"}, {"queries": "a", "items": "b"}]
INPUTS: list[Json] = [{"input": "hello"}, {"messages": MESSAGES}]


def view(request: Any) -> View:
    asked = (request.repeated, request.own_items, request.params.store) if isinstance(request, ResponsesChat) else ()
    return (request.model_dump(), asked), request.ignored


def counted(body: bytes) -> View:
    request = parse(CountRequest, body)
    return request.chat(), request.ignored


def uploaded(body: bytes) -> View:
    """Write an object as a form, and read it."""

    async def form() -> AsyncIterator[bytes]:
        for name, value in orjson.loads(body).items():
            filename = '; filename="f"' if name == "file" else ""
            for key, text in value.items() if isinstance(value, dict) else [("", value)]:
                place = f"{name}[{key}]" if key else name
                yield f'--b\r\nContent-Disposition: form-data; name="{place}"{filename}\r\n\r\n{text}\r\n'.encode()
        yield b"--b--\r\n"

    async def read() -> list[bytes]:
        upload = UploadForm("multipart/form-data; boundary=b", form(), 1 << 20)
        await upload.open()
        return [chunk async for chunk in upload.chunks()]

    return asyncio.run(read()), frozenset()


def of(kind: type[Any]) -> Callable[[bytes], View]:
    return lambda body: view(parse(kind, body))


def by(endpoint: Any) -> Callable[[bytes], View]:
    return lambda body: view(endpoint.parse(body))


# By path: its parser and its plain requests.
APIS: dict[str, tuple[Callable[[bytes], View], list[Json]]] = {
    "/v1/chat/completions": (by(CHAT), [{"messages": MESSAGES} | TOOLS]),
    "/v1/chat/completions/batch": (by(CHATS), [{"messages": [MESSAGES]} | TOOLS]),
    "/v1/completions": (by(COMPLETIONS), [{"prompt": "hello"}]),
    "/v1/responses": (by(ResponsesEndpoint()), [RESPONSE]),
    "/v1/responses/input_tokens": (by(ResponsesEndpoint()), [RESPONSE]),
    "/v1/messages": (by(MessagesEndpoint()), [CLAUDE | {"max_tokens": 9}]),
    "/v1/messages/count_tokens": (counted, [CLAUDE]),
    "/v1/embeddings": (by(EMBEDDINGS), INPUTS),
    "/pooling": (by(POOLING), INPUTS),
    "/score": (by(SCORE), SCORES),
    "/rerank": (by(RERANK), [{"query": "a", "documents": ["b"]}]),
    "/tokenize": (lambda body: view(tokenize_request(body)), [{"prompt": "hello"}, {"messages": MESSAGES}]),
    "/detokenize": (of(DetokenizeRequest), [{"tokens": [1]}]),
    "/v1/load_lora_adapter": (of(LoadRequest), [{"lora_name": "n", "lora_path": "p"}]),
    "/v1/unload_lora_adapter": (of(UnloadRequest), [{"lora_name": "n"}]),
    "/v1/files": (uploaded, [{"purpose": "batch", "file": "{}"}]),
    "/v1/batches": (
        of(BatchRequest), [{"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}],
    ),
}  # fmt: skip
VALUES: Sequence[Any] = (True, False, 7, 0.5, "x", ["x"], {"x": "y"}, [{"x": "y"}])
FEW_VALUES: dict[str, Sequence[Any]] = {
    "allowed_token_ids": [[7]],
    "embed_dtype": ["float16"],
    "encoding_format": ["base64"],
    "endianness": ["big"],
    "include": [["message.output_text.logprobs"]],
    "logit_bias": [{"7": 1}],
    "output_config": [{"effort": "low"}],
    "prediction": [{"type": "content", "content": "x"}],
    "output_config.effort": ["low"],
    "output_config.format": [{"type": "json_schema", "schema": {}}],
    "reasoning": [{"effort": "low"}],
    "reasoning.effort": ["low"],
    "reasoning_effort": ["low"],
    "stop_token_ids": [[7]],
    "stream_options": [{"include_usage": True}],
    "text": [{"format": {"type": "json_object"}}],
    "thinking": [{"type": "disabled"}],
    "tools": [[{"type": "function", "function": FUNCTION | {"name": "g"}}]],
    "tool_choice": ["none", {"type": "none"}],
    "truncation_side": ["right"],
}
NEEDED = {"stream_options": "stream", "top_logprobs": "logprobs"}  # a field is refused without the other one
OBJECTS: dict[str, Any] = {  # that fields inside are set in, beside those of plain requests
    **{name: {} for name in ("metadata", "output_config", "reasoning", "stream_options", "text")},
    "system": TEXT,
    "thinking": {"type": "enabled"},
    "tool_choice": {"type": "auto"},
}
CASES = [(path, form) for path, (_, forms) in APIS.items() for form in range(len(forms))]


class Outcome(StrEnum):
    """What becomes of a field with a value."""

    APPLIED = "applied"
    IGNORED = "ignored"  # named in the header `weft-ignored`
    REFUSED = "refused"  # with an advice
    MISTYPED = "mistyped"  # refused for its value
    SILENT = "silent"


def changed(plain: Json, place: str, value: Any) -> tuple[Json, bool]:
    """Set a field of a request, of the first item of a list; False: the request does not have it."""
    request = orjson.loads(orjson.dumps(plain))
    *path, name = place.replace("[]", ".0").split(".")
    holder = request
    for step in path:
        holder = holder[int(step)] if step.isdigit() else holder[step]
    is_there = name in holder
    holder[name] = value
    return request, is_there


def outcome(read: Callable[[bytes], View], before: Any, request: Json, name: str) -> tuple[Outcome, str]:
    """Return what becomes of a field, and the parameter that a refusal names. `before`: asked for without the field."""
    try:
        after, ignored = read(orjson.dumps(request))
    except ParameterError as error:
        last = name.rpartition(".")[2]
        named = f": {advice(name)}." if last == name else last  # errors of objects inside say what these may have
        is_refused = "is not supported" in error.message and named in error.message and named != ": ."
        result = Outcome.REFUSED if is_refused or error.code == "unsupported_value" else Outcome.MISTYPED
        return result, re.split(r"[.\[]", error.param or "")[0]
    root = re.split(r"[.\[]", name)[0]
    if after == before and [hint.rpartition(".")[2] for hint in ignored] == [name.rpartition(".")[2]]:
        return Outcome.IGNORED, root
    return Outcome.SILENT if after == before else Outcome.APPLIED, root


@pytest.mark.parametrize(("path", "form"), CASES)
def test_each_field_is_applied_or_ignored_by_name_or_refused_by_name(path: str, form: int) -> None:
    read, forms = APIS[path]
    names = {name for listed in FIELDS[path].values() for name in listed.split()}
    plain = ({"model": "m"} if "model" in names else {}) | forms[form]
    keys = {key for other in forms for key in other}  # `input` beside `messages` may be refused as `messages`
    for name in sorted(names):
        root = re.split(r"[.\[]", name)[0]
        base = plain | {other: True for other in NEEDED.get(root, "").split() if other in names}
        base |= {root: OBJECTS[root]} if root != name and root in OBJECTS else {}
        before, _ = read(orjson.dumps(base))
        outcomes, silent, is_there = list[Outcome](), list[Any](), False
        for value in [*VALUES, *FEW_VALUES.get(name, ())]:
            request, is_there = changed(base, name, value)
            result, param = outcome(read, before, request, name)
            assert param == root or {param, name} <= keys, f"{name}: {value} is refused as {param}"
            outcomes.append(result)
            if result is Outcome.SILENT and value not in NEUTRAL.get(name, ()):
                silent.append(value)
        assert silent in ([], [True], [False]), f"{name} is ignored in silence"
        if name in keys - plain.keys():
            assert {*outcomes} <= {Outcome.REFUSED, Outcome.MISTYPED}, f"{name} has an effect beside {plain.keys()}"
        elif not is_there and (silent != [False] or outcomes[0] is not Outcome.MISTYPED):  # false alone is taken
            assert {Outcome.APPLIED, Outcome.IGNORED, Outcome.REFUSED} & {*outcomes}, f"{name} has no advice"


def test_each_path_of_the_record_is_read() -> None:
    assert APIS.keys() == FIELDS.keys()
