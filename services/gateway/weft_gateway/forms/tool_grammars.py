"""Grammars (Lark) of answers with calls of tools, as each model family writes calls.

An answer has to call (`tool_choice: required`), or is free text until a call begins (`auto`, with a strict tool). An
answer ends after its calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from weft_gateway.forms.json_schemas import (
    allow_null,
    drop_annotations,
    keep_enforceable,
    rebase_references,
    with_nulls,
)
from weft_gateway.forms.marks import RESPONSE, in_grammar
from weft_gateway.forms.python_calls import PYTHON_NAME
from weft_gateway.forms.tool_formats import ToolFormat

CALL_WHITESPACE = " ?"  # white space of calls: families write them in a single line
_NOT_CLOSED = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
_BLANK = r"[\s\x1c-\x1f]*"  # as Python strips it
_ANY_ARGUMENTS: Mapping[str, Any] = {"parameters": {"type": "object"}}  # schema of a tool without strict, in free text


class FaultyTool(ValueError):
    """A strict tool with an unenforceable schema. `param`: the tool, as `tools[2]`."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(text)
        self.param = param


def describe_answer(
    tools: Sequence[Mapping[str, Any]],
    written: ToolFormat,
    answer: Mapping[str, Any] | None,
    *,
    several: bool,
    is_free: bool,
    function_name: str | None,
) -> dict[str, Any]:
    """Write down the form of an answer, as JSON: see `structured_outputs.with_tools`."""
    functions = [{"index": index, **tool["function"]} for index, tool in enumerate(tools)]
    return {
        "functions": [function for function in functions if function_name in (None, function["name"])],
        "written": asdict(written),
        "several": several,
        "answer": answer,
        "is_free": is_free,
    }


def keep_enforceable_tools(answer_form: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the unenforceable parts of lenient schemas. Raises FaultyTool, ValueError."""
    functions: list[dict[str, Any]] = []
    for function in answer_form["functions"]:
        if answer_form["is_free"] and not function.get("strict"):
            functions.append(function)
            continue
        param = f"tools[{function['index']}]"
        try:
            schema = keep_enforceable(_arguments(function), _options(function), root_name="parameters")
        except ValueError as error:
            raise FaultyTool(param, f"{param} ({function['name']}): {error}") from error
        functions.append({**function, "parameters": schema})
    answer = answer_form["answer"]
    if answer:
        schema, options = json.loads(with_nulls(answer["text"])), answer["options"]
        answer = {**answer, "text": json.dumps(keep_enforceable(schema, options))}
    return {**answer_form, "functions": functions, "answer": answer}


def grammar_of_tools(answer_form: Mapping[str, Any], reasoning: str) -> str:
    """Write Lark: calls in their family's format, or the alternative answer. `reasoning`: see `_free_text`."""
    written, is_free = ToolFormat(**answer_form["written"]), answer_form["is_free"]

    def mark(text: str) -> str:
        return in_grammar(text, written.marks)

    def function_of(name: str, function: Mapping[str, Any]) -> str:
        any_arguments = is_free and not function.get("strict")
        if written.python and any_arguments:
            return f'"{function["name"]}(" (argument (", " argument)*)? ")"'
        if written.python and (named := _keywords(name, function)):
            return named
        schema = json.dumps(_call({**function, **(_ANY_ARGUMENTS if any_arguments else {})}, written))
        if not written.arguments_mark:
            return f"%json {schema}"
        call_id = f"({mark(written.id_mark)} /[0-9A-Za-z]{{{written.id_chars}}}/)?" if written.id_mark else ""
        return f"{mark(function['name'])} {call_id} {mark(written.arguments_mark)} %json {schema}"

    functions = answer_form["functions"]
    repetition = f"({mark(written.separator)} {mark(written.begin)} function)*" if answer_form["several"] else ""
    names = [f"function_{index}" for index in range(len(functions))]
    rules = [f"functions: function {repetition}", f"function: ({' | '.join(names)}) {mark(written.end)}"]
    rules += [f"{name}: {function_of(name, function)}" for name, function in zip(names, functions, strict=True)]
    if is_free:
        return "\n".join([*_free_text(written, reasoning), *rules])
    start = "start: calls"
    if answer := answer_form["answer"]:
        schema = json.loads(with_nulls(answer["text"]))
        start += f" | answer\nanswer: %json {json.dumps({**schema, 'x-guidance': answer['options']})}"
    spelled = f"({mark(written.spelled)})?" if written.spelled else ""
    calls = f"calls: {spelled} {mark(written.first)} {mark(written.begin)} functions {mark(written.last)}"
    return "\n".join([start, calls, *rules])


def _free_text(written: ToolFormat, reasoning: str) -> list[str]:
    """Write the rules of text without a call, or until a call begins, matching `tool_calls.ToolCallParser`.

    `reasoning`: the mark of possible leading reasoning, not part of the text; "": none.
    """
    mark, is_bare = written.openings[0], not written.begin
    opened = written.first.removeprefix(mark)  # a bracket around all calls, or none
    closed = written.last[: len(opened)]
    # A mark in the form of a word begins a call only with a bracket after it.
    calling = "|".join(rf"{text}{_BLANK}[\[{{]" if text.isalpha() else re.escape(text) for text in written.openings)
    no_first = " & ~FIRST" if is_bare else ""
    starts, rules = ["TEXT"], [rf"TEXT: /(.|\n)*/ & ~/(.|\n)*({calling})(.|\n)*/{no_first}"]
    for index, opening in enumerate(written.openings):
        letters, rest = (opening + opened, "") if opening.isalpha() else (opening, opened)
        prefix = rf"/(.|\n)*{re.escape(letters)}/ & ~/(.|\n)*({calling})(.|\n)+/{no_first}"
        token = f" | TEXT <[{written.marks[opening][0]}]>" if opening in written.marks else ""
        begins = _literal(written.begin.removeprefix(opening) or rest)
        ends = in_grammar(written.last, written.marks) if opening == mark else _literal(closed)
        rules += [f"until_{index}: UNTIL_{index}{token}", f"UNTIL_{index}: {prefix}"]
        starts.append(f"until_{index} {begins} functions {ends}")
    if is_bare:
        thinks = rf"|{re.escape(reasoning)}" if reasoning else ""
        rules.append(rf"FIRST: /{_BLANK}(({re.escape(RESPONSE[0])}{_BLANK})?(\[{_BLANK})?\{{{thinks})(.|\n)*/")
    if is_bare and not written.python:
        starts.append(f"{_literal(opened)} functions {_literal(closed)}")
    if written.python:
        rules += ['argument: KEY "=" %json {}', "KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/"]
    return [f"start: {' | '.join(starts)}", *rules]


def _literal(text: str) -> str:
    """Spell a text as Lark does; nothing for none."""
    return json.dumps(text) if text else ""


def _keywords(name: str, function: Mapping[str, Any]) -> str:
    """Write the rest of a rule after its name: Python's call, and the rules of its arguments, in the schema's order.

    "": the schema has more than properties, and the call is an object.
    """
    schema = _arguments(function)
    is_wider = (_NOT_CLOSED - {"additionalProperties"}) & schema.keys() or schema.get("additionalProperties")
    properties, required = {} if is_wider else schema.get("properties", {}), schema.get("required", [])
    if is_wider or not isinstance(properties, dict) or not isinstance(required, list):
        return ""
    are_schemas = all(isinstance(value, dict | bool) for value in properties.values())
    if not are_schemas or not all(map(PYTHON_NAME.fullmatch, properties)):
        return ""
    place = "/$defs/arguments"
    rules = [f'"{function["name"]}(" {name}_first0 ")"']
    for index, (key, value) in enumerate(properties.items()):
        inner: Any = {"not": {}} if value is False else {} if value is True else rebase_references(value, place)
        if '"$ref"' in json.dumps(inner):
            inner = {**inner, "$defs": {"arguments": rebase_references(schema, place)}}
        typed = json.dumps({**inner, "x-guidance": _options(function)})
        rest, skips = f"{name}_more{index + 1}", key not in required
        rules.append(f'{name}_value{index}: "{key}=" %json {typed}')
        rules.append(f"{name}_first{index}: {name}_value{index} {rest}{f' | {name}_first{index + 1}' * skips}")
        rules.append(f'{name}_more{index}: (", " {name}_value{index}){"?" * skips} {rest}')
    return "\n".join([*rules, f'{name}_first{len(properties)}: ""', f'{name}_more{len(properties)}: ""'])


def _call(function: Mapping[str, Any], written: ToolFormat) -> dict[str, Any]:
    """Write the JSON schema of a call, or of its arguments."""
    arguments, options = _arguments(function), {"x-guidance": _options(function)}
    if written.arguments_mark:
        return {**arguments, **options}
    inside = rebase_references(arguments, f"/properties/{written.arguments}")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, written.arguments: inside},
        "required": ["name", written.arguments],
        "additionalProperties": False,
        **options,
    }


def _options(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"whitespace_pattern": CALL_WHITESPACE, "lenient": not function.get("strict")}


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return the schema of a function's arguments, always an object."""
    schema = allow_null(_closed(drop_annotations(function.get("parameters") or {"properties": {}})))
    return {"type": "object", **{key: value for key, value in schema.items() if key != "type"}}


def _closed(schema: Any) -> Any:
    """Close a schema of arguments: objects have only the named properties.

    An object stays open if several schemas describe it, or if it specifies further properties itself.
    """
    if not isinstance(schema, dict):
        return schema
    inside = {name: _closed(schema[name]) for name in ("items",) if name in schema}
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            inside[name] = {key: _closed(value) for key, value in schema[name].items()}
    closed = {} if _NOT_CLOSED & schema.keys() or "properties" not in schema else {"additionalProperties": False}
    return {**schema, **inside, **closed}
