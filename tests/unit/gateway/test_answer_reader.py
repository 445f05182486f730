"""An answer's form, and its reasoning, content and calls: the same however the text is cut."""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from weft.chat_template import ChatTemplate
from weft_gateway.core.answer_text import Detokeniser
from weft_gateway.forms import (
    HERMES,
    MARKS,
    MISTRAL,
    MISTRAL_NAMED,
    REASONING,
    THINK,
    AnswerForm,
    AnswerReader,
    ReasoningMarks,
    ReasoningParser,
    TemplateForms,
    ToolFormat,
    message_of,
    showing,
)
from weft_gateway.openai import ChatRequest, CompletionRequest, parse, select_form
from weft_gateway.shell import ModelTokenizer

from .test_tool_calls import cut

CUTS = st.lists(st.integers(0, 10_000), max_size=8)
plain = st.text("ab <>/think\n", max_size=20)


def split(chunks: list[str], *, begun: bool, marks: ReasoningMarks = THINK) -> tuple[str, str]:
    parser = ReasoningParser(AnswerForm(reasoning=marks, in_reasoning=begun))
    parts = [*map(parser.push, chunks), parser.flush()]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


@given(plain.filter(lambda t: "</think>" not in t), plain, CUTS, st.booleans(), st.sampled_from(REASONING))
def test_reasoning_and_content_come_apart_without_the_white_space_between(
    reasoning: str, content: str, at: list[int], begun: bool, marks: ReasoningMarks
) -> None:
    text = ("" if begun else marks.begin) + reasoning + marks.end + content
    assert split(cut(text, at), begun=begun, marks=marks) == (reasoning.strip(), content.lstrip())


@given(plain.filter(lambda t: "</think>" not in t), plain, CUTS, st.booleans(), st.booleans())
def test_the_tokens_between_the_marks_are_counted(
    reasoning: str, content: str, at: list[int], begun: bool, ended: bool
) -> None:
    """Each character is a token."""
    text = ("" if begun else "<think>") + reasoning + ("</think>" + content if ended else "")
    reader, read = AnswerReader(AnswerForm(reasoning=THINK, in_reasoning=begun), "a/0"), 0
    for chunk in cut(text, at):
        reader.push(chunk, range(read, read + len(chunk)))
        read += len(chunk)
    reader.flush()
    assert reader.reasoning_tokens == len(reasoning)


@given(plain.filter(lambda t: not t.lstrip().startswith("<think>")), CUTS)
def test_an_answer_without_reasoning_is_content_as_it_stands(text: str, at: list[int]) -> None:
    assert split(cut(text, at), begun=False) == ("", text)


@given(CUTS)
def test_an_answer_that_is_cut_inside_its_reasoning_has_no_content(at: list[int]) -> None:
    assert split(cut("<think>\nfirst, </thi", at), begun=False) == ("first, </thi", "")


@given(CUTS)
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>why</think><response>So </b></response>", ("why", "So </b>")),
        ("<think>why</think>\n\n<response>\nSo\n\nit\n</response>\n", ("why", "So\n\nit\n")),
        ("<think>why</think>So <response>it</response>", ("why", "So <response>it</response>")),
        ("<think>why</think><response>So </resp", ("why", "So </resp")),
        ("<think>why</think> <resp", ("why", "<resp")),
        ("<response>So</response>", ("", "<response>So</response>")),
    ],
)
def test_marks_of_a_response_that_the_template_asks_for_are_no_part_of_the_content(
    text: str, left: tuple[str, str], at: list[int]
) -> None:
    parser = ReasoningParser(
        AnswerForm(reasoning=THINK, template=TemplateForms.of_template(ChatTemplate("</think></response>", {})))
    )
    parts = [*map(parser.push, cut(text, at)), parser.flush()]
    assert tuple("".join(some) for some in zip(*parts, strict=True)) == left
    assert split(["<think>a</think><response>b"], begun=False) == ("a", "<response>b"), "of another template"


@pytest.mark.parametrize(
    ("template", "end", "tokens", "found"),
    [
        *((f"{{{{ '{marks.begin}' }}}}{{{{ '{marks.end}' }}}}", "", {}, marks) for marks in REASONING),
        *(("", f"hello{marks.begin}", {}, marks) for marks in REASONING),
        ("tools", "hello</think>", {}, None),
        ("</think>[/THINK]", "hello", {}, THINK),
        ("</think>[/THINK]", "hello", {"[/THINK]": (5, True)}, ReasoningMarks("[THINK]", "[/THINK]")),
        ("</think>[/THINK]", "[THINK][/THINK]", {}, ReasoningMarks("[THINK]", "[/THINK]")),
    ],
)
def test_the_marks_of_reasoning_are_those_of_the_template_and_the_tokenizer(
    template: str, end: str, tokens: dict[str, tuple[int, bool]], found: ReasoningMarks | None
) -> None:
    assert TemplateForms.of_template(ChatTemplate(template, {}), tokens).reasoning_before(end) == found


def answer(form: AnswerForm, chunks: list[str]) -> tuple[dict[str, Any], bool]:
    reader = AnswerReader(form, "a/0")
    deltas = [delta for chunk in chunks for delta in reader.push(chunk)]
    return message_of([*deltas, *reader.flush()]), reader.ends_with_calls


@given(CUTS)
def test_a_message_has_all_three_parts(at: list[int]) -> None:
    text = '<think>why</think>\nSo:\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    message, ends = answer(AnswerForm(tools=HERMES, reasoning=THINK), cut(text, at))
    (call,) = message.pop("tool_calls")
    reasoning = {"reasoning_content": "why", "reasoning": "why"}
    assert message == {"role": "assistant", "content": "So:\n", "refusal": None, **reasoning}
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert ends


CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@given(CUTS)
@pytest.mark.parametrize(
    ("tools", "text", "thought", "content", "calls"),
    [
        (HERMES, f"why <tool_call> here?\n{CALL_TEXT}", "why <tool_call> here?", None, 1),
        (HERMES, f"why{CALL_TEXT}\n{CALL_TEXT}", "why", None, 2),
        (HERMES, f"why {CALL_TEXT} no</think>{CALL_TEXT}", f"why {CALL_TEXT} no", None, 1),
        (HERMES, 'why <tool_call>{"no": 1}', 'why <tool_call>{"no": 1}', "", 0),
        (HERMES, "why <tool_call>\n", "why <tool_call>", "", 0),
        (MISTRAL_NAMED, 'why[TOOL_CALLS]f[ARGS]{"x": 1}', "why", None, 1),
        (None, f"why{CALL_TEXT}", f"why{CALL_TEXT}", "", 0),
    ],
)
def test_a_call_ends_reasoning_whose_end_mark_never_comes(
    tools: ToolFormat | None, text: str, thought: str, content: str | None, calls: int, at: list[int]
) -> None:
    message, ends = answer(AnswerForm(tools=tools, reasoning=THINK, in_reasoning=True), cut(text, at))
    assert (message["reasoning_content"], message["content"]) == (thought, content)
    assert (len(message.get("tool_calls", ())), ends) == (calls, calls > 0)


def test_a_message_of_calls_alone_has_no_content_and_the_end_of_a_named_call_is_no_surprise() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message, ends = answer(AnswerForm(tools=HERMES, calls_are_asked=True), [text])
    assert (message["content"], len(message["tool_calls"]), ends) == (None, 1, False)
    assert answer(AnswerForm(tools=HERMES), [""])[0]["content"] == ""


def bytes_tokenizer(special: bool | None) -> tokenizers.Tokenizer:
    """A token for each byte, and for each mark. `special`: None: none for marks."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)} | {"<end>": 256}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    if special is not None:
        tokenizer.add_tokens([tokenizers.AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    return tokenizer


@pytest.mark.parametrize("special", [None, False, True])
def test_marks_are_read_as_letters_as_tokens_and_as_special_tokens_which_clients_do_not_see(
    special: bool | None,
) -> None:
    tokenizer = bytes_tokenizer(special)
    model = ModelTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    form = AnswerForm(tools=HERMES, reasoning=THINK, in_reasoning=True, template=model.forms)
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>'
    tokens = tokenizer.encode(f"why<think></think>So </think>:{call}", add_special_tokens=False).ids
    text = Detokeniser(showing(model.bytes_of, form.marks))
    message, ends = answer(form, [text.push(token) for token in tokens])
    (made,) = message.pop("tool_calls")
    assert (made["function"]["arguments"], ends) == ('{"x": "</tool_call>"}', True)
    left = ("why", "So :") if special else ("why<think>", "So </think>:")
    assert (message["reasoning_content"], message["content"]) == left
    letters = [
        *map(tokenizer.token_to_id, "</think>"),
        *([] if special is None else [tokenizer.token_to_id("</think>")]),
    ]
    message, _ = answer(form, [text.push(token) for token in letters])
    assert message.get("reasoning_content") == ("</think>" if special else None)


# ---- what is chosen

REASONS = TemplateForms.of_template(ChatTemplate("{{ '</think>' }}{{ tools }}", {}))
PLAIN = TemplateForms.of_template(ChatTemplate("{{ messages }}", {}))
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f"}}]}
BOUND: dict[str, Any] = {"structured_outputs": {"regex": "a"}}
GOES_ON: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}


def letters_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


def chosen(template: TemplateForms, parser: str = "", last: str = "hello", **params: Any) -> AnswerForm:
    body = {"model": "m", "messages": [{"role": "user", "content": last}], **params}
    return select_form(parse(ChatRequest, orjson.dumps(body)), template, parser)


@pytest.mark.parametrize(
    ("asked", "prompt", "begun", "lead"),
    [
        ({}, "hello", False, "lead: (BEFORE"),
        ({}, "hello<think>\n", True, "lead: reasoning"),
        ({}, "<think></think>\n\n", False, ""),
        (GOES_ON, "hello", False, ""),
        (GOES_ON | {"last": "<think>so"}, "so", True, "lead: reasoning"),
        (GOES_ON | {"last": "<think>so</think>"}, "so", False, ""),
    ],
)
def test_the_end_of_the_prompt_says_how_far_reasoning_is_and_what_may_stand_before_the_output(
    asked: dict[str, Any], prompt: str, begun: bool, lead: str
) -> None:
    form = chosen(REASONS, **asked, **BOUND).completed_by(list(prompt.encode()), letters_of)
    assert (form.reasoning, form.in_reasoning) == (THINK, begun)
    assert form.output.lead.startswith(lead)
    assert bool(form.output.lead) == bool(lead)


def test_a_model_that_does_not_reason_and_a_completion_have_nothing_before_the_output() -> None:
    form = chosen(PLAIN, **BOUND)
    assert form.completed_by(list(b"hello</think>"), letters_of) is form
    assert chosen(PLAIN).completed_by(list(b"hello<think>"), letters_of).reasoning == THINK, "the prompt shows it"
    completion = parse(CompletionRequest, orjson.dumps({"model": "m", "prompt": "hello<think>", **BOUND}))
    form = select_form(completion, REASONS, "")
    assert form == AnswerForm(form.output)
    assert form.completed_by(list(b"hello<think>"), letters_of) is form


def test_calls_are_read_in_the_pools_format_where_the_request_has_tools() -> None:
    assert chosen(PLAIN).is_plain
    free = chosen(PLAIN, **TOOLS)
    assert (free.tools, free.output) == (HERMES, None)
    assert chosen(PLAIN, "mistral", **TOOLS).tools == MISTRAL
    assert chosen(PLAIN, **TOOLS, tool_choice="none").is_plain
    named = chosen(PLAIN, **TOOLS, tool_choice={"type": "function", "function": {"name": "f"}})
    assert (named.calls_are_asked, named.calls_alone) == (True, True)
    assert named.output.param == "tools"
