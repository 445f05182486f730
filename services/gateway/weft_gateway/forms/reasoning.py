"""Reasoning before an answer: what stands between the marks that a model's template has, as `<think>`. Pure."""

from weft_gateway.forms.answer_form import AnswerForm
from weft_gateway.forms.marks import NO_TOKENS, RESPONSE, begun, in_text
from weft_gateway.forms.tool_calls import ToolCallParser, call_begins


class ReasoningParser:
    """Reads one answer into reasoning and content: `push` text as it comes, then `flush` once.

    White space around the reasoning belongs to neither part, nor do the marks around what follows it. A call of the
    form's tools ends the reasoning, too, where its end mark never comes: text behind it is held back until then.
    `span`: the characters of the answer between which its reasoning stands, without the marks.
    """

    def __init__(self, form: AnswerForm) -> None:
        assert form.reasoning
        tokens = NO_TOKENS if form.spells_marks else form.marks
        self._begin_mark, self._end_mark = (in_text(mark, tokens) for mark in form.reasoning)
        # A grammar ends the reasoning by its mark, so that a call in it is none.
        self._tools = None if form.output else form.tools
        self._call = self._tools and call_begins(self._tools)
        self._held, self._n_chars, self.span = "", 0, (0, 0)
        self._inside: bool | None = form.in_reasoning or None  # None: not known yet
        self._at_edge = True  # white space that comes next is dropped
        has_response = form.template is not None and form.template.has_response
        self._mark = RESPONSE[0] if has_response else ""  # of what follows the reasoning, that may come next

    def push(self, text: str) -> tuple[str, str]:
        """Return what is certain by now."""
        self._held += text
        self._n_chars += len(text)
        if self._inside is None and not self._begin():
            return "", ""
        reasoning = self._read() if self._inside else ""
        return reasoning, "" if self._inside else self._content()

    def flush(self) -> tuple[str, str]:
        """Return what is left at the end of the answer."""
        held, self._held = self._held, ""
        if not self._inside:
            return "", held
        at = self._call_at(held)
        self._end_at(self._n_chars - len(held) + at)
        return held[:at].rstrip(), held[at:]

    @property
    def is_over(self) -> bool:
        """Whether the text that comes next is content."""
        return self._inside is False

    def _end_at(self, n_chars: int) -> None:
        self.span = self.span[0], n_chars

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
        """Decide whether the answer begins with reasoning; False: more text has to come."""
        text = self._held.lstrip()
        if self._begin_mark.startswith(text):
            return False
        self._inside = text.startswith(self._begin_mark)
        if self._inside:
            self._held = text[len(self._begin_mark) :]
            self.span = (self._n_chars - len(self._held),) * 2
        else:
            self._at_edge = False
        return True

    def _read(self) -> str:
        """Take reasoning that is certain, without white space that may stand before its end."""
        if self._at_edge:
            self._held = self._held.lstrip()
        before, found, behind = self._held.partition(self._end_mark)
        if found:
            self._held, self._inside, self._at_edge = behind, False, True
            self._end_at(self._n_chars - len(behind) - len(found))
            return before.rstrip()
        kept = begun(before, [self._end_mark])
        call = self._call and self._call.search(before)
        certain = before[: min(len(before) - kept, call.start() if call else len(before))].rstrip()
        self._held = before[len(certain) :]
        self._end_at(self._n_chars - len(self._held))
        self._at_edge = self._at_edge and not certain
        return certain

    def _content(self) -> str:
        begin, end = RESPONSE
        if self._at_edge:
            self._held = self._held.lstrip()
            if self._mark == begin and begin.startswith(self._held):
                return ""
            if self._mark == begin:
                self._mark = end if self._held.startswith(begin) else ""
                self._held = self._held.removeprefix(begin).lstrip()
        content, self._held = self._held, ""
        if self._mark == end:
            content, found, behind = content.partition(end)
            certain = content[: len(content) - begun(content, [end])].rstrip()
            content, self._held = (certain + behind, "") if found else (certain, content[len(certain) :])
            self._mark = "" if found else end
        self._at_edge = self._at_edge and not content
        return content
