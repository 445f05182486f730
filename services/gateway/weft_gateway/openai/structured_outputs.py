"""What a client asks of its answer's form, as an llguidance grammar: https://github.com/guidance-ai/llguidance

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`. A request asks for one form.
`grammar_of` may take any time and memory with hostile input: `grammar_worker` runs it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from weft.grammars import MAX_BYTES, one_line, parser_limits
from weft_gateway.errors import ParameterError

# Between the parts of a JSON text: pretty-printed or in one line, but no endless run of spaces.
WHITESPACE = r"\n?[ \t]{0,16}"
_OBJECT = '{"type": "object"}'
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
FORM_PARAMETERS = (
    "response_format", "structured_outputs", *(f"guided_{kind}" for kind in (*_FORMS, "whitespace_pattern")),
)  # fmt: skip


class Form(NamedTuple):
    """Of one request. `param`: where it stands; `kind`: one of json, regex, choice, grammar.

    `text`: a JSON schema, a regular expression, a JSON list of texts, a grammar (Lark or GBNF). `whitespace`: a regular
    expression; `lenient`: keywords of the schema that are not implemented are passed over.
    """

    param: str
    kind: str
    text: str
    whitespace: str = WHITESPACE
    lenient: bool = False


def form_of(params: Mapping[str, Any]) -> Form | None:
    """Of a request's parameters; None: any text. Raises ParameterError."""
    forms = [*_of_response_format(params.get("response_format")), *_of_vllm(params.get("structured_outputs"))]
    guided = {kind: value for kind in _FORMS if (value := params.get(f"guided_{kind}")) not in (None, False)}
    if (whitespace := params.get("guided_whitespace_pattern")) is not None:
        guided["whitespace_pattern"] = whitespace
    forms += _of_kinds(guided, "guided_")
    if len(forms) > 1:
        names = " and ".join(form.param for form in forms)
        raise ParameterError(f"An answer has one form; {names} ask for several.", param=forms[1].param)
    return forms[0] if forms else None


def grammar_of(form: Form) -> str:
    """A grammar that compiles. Raises ValueError with what is wrong with the form."""
    grammar = _built(form)
    if len(grammar.encode()) > MAX_BYTES:
        raise ValueError(f"its grammar is larger than {MAX_BYTES >> 10} KiB")
    if error := LLMatcher.validate_grammar(grammar, limits=parser_limits()):
        raise ValueError(one_line(error))
    return grammar


def grammar_of_tools(tools: Sequence[tuple[str, Mapping[str, Any]]], begin: str, end: str, *, several: bool) -> str:
    """Calls of any of these tools (name, JSON schema of its arguments), each {"name": ..., "arguments": ...}.

    Each call stands between `begin` and `end`. `several`: one or more, on lines of their own; else exactly one. The
    grammar is Lark text and may not compile; `parser_limits` hold for it as for any other.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"type": "object", **schema}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_pattern": WHITESPACE},
        }
        for name, schema in tools
    ]
    rules = [f"call_{i}: {_literal(begin)} %json {json.dumps(call)} {_literal(end)}" for i, call in enumerate(calls)]
    any_call = " | ".join(f"call_{i}" for i in range(len(calls)))
    start = "start: call (/\\n?/ call)*" if several else "start: call"
    return "\n".join([start, f"call: {any_call}", *rules])


# ---- the parameters


def _of_response_format(value: Any) -> list[Form]:
    name = "response_format"
    match value:
        case None | {"type": "text"}:
            return []
        case {"type": "json_object"}:
            return [Form(name, "json", _OBJECT)]
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **other}}:
            return [
                Form(f"{name}.json_schema.schema", "json", json.dumps(schema), lenient=other.get("strict") is False)
            ]
        case {"type": "json_schema"}:
            text = 'response_format: json_schema has to be {"name": ..., "schema": {...}}.'
            raise ParameterError(text, param="response_format.json_schema")
        case {"type": str(type_)}:
            text = f"response_format: type {type_[:64]!r} is not served; text, json_object and json_schema are."
            raise ParameterError(text, param="response_format.type")
        case _:
            raise ParameterError('response_format has to be an object with a "type".', param=name)


def _of_vllm(value: Any) -> list[Form]:
    name = "structured_outputs"
    if value is None:
        return []
    if not isinstance(value, dict):
        raise ParameterError(f"{name} has to be an object.", param=name)
    given = {key: item for key, item in value.items() if item is not None and item is not False}
    given.pop("disable_fallback", None)
    if given.pop("disable_any_whitespace", False):
        given.setdefault("whitespace_pattern", "")
    known = (*_FORMS, "whitespace_pattern")
    if (unknown := next((key for key in given if key not in known), None)) is not None:
        text = f"{name}.{unknown[:64]} is not served; {', '.join(known)} are."
        raise ParameterError(text, param=f"{name}.{unknown[:64]}")
    return _of_kinds(given, f"{name}.")


def _of_kinds(given: dict[str, Any], prefix: str) -> list[Form]:
    """`given`: vLLM's parameters of a form, by their names behind `prefix`."""
    whitespace = given.pop("whitespace_pattern", WHITESPACE)
    if not isinstance(whitespace, str):
        raise _wrong(f"{prefix}whitespace_pattern", "a string")
    return [_of_kind(f"{prefix}{kind}", kind, value, whitespace) for kind, value in given.items()]


def _of_kind(param: str, kind: str, value: Any, whitespace: str) -> Form:
    match kind, value:
        case "json", str(schema):
            return Form(param, "json", schema, whitespace)
        case "json", dict(schema):
            return Form(param, "json", json.dumps(schema), whitespace)
        case "json", _:
            raise _wrong(param, "a JSON schema")
        case "json_object", True:
            return Form(param, "json", _OBJECT, whitespace)
        case "json_object", _:
            raise _wrong(param, "true or false")
        case "choice", [_, *_] if all(isinstance(text, str) for text in value):
            return Form(param, "choice", json.dumps(value))
        case "choice", _:
            raise _wrong(param, "a list of one or more strings")
        case _, str(text):
            return Form(param, kind, text)
        case _:
            raise _wrong(param, "a string")


def _wrong(param: str, what: str) -> ParameterError:
    return ParameterError(f"{param} has to be {what}.", param=param)


# ---- grammars


def _built(form: Form) -> str:
    match form.kind:
        case "json":
            defaults: Any = {"whitespace_pattern": form.whitespace, "lenient": form.lenient}
            return LLMatcher.grammar_from_json_schema(form.text, defaults=defaults)
        case "regex":
            return LLMatcher.grammar_from_regex(_unanchored(form.text))
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, json.loads(form.text))))
        case _:
            return LLMatcher.grammar_from_lark(_lark(form.text))


def _unanchored(regex: str) -> str:
    """The whole answer is matched, so that anchors at the ends change nothing; llguidance knows none."""
    body = regex.removesuffix("$")
    if body != regex and (len(body) - len(body.rstrip("\\"))) % 2:  # an escaped dollar
        body = regex
    return body.removeprefix("^")


def _lark(text: str) -> str:
    """Of Lark or GBNF."""
    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        raise ValueError(one_line(str(error))) from error
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error


def _literal(text: str) -> str:
    """A text as Lark spells it."""
    return json.dumps(text, ensure_ascii=False)
