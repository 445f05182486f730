"""Reasoning before an answer: what stands between the marks that a model's template has, as `<think>`. Pure."""

from typing import NamedTuple

from weft_gateway.openai.marks import (
    NO_TOKENS,
    REASONING,
    MarkTokens,
    ReasoningMarks,
    in_grammar,
    in_text,
    is_special,
)
from weft_gateway.openai.tool_calls import ToolCallParser, ToolFormat, call_begins


def reasons(template: str) -> bool:
    """Whether the models of a chat template reason before they answer: some leave it to the model to begin."""
    return marks_of(template) is not None


def marks_of(template: str, prompt_end: str = "", tokens: MarkTokens = NO_TOKENS) -> ReasoningMarks | None:
    """The marks of a chat template, or those at the end of a prompt; of several those that the tokenizer has."""
    known = [marks for marks in REASONING if marks.end in template or prompt_end.endswith(marks.begin)]
    return min(known, key=lambda marks: (not prompt_end.endswith(marks), marks.end not in tokens), default=None)


def grammar_of_lead(marks: ReasoningMarks, tokens: MarkTokens, *, begun: bool) -> str:
    """Lark, a rule `lead`: what stands before the form of an answer, some reasoning or none; `begun`: the rest of some.

    It ends at the first mark, and white space around it is passed over, as the parser does.
    """
    begin, end = marks
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


class AnswerSplit(NamedTuple):
    """What some text adds to each part of an answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Reads one answer: `push` text as it comes, then `flush` once. `begun`: the prompt ends inside the reasoning.

    White space around the reasoning belongs to neither part. `tokens`: of a tokenizer that has marks. `tools`: a call
    in this form ends the reasoning, too, where its end mark never comes: text behind it is held back until then.
    """

    def __init__(
        self,
        marks: ReasoningMarks,
        *,
        begun: bool,
        tokens: MarkTokens = NO_TOKENS,
        tools: ToolFormat | None = None,
    ) -> None:
        self._begin_mark, self._end_mark = (in_text(mark, tokens) for mark in marks)
        self._tools, self._call = tools, None if tools is None else call_begins(tools)
        self._held = ""
        self._inside: bool | None = begun or None  # None: not known yet
        self._at_edge = True  # white space that comes next is dropped

    def push(self, text: str) -> AnswerSplit:
        """What is certain by now."""
        self._held += text
        if self._inside is None and not self._begin():
            return AnswerSplit()
        reasoning = self._read() if self._inside else ""
        return AnswerSplit(reasoning, "" if self._inside else self._content())

    def flush(self) -> AnswerSplit:
        """What is left at the end of the answer."""
        held, self._held = self._held, ""
        if not self._inside:
            return AnswerSplit(content=held)
        at = self._call_at(held)
        return AnswerSplit(held[:at].rstrip(), held[at:])

    def _call_at(self, text: str) -> int:
        """Find where the calls begin that a text ends with."""
        found = self._call and self._call.search(text)
        if not found or not found["call"] or self._tools is None:
            return len(text)
        calls = ToolCallParser(self._tools)
        calls.push(text[found.start() :])
        calls.flush()
        return found.start() if calls.calls else len(text)

    def _begin(self) -> bool:
        """Whether it is known now if the answer begins with reasoning."""
        text = self._held.lstrip()
        if self._begin_mark.startswith(text):
            return False
        self._inside = text.startswith(self._begin_mark)
        if self._inside:
            self._held = text[len(self._begin_mark) :]
        else:
            self._at_edge = False
        return True

    def _read(self) -> str:
        """Reasoning that is certain, without white space that may stand before its end."""
        if self._at_edge:
            self._held = self._held.lstrip()
        before, found, behind = self._held.partition(self._end_mark)
        if found:
            self._held, self._inside, self._at_edge = behind, False, True
            return before.rstrip()
        mark = self._end_mark
        kept = next((n for n in range(len(mark) - 1, 0, -1) if before.endswith(mark[:n])), 0)
        call = self._call and self._call.search(before)
        certain = before[: min(len(before) - kept, call.start() if call else len(before))].rstrip()
        self._held = before[len(certain) :]
        self._at_edge = self._at_edge and not certain
        return certain

    def _content(self) -> str:
        if self._at_edge:
            self._held = self._held.lstrip()
        content, self._held = self._held, ""
        self._at_edge = self._at_edge and not content
        return content
