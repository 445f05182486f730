"""A chat's answer taken apart: reasoning, content and calls of tools, as OpenAI's messages have them. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft_gateway.openai.marks import NO_TOKENS, MarkTokens, ReasoningMarks, left_out, spelled
from weft_gateway.openai.reasoning import ReasoningParser, grammar_of_lead
from weft_gateway.openai.tool_calls import ArgumentsPart, CallBegun, Content, Part, ToolCallParser, ToolFormat, call_id


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer may hold beside content.

    `tools`: the form of calls; None: there are none. `reasons`: the marks of reasoning that it may begin with;
    `in_reasoning`: it does; `reasoned`: the prompt has that. `shows_reasoning`: clients get it. `marks`: those that are
    one token. `spells_marks`: readers get the letters of special tokens, which are part of the text.
    `calls_are_asked`: the request names the tool that is called, and the end of the answer is no surprise (OpenAI).
    `one_call`: the request takes one call, and the first of several is it (vLLM).
    `calls_alone`: the answer has to call, so text beside its calls is that of a call which was cut, and no content.
    """

    tools: ToolFormat | None = None
    reasons: ReasoningMarks | None = None
    in_reasoning: bool = False
    reasoned: bool = False
    shows_reasoning: bool = True
    spells_marks: bool = False
    marks: MarkTokens = field(default_factory=dict[str, tuple[int, bool]])
    calls_are_asked: bool = False
    calls_alone: bool = False
    one_call: bool = False

    @property
    def is_plain(self) -> bool:
        """Text alone."""
        return self.tools is None and self.reasons is None

    @property
    def lead(self) -> str:
        """The grammar of what stands before the form that the client asks for; "": nothing does."""
        if self.reasons is None or self.reasoned:
            return ""
        return grammar_of_lead(self.reasons, self.marks, begun=self.in_reasoning)


class AnswerReader:
    """Reads the text of one answer; `answer_id` makes the ids of its calls."""

    def __init__(self, form: AnswerForm, answer_id: str) -> None:
        self._form, self._answer_id = form, answer_id
        tokens = NO_TOKENS if form.spells_marks else form.marks
        self._calls = ToolCallParser(form.tools) if form.tools else None
        self._reasoning = form.reasons and ReasoningParser(
            form.reasons, begun=form.in_reasoning, tokens=tokens, tools=form.tools
        )

    @property
    def ends_with_calls(self) -> bool:
        """Whether the answer ends for the caller to make calls."""
        return self._calls is not None and self._calls.calls > 0 and not self._form.calls_are_asked

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas that are certain by now."""
        split = self._reasoning.push(text) if self._reasoning else None
        reasoning, content = (split.reasoning, split.content) if split else ("", text)
        return [*self._reasoned(reasoning), *self._deltas(self._parts(content))]

    def flush(self, *, cut: bool = False) -> list[dict[str, Any]]:
        """The deltas that are left at the end of the answer. `cut`: more was to come."""
        split = self._reasoning.flush() if self._reasoning else None
        reasoning, content = (split.reasoning, split.content) if split else ("", "")
        parts = self._parts(content)
        parts += self._calls.flush(cut=cut) if self._calls else []
        return [*self._reasoned(reasoning), *self._deltas(parts)]

    def _reasoned(self, reasoning: str) -> list[dict[str, Any]]:
        text = left_out(reasoning) if self._form.shows_reasoning else ""
        return [{"reasoning_content": text}] if text else []

    def _parts(self, content: str) -> list[Part]:
        if self._calls:
            return self._calls.push(content)
        return [Content(content)] if content else []

    def _deltas(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        most = 1 if self._form.one_call else math.inf
        taken = [part for part in parts if isinstance(part, Content) or part.number < most]
        return [delta for part in taken if (delta := self._delta(part)) is not None]

    def _delta(self, part: Part) -> dict[str, Any] | None:
        match part:
            case Content(text):
                content = "" if self._form.calls_alone else left_out(text)
                return {"content": content} if content else None
            case CallBegun(number, name):
                assert self._form.tools
                own = {"id": call_id(self._form.tools, self._answer_id, number), "type": "function"}
                return {"tool_calls": [{"index": number, **own, "function": {"name": name, "arguments": ""}}]}
            case ArgumentsPart(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": spelled(text)}}]}


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that an answer's deltas make: without content where it has calls alone."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                named = {"name": part["function"]["name"], "arguments": ""}
                calls.append({"id": part["id"], "type": part["type"], "function": named})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    message |= {"refusal": None} | ({"reasoning_content": reasoning} if reasoning else {})
    return message | ({"tool_calls": calls} if calls else {})
