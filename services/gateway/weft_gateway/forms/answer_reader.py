"""A chat's answer taken apart: reasoning, content and calls of tools, as OpenAI's messages have them. Pure."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from weft_gateway.forms.answer_form import AnswerForm
from weft_gateway.forms.marks import left_out, spelled
from weft_gateway.forms.reasoning import ReasoningParser
from weft_gateway.forms.tool_calls import ArgumentsPart, CallBegun, Content, Part, ToolCallParser
from weft_gateway.forms.tool_formats import call_id


class AnswerReader:
    """The reader of an answer's text. `answer_id` makes the ids of its calls."""

    def __init__(self, form: AnswerForm, answer_id: str) -> None:
        self._form, self._answer_id = form, answer_id
        self._calls = ToolCallParser(form.tools) if form.tools else None
        self._reasoning = ReasoningParser(form) if form.reasoning else None
        self._starts = array("L")  # starts of the answer's tokens up to the end of its reasoning, in characters

    @property
    def ends_with_calls(self) -> bool:
        """Whether the answer ends for the caller to make calls."""
        return self._calls is not None and self._calls.calls > 0 and not self._form.calls_are_asked

    @property
    def reasoning_tokens(self) -> int:
        """Count the tokens begun between the marks of the reasoning, as far as read."""
        if self._reasoning is None:
            return 0
        begin, end = self._reasoning.span
        return bisect_left(self._starts, end) - bisect_left(self._starts, begin)

    def push(self, text: str, token_starts: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return the deltas certain by now. `token_starts`: see `Emit`."""
        if self._reasoning and not self._reasoning.is_over:
            self._starts.extend(token_starts)
        reasoning, content = self._reasoning.push(text) if self._reasoning else ("", text)
        return [*self._reasoned(reasoning), *self._deltas(self._parts(content))]

    def flush(self, *, cut: bool = False) -> list[dict[str, Any]]:
        """Return the remaining deltas at the end of the answer. `cut`: the answer was cut off."""
        reasoning, content = self._reasoning.flush() if self._reasoning else ("", "")
        parts = self._parts(content)
        parts += self._calls.flush(cut=cut) if self._calls else []
        return [*self._reasoned(reasoning), *self._deltas(parts)]

    def _reasoned(self, reasoning: str) -> list[dict[str, Any]]:
        text = left_out(reasoning) if self._form.shows_reasoning else ""
        return [_reasoning(text)] if text else []

    def _parts(self, content: str) -> list[Part]:
        if self._calls:
            return self._calls.push(content)
        return [Content(content)] if content else []

    def _deltas(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        max_calls = 1 if self._form.one_call else math.inf
        used = [part for part in parts if isinstance(part, Content) or part.number < max_calls]
        return [delta for part in used if (delta := self._delta(part)) is not None]

    def _delta(self, part: Part) -> dict[str, Any] | None:
        match part:
            case Content(text):
                content = "" if self._form.calls_alone else left_out(text)
                return {"content": content} if content else None
            case CallBegun(number, name):
                assert self._form.tools
                call = {"id": call_id(self._form.tools, self._answer_id, number), "type": "function"}
                return {"tool_calls": [{"index": number, **call, "function": {"name": name, "arguments": ""}}]}
            case ArgumentsPart(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": spelled(text)}}]}


def _reasoning(text: str) -> dict[str, Any]:
    """Write reasoning under both of vLLM's names of the field, old and new."""
    return {"reasoning_content": text, "reasoning": text}


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join an answer's deltas to a message. Without text next to calls its content is None."""
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
    message |= {"refusal": None} | (_reasoning(reasoning) if reasoning else {})
    return message | ({"tool_calls": calls} if calls else {})
