"""What a client binds its answer's text to, as an llguidance grammar: https://github.com/guidance-ai/llguidance

OpenAI's `response_format`, and vLLM's `structured_outputs`; a request asks for one form.
`grammar_of` may take any time and memory with hostile input: `grammar_worker` runs it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, NamedTuple

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from weft.domain.request import MAX_GRAMMAR
from weft.grammars import first_fault, one_line, parser_limits
from weft_gateway.errors import ParameterError
from weft_gateway.forms.marks import MarkTokens, ReasoningMarks, in_grammar, is_special
from weft_gateway.forms.python_calls import PYTHON_NAME
from weft_gateway.forms.tool_formats import ToolFormat
from weft_gateway.tolerance import check_names

# Between the parts of a JSON text: pretty-printed or in one line, but no endless run of spaces.
WHITESPACE = r"\n?[ \t]{0,16}"
CALL_WHITESPACE = " ?"  # of calls, which nobody reads: families write them in one line
_NOT_CLOSED = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
_ONE_OF = (
    "oneOf is taken where its schemas cannot hold at once, as by a required property of different const; otherwise "
    "write anyOf, or, beside a schema that may have it, strict: false, which takes it as anyOf"
)
_INSIDE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")  # a schema
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_OBJECT = '{"type": "object"}'
_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#.*|[\w-]+')  # a text, a class, a remark, a name
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_FLAGS = ("json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")


class StructuredOutput(NamedTuple):
    """What an answer's text is bound to. `param`: where it stands; `kind`: json, regex, choice, grammar or tools.

    `text`: a JSON schema, a regular expression, a JSON list of texts, a grammar (Lark or GBNF), what `with_tools`
    makes. `whitespace`: a regular expression; `lenient`: keywords of the schema that are not implemented are passed
    over; `lead`: a grammar of what stands before it, with a rule of that name.
    """

    param: str
    kind: str
    text: str
    whitespace: str = WHITESPACE
    lenient: bool = False
    lead: str = ""


def structured_output(response_format: Any = None, structured_outputs: Any = None) -> StructuredOutput | None:
    """Read a request's parameters; None: any text. Raises ParameterError."""
    forms = [*_of_response_format(response_format), *_of_vllm(structured_outputs)]
    if len(forms) > 1:
        names = " and ".join(form.param for form in forms)
        raise ParameterError(f"An answer has one form; {names} ask for several.", param=forms[1].param)
    return forms[0] if forms else None


def grammar_of(output: StructuredOutput) -> str:
    """Build a grammar that compiles and says what may come first. Raises ValueError with what is wrong."""
    own = _built(output)
    grammar = _after_lead(output.lead, own) if output.lead else own
    if len(grammar.encode()) > MAX_GRAMMAR:
        raise ValueError(f"its grammar is larger than {MAX_GRAMMAR >> 10} KiB")
    if error := LLMatcher.validate_grammar(grammar, limits=parser_limits()):
        raise ValueError(_ONE_OF if "coerce_one_of" in error else one_line(error))
    if fault := first_fault(own):
        raise ValueError(fault)
    return grammar


def with_tools(
    tools: Sequence[Mapping[str, Any]], written: ToolFormat, answer: StructuredOutput | None, *, several: bool
) -> StructuredOutput:
    """Bind an answer to calls of these tools (OpenAI's functions), or to `answer`; None: it has to call.

    Calls are written as the model's family writes them. Raises ParameterError where both cannot stand side by side.
    """
    if answer is not None and answer.kind != "json":
        text = f"{answer.param} cannot stand beside tools: of an answer that may call them the other form is JSON."
        raise ParameterError(text, param=answer.param)
    functions = [tool["function"] for tool in tools]
    beside = answer and {"text": answer.text, **_options(answer)}
    asked = {"functions": functions, "written": asdict(written), "several": several, "answer": beside}
    return StructuredOutput("tools", "tools", json.dumps(asked))


def grammar_of_lead(around: ReasoningMarks, tokens: MarkTokens, *, begun: bool) -> str:
    """Write the Lark rule `lead`: some reasoning before the answer, or none; `begun`: the rest of some.

    Reasoning ends at the first mark, and white space around it is passed over, as the parser does.
    """
    begin, end = around
    ends = [f"TEXT <[{tokens[end][0]}]>"] if end in tokens else []
    ends += [] if is_special(end, tokens) else ["spelled"]
    rules = [
        "lead: reasoning BLANK" if begun else f"lead: (BEFORE {in_grammar(begin, tokens)} reasoning BLANK)?",
        f"reasoning: {' | '.join(ends)}",
        f'spelled[suffix="{end}"]: TEXT',
        r"TEXT: /(.|\n)*/",
        r"BLANK: /[ \t\r\n]{0,16}/",
        r"BEFORE: /\n{0,2}/",  # few texts: whoever begins with one has to reason
    ]
    return "\n".join(rules)


def _grammar_of_tools(asked: Mapping[str, Any]) -> str:
    """Write Lark: calls in their family's format, or the other answer."""
    written = ToolFormat(**asked["written"])

    def mark(text: str) -> str:
        return in_grammar(text, written.marks)

    def call(index: int, function: Mapping[str, Any]) -> str:
        if written.python and (named := _keywords(f"call_{index}", function)):
            return named
        schema = json.dumps(_call(function, written))
        if not written.arguments_mark:
            return f"{mark(written.begin)} %json {schema} {mark(written.end)}"
        call_id = f"({mark(written.id_mark)} /[0-9A-Za-z]{{{written.id_chars}}}/)?" if written.id_mark else ""
        return f"{mark(written.begin + function['name'])} {call_id} {mark(written.arguments_mark)} %json {schema}"

    rules = [f"call_{index}: {call(index, function)}" for index, function in enumerate(asked["functions"])]
    any_call = " | ".join(f"call_{index}" for index in range(len(rules)))
    more = f" ({mark(written.between)} call)*" if asked["several"] else ""
    start = "start: calls"
    if answer := asked["answer"]:
        schema = json.loads(_with_nulls(answer.pop("text")))
        start += f" | answer\nanswer: %json {json.dumps({**schema, 'x-guidance': answer})}"
    spelled = f"({mark(written.spelled)})?" if written.spelled else ""
    calls = f"calls: {spelled} {mark(written.first)} call{more} {mark(written.last)}"
    return "\n".join([start, calls, f"call: {any_call}", *rules])


def _keywords(name: str, function: Mapping[str, Any]) -> str:
    """Write what follows the name of a rule: Python's call, and the rules of its arguments, in the schema's order.

    "": the schema says more than properties, and the call is an object.
    """
    schema = _nullable(_closed(function.get("parameters") or {"properties": {}}))
    is_wider = (_NOT_CLOSED - {"additionalProperties"}) & schema.keys() or schema.get("additionalProperties")
    properties = {} if is_wider else schema.get("properties", {})
    if is_wider or not isinstance(properties, dict) or not all(map(PYTHON_NAME.fullmatch, properties)):
        return ""
    beside = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    beside["x-guidance"] = {"whitespace_pattern": CALL_WHITESPACE, "lenient": not function.get("strict")}
    rules = [f'"{function["name"]}(" {name}_first0 ")"']
    for index, (key, value) in enumerate(properties.items()):
        typed = json.dumps({**({"not": {}} if value is False else {} if value is True else value), **beside})
        after, skips = f"{name}_more{index + 1}", key not in schema.get("required", ())
        rules.append(f'{name}_value{index}: "{key}=" %json {typed}')
        rules.append(f"{name}_first{index}: {name}_value{index} {after}{f' | {name}_first{index + 1}' * skips}")
        rules.append(f'{name}_more{index}: (", " {name}_value{index}){"?" * skips} {after}')
    return "\n".join([*rules, f'{name}_first{len(properties)}: ""', f'{name}_more{len(properties)}: ""'])


def _call(function: Mapping[str, Any], written: ToolFormat) -> dict[str, Any]:
    """Write the JSON schema of a call, or of its arguments; the definitions that these refer to stand at its root."""
    arguments = _nullable(_closed(function.get("parameters") or {"properties": {}}))
    options = {"x-guidance": {"whitespace_pattern": CALL_WHITESPACE, "lenient": not function.get("strict")}}
    if written.arguments_mark:
        return {"type": "object", **arguments, **options}
    shared = {name: arguments.pop(name) for name in ("$defs", "definitions") if name in arguments}
    return {
        **shared,
        "type": "object",
        "properties": {"name": {"const": function["name"]}, written.arguments: {"type": "object", **arguments}},
        "required": ["name", written.arguments],
        "additionalProperties": False,
        **options,
    }


def _closed(schema: Any) -> Any:
    """Close a schema of arguments: objects have the properties that they name, and no function takes others.

    An object that several schemas describe, or that says itself what else it may have, stays as it is.
    """
    if not isinstance(schema, dict):
        return schema
    inside = {name: _closed(schema[name]) for name in ("items",) if name in schema}
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            inside[name] = {key: _closed(value) for key, value in schema[name].items()}
    closed = {} if _NOT_CLOSED & schema.keys() or "properties" not in schema else {"additionalProperties": False}
    return {**schema, **inside, **closed}


def _options(output: StructuredOutput) -> dict[str, Any]:
    """What llguidance takes beside a JSON schema."""
    return {"whitespace_pattern": output.whitespace, "lenient": output.lenient}


# ---- the parameters


def _of_response_format(value: Any) -> list[StructuredOutput]:
    """Read OpenAI's parameter; a schema beside `type`, too, which llama.cpp, Together and Fireworks have."""
    name = "response_format"
    match value:
        case None:
            return []
        case {"type": "text", **others}:
            check_names(name, others, ())
            return []
        case {"type": "json_object", **others}:
            check_names(name, others, ("schema",))
            schema = others.get("schema")
            return (
                [StructuredOutput(name, "json", _OBJECT)]
                if schema in (None, {})
                else [_of_schema(f"{name}.schema", schema, {})]
            )
        case {"type": "json_schema", "json_schema": {"schema": schema, **about}, **others}:
            check_names(name, others, ())
            return [_of_schema(f"{name}.json_schema.schema", schema, about)]
        case {"type": "json_schema", "schema": schema, **about} if about.get("json_schema") is None:
            return [_of_schema(f"{name}.schema", schema, about)]
        case {"type": "json_schema"}:
            text = 'response_format: json_schema has to be {"name": ..., "schema": {...}}.'
            raise ParameterError(text, param="response_format.json_schema")
        case {"type": str(type_)}:
            text = f"response_format: type {type_[:64]!r} is not served; text, json_object and json_schema are."
            raise ParameterError(text, param="response_format.type")
        case _:
            raise ParameterError('response_format has to be an object with a "type".', param=name)


def _of_schema(param: str, schema: Any, about: Mapping[str, Any]) -> StructuredOutput:
    """Read a schema; `about`: what stands beside it."""
    beside = param.rpartition(".")[0]
    check_names(beside, about, ("name", "description", "strict"))
    if not isinstance(schema, dict):
        raise _wrong(param, "a JSON schema")
    if not isinstance(strict := about.get("strict"), bool | None):
        raise _wrong(f"{beside}.strict", "true or false")
    return StructuredOutput(param, "json", json.dumps(schema), lenient=strict is False)


def _of_vllm(value: Any) -> list[StructuredOutput]:
    name = "structured_outputs"
    if value is None:
        return []
    if not isinstance(value, dict):
        raise ParameterError(f"{name} has to be an object.", param=name)
    given = {key: item for key, item in value.items() if item is not None and (key not in _FLAGS or item is not False)}
    if wrong := next((key for key in _FLAGS if given.get(key, True) is not True), None):
        raise _wrong(f"{name}.{wrong}", "true or false")
    given.pop("disable_fallback", None)  # there is one engine
    if given.pop("disable_any_whitespace", False) and given.keys() & {"json", "json_object"}:
        given.setdefault("whitespace_pattern", "")
    check_names(name, given, (*_FORMS, "whitespace_pattern"))
    asked = "whitespace_pattern" in given
    whitespace = given.pop("whitespace_pattern", WHITESPACE)
    if not isinstance(whitespace, str):
        raise _wrong(f"{name}.whitespace_pattern", "a string")
    if asked and not given.keys() & {"json", "json_object"}:
        text = f"{name}.whitespace_pattern is of a JSON form, and there is none."
        raise ParameterError(text, param=f"{name}.whitespace_pattern")
    return [_of_kind(f"{name}.{kind}", kind, value, whitespace) for kind, value in given.items()]


def _of_kind(param: str, kind: str, value: Any, whitespace: str) -> StructuredOutput:
    match kind, value:
        case "json", str() | dict():
            return StructuredOutput(param, "json", value if isinstance(value, str) else json.dumps(value), whitespace)
        case "json", _:
            raise _wrong(param, "a JSON schema")
        case "json_object", _:  # true, like any flag that is left
            return StructuredOutput(param, "json", _OBJECT, whitespace)
        case "choice", [_, *_] if all(isinstance(text, str) for text in value):
            return StructuredOutput(param, "choice", json.dumps(value))
        case "choice", _:
            raise _wrong(param, "a list of one or more strings")
        case _, str(text) if text:
            return StructuredOutput(param, kind, text)
        case _:
            raise _wrong(param, "a string that is not empty")


def _wrong(param: str, what: str) -> ParameterError:
    return ParameterError(f"{param} has to be {what}.", param=param)


# ---- grammars


def _built(output: StructuredOutput) -> str:
    match output.kind:
        case "json":
            defaults: Any = _options(output)
            return LLMatcher.grammar_from_json_schema(_with_nulls(output.text), defaults=defaults)
        case "tools":
            return LLMatcher.grammar_from_lark(_grammar_of_tools(json.loads(output.text)))
        case "regex":
            return LLMatcher.grammar_from_regex(_ascii_classes(_unanchored(output.text)))
        case "choice":
            texts = " | ".join(map(_literal, json.loads(output.text)))
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")  # one lexeme, however many there are
        case _:
            return LLMatcher.grammar_from_lark(_lark(output.text))


def _with_nulls(text: str) -> str:
    """Say OpenAPI's `nullable` in a JSON schema's own words; what is no JSON stays as it is."""
    if '"nullable"' not in text:
        return text
    try:
        return json.dumps(_nullable(json.loads(text)))
    except json.JSONDecodeError:
        return text
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error


def _nullable(schema: Any) -> Any:
    """Let a schema take null where it says `nullable: true`; in enum, too: whoever writes both means it."""
    if not isinstance(schema, dict):
        return schema
    inside: dict[str, Any] = {key: _nullable(schema[key]) for key in _INSIDE if isinstance(schema.get(key), dict)}
    for key in _LISTED:
        if isinstance(schema.get(key), list):
            inside[key] = [_nullable(one) for one in schema[key]]
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            inside[key] = {name: _nullable(one) for name, one in schema[key].items()}
    if not isinstance(nullable := schema.get("nullable", False), bool):
        raise ValueError("nullable is true or false")
    whole = {**schema, **inside}
    whole.pop("nullable", None)
    if not nullable:
        return whole
    shared = {key: whole.pop(key) for key in ("$defs", "definitions", "$schema", "$id") if key in whole}
    return {**shared, "anyOf": [whole, {"type": "null"}]}


def _after_lead(lead: str, grammar: str) -> str:
    """Put a grammar behind the lead, each with names of its own: no rule of the client's has the name of another."""
    (own,) = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": f"start: lead @form\n{lead}"}, {**own, "name": "form"}]})


def _unanchored(regex: str) -> str:
    """Drop anchors at the ends, which llguidance does not know: the whole answer is matched anyway."""
    body = regex.removesuffix("$")
    if body != regex and (len(body) - len(body.rstrip("\\"))) % 2:  # an escaped dollar
        body = regex
    return body.removeprefix("^")


def _ascii_classes(regex: str) -> str:
    """Make digits and letters ASCII's, as in a JSON schema's patterns and in vLLM; llguidance's own are Unicode's."""
    return re.sub(r"\\(.)", lambda escape: _ASCII_CLASSES.get(escape[1], escape[0]), regex, flags=re.DOTALL)


def _lark(text: str) -> str:
    """Turn GBNF, which begins a rule by `name ::=`, into Lark; leave Lark as it is."""
    if not _GBNF_RULE.search(text):
        return text
    other = next(name for i in count() if (name := f"start{i}") not in text)
    try:
        return gbnf_to_lark(_GBNF_PART.sub(lambda part: other if part[0] == "start" else part[0], text))
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error
    except Exception as error:  # of any class: a grammar without a rule of that name, without a root
        raise ValueError(one_line(str(error))) from error


def _literal(text: str) -> str:
    """Spell a text as Lark does."""
    return json.dumps(text, ensure_ascii=False)
