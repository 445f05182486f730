"""Hints that clients send to every server, and their treatment by each API. Pure.

A hint changes how a server works, not an answer's meaning. The table says of each hint whether it is applied, mapped to
a parameter of chats, or ignored. Ignored hints are removed before a request is checked, so the checks of requests stay
strict. The answer's header `weft-ignored` names them. `docs/reference/hints.md` shows the table.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from weft_gateway.errors import ParameterError

HEADER = "weft-ignored"
MAX_KIND_CHARS = 64  # characters of a tool's type in an error


class HintScope(StrEnum):
    """The API of a request."""

    ANY = "any"
    CHATS = "chats"
    RESPONSES = "responses"
    MESSAGES = "messages"


class Treatment(StrEnum):
    """The treatment of a hint."""

    APPLIED = "applied"
    MAPPED = "mapped"
    IGNORED = "ignored"
    LEFT_OUT = "left out"  # a tool of another type


ANY, CHATS, RESPONSES, MESSAGES = HintScope
APPLIED, MAPPED, IGNORED, LEFT_OUT = Treatment


class Hint(NamedTuple):
    """A row of the table. `places`: the hint's paths, `[]` for the items of a list; empty: its name is its path."""

    apis: tuple[HintScope, ...]
    name: str
    treatment: Treatment
    effect: str
    places: tuple[str, ...] = ()


_PART = "messages[].content[]"
_BOOKS = "It concerns the caller's books."
_CONVERSATION = "A conversation is used as it is sent; one beyond the context is refused."
_LENGTH = "`max_tokens` bounds reasoning and answer together."
_EFFORT = "It is `reasoning_effort` of chats."
_SERVER_TOOL = "The server of the API would run it; Weft runs no tools."
HINTS = (
    Hint((ANY,), "metadata", IGNORED, "It concerns the caller's books. Responses store and return it instead."),
    *(
        Hint((ANY,), name, IGNORED, _BOOKS)
        for name in "prompt_cache_key prompt_cache_options prompt_cache_retention request_id moderation "
        "session_id rid custom_labels".split()
    ),
    Hint((RESPONSES,), "client_metadata", IGNORED, _BOOKS),
    Hint((RESPONSES,), "max_tool_calls", IGNORED, "It bounds calls that the server would run; Weft runs no tools."),
    *(
        Hint((MESSAGES,), name, IGNORED, _BOOKS)
        for name in "diagnostics billing_policy fallback_credit_token user_profile_id workspace_id".split()
    ),
    Hint((MESSAGES,), "betas", IGNORED, "What is served needs no beta; so is the header `anthropic-beta`."),
    Hint((MESSAGES,), "anthropic_beta", IGNORED, "The name of `betas` in bodies of Bedrock and Vertex AI."),
    Hint(
        (CHATS, RESPONSES, MESSAGES),
        "cache_control",
        IGNORED,
        "Prefixes of prompts are reused without marks.",
        tuple(
            f"{place}cache_control"
            for place in ("", "tools[].", "system[].", f"{_PART}.", f"{_PART}.content[].", "input[].content[].")
        ),
    ),
    Hint(
        (CHATS, RESPONSES),
        "prompt_cache_breakpoint",
        IGNORED,
        "Prefixes of prompts are reused without marks.",
        (f"{_PART}.prompt_cache_breakpoint", "input[].content[].prompt_cache_breakpoint"),
    ),
    Hint(
        (MESSAGES,),
        "citations",
        IGNORED,
        "They come back with an answer; the text is used without them.",
        tuple(f"{place}.citations" for place in ("system[]", _PART, f"{_PART}.content[]")),
    ),
    Hint(
        (MESSAGES,),
        "is_error",
        IGNORED,
        "Chat templates have no mark for it: the result says it.",
        (f"{_PART}.is_error",),
    ),
    Hint((RESPONSES, MESSAGES), "context_management", IGNORED, _CONVERSATION),
    Hint((CHATS,), "verbosity", IGNORED, "Ask for it in a message."),
    Hint((RESPONSES,), "text.verbosity", IGNORED, "Ask for it in a message."),
    Hint((RESPONSES,), "text.format", APPLIED, "The form of the answer."),
    Hint((MESSAGES,), "output_config.format", APPLIED, "The form of the answer: a JSON schema."),
    Hint((MESSAGES,), "output_format", MAPPED, "The older name of `output_config.format`."),
    Hint((RESPONSES,), "reasoning.effort", MAPPED, _EFFORT),
    Hint((MESSAGES,), "output_config.effort", MAPPED, _EFFORT),
    Hint((MESSAGES,), "output_config.task_budget", IGNORED, _LENGTH),
    Hint((RESPONSES,), "reasoning.summary", IGNORED, "Reasoning is shown whole."),
    Hint((RESPONSES,), "reasoning.generate_summary", IGNORED, "The older name of `reasoning.summary`."),
    Hint((RESPONSES,), "reasoning.context", IGNORED, "The chat template decides which reasoning it shows."),
    Hint((MESSAGES,), "thinking: disabled", MAPPED, "It is `enable_thinking: false` of chats."),
    Hint((MESSAGES,), "thinking: enabled", MAPPED, "It is `reasoning_effort`: `output_config.effort`, or high."),
    Hint((MESSAGES,), "thinking: adaptive", MAPPED, "As `thinking: enabled`."),
    Hint((MESSAGES,), "thinking.budget_tokens", IGNORED, _LENGTH),
    Hint((MESSAGES,), "thinking.display", IGNORED, "Reasoning is shown whole, so that it can be sent back."),
    Hint((MESSAGES,), "tool_addition", MAPPED, "A block of a system message: the tool joins `tools`."),
    Hint((MESSAGES,), "tool_removal", MAPPED, "A block of a system message: the tool leaves `tools`."),
    Hint((MESSAGES,), "tool_reference", MAPPED, "In a result of a tool: it is the name of the tool, as text."),
    Hint((MESSAGES,), "metadata.user_id", APPLIED, "The access log has a hash of it."),
    Hint(
        (CHATS, RESPONSES, MESSAGES),
        "tools.defer_loading",
        IGNORED,
        "Every tool is shown to the model at once.",
        ("tools[].defer_loading", "tools[].function.defer_loading"),
    ),
    Hint(
        (MESSAGES,),
        "tools.eager_input_streaming",
        IGNORED,
        "Arguments are streamed as they come.",
        ("tools[].eager_input_streaming",),
    ),
    Hint(
        (MESSAGES,),
        "tools.input_examples",
        IGNORED,
        "Write examples into the tool's description.",
        ("tools[].input_examples",),
    ),
    *(
        Hint((CHATS, RESPONSES), f"tools.{kind}", LEFT_OUT, _SERVER_TOOL)
        for kind in "web_search web_search_preview file_search code_interpreter image_generation mcp tool_search "
        "programmatic_tool_calling".split()
    ),
    *(
        Hint((CHATS, RESPONSES), f"tools.{kind}", LEFT_OUT, "Its form is known to models of OpenAI; send a function.")
        for kind in "custom namespace computer computer_use_preview local_shell shell apply_patch".split()
    ),
    *(
        Hint((MESSAGES,), f"tools.{kind}", LEFT_OUT, _SERVER_TOOL)
        for kind in "web_search web_fetch code_execution advisor mcp_toolset tool_search_tool_bm25 "
        "tool_search_tool_regex".split()
    ),
    *(
        Hint((MESSAGES,), f"tools.{kind}", LEFT_OUT, "Its form is known to Claude; send a tool with an `input_schema`.")
        for kind in "bash text_editor memory computer computer_toolset browser_toolset".split()
    ),
)
_FUNCTION = {CHATS: "function", RESPONSES: "function", MESSAGES: "custom"}  # the type of served tools
_VERSION = re.compile(r"_(?:[0-9]{8}|[0-9]{4}_[0-9]{2}_[0-9]{2})\Z", re.ASCII)  # of a tool's type


def _places(api: HintScope) -> Mapping[tuple[str, ...], Mapping[str, str]]:
    """Return an API's ignored hints: the path of an object, the name there, the name in the table."""
    places = dict[tuple[str, ...], dict[str, str]]()
    for hint in HINTS:
        if hint.treatment is IGNORED and not {api, ANY}.isdisjoint(hint.apis):
            for place in hint.places or (hint.name,):
                *path, last = place.replace("[]", ".[]").split(".")
                places.setdefault(tuple(path), {})[last] = hint.name
    return places


_IGNORED = {api: _places(api) for api in HintScope}
_FIRST_NAMES = {api: {name for path, ends in _IGNORED[api].items() for name in path[:1] or ends} for api in HintScope}
_LEFT_OUT = {
    api: {hint.name.partition(".")[2]: hint.name for hint in HINTS if hint.treatment is LEFT_OUT and api in hint.apis}
    for api in _FUNCTION
}


def ignored_header(names: Collection[str]) -> dict[str, str]:
    """Return the header of an answer to a request with ignored hints."""
    return {HEADER: ", ".join(sorted(names))} if names else {}


def take_hints(api: HintScope, value: dict[str, Any], served: Collection[str]) -> frozenset[str]:
    """Remove a request's ignored hints, and return the names of the hints with an effect elsewhere.

    `served`: the served parameters. Raises ParameterError for a tool of an unknown type, and for a `tool_choice` of a
    removed tool.
    """
    names = set[str]()
    for path, places in () if _FIRST_NAMES[api].isdisjoint(value) else _IGNORED[api].items():
        if path and path[0] not in value:
            continue
        for part in _objects(value, path):
            for last in places.keys() & part.keys():
                if (path or last not in served) and part.pop(last):
                    names.add(places[last])
    return frozenset(names | (_leave_out_tools(api, value) if api in _FUNCTION else set()))


def _objects(value: dict[str, Any], path: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the objects at a path."""
    values: list[Any] = [value]
    for step in path:
        if step == "[]":
            values = [item for outer in values if isinstance(outer, list) for item in outer]
        else:
            values = [outer.get(step) for outer in values if isinstance(outer, dict)]
    return (item for item in values if isinstance(item, dict))


def _leave_out_tools(api: HintScope, value: dict[str, Any]) -> set[str]:
    """Remove the tools of known unserved types, and return their names in the table. Raises ParameterError."""
    served, left_out = _FUNCTION[api], _LEFT_OUT[api]
    tools: list[Any] = entries if isinstance(entries := value.get("tools"), list) else []
    names, called, retained = set[str](), set[str](), list[Any]()
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind == served:
            retained.append(tool)
            continue
        if (name := left_out.get(_VERSION.sub("", kind))) is None:
            path = f"tools[{index}].type"
            text = f"{path}: expected {served}, got {kind[:MAX_KIND_CHARS]!r}. Leave this tool out."
            raise ParameterError(text, param=path, code="unsupported_value")
        names.add(name)
        called.update(_names(tool))
    if names:
        value["tools"] = retained
    match value.get("tool_choice"):
        case {**choice}:
            name = left_out.get(_VERSION.sub("", str(choice.get("type"))))
            if name or not called.isdisjoint(_names(choice)):
                text = f"tool_choice: expected a {served} tool, got {name or 'a removed tool'}. Send auto."
                raise ParameterError(text, param="tool_choice", code="unsupported_value")
        case _:
            pass
    return names


def _names(tool: dict[str, Any]) -> Iterator[str]:
    """Yield the names of a tool or of a choice of a tool."""
    holders: list[Any] = [tool, tool.get("function"), tool.get("custom")]
    for holder in holders:
        match holder:
            case {"name": str(name)}:
                yield name
            case _:
                pass
