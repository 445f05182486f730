"""Reasoning before an answer: what stands between `<think>` and `</think>` where a model's template has them. Pure."""

from typing import NamedTuple

BEGIN, END = "<think>", "</think>"


def reasons(template: str) -> bool:
    """Whether the models of a chat template reason before they answer."""
    return BEGIN in template and END in template


class AnswerSplit(NamedTuple):
    """What some text adds to each part of an answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Reads one answer: `push` text as it comes, then `flush` once. `begun`: the prompt ends inside the reasoning.

    White space around the reasoning belongs to neither part.
    """

    def __init__(self, *, begun: bool) -> None:
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
        return AnswerSplit(reasoning=held.rstrip()) if self._inside else AnswerSplit(content=held)

    def _begin(self) -> bool:
        """Whether it is known now if the answer begins with reasoning."""
        text = self._held.lstrip()
        if BEGIN.startswith(text):
            return False
        self._inside = text.startswith(BEGIN)
        if self._inside:
            self._held = text[len(BEGIN) :]
        else:
            self._at_edge = False
        return True

    def _read(self) -> str:
        """Reasoning that is certain, without white space that may stand before its end."""
        if self._at_edge:
            self._held = self._held.lstrip()
        before, found, behind = self._held.partition(END)
        if found:
            self._held, self._inside, self._at_edge = behind, False, True
            return before.rstrip()
        kept = next((n for n in range(len(END) - 1, 0, -1) if before.endswith(END[:n])), 0)
        certain = before[: len(before) - kept].rstrip()
        self._held = before[len(certain) :]
        self._at_edge = self._at_edge and not certain
        return certain

    def _content(self) -> str:
        if self._at_edge:
            self._held = self._held.lstrip()
        content, self._held = self._held, ""
        self._at_edge = self._at_edge and not content
        return content
