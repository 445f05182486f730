"""Hints of clients: the table of `weft_gateway.hints` says what happens, and the reference page shows the table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from weft_gateway.errors import ParameterError
from weft_gateway.hints import ANY, CHATS, HINTS, IGNORED, LEFT_OUT, MESSAGES, RESPONSES, Hint, HintScope
from weft_gateway.openai import ChatRequest, MessagesEndpoint, ResponsesEndpoint, parse

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "hints.md"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
PART: dict[str, Any] = {"type": "text", "text": "hello"}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "1", "content": [PART]}
FLAT: dict[str, Any] = {"type": "function", "name": "f", "parameters": SCHEMA}
USER: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def addition(*names: str) -> list[dict[str, Any]]:
    """Blocks that add tools: `f` of the plain request by reference, further tools by definition."""
    known = {"type": "tool_reference", "name": "f"}
    others = [{"type": "tool_definition", "definition": {"name": name, "input_schema": SCHEMA}} for name in names]
    return [{"type": "tool_addition", "tool": known if names == ("f",) else other} for other in others]


def removal(*names: str) -> list[dict[str, Any]]:
    return [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}} for name in names]


def changes(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "system", "content": blocks}


PLAIN: dict[HintScope, dict[str, Any]] = {
    CHATS: {
        "messages": [{"role": "user", "content": [PART]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}], "tools": [FLAT]},
    MESSAGES: {
        "max_tokens": 9,
        "system": [PART],
        "messages": [{"role": "user", "content": [RESULT, PART]}],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive"},
    },
}
PARSERS: dict[HintScope, Callable[[bytes], ChatRequest]] = {
    CHATS: lambda body: parse(ChatRequest, body),
    RESPONSES: ResponsesEndpoint().parse,
    MESSAGES: MessagesEndpoint().parse,
}
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of what is mapped or applied: a request, its chat
    "text.format": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    ),
    "output_config.format": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    ),
    "output_format": (
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    ),
    "reasoning.effort": ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    "output_config.effort": ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    "thinking: disabled": ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "reasoning_effort": None}),
    "thinking: enabled": ({"thinking": {"type": "enabled"}}, {"enable_thinking": None, "reasoning_effort": "high"}),
    "thinking: adaptive": ({"thinking": {"type": "adaptive"}}, {"enable_thinking": None, "reasoning_effort": "high"}),
    "tool_addition": (
        {"messages": [*USER, changes(addition("g", "h")), changes(removal("f", "g")), changes(addition("f"))]},
        {"tools": [function("h"), function("f")]},
    ),
    "tool_removal": ({"messages": [*USER, changes(removal("f"))]}, {"tools": []}),
    "tool_reference": (
        {
            "messages": [
                {"role": "user", "content": [RESULT | {"content": [{"type": "tool_reference", "tool_name": "f"}]}]}
            ]
        },
        {"contents": ["hello", "f"]},
    ),
    "metadata.user_id": ({"metadata": {"user_id": "u"}}, {"user": "u"}),
}


def asked(api: HintScope, **changes: Any) -> dict[str, Any]:
    """A request of its own: what is ignored is taken out of it."""
    return orjson.loads(orjson.dumps({"model": "m"} | PLAIN[api] | changes))


def chat_of(api: HintScope, request: dict[str, Any]) -> ChatRequest:
    return PARSERS[api](orjson.dumps(request))


def with_hint(request: dict[str, Any], place: str, value: Any) -> bool:
    """Set a hint at a place; False: the plain request has no such place."""
    *path, last = place.replace("[]", ".[]").split(".")
    found: Any = request
    for step in path:
        if step == "[]" and isinstance(found, list):
            found = found[0]
        elif isinstance(found, dict) and step != "[]":
            found = found.setdefault(step, {}) if step in ("text", "reasoning", "output_config") else found.get(step)
        else:
            return False
    if isinstance(found, dict):
        found[last] = value
    return isinstance(found, dict)


PLACES = [
    (api, hint.name, place)
    for hint in HINTS
    if hint.treatment is IGNORED
    for api in PARSERS
    if {api, ANY} & {*hint.apis}
    for place in hint.places or (hint.name,)
    if hint.name != "metadata" or api is CHATS  # the other APIs apply it
]


def test_what_is_ignored_changes_nothing_and_is_named_at_each_place() -> None:
    named = set[tuple[HintScope, str]]()
    for api, name, place in PLACES:
        plain = chat_of(api, asked(api))
        for value, names in (({"any": [1]}, {name}), (False, set[str]())):
            request = asked(api)
            if with_hint(request, place, value):
                chat = chat_of(api, request)
                assert (chat.model_dump(), chat.ignored) == (plain.model_dump(), names), (api, place, value)
                named.add((api, name))
    assert named == {(api, name) for api, name, _ in PLACES}


@pytest.mark.parametrize(
    "hint", [hint for hint in HINTS if hint.treatment not in (IGNORED, LEFT_OUT)], ids=lambda hint: hint.name
)
def test_what_is_applied_or_mapped_has_its_effect(hint: Hint) -> None:
    changes, effect = EFFECTS[hint.name]
    for api in hint.apis:
        chat = chat_of(api, asked(api, **changes))
        found = chat.model_dump() | {"contents": [message.content for message in chat.messages]}
        assert {name: found[name] for name in effect} == effect
        assert not chat.ignored


@pytest.mark.parametrize("hint", [hint for hint in HINTS if hint.treatment is LEFT_OUT], ids=lambda hint: hint.name)
def test_a_tool_of_a_known_other_type_is_left_out_and_named_and_cannot_be_forced(hint: Hint) -> None:
    kind = hint.name.removeprefix("tools.")
    for api in hint.apis:
        for version in ("", "_20250305", "_2025_03_11"):
            other: dict[str, Any] = {"type": kind + version, "name": "other", kind: {"name": "inner"}}
            request = asked(api)
            plain, request["tools"] = chat_of(api, request), [other, *request["tools"]]
            chat = chat_of(api, request)
            assert (chat.tools, chat.ignored) == (plain.tools, {hint.name})
            forced: list[Any] = [{"type": kind + version}, {"type": "tool", "name": "other"}]
            for choice in [*forced, {"type": "function", "function": {"name": "other"}}]:
                with pytest.raises(ParameterError, match=r"^tool_choice: expected a .* tool, got ") as caught:
                    chat_of(api, request | {"tool_choice": choice})
                assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("api", PARSERS)
def test_a_tool_of_an_unknown_type_is_refused_by_name(api: HintScope) -> None:
    request = asked(api)
    request["tools"].append({"type": "x" * 100})
    with pytest.raises(ParameterError, match=rf"^tools\[1\]\.type: expected \w+, got '{'x' * 64}'\. ") as caught:
        chat_of(api, request)
    assert caught.value.param == "tools[1].type"


def test_the_reference_page_shows_the_table() -> None:
    rows = [
        f"| `{hint.name}` | {', '.join(api for api in hint.apis)} | {hint.treatment} | {hint.effect} |"
        for hint in HINTS
    ]
    table = "\n".join(["| hint | API | treatment | effect |", "|---|---|---|---|", *rows])
    assert table in PAGE.read_text(), f"{PAGE} needs this table:\n{table}"
