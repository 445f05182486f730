"""Calls in the text of an answer: the same parts however the text is cut, nothing lost, nothing twice."""

import json
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.chat_template import ChatTemplate
from weft.domain.routes import ToolCallParserName
from weft_gateway.forms import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    OLMO,
    PARSERS,
    PHI,
    AnswerForm,
    AnswerReader,
    ArgumentsPart,
    CallBegun,
    Content,
    Part,
    TemplateForms,
    ToolCallParser,
    ToolFormat,
    call_id,
    message_of,
    stand_in,
)

FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, GRANITE, PHI, OLMO]
names = st.text("abc_", min_size=1, max_size=5)
values = st.recursive(st.integers() | st.text('{}[]"\\a', max_size=4), lambda v: st.lists(v, max_size=2))
arguments = st.dictionaries(st.text(max_size=3), values)
python_values = (
    values | st.none() | st.booleans() | st.floats(-9, 9) | st.dictionaries(st.text("a'\n", max_size=2), values)
)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)


def read(form: ToolFormat, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and each call's name and arguments."""
    parser, parts = ToolCallParser(form), list[Part]()
    for chunk in chunks:
        parts += parser.push(chunk)
    parts += parser.flush()
    content, found = "", list[list[str]]()
    for part in parts:
        match part:
            case Content(text):
                assert text
                content += text
            case CallBegun(index, name):
                assert index == len(found)
                found.append([name, ""])
            case ArgumentsPart(index, text):
                assert index == len(found) - 1
                found[-1][1] += text
    assert parser.calls == len(found)
    return content, [(name, text) for name, text in found]


def written(form: ToolFormat, made: list[tuple[str, Any]]) -> str:
    if form is MISTRAL_NAMED:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in made)
    objects = [json.dumps({"name": name, form.arguments: given}, ensure_ascii=False) for name, given in made]
    return form.first + form.separator.join(form.begin + one + form.end for one in objects) + form.last


def cut(text: str, at: list[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@given(st.sampled_from(FORMATS), calls, st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
def test_calls_are_read_back_as_they_were_written_however_the_text_is_cut(
    form: ToolFormat, made: list[tuple[str, Any]], at: list[int], spelled: bool
) -> None:
    text = (form.spelled if spelled else "") + written(form, made)
    content, found = read(form, cut(text, at))
    assert content == ""
    assert [(name, json.loads(given)) for name, given in found] == made


@given(
    st.lists(st.tuples(names, st.dictionaries(names, python_values)), min_size=1, max_size=3),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from([repr, json.dumps]),
    st.sampled_from(["<function_calls>", "<function_calls>\n[", stand_in("<function_calls>")]),
)
def test_pythons_calls_are_read_back_with_values_of_python_or_json(
    made: list[tuple[str, Any]], at: list[int], write: Any, begin: str
) -> None:
    listed = [f"{name}({', '.join(f'{key}={write(value)}' for key, value in given.items())})" for name, given in made]
    end = "]\n</function_calls>" if begin.endswith("[") else "</function_calls>"
    text = f"'So' {begin}{', '.join(listed) if begin.endswith('[') else chr(10).join(listed)}{end} it's"
    content, found = read(OLMO, cut(text, at))
    assert content == "'So' it's"
    assert [(name, json.loads(given)) for name, given in found] == made


@given(
    st.sampled_from(FORMATS),
    st.text('<tool_call>{"name": [TOOL]/n}', max_size=40),
    st.lists(st.integers(0, 99), max_size=5),
)
def test_text_without_a_call_is_content_as_it_stands(form: ToolFormat, text: str, at: list[int]) -> None:
    content, found = read(form, cut(text, at))
    if not found:
        assert content == text


@given(st.sampled_from(FORMATS), calls, st.text("ab <>\n", max_size=12), st.lists(st.integers(0, 10_000), max_size=8))
def test_content_may_stand_before_calls_with_marks(
    form: ToolFormat, made: list[Any], before: str, at: list[int]
) -> None:
    content, found = read(form, cut(before + form.spelled + written(form, made), at))
    assert (content, len(found)) == (before, len(made))


def test_arguments_go_out_as_they_come() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>\n{"name": "get", "argu') == []
    assert parser.push('ments": {"city": "Pa') == [CallBegun(0, "get"), ArgumentsPart(0, '{"city": "Pa')]
    assert parser.push('ris"}}\n</tool_') == [ArgumentsPart(0, 'ris"}')]
    assert parser.push("call>") == []
    assert parser.flush() == []


@pytest.mark.parametrize(
    ("form", "text", "content", "found"),
    [
        (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x":1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call> bye', "bye", [("f", "{}")]),
        (HERMES, '<tool_call>{"other": 1}</tool_call>', '<tool_call>{"other": 1}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": ', "", [("f", '{"x": ')]),
        (HERMES, "<tool_call>\nno object", "<tool_call>\nno object", []),
        (LLAMA, '{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
        (LLAMA, 'The call {"name": "f"}', 'The call {"name": "f"}', []),
        (MISTRAL, '[{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (MISTRAL, "[1, 2]", "[1, 2]", []),
        (LLAMA, " {", " {", []),
        (MISTRAL, ' [ {"x": 1}]', ' [ {"x": 1}]', []),
        (HERMES, '<tool_call>\n {"x": 1}', '<tool_call>\n {"x": 1}', []),
    ],
)
def test_other_forms_are_read_too_and_what_is_no_call_is_content(
    form: ToolFormat, text: str, content: str, found: list[tuple[str, str]]
) -> None:
    assert read(form, [text]) == (content, found)
    assert read(form, list(text)) == (content, found)


def marked(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


BEGIN, END, CALLS, ARGS, CALL_ID = map(stand_in, ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))
OPEN, CLOSE = map(stand_in, ("<|tool_call|>", "<|/tool_call|>"))
X, Y, WEI = ("f", {"x": 1}), ("g", {"y": {"z": []}}), ("f", {"x": 19876543210987654321})
NEARLY: list[tuple[ToolFormat, str, str, list[tuple[str, Any]]]] = [
    # brackets that are missing, or too many
    (HERMES, marked('{"name": "f", "arguments": {"x": 1}'), "", [X]),
    (HERMES, marked('{"name": "f", "arguments": {"x": 1'), "", [X]),
    (HERMES, marked('{"name": "f", "arguments": {"x": "a"'), "", [("f", {"x": "a"})]),
    (HERMES, marked('{"name": "f", "arguments": {"x": 1}}}'), "", [X]),
    (HERMES, marked('{"arguments": {"x": 1}, "name": "f"'), "", [X]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1', "", [X]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "a', "", [("f", {"x": "a"})]),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}; {"name": "g", "parameters": {"y": {"z": []}}', "", [X, Y]),
    (LLAMA, '[{"name": "f", "parameters": {"x": 1}}]', "", [X]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}]', "", [X]),
    (MISTRAL, '{"name": "f", "arguments": {"x": 1}}', "", [X]),
    # several calls
    (
        HERMES,
        marked('[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": {"z": []}}}]'),
        "",
        [X, Y],
    ),
    (HERMES, marked('{"name": "f", "arguments": {"x": 1}}\n{"name": "g", "arguments": {"y": {"z": []}}}'), "", [X, Y]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"x": 1}\n' + marked('{"name": "f", "arguments": {"x": 1}}'),
        "",
        [X, X],
    ),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}\n{"name": "f", "parameters": {"x": 1}}', "", [X, X]),
    # OpenAI's own form, and arguments that are a text
    (HERMES, marked('{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}'), "", [X]),
    (LLAMA, '{"id": "1", "type": "function", "function": {"name": "f", "parameters": "{\\"x\\": 1}"}}', "", [X]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": "{\\"x\\": 1}"}]', "", [X]),
    (HERMES, marked('{"name": "f", "arguments": "Oslo"}'), "", [("f", "Oslo")]),
    (HERMES, marked('{"name": "f", "arguments": ""}'), "", [("f", {})]),
    (HERMES, marked('{"name": "f", "arguments": null}'), "", [("f", {})]),
    # Mistral's newer form
    (MISTRAL, 'So: [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": {"z": []}}', "So: ", [X, Y]),
    (MISTRAL, f'{CALLS}f{CALL_ID}a1B{ARGS}{{"x": 1}}', "", [X]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": 1', "", [X]),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]{x}", "[TOOL_CALLS]f[ARGS]{x}", []),
    (MISTRAL, "[TOOL_CALLS]f and more {", "[TOOL_CALLS]f and more {", []),
    # marks that are special tokens
    (HERMES, f'a {BEGIN}\n{{"name": "f", "arguments": {{"x": 1}}}}\n{END}{BEGIN} b', "a  b", [X]),
    (HERMES, f'{BEGIN}{{"name": "f", "arguments": {{"x": "{END}"}}\n{END}', "", [("f", {"x": "</tool_call>"})]),
    (MISTRAL, f'Sure. {CALLS}[{{"name": "f", "arguments": {{"x": 1}}}}]', "Sure. ", [X]),
    (MISTRAL, f"{CALLS}no call", "no call", []),
    # JSON as models write it
    (HERMES, marked('{"name": "f", "arguments": {"x": [True, None, 1.50,],}}'), "", [("f", {"x": [True, None, 1.5]})]),
    (HERMES, marked('{"name": "f", "arguments": {"x": "a\n\tb"}}'), "", [("f", {"x": "a\n\tb"})]),
    (HERMES, marked(r'{"name": "f", "arguments": {"x": "\d\'\u12\u00e9\n"}}'), "", [("f", {"x": "\\d'\\u12é\n"})]),
    (HERMES, marked('{"name": "f", "arguments": {"x": "say "hi" to"}}'), "", [("f", {"x": 'say "hi" to'})]),
    # Granite 3 and Phi-4-mini: a list behind a mark, or behind what stands in its place
    (
        GRANITE,
        '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": {"z": []}}}]',
        "",
        [X, Y],
    ),
    (GRANITE, 'So <tool_call>[{"name": "f", "arguments": {"x": 1}}]', "So ", [X]),
    (GRANITE, f'{OPEN}[{{"name": "f", "arguments": {{"x": 1}}}}]', "", [X]),
    (PHI, '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]<|/tool_call|>', "", [X]),
    (PHI, 'functools[{"name": "f", "arguments": {"x": 1}}]', "", [X]),
    (PHI, f'{OPEN}[{{"name": "f", "arguments": {{"x": 1}}}}]{CLOSE} b', "b", [X]),
    (PHI, "from functools import reduce", "from functools import reduce", []),
    # Python's calls
    (OLMO, "<function_calls>f(x=1", "", [X]),
    (OLMO, "<function_calls>f(x=1</function_calls> 'a'", "'a'", [X]),
    (OLMO, "<function_calls>f(x=(1, 'it\\'s', {'a': True}))", "", [("f", {"x": [1, "it's", {"a": True}]})]),
    (OLMO, '<function_calls>{"name": "f", "arguments": {"x": 1}}</function_calls>', "", [X]),
    (OLMO, "<function_calls>f(x=y)</function_calls>", "<function_calls>f(x=y)</function_calls>", []),
    (OLMO, "<function_calls>a text (with more)", "<function_calls>a text (with more)", []),
    (OLMO, "f(x=1)", "f(x=1)", []),
    # integers beyond 64 bits
    (HERMES, marked('{"name": "f", "arguments": {"x": 19876543210987654321}}'), "", [WEI]),
    (HERMES, marked('{"arguments": {"x": 19876543210987654321}, "name": "f"}'), "", [WEI]),
    (
        HERMES,
        marked('{"type": "function", "function": {"name": "f", "arguments": {"x": 19876543210987654321}}}'),
        "",
        [WEI],
    ),
    (LLAMA, '{"name": "f", "parameters": "{\\"x\\": 19876543210987654321}"}', "", [WEI]),
    (OLMO, "<function_calls>f(x=19876543210987654321)</function_calls>", "", [WEI]),
    # no JSON, and no call
    (HERMES, marked('{"name": "f", "args": {"x": 1}}'), marked('{"name": "f", "args": {"x": 1}}'), []),
    (HERMES, marked('{"id": "1", "type": "function", "name": "f"}'), "", [("f", {})]),
    (HERMES, marked('{"name": "f", "arguments": {x: 1}}'), marked('{"name": "f", "arguments": {x: 1}}'), []),
    (HERMES, marked('{"name": "f", "arguments": {"x": NaN}}'), marked('{"name": "f", "arguments": {"x": NaN}}'), []),
    (HERMES, marked('{"name": "f", "arguments": {"x": 1, y: 2}}'), ", y: 2}}\n</tool_call>", [X]),
    (LLAMA, '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
]


@pytest.mark.parametrize(("form", "text", "content", "found"), NEARLY)
def test_a_call_that_is_nearly_right_is_one_and_its_arguments_are_json(
    form: ToolFormat, text: str, content: str, found: list[tuple[str, Any]]
) -> None:
    whole = answered(form, [text])
    assert whole == answered(form, list(text))
    assert whole == (content, found)


@given(
    st.sampled_from([text for _, text, _, _ in NEARLY]),
    st.sampled_from(FORMATS),
    st.integers(0, 200),
    st.text('{}[]",:;\\ \n1ae<', max_size=2),
    st.lists(st.integers(0, 10_000), max_size=4),
)
def test_whatever_is_said_to_be_arguments_is_json_however_the_text_is_cut(
    text: str, form: ToolFormat, place: int, put: str, at: list[int]
) -> None:
    text = text[: place % len(text)] + put + text[place % len(text) + 1 :]
    assert answered(form, cut(text, at)) == answered(form, [text])


def answered(form: ToolFormat, chunks: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The content, and each call's name and the value of its arguments."""
    reader = AnswerReader(AnswerForm(tools=form), "a/0")
    deltas = [delta for chunk in chunks for delta in reader.push(chunk)]
    message = message_of([*deltas, *reader.flush()])
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert reader.ends_with_calls == bool(functions)
    return message["content"] or "", [(one["name"], json.loads(one["arguments"])) for one in functions]


def format_of(template: str, parser: str = "") -> ToolFormat:
    return TemplateForms.of_template(ChatTemplate(template, {})).tool_format(parser)


def test_the_form_shows_in_the_template() -> None:
    assert format_of("{{ '<tool_call>' }}") == HERMES
    assert format_of("{{ '<|python_tag|>' }}{{ tools }}") == LLAMA
    assert format_of("{{ '[TOOL_CALLS]' }}") == MISTRAL
    assert format_of("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral") == MISTRAL_NAMED
    assert format_of("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}").id_mark == "[CALL_ID]"
    assert format_of("{{ messages }}") == HERMES
    assert format_of("{{ '<tool_call>' }}{{ '<|tool_call|>' }}") == HERMES, "Granite 4"
    assert format_of("{{ '<|tool_call|>' }}") == GRANITE
    assert format_of("{{ '<|tool|>' + message['tools'] }}") == PHI
    assert format_of("{{ '<function_calls>' }}") == OLMO


def test_a_pools_parser_goes_before_the_template_and_the_schema_has_every_parser() -> None:
    assert format_of("{{ '<tool_call>' }}", "mistral") == MISTRAL
    assert set(get_args(ToolCallParserName)) == PARSERS.keys()


def test_ids_are_as_long_as_templates_want_and_differ() -> None:
    found = {call_id(form, answer, index) for form in FORMATS for answer in "ab" for index in range(3)}
    assert len(call_id(MISTRAL, "a", 0)) == 9
    assert call_id(HERMES, "a", 0).startswith("call_")
    assert len(found) == 12, "two formats share ids"
