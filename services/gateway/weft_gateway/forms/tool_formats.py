"""How model families write calls of tools: an object with a name and arguments, or both between marks. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft_gateway.forms.marks import MarkTokens


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls: `begin` object `end`, joined by `between`, all of them inside `first` and `last`.

    `spelled`: the mark that may stand before the calls of a format without `begin`; where it does not, they stand where
    the answer begins. `arguments_mark`: the mark between a name and its arguments, where a call is no object of both;
    `id_mark`: the mark of an id between them. `marks`: the marks that are one token.
    """

    name: str
    arguments: str  # the field that holds them
    begin: str = ""
    end: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    spelled: str = ""
    arguments_mark: str = ""
    id_mark: str = ""
    id_chars: int = 24
    marks: MarkTokens = field(default_factory=dict[str, tuple[int, bool]])


HERMES = ToolFormat("hermes", "arguments", "<tool_call>\n", "\n</tool_call>", between="\n")
LLAMA = ToolFormat("llama3_json", "parameters", between="; ", spelled="<|python_tag|>")
MISTRAL = ToolFormat("mistral", "arguments", first="[", between=", ", last="]", spelled="[TOOL_CALLS]", id_chars=9)
MISTRAL_NAMED = ToolFormat("mistral", "arguments", "[TOOL_CALLS]", arguments_mark="[ARGS]", id_chars=9)
PARSERS: Mapping[str, ToolFormat] = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}


def instructions(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Write a system message for templates that do not show tools: what they are and how they are called."""
    call = f'{{"name": NAME, "{form.arguments}": {{ARGUMENTS}}}}'
    if form.arguments_mark:
        call = f"NAME{form.arguments_mark}{{ARGUMENTS}}"
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
    rendered = [f"{form.begin}{_rendered(form, one.get('name'), one.get('arguments'))}{form.end}" for one in functions]
    return form.first + form.between.join(rendered) + form.last


def _rendered(form: ToolFormat, name: Any, arguments: Any) -> str:
    if form.arguments_mark:
        return f"{name}{form.arguments_mark}{json.dumps(arguments, ensure_ascii=False)}"
    return json.dumps({"name": name, form.arguments: arguments}, ensure_ascii=False)


def call_id(form: ToolFormat, answer_id: str, index: int) -> str:
    """Return a call's id: the same for the same answer, as long as the family's templates want it."""
    drawn = hashlib.sha256(f"{answer_id}/{index}".encode()).hexdigest()
    return drawn[: form.id_chars] if form.name == MISTRAL.name else f"call_{drawn[: form.id_chars]}"
