"""Reasoning before an answer, between the marks of a model's template, for example `<think>`. Pure."""

from weft_gateway.forms.answer_form import AnswerForm
from weft_gateway.forms.marks import NO_TOKENS, RESPONSE, begun, in_text
from weft_gateway.forms.tool_calls import ToolCallParser, call_begins


class ReasoningParser:
    """A reader that divides an answer into reasoning and content: `push` text as it comes, then `flush` once.

    White space around the reasoning belongs to neither part; nor do the marks around the response after it. Without an
    end mark, a call of the form's tools ends the reasoning, too; text after the call is held back until then. `span`:
    the range of the reasoning's characters in the answer, without the marks.
    """

    def __init__(self, form: AnswerForm) -> None:
        assert form.reasoning
        tokens = NO_TOKENS if form.spells_marks else form.marks
        self._begin_mark, self._end_mark = (in_text(mark, tokens) for mark in form.reasoning)
        # A grammar ends the reasoning by its mark, so calls are not looked for inside.
        self._tools = None if form.output else form.tools
        self._call = self._tools and call_begins(self._tools)
        self._pending, self._n_chars, self.span = "", 0, (0, 0)
        self._inside: bool | None = form.in_reasoning or None  # None: not known yet
        self._at_edge = True  # drops white space at the current position
        has_response = form.template is not None and form.template.has_response
        self._mark = RESPONSE[0] if has_response else ""  # the next possible mark of the response after the reasoning

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and content certain by now."""
        self._pending += text
        self._n_chars += len(text)
        if self._inside is None and not self._begin():
            return "", ""
        reasoning = self._read() if self._inside else ""
        return reasoning, "" if self._inside else self._content()

    def flush(self) -> tuple[str, str]:
        """Return the remaining reasoning and content at the end of the answer."""
        pending, self._pending = self._pending, ""
        if not self._inside:
            return "", pending
        at = self._call_at(pending)
        self._end_at(self._n_chars - len(pending) + at)
        return pending[:at].rstrip(), pending[at:]

    @property
    def is_over(self) -> bool:
        """Whether the next text is content."""
        return self._inside is False

    def _end_at(self, n_chars: int) -> None:
        self.span = self.span[0], n_chars

    def _call_at(self, text: str) -> int:
        """Find the start of the calls at the end of a text."""
        match = self._call and self._call.search(text)
        if not match or not match["call"] or self._tools is None:
            return len(text)
        calls = ToolCallParser(self._tools)
        calls.push(text[match.start() :])
        calls.flush()
        return match.start() if calls.calls else len(text)

    def _begin(self) -> bool:
        """Decide whether the answer begins with reasoning; False: more text has to come."""
        text = self._pending.lstrip()
        if self._begin_mark.startswith(text):
            return False
        self._inside = text.startswith(self._begin_mark)
        if self._inside:
            self._pending = text[len(self._begin_mark) :]
            self.span = (self._n_chars - len(self._pending),) * 2
        else:
            self._at_edge = False
        return True

    def _read(self) -> str:
        """Take the certain reasoning, without white space before its possible end."""
        if self._at_edge:
            self._pending = self._pending.lstrip()
        reasoning, mark, rest = self._pending.partition(self._end_mark)
        if mark:
            self._pending, self._inside, self._at_edge = rest, False, True
            self._end_at(self._n_chars - len(rest) - len(mark))
            return reasoning.rstrip()
        n_kept = begun(reasoning, [self._end_mark])
        call = self._call and self._call.search(reasoning)
        certain = reasoning[: min(len(reasoning) - n_kept, call.start() if call else len(reasoning))].rstrip()
        self._pending = reasoning[len(certain) :]
        self._end_at(self._n_chars - len(self._pending))
        self._at_edge = self._at_edge and not certain
        return certain

    def _content(self) -> str:
        begin, end = RESPONSE
        if self._at_edge:
            self._pending = self._pending.lstrip()
            if self._mark == begin and begin.startswith(self._pending):
                return ""
            if self._mark == begin:
                self._mark = end if self._pending.startswith(begin) else ""
                self._pending = self._pending.removeprefix(begin).lstrip()
        content, self._pending = self._pending, ""
        if self._mark == end:
            content, mark, rest = content.partition(end)
            certain = content[: len(content) - begun(content, [end])].rstrip()
            content, self._pending = (certain + rest, "") if mark else (certain, content[len(certain) :])
            self._mark = "" if mark else end
        self._at_edge = self._at_edge and not content
        return content
