"""Forms of answers: from a client's parameters to a grammar, or to a refusal that names the parameter."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from harness.waiting import PATIENCE_S
from weft.grammars import Bytes
from weft_gateway.core.answer_text import Detokeniser
from weft_gateway.errors import ParameterError
from weft_gateway.forms import (
    GRANITE,
    HERMES,
    LLAMA,
    MARKS,
    MISTRAL,
    MISTRAL_NAMED,
    OLMO,
    PHI,
    REASONING,
    THINK,
    WHITESPACE,
    AnswerForm,
    AnswerReader,
    FaultyTool,
    ReasoningMarks,
    StructuredOutput,
    ToolFormat,
    grammar_checker,
    grammar_of,
    grammar_of_lead,
    message_of,
    render_calls,
    showing,
    structured_output,
    with_tools,
)
from weft_gateway.shell import BoundedTurnstile, ModelTokenizer

from .test_answer_reader import bytes_tokenizer

TOKENIZER = LLTokenizer(Bytes())  # pyright: ignore[reportArgumentType]


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def form_of(**params: Any) -> StructuredOutput:
    form = structured_output(**params)
    assert form is not None
    return form


def grammar(**params: Any) -> str:
    return grammar_of(form_of(**params))


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "y"]}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
ONE_LINE, PRETTY = (json.dumps({"a": 1, "b": ["x", "y"]}, indent=indent) for indent in (None, 2))


@pytest.mark.parametrize(
    "params",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "disable_fallback": True}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_a_json_schema_in_every_spelling(params: dict[str, Any]) -> None:
    made = grammar(**params)
    for text in (ONE_LINE, PRETTY, '{"a":1,"b":[]}'):
        assert accepts(made, text)
    for text in ('{"a": 1}', '{"a": "1", "b": []}', '{"a": 1, "b": ["z"]}', ONE_LINE + "x", '{"a": 1,\n\n"b": []}'):
        assert not accepts(made, text)


@pytest.mark.parametrize(
    "params",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": {}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_any_json_object(params: dict[str, Any]) -> None:
    made = grammar(**params)
    assert accepts(made, PRETTY)
    assert not accepts(made, "[1]")


NULLABLE = {"type": "integer", "nullable": True}


@pytest.mark.parametrize(
    ("schema", "of_it", "others"),
    [
        (NULLABLE, ("null", "1"), ('"a"',)),
        ({"type": "string", "enum": ["a"], "nullable": True}, ("null", '"a"'), ('"b"',)),
        ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "nullable": True}, ("null", "1"), ('"a"',)),
        ({"$defs": {"n": NULLABLE}, "type": "array", "items": {"$ref": "#/$defs/n"}}, ("[null, 1]",), ('["a"]',)),
        ({"anyOf": [{"type": "integer"}, {"const": "a"}], "nullable": True}, ("null", "1", '"a"'), ('"b"',)),
        (
            {"type": "object", "properties": {"nullable": NULLABLE}, "required": ["nullable"]},
            ('{"nullable": null}',),
            ("{}", "null"),
        ),
        ({"const": {"nullable": True}}, ('{"nullable": true}',), ("null",)),
        ({"type": "integer", "nullable": False}, ("1",), ("null",)),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_openapis_nullable_adds_null(
    schema: dict[str, Any], of_it: Sequence[str], others: Sequence[str], strict: bool
) -> None:
    made = grammar(response_format={"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}})
    assert [text for text in (*of_it, *others) if accepts(made, text)] == [*of_it]


@pytest.mark.parametrize("regex", ["[0-9]{3}-[a-z]+", "^[0-9]{3}-[a-z]+$", r"\d{3}-[a-z]+$"])
def test_a_regular_expression_is_of_the_whole_answer(regex: str) -> None:
    made = grammar(structured_outputs={"regex": regex})
    assert accepts(made, "123-abc")
    assert not accepts(made, "123-abc ")
    assert not accepts(made, "x123-abc")


def test_an_escaped_dollar_at_the_end_is_a_dollar() -> None:
    assert accepts(grammar(structured_outputs={"regex": r"[0-9]+\$"}), "5$")


@pytest.mark.parametrize(
    ("regex", "of_it", "others"),
    [
        (r"\d", "5", "٣x"),
        (r"[\d.-]", "5.-", "٣x"),
        (r"\w", "5a_", "é٣-"),
        (r"[^\d]", "xé٣", "5"),
        (r"\D", "xé٣", "5"),
        (r"\W", "é- ", "a5_"),
        (r"\\d", ("\\d",), "5"),
    ],
)
def test_digits_and_letters_are_those_of_ascii(regex: str, of_it: Sequence[str], others: str) -> None:
    made = grammar(structured_outputs={"regex": regex})
    assert [text for text in (*of_it, *others) if accepts(made, text)] == [*of_it]


def test_choices_are_texts_of_any_characters() -> None:
    texts = ["yes", 'a "quoted" one', "back\\slash", "two\nlines", "é 😀"]
    made = grammar(structured_outputs={"choice": texts})
    assert all(accepts(made, text) for text in texts)
    assert not accepts(made, "no")
    many = grammar(structured_outputs={"choice": ["", *(f"label {i}" for i in range(4000))]})
    assert [accepts(many, text) for text in ("", "label 399", "label 3999", "label 4000")] == [True, True, True, False]


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" DIGITS\nDIGITS: /[0-9]+/',
        '?start: "a" digits | "b ::= c"\ndigits: /[0-9]+/',
        'root ::= "a" digits\ndigits ::= [0-9]+',
        'start ::= "start" | [start\\]]* "a" # start\nroot ::= start digits | s0\ns0 ::= "0"\ndigits ::= [0-9]+',
    ],
    ids=["Lark", "Lark, rule inlined", "GBNF", "GBNF, rule called start"],
)
def test_grammars_of_two_kinds(text: str) -> None:
    made = grammar(structured_outputs={"grammar": text})
    assert accepts(made, "a12")
    assert not accepts(made, "a")


def test_whitespace_is_the_clients_where_it_says_so() -> None:
    none = grammar(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert accepts(none, '{"a":1,"b":[]}')
    assert not accepts(none, ONE_LINE)
    own = grammar(structured_outputs={"json": SCHEMA, "whitespace_pattern": " *"})
    assert accepts(own, '{"a":     1,"b":[]}')
    assert re.fullmatch(WHITESPACE, "\n" + 20 * " ") is None, "an answer is no endless run of spaces"


def test_texts_have_no_form() -> None:
    assert structured_output() is None
    assert structured_output({"type": "text"}, {"json_object": False}) is None


NO_FORMATS: list[tuple[Any, str]] = [
    ({"type": "grammar"}, ".type"),
    ("json", ""),
    ({"type": "json_schema"}, ".json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "n"}}, ".json_schema"),
    ({"type": "text", "schema": {}}, ".schema"),
    ({"type": "json_object", "strict": False}, ".strict"),
    ({"type": "json_object", "schema": "{}"}, ".schema"),
    (NAMED | {"schema": {}}, ".schema"),
    ({"type": "json_schema", "json_schema": {"schema": {}, "x": 0}}, ".json_schema.x"),
    ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "no"}}, ".json_schema.strict"),
]
NO_OUTPUTS: list[tuple[Any, str]] = [
    ({"regex": "a", "any": False}, ".any"),
    ({"json": False}, ".json"),
    ({"json": {}, "disable_any_whitespace": 1}, ".disable_any_whitespace"),
    (["a"], ""),
    ({"structural_tag": "{}"}, ".structural_tag"),
    ({"json": 5}, ".json"),
    ({"choice": []}, ".choice"),
    ({"choice": ["a", 1]}, ".choice"),
    ({"regex": {}}, ".regex"),
    ({"json": {}, "whitespace_pattern": 1}, ".whitespace_pattern"),
    ({"regex": "a", "whitespace_pattern": " "}, ".whitespace_pattern"),
    ({"whitespace_pattern": " "}, ".whitespace_pattern"),
    ({"json": {}, "regex": "a"}, ".regex"),
]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        *(({"response_format": value}, f"response_format{of}") for value, of in NO_FORMATS),
        *(({"structured_outputs": value}, f"structured_outputs{of}") for value, of in NO_OUTPUTS),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_what_is_no_form_is_refused_by_its_parameter(params: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as refused:
        structured_output(**params)
    assert refused.value.param == param


ROUNDED: list[dict[str, Any]] = [
    {"enum": ["a", 2**64]},
    {"enum": [-(2**63)]},
    {"const": {"a": [2**53 + 1]}},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "array", "items": {"type": "number", "exclusiveMaximum": 2**62 + 1}},
    {"type": "integer", "multipleOf": 2**53 + 1},
]
EXACT: list[tuple[dict[str, Any], str, str]] = [
    ({"enum": [2**63 - 1, True]}, str(2**63 - 1), str(2**63 - 2)),
    ({"type": "integer", "minimum": 2**54, "maximum": 2**54}, str(2**54), str(2**54 + 1)),
    ({"type": "integer", "default": 2**70, "maximum": 5}, "5", "6"),
]


@pytest.mark.parametrize(("schema", "text", "other"), EXACT)
def test_long_integers_that_llguidance_keeps_are_taken(schema: dict[str, Any], text: str, other: str) -> None:
    made = grammar(structured_outputs={"json": schema})
    assert (accepts(made, text), accepts(made, other)) == (True, False)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys.*not"),
        ({"json": {"type": "nothing"}}, "Invalid type: nothing"),
        ({"json": "{"}, "."),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "Write anyOf, or.*strict: false"),
        ({"json": {"nullable": "yes"}}, "nullable is true or false"),
        *(({"json": schema}, "the grammar would round the integer -?[0-9]{16,}; leave it out") for schema in ROUNDED),
        ({"regex": "a(?=b)"}, "look-ahead"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
        ({"grammar": "root ::= ["}, "."),
        ({"grammar": 'foo ::= "a"'}, "No 'root' rule"),
        ({"grammar": "root ::= " + "(" * 9999 + '"a"' + ")" * 9999}, "too deeply nested"),
        ({"grammar": "root ::= root"}, "NoExtension"),
        ({"grammar": 'root ::= "a"{999999999}'}, "Too many items"),
        ({"regex": "(a{1000}){900}"}, "too many expressions"),
        ({"choice": ["x" * 70_000]}, "larger than 64 KiB"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(form: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        grammar(structured_outputs=form)


def test_keywords_that_cannot_be_held_are_passed_over_where_the_client_is_not_strict() -> None:
    properties = {**SCHEMA["properties"], "a": {"type": "integer", "maximum": 2**64}}
    schema = {**SCHEMA, "properties": properties, "if": {}}
    lenient = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": False}}
    assert accepts(grammar(response_format=lenient), ONE_LINE)


# ---- tools

NUMBER = {"$defs": {"n": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {**NUMBER, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]
FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, GRANITE, PHI, OLMO]
ADD, NOW = ("add", {"x": 1}), ("now", {})


def called(written: ToolFormat, *, several: bool = True, **params: Any) -> str:
    return grammar_of(with_tools(TOOLS, written, structured_output(**params), several=several))


def calls(written: ToolFormat, *made: tuple[str, Any]) -> str:
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in made]
    return render_calls(written, functions)


@pytest.mark.parametrize("written", FORMATS)
def test_a_call_is_of_one_of_the_tools_as_the_family_writes_it(written: ToolFormat) -> None:
    one, several = called(written, several=False), called(written)
    for found in (one, several):
        assert accepts(found, calls(written, ADD))
        assert accepts(found, calls(written, NOW))
        for made in [("now", {"x": 1}), ("add", {}), ("add", {"x": "1"}), ("other", {})]:
            assert not accepts(found, calls(written, made))
        assert not accepts(found, "text")
        assert not accepts(found, "")
    assert accepts(several, calls(written, NOW, ADD, ADD))
    assert not accepts(one, calls(written, NOW, ADD))


STRICT = [{"function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
WRONG = [("add", {}), ("add", {"x": "1"}), ("add", {"y": 1}), ("other", {})]


@pytest.mark.parametrize("written", FORMATS)
def test_text_is_free_until_a_call_begins_and_the_arguments_of_a_strict_tool_are_of_its_schema(
    written: ToolFormat,
) -> None:
    free, one = (grammar_of(with_tools(STRICT, written, None, several=n, is_free=True)) for n in (True, False))
    mark = written.spelled
    for text in ("", "hello", 'a {"name": "other"}', "use functools.partial", "<tool"):
        assert accepts(free, text), text
    for before in ("", "So:\n"):
        for made in ([ADD], [NOW], [("now", {"any": [1, {}]})]):
            assert accepts(free, before + mark + calls(written, *made)), made
            assert accepts(one, before + mark + calls(written, *made)), made
        assert accepts(free, before + mark + calls(written, NOW, ADD, ADD))
        assert not accepts(one, before + mark + calls(written, NOW, ADD))
        for made in WRONG:
            assert not accepts(free, before + mark + calls(written, made)), made
    assert not accepts(free, mark + calls(written, ADD) + "so")


FRAGMENTS = [
    *MARKS,
    *("functools", "<response>", "[", "]", "{", "}", "\n", " ", "\x1c", "; ", ", ", '"', "1", "so", "add", "now"),
    *(f'{{"name": "{name}", "{inside}": {{"{key}": 1}}}}' for name in ("add", "other") for inside in
      ("arguments", "parameters") for key in ("x", "y")),
    *('{"arguments": {"y": 1}, "name": "add"}', '{"function": {"name": "add", "arguments": {"y": 1}}}'),
    *('add{"y": 1}', 'add{"x": 1}', "add(y=1)", "add(x=1)", "now(a=[1])"),
]  # fmt: skip


@cache
def masking(number: int, special: bool | None, prompt: str) -> tuple[Any, AnswerForm, LLMatcher]:
    tokenizer = bytes_tokenizer(special)
    known = ModelTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    written = replace(FORMATS[number], marks=known.forms.marks)
    template = replace(known.forms, has_response=True, reasoning=(THINK,) if prompt else ())
    output = with_tools(STRICT, written, None, several=True, is_free=True)
    form = AnswerForm(output=output, template=template, tools=written)
    form = form.completed_by(tokenizer.encode(prompt).ids, partial(tokenizer.decode, skip_special_tokens=False))
    masks = LLTokenizer(tokenizer.to_str(), eos_token=256)
    return tokenizer, form, LLMatcher(masks, grammar_of(form.output), log_level=0)


@pytest.mark.parametrize("number", range(len(FORMATS)))
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.sampled_from([None, False, True]),
    st.sampled_from(["", "hello", "hello<think>"]),
)
@example(["<tool_call>", "\n", '{"name": "add", "arguments": {"y": 1}}'], None, "hello<think>")
@example(["<think>", "</think>", '{"name": "add", "parameters": {"y": 1}}'], None, "hello")
def test_no_call_is_read_that_a_strict_tool_does_not_have_whatever_the_model_would_write(
    number: int, wished: list[str], special: bool | None, prompt: str
) -> None:
    """Tokens that the grammar does not allow are left out of what the model would write."""
    tokenizer, form, compiled = masking(number, special, prompt)
    matcher, known = compiled.deep_copy(), ModelTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    tokens = tokenizer.encode("".join(wished), add_special_tokens=False).ids
    tokens = [token for token in tokens if matcher.try_consume_tokens([token])]
    text, whole = Detokeniser(showing(known.bytes_of, form.marks)), matcher.is_accepting()
    pieces = [text.push(token) for token in tokens]
    messages = list[dict[str, Any]]()
    for parts in (pieces, ["".join(pieces)]):
        reader = AnswerReader(form, "a")
        deltas = [delta for part in parts for delta in reader.push(part)]
        messages.append(message_of([*deltas, *reader.flush(cut=not whole)]))
    assert messages[0] == messages[1]
    for call in messages[0].get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        assert name in ("add", "now")
        if name == "add":
            assert re.fullmatch(r'\{ ?"x" ?: ?-?[0-9]+ ?\}' if whole else r'[{} "x:0-9-]*', arguments), arguments


def test_a_call_has_an_id_where_the_family_writes_one() -> None:
    found = called(replace(MISTRAL_NAMED, id_mark="[CALL_ID]"))
    assert accepts(found, '[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]add[ARGS]{"x": 1}')
    assert not accepts(found, "[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}")


def test_a_call_of_pythons_names_its_arguments_in_their_order_and_is_an_object_where_its_schema_says_more() -> None:
    properties = {"a": {"$ref": "#/$defs/n"}, "b": {"type": "string"}, "c": True, "d": {"type": "integer"}}
    schema = {"$defs": NUMBER["$defs"], "properties": properties, "required": ["b"]}
    other = {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}]}
    functions = [{"function": {"name": "f", "parameters": schema}}, {"function": {"name": "g", "parameters": other}}]
    grammar = grammar_of(with_tools(functions, OLMO, None, several=True))
    for good in ('f(b="x")', 'f(a=1, b="x")', 'f(b="x", d=2)', 'f(a=1, b="x", c=[null], d=2)', 'f(b="")\nf(b=")")'):
        assert accepts(grammar, f"<function_calls>{good}</function_calls>"), good
    for bad in ("f()", "f(a=1)", 'f(b="x", a=1)', "f(b=x)", 'f(b="x", )', 'f(b="x", e=1)', "g(a=1)"):
        assert not accepts(grammar, f"<function_calls>{bad}</function_calls>"), bad
    assert accepts(grammar, '<function_calls>{"name": "g", "arguments": {"a": 1}}</function_calls>')


def test_arguments_have_the_properties_that_their_schema_names_unless_it_says_what_else() -> None:
    inner = {"properties": {"a": {"type": "integer"}}}
    open_ = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"}}
    schema = {"properties": {"x": inner, "y": open_, "z": {"items": inner}, "w": {"allOf": [inner]}}}
    schema["properties"] |= {"o": {**inner, "nullable": True}}
    functions = [{"function": {"name": "f", "parameters": schema}}]
    grammar = grammar_of(with_tools(functions, HERMES, None, several=False))
    for good in ({}, {"x": {"a": 1}}, {"y": {"a": 1, "b": 2}}, {"z": [{"a": 1}]}, {"w": {"a": 1, "b": 2}}, {"o": None}):
        assert accepts(grammar, calls(HERMES, ("f", good))), good
    for bad in ({"v": 1}, {"x": {"b": 1}}, {"z": [{"b": 1}]}, {"o": {"b": 1}}):
        assert not accepts(grammar, calls(HERMES, ("f", bad))), bad


def test_an_answer_in_a_form_that_may_call_tools_instead_is_either_of_both() -> None:
    either = called(HERMES, structured_outputs={"json": {"type": "boolean"}})
    assert accepts(either, "true")
    assert accepts(either, calls(HERMES, ADD))
    assert not accepts(either, "true" + calls(HERMES, ADD))
    with pytest.raises(ParameterError, match=r"structured_outputs\.regex cannot be combined with tools"):
        called(HERMES, structured_outputs={"regex": "a+"})


AHEAD = {"type": "string", "pattern": "^(?!a)b*$"}
LOOK_AROUND = "look-around, including look-ahead and look-behind, is not supported"
UNENFORCEABLE: list[tuple[Any, str]] = [
    ({"properties": {"a": {"anyOf": [{"type": "null"}, AHEAD]}}}, f"properties.a.anyOf[1].pattern: {LOOK_AROUND}"),
    ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": AHEAD}}, f"$defs.n.pattern: {LOOK_AROUND}"),
    ({"properties": {"a": AHEAD, "b": {"$ref": "#/properties/a"}}}, f"properties.a.pattern: {LOOK_AROUND}"),
    ({"properties": {"a": {"items": {"type": "nothing"}}}}, "properties.a.items.type: Invalid type: nothing"),
    ({"properties": {"a": {}}, "required": None}, "required: Expected array for 'required', got null"),
    ({"properties": None}, "properties: properties must be an object"),
    ({"properties": {"a": 5}}, "properties.a: expected a schema, got 5"),
    ({"properties": {"a": {"nullable": 1}}}, "nullable is true or false"),
]  # fmt: skip


@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("written", [HERMES, OLMO])
@pytest.mark.parametrize(("schema", "fault"), UNENFORCEABLE)
def test_a_strict_tool_that_cannot_be_enforced_is_refused_by_its_index_its_name_and_the_field(
    schema: Any, fault: str, written: ToolFormat, is_free: bool
) -> None:
    wrong = {"function": {"name": "pay", "parameters": schema, "strict": True}}
    with pytest.raises(FaultyTool) as refused:
        grammar_of(with_tools([*TOOLS, wrong], written, None, several=True, is_free=is_free))
    where = "" if fault.startswith("nullable") else "parameters."
    assert (str(refused.value), refused.value.param) == (f"tools[2] (pay): {where}{fault}", "tools[2]")


@pytest.mark.parametrize("written", FORMATS)
def test_what_cannot_be_enforced_is_left_out_where_the_client_is_not_strict(written: ToolFormat) -> None:
    for schema in (*(schema for schema, _ in UNENFORCEABLE[:-1]), {"const": 5}, {"type": "string"}):
        loose = {"function": {"name": "pay", "parameters": schema}}
        assert accepts(grammar_of(with_tools([loose], written, None, several=True)), calls(written, ("pay", {})))
    schema = {"properties": {"a": AHEAD, "b": {"type": "integer"}}, "required": ["a"]}
    loose = {"function": {"name": "pay", "parameters": schema}}
    made = grammar_of(with_tools([loose], written, None, several=True))
    assert accepts(made, calls(written, ("pay", {"a": "a", "b": 1})))
    for other in ({"a": 1}, {"a": "a", "b": "1"}, {"b": 1}, {"a": "a", "c": 1}):
        assert not accepts(made, calls(written, ("pay", other))), other
    form = {"type": "json_schema", "json_schema": {"schema": {**schema, "additionalProperties": False}}}
    with pytest.raises(ValueError, match=re.escape(f"properties.a.pattern: {LOOK_AROUND}")):
        grammar(response_format=form)
    form["json_schema"]["strict"] = False
    assert accepts(grammar(response_format=form), '{"a": "a", "b": 1}')
    assert not accepts(grammar(response_format=form), '{"a": "a", "b": "1"}')


@pytest.mark.parametrize("about", [{"$id": "w"}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}, {}])
@pytest.mark.parametrize("written", FORMATS)
def test_references_of_a_tools_schema_are_found_wherever_they_point(written: ToolFormat, about: dict[str, Any]) -> None:
    places = {
        "a": {"$ref": "#/$defs/n"},
        "b": {"$ref": "#/properties/a"},
        "c": {"type": "array", "items": {"$ref": "#"}},
    }
    schema = {**about, "$defs": {"n": {"enum": [1, 2]}}, "properties": places}
    tool = {"function": {"name": "f", "strict": True, "parameters": schema}}
    made = grammar_of(with_tools([tool], written, None, several=False, is_free=True))
    assert accepts(made, written.spelled + calls(written, ("f", {"a": 1, "b": 2, "c": [{"a": 2}]})))
    for other in ({"a": 3}, {"b": 3}, {"c": [{"b": 3}]}, {"c": [{"d": 1}]}):
        assert not accepts(made, written.spelled + calls(written, ("f", other))), other


def test_descriptions_take_no_room_in_a_grammar_and_what_is_too_large_is_refused_with_a_remedy() -> None:
    told = {"type": "string", "description": "a" * 1000, "title": "b"}
    schema = {"properties": {"description": told, "title": told}, "required": ["description"]}
    many = [{"function": {"name": f"f{i}", "strict": True, "parameters": schema}} for i in range(128)]
    made = grammar_of(with_tools(many, HERMES, None, several=True, is_free=True))
    assert accepts(made, calls(HERMES, ("f127", {"description": "a", "title": "b"})))
    assert not accepts(made, calls(HERMES, ("f127", {"title": "b"})))
    schema["properties"] |= {f"p{i}": {"type": "string"} for i in range(30)}
    with pytest.raises(ValueError, match="larger than 64 KiB; send fewer tools, or fewer strict tools"):
        grammar_of(with_tools(many, HERMES, None, several=True, is_free=True))


# ---- behind reasoning

CLASHING = 'start: lead reasoning BLANK\nlead: "a"\nreasoning: TEXT\nTEXT: "b"\nBLANK: "c"\nform: "d"'
TOOL_FORM = with_tools(TOOLS, HERMES, None, several=True)
NAMED_FORM = with_tools(TOOLS, MISTRAL_NAMED, None, several=True)
EITHER = with_tools(TOOLS, HERMES, structured_output(structured_outputs={"json": SCHEMA}), several=True)
BEHIND = [
    (structured_output(structured_outputs={"json": SCHEMA}), ONE_LINE, '{"a": 1}'),
    (structured_output(structured_outputs={"regex": "<[a-z]+>"}), "<thin>", "<thin"),
    (structured_output(structured_outputs={"choice": ["yes", "no", "<th"]}), "<th", "<thi"),
    (structured_output(structured_outputs={"grammar": CLASHING}), "abc", "d"),
    (structured_output(structured_outputs={"grammar": 'root ::= lead "b"\nlead ::= "a"'}), "ab", "a"),
    (TOOL_FORM, calls(HERMES, ADD, NOW), ONE_LINE),
    (NAMED_FORM, calls(MISTRAL_NAMED, ADD, NOW), calls(MISTRAL, ADD)),
    (EITHER, ONE_LINE, "text"),
    (EITHER, calls(HERMES, ADD), "text"),
]


@pytest.mark.parametrize("special", [None, False, True])
@pytest.mark.parametrize(
    ("around", "form", "text", "other"),
    [*((THINK, *row) for row in BEHIND), *((around, *BEHIND[1]) for around in REASONING[1:])],
)
def test_a_form_holds_for_what_follows_the_reasoning(
    around: ReasoningMarks, form: StructuredOutput, text: str, other: str, special: bool | None
) -> None:
    tokenizer = bytes_tokenizer(special)
    known = ModelTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    masks, marks = LLTokenizer(tokenizer.to_str(), eos_token=256), known.forms.marks
    begun, free = (grammar_of_lead(around, marks, begun=begun) for begun in (True, False))
    if form.kind == "tools":
        asked = json.loads(form.text)
        form = form._replace(text=json.dumps(asked | {"written": asked["written"] | {"marks": marks}}))

    compiled = {lead: LLMatcher(masks, grammar_of(form._replace(lead=lead)), log_level=0) for lead in (begun, free)}

    def fits(lead: str, answer: str) -> bool:
        matcher, tokens = compiled[lead].deep_copy(), tokenizer.encode(answer, add_special_tokens=False).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    for thought in ("", '\nplan {"a": 1} </thin é\n'):
        for blank in ("", "\n\n"):
            behind = f"{thought}{around.end}{blank}"
            assert fits(begun, behind + text)
            assert fits(free, f"{blank}{around.begin}{behind}{text}")
            assert not fits(begun, behind + other)
            assert not fits(free, f"{around.begin}{behind}{other}")
            assert not fits(free, f"{around.begin}{behind}x{around.end}{text}"), "the reasoning ends once"
    assert fits(free, text)
    assert not fits(begun, text)


# ---- the process that checks


async def test_forms_are_checked_by_a_process_that_a_hostile_one_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker's bound is of processor time; a starved machine may take more than 20 s to start its process."""
    monkeypatch.setattr(grammar_checker, "WAIT_S", PATIENCE_S)
    checker = grammar_checker.GrammarChecker(BoundedTurnstile(1, 64))
    both = [
        {"anyOf": [{"type": "string", "pattern": f"a{i}"}, {"type": "number", "multipleOf": i + 1}]} for i in range(200)
    ]
    try:
        assert accepts(await checker.grammar("acme", form_of(structured_outputs={"choice": ["a", "b"]})), "b")
        hostile = form_of(structured_outputs={"json": {"allOf": both}})
        with pytest.raises(ParameterError, match=r"structured_outputs\.json: it takes (more than 1 s|too much memory)"):
            await checker.grammar("acme", hostile)
        with pytest.raises(ParameterError, match="tools: it cannot be compiled: KeyError"):
            await checker.grammar("acme", StructuredOutput("tools", "tools", "{}"))  # not called the form's size
        with pytest.raises(ParameterError, match=r"structured_outputs\.regex.*look-ahead") as refused:
            await checker.grammar("acme", form_of(structured_outputs={"regex": "a(?=b)"}))
        assert refused.value.param == "structured_outputs.regex"
        checker._process.kill()
        await checker._process.wait()
        other = await checker.grammar("acme", form_of(structured_outputs={"choice": ["c"]}))
        assert accepts(other, "c"), "a process that has ended is started again"
    finally:
        await checker.close()
