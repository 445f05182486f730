"""How model families write calls of tools: an object with a name and arguments, or both between marks. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft_gateway.forms.marks import CALL_MARKS, MarkTokens


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's format of calls: `begin` object `end`, joined by `separator`, all of them inside `first` and `last`.

    `spelled`: an optional mark before the calls of a format without `begin`; without the mark, calls stand at the
    answer's start. `also`: an alternative mark of some models. `python`: calls are Python's, with values of Python or
    JSON. `arguments_mark`: the mark between a name and its arguments, if a call is not an object of both; `id_mark`:
    the mark of an id between them. `marks`: the marks encoded as a single token.
    """

    name: str
    arguments: str  # the field of the arguments
    begin: str = ""
    end: str = ""
    first: str = ""
    separator: str = ""
    last: str = ""
    spelled: str = ""
    also: str = ""
    python: bool = False
    arguments_mark: str = ""
    id_mark: str = ""
    id_chars: int = 24
    marks: MarkTokens = field(default_factory=dict[str, tuple[int, bool]])

    @property
    def openings(self) -> tuple[str, ...]:
        """Return the letters of the marks before a call, or before all calls."""
        return tuple(filter(None, (self.begin.strip() or self.spelled or self.first.rstrip("["), self.also)))

    @property
    def closing(self) -> str:
        """Return the letters of the mark after a call, or after all calls; "": none."""
        return (self.end or self.last).strip().lstrip("]")

    @property
    def spellings(self) -> frozenset[str]:
        """Return the marks in the text of calls."""
        text = "".join((self.begin, self.end, self.first, self.last, self.arguments_mark))
        return frozenset(mark for mark in CALL_MARKS if mark in text)


HERMES = ToolFormat("hermes", "arguments", "<tool_call>\n", "\n</tool_call>", separator="\n")
LLAMA = ToolFormat("llama3_json", "parameters", separator="; ", spelled="<|python_tag|>")
MISTRAL = ToolFormat("mistral", "arguments", first="[", separator=", ", last="]", spelled="[TOOL_CALLS]", id_chars=9)
MISTRAL_NAMED = ToolFormat("mistral", "arguments", "[TOOL_CALLS]", arguments_mark="[ARGS]", id_chars=9)
GRANITE = ToolFormat("granite", "arguments", first="<|tool_call|>[", separator=", ", last="]", also="<tool_call>")
PHI = ToolFormat(
    "phi4_mini_json", "arguments", first="<|tool_call|>[", separator=", ", last="]<|/tool_call|>", also="functools"
)
OLMO = ToolFormat("olmo3", "arguments", first="<function_calls>", separator="\n", last="</function_calls>", python=True)
PARSERS: Mapping[str, ToolFormat] = {form.name: form for form in (HERMES, LLAMA, MISTRAL, GRANITE, PHI, OLMO)}


def instructions(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Write a system message with the tools and their call format, for templates without tools."""
    call = f'{{"name": NAME, "{form.arguments}": {{ARGUMENTS}}}}'
    if form.arguments_mark:
        call = f"NAME{form.arguments_mark}{{ARGUMENTS}}"
    elif form.python:
        call = "NAME(ARGUMENT=VALUE, ...)"
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer. Their signatures, as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments in this form:\n"
        f"{form.first}{form.begin}{call}{form.end}{form.last}"
    )


def render_calls(form: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Write OpenAI's calls of an earlier answer as the family's text."""
    functions = [call.get("function") or {} for call in calls]
    rendered = [
        f"{form.begin}{_rendered(form, function.get('name'), function.get('arguments'))}{form.end}"
        for function in functions
    ]
    return form.first + form.separator.join(rendered) + form.last


def _rendered(form: ToolFormat, name: Any, arguments: Any) -> str:
    if form.arguments_mark:
        return f"{name}{form.arguments_mark}{_json(form, arguments)}"
    if form.python and isinstance(arguments, dict):
        named: dict[str, Any] = arguments
        return f"{name}({', '.join(f'{key}={_json(form, value)}' for key, value in named.items())})"
    return _json(form, {"name": name, form.arguments: arguments})


def _json(form: ToolFormat, value: Any) -> str:
    """Write JSON with escaped marks: only the calls' marks are marks."""
    text = json.dumps(value, ensure_ascii=False)
    for mark in form.spellings:
        text = text.replace(mark, f"\\u{ord(mark[0]):04x}{mark[1:]}")
    return text


def call_id(form: ToolFormat, answer_id: str, index: int) -> str:
    """Return a call's id, equal for equal answers, with the length expected by the family's templates."""
    drawn = hashlib.sha256(f"{answer_id}/{index}".encode()).hexdigest()
    return drawn[: form.id_chars] if form.name == MISTRAL.name else f"call_{drawn[: form.id_chars]}"
