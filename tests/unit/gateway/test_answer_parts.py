"""An answer's reasoning, content and calls, the same however the text is cut."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from weft_gateway.core.detokenise import Detokeniser
from weft_gateway.openai.answer_parts import AnswerForm, AnswerReader, message_of
from weft_gateway.openai.marks import MARKS, REASONING, THINK, ReasoningMarks, mark_tokens, showing
from weft_gateway.openai.reasoning import ReasoningParser, marks_of
from weft_gateway.openai.tool_calls import HERMES, MISTRAL_NAMED, ToolFormat
from weft_gateway.shell.tokenizer import ModelTokenizer

from .test_tool_calls import cut

CUTS = st.lists(st.integers(0, 10_000), max_size=8)
plain = st.text("ab <>/think\n", max_size=20)


def split(chunks: list[str], *, begun: bool, marks: ReasoningMarks = THINK) -> tuple[str, str]:
    parser = ReasoningParser(marks, begun=begun)
    parts = [*map(parser.push, chunks), parser.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@given(plain.filter(lambda t: "</think>" not in t), plain, CUTS, st.booleans(), st.sampled_from(REASONING))
def test_reasoning_and_content_come_apart_without_the_white_space_between(
    reasoning: str, content: str, at: list[int], begun: bool, marks: ReasoningMarks
) -> None:
    text = ("" if begun else marks.begin) + reasoning + marks.end + content
    assert split(cut(text, at), begun=begun, marks=marks) == (reasoning.strip(), content.lstrip())


@given(plain.filter(lambda t: not t.lstrip().startswith("<think>")), CUTS)
def test_an_answer_without_reasoning_is_content_as_it_stands(text: str, at: list[int]) -> None:
    assert split(cut(text, at), begun=False) == ("", text)


@given(CUTS)
def test_an_answer_that_is_cut_inside_its_reasoning_has_no_content(at: list[int]) -> None:
    assert split(cut("<think>\nfirst, </thi", at), begun=False) == ("first, </thi", "")


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
    assert marks_of(template, end, tokens) == found


def answer(form: AnswerForm, chunks: list[str]) -> tuple[dict[str, Any], bool]:
    reader = AnswerReader(form, "a/0")
    deltas = [delta for chunk in chunks for delta in reader.push(chunk)]
    return message_of([*deltas, *reader.flush()]), reader.ends_with_calls


@given(CUTS)
def test_a_message_has_all_three_parts(at: list[int]) -> None:
    text = '<think>why</think>\nSo:\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    message, ends = answer(AnswerForm(tools=HERMES, reasons=THINK), cut(text, at))
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "So:\n", "refusal": None, "reasoning_content": "why"}
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
    message, ends = answer(AnswerForm(tools=tools, reasons=THINK, in_reasoning=True), cut(text, at))
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
    form = AnswerForm(tools=HERMES, reasons=THINK, in_reasoning=True, marks=mark_tokens(model.added))
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
