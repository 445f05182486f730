"""The grammar of an answer's text, for llguidance: https://github.com/guidance-ai/llguidance

OpenAI's `response_format`, and vLLM's `structured_outputs`; a request has at most a single form. `grammar_of` may take
any time and memory with hostile input: `grammar_worker` runs it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from weft.domain.request import MAX_GRAMMAR
from weft.grammars import first_fault, one_line, parser_limits
from weft_gateway.errors import ParameterError
from weft_gateway.forms.json_schemas import LONG_NUMBER, explain, keep_enforceable, with_nulls
from weft_gateway.forms.marks import MarkTokens, ReasoningMarks, in_grammar, is_special
from weft_gateway.forms.tool_formats import ToolFormat
from weft_gateway.forms.tool_grammars import describe_answer, grammar_of_tools, keep_enforceable_tools
from weft_gateway.tolerance import check_names

# Between the parts of a JSON text: pretty-printed or in a single line, but no endless run of spaces.
WHITESPACE = r"\n?[ \t]{0,16}"
_OBJECT = '{"type": "object"}'
_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_WRITTEN = re.compile(r"\n *\d+ \| ")  # lines of the generated grammar in a message
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#.*|[\w-]+')  # a text, a class, a remark, a name
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_FLAGS = ("json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")


class StructuredOutput(NamedTuple):
    """The form of an answer's text. `param`: its parameter; `kind`: json, regex, choice, grammar or tools.

    `text`: a JSON schema, a regular expression, a JSON list of texts, a grammar (Lark or GBNF), or the output of
    `with_tools`. `whitespace`: a regular expression. `lenient`: skip unimplemented keywords of the schema. `lead`: a
    grammar of the text before the form, with a rule `lead`. `reasoning`: the possible first mark of the lead.
    """

    param: str
    kind: str
    text: str
    whitespace: str = WHITESPACE
    lenient: bool = False
    lead: str = ""
    reasoning: str = ""


def structured_output(response_format: Any = None, structured_outputs: Any = None) -> StructuredOutput | None:
    """Read a request's parameters; None: any text. Raises ParameterError."""
    forms = [*_of_response_format(response_format), *_of_vllm(structured_outputs)]
    if len(forms) > 1:
        names = " and ".join(form.param for form in forms)
        raise ParameterError(f"Expected a single form of the answer, got {names}.", param=forms[1].param)
    return forms[0] if forms else None


def grammar_of(output: StructuredOutput) -> str:
    """Build a grammar that llguidance compiles without an error.

    Raises ValueError with the fault, or FaultyTool for a tool.
    """
    if LONG_NUMBER.search(output.text):
        output = _enforceable(output)  # llguidance rounds these numbers without an error
    try:
        return _compiled(output)
    except ValueError as error:
        if (reduced := _enforceable(output)) == output:
            raise
        try:
            return _compiled(reduced)
        except ValueError:
            raise error from None


def with_tools(
    tools: Sequence[Mapping[str, Any]],
    written: ToolFormat,
    answer: StructuredOutput | None,
    *,
    several: bool,
    is_free: bool = False,
    function_name: str | None = None,
) -> StructuredOutput:
    """Bind an answer to calls of tools (OpenAI's functions) or to `answer`; None: the answer has to call.

    With `is_free` the answer may also be text, with text before the calls, and only arguments of strict tools follow
    their schema. `function_name` names the only callable function. Calls have the form of the model's family. Raises
    ParameterError if calls and `answer` exclude each other.
    """
    if answer is not None and answer.kind != "json":
        text = f"{answer.param} cannot be combined with tools: expected a JSON form as the alternative to calls."
        raise ParameterError(text, param=answer.param)
    alternative = answer and {"text": answer.text, "options": _options(answer)}
    answer_form = describe_answer(
        tools, written, alternative, several=several, is_free=is_free, function_name=function_name
    )
    return StructuredOutput("tools", "tools", json.dumps(answer_form))


def behind_reasoning(
    output: StructuredOutput, around: ReasoningMarks, tokens: MarkTokens, *, begun: bool
) -> StructuredOutput:
    """Bind the text after the reasoning of an answer; `begun`: the prompt has begun the reasoning."""
    lead = grammar_of_lead(around, tokens, begun=begun)
    return output._replace(lead=lead, reasoning="" if begun else around.begin)


def grammar_of_lead(around: ReasoningMarks, tokens: MarkTokens, *, begun: bool) -> str:
    """Write the Lark rule `lead`: optional reasoning before the answer; `begun`: the rest of begun reasoning.

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
        r"BEFORE: /\n{0,2}/",  # few texts: an answer begun with them has to reason
    ]
    return "\n".join(rules)


def _options(output: StructuredOutput) -> dict[str, Any]:
    """Return llguidance's options for a JSON schema."""
    return {"whitespace_pattern": output.whitespace, "lenient": output.lenient}


# ---- the parameters


def _of_response_format(value: Any) -> list[StructuredOutput]:
    """Read OpenAI's parameter; also a schema next to `type`, as in llama.cpp, Together and Fireworks."""
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
    """Read a schema; `about`: the fields next to it."""
    parent = param.rpartition(".")[0]
    check_names(parent, about, ("name", "description", "strict"))
    if not isinstance(schema, dict):
        raise _wrong(param, "a JSON schema")
    if not isinstance(strict := about.get("strict"), bool | None):
        raise _wrong(f"{parent}.strict", "true or false")
    return StructuredOutput(param, "json", json.dumps(schema), lenient=strict is False)


def _of_vllm(value: Any) -> list[StructuredOutput]:
    name = "structured_outputs"
    if value is None:
        return []
    if not isinstance(value, dict):
        raise ParameterError(f"{name} has to be an object.", param=name)
    members = {
        key: item for key, item in value.items() if item is not None and (key not in _FLAGS or item is not False)
    }
    if wrong := next((key for key in _FLAGS if members.get(key, True) is not True), None):
        raise _wrong(f"{name}.{wrong}", "true or false")
    members.pop("disable_fallback", None)  # there is one engine
    if members.pop("disable_any_whitespace", False) and members.keys() & {"json", "json_object"}:
        members.setdefault("whitespace_pattern", "")
    check_names(name, members, (*_FORMS, "whitespace_pattern"))
    has_whitespace = "whitespace_pattern" in members
    whitespace = members.pop("whitespace_pattern", WHITESPACE)
    if not isinstance(whitespace, str):
        raise _wrong(f"{name}.whitespace_pattern", "a string")
    if has_whitespace and not members.keys() & {"json", "json_object"}:
        text = f"{name}.whitespace_pattern is of a JSON form, and there is none."
        raise ParameterError(text, param=f"{name}.whitespace_pattern")
    return [_of_kind(f"{name}.{kind}", kind, value, whitespace) for kind, value in members.items()]


def _of_kind(param: str, kind: str, value: Any, whitespace: str) -> StructuredOutput:
    match kind, value:
        case "json", str() | dict():
            return StructuredOutput(param, "json", value if isinstance(value, str) else json.dumps(value), whitespace)
        case "json", _:
            raise _wrong(param, "a JSON schema")
        case "json_object", _:  # true, like all remaining flags
            return StructuredOutput(param, "json", _OBJECT, whitespace)
        case "choice", [_, *_] if all(isinstance(text, str) for text in value):
            return StructuredOutput(param, "choice", json.dumps(value))
        case "choice", _:
            raise _wrong(param, "a non-empty list of strings")
        case _, str(text) if text:
            return StructuredOutput(param, kind, text)
        case _:
            raise _wrong(param, "a non-empty string")


def _wrong(param: str, rule: str) -> ParameterError:
    return ParameterError(f"{param} has to be {rule}.", param=param)


# ---- grammars


def _compiled(output: StructuredOutput) -> str:
    """Build a grammar and compile it. Raises ValueError."""
    built = _built(output)
    grammar = _after_lead(output.lead, built) if output.lead else built
    if len(grammar.encode()) > MAX_GRAMMAR:
        remedy = "; send fewer tools, or fewer strict tools" if output.kind == "tools" else ""
        raise ValueError(f"its grammar is larger than {MAX_GRAMMAR >> 10} KiB{remedy}")
    if error := LLMatcher.validate_grammar(grammar, limits=parser_limits()):
        raise ValueError(explain(_WRITTEN.split(error)[0] if output.kind == "tools" else error))
    if fault := first_fault(built):
        raise ValueError(fault)
    return grammar


def _enforceable(output: StructuredOutput) -> StructuredOutput:
    """Leave out unenforceable parts if the client is not strict. Raises ValueError, which names them, otherwise."""
    try:
        match output.kind:
            case "json":
                schema = keep_enforceable(json.loads(with_nulls(output.text)), _options(output))
                return output._replace(text=json.dumps(schema))
            case "tools":
                return output._replace(text=json.dumps(keep_enforceable_tools(json.loads(output.text))))
            case _:
                return output
    except json.JSONDecodeError:
        return output


def _built(output: StructuredOutput) -> str:
    match output.kind:
        case "json":
            defaults: Any = _options(output)
            return LLMatcher.grammar_from_json_schema(with_nulls(output.text), defaults=defaults)
        case "tools":
            return LLMatcher.grammar_from_lark(grammar_of_tools(json.loads(output.text), output.reasoning))
        case "regex":
            return LLMatcher.grammar_from_regex(_ascii_classes(_unanchored(output.text)))
        case "choice":
            texts = " | ".join(map(_literal, json.loads(output.text)))
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")  # a single lexeme for any number of texts
        case _:
            return LLMatcher.grammar_from_lark(_lark(output.text))


def _after_lead(lead: str, grammar: str) -> str:
    """Put a grammar after the lead, each with separate names: no rule of the client's collides with a rule of the
    lead."""
    (built,) = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": f"start: lead @form\n{lead}"}, {**built, "name": "form"}]})


def _unanchored(regex: str) -> str:
    """Drop anchors at the ends, unknown to llguidance: the whole answer is matched anyway."""
    body = regex.removesuffix("$")
    if body != regex and (len(body) - len(body.rstrip("\\"))) % 2:  # an escaped dollar
        body = regex
    return body.removeprefix("^")


def _ascii_classes(regex: str) -> str:
    """Restrict digits and letters to ASCII, as in a JSON schema's patterns and in vLLM; llguidance's default is
    Unicode."""
    return re.sub(r"\\(.)", lambda escape: _ASCII_CLASSES.get(escape[1], escape[0]), regex, flags=re.DOTALL)


def _lark(text: str) -> str:
    """Turn GBNF (rules begin with `name ::=`) into Lark; leave Lark unchanged."""
    if not _GBNF_RULE.search(text):
        return text
    start_name = next(name for i in count() if (name := f"start{i}") not in text)
    try:
        return gbnf_to_lark(_GBNF_PART.sub(lambda part: start_name if part[0] == "start" else part[0], text))
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error
    except Exception as error:  # exceptions of any class: a missing rule, a missing root
        raise ValueError(one_line(str(error))) from error


def _literal(text: str) -> str:
    """Spell a text as Lark does."""
    return json.dumps(text, ensure_ascii=False)
