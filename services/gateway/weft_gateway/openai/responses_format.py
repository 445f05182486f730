"""The shape of `POST /v1/responses`: an answer as items, whole or as events by name with numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from weft.domain.request import FinishReason
from weft_gateway.core.events import Emit, End
from weft_gateway.errors import ApiError
from weft_gateway.forms.answer_reader import AnswerReader
from weft_gateway.openai.call import AnswerEncoder, Call
from weft_gateway.openai.logprobs import chat_logprobs
from weft_gateway.openai.usage import CallUsage


class RepeatedRequest(Protocol):
    """The fields of a request repeated in its answer."""

    @property
    def model(self) -> str: ...
    @property
    def repeated(self) -> dict[str, Any]: ...
    @property
    def conversation(self) -> str: ...
    @property
    def alternatives(self) -> int | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


class ResponsesEncoder(AnswerEncoder):
    """Makes items of an answer's deltas (reasoning, a message, calls), with at most one open item."""

    def __init__(self, params: RepeatedRequest, call: Call) -> None:
        request_id = call.ids.request_id
        self._id, self._created_unix_s, self._params = f"resp_{request_id}", call.arrived_unix_ms // 1000, params
        self._reader = AnswerReader(call.prompts[0].form, f"{request_id}/0")
        self._names = call.tokenizer
        self._logprobs: list[Any] = []  # of tokens whose text has not gone out
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        self._events = 0
        self._cut = False
        self._is_stored, self._not_kept = bool(params.repeated["store"]), dict[str, Any]()

    @property
    def span_attributes(self) -> Mapping[str, str | None]:
        """A conversation has the id of its first response."""
        return {"gen_ai.conversation.id": self._params.conversation or (self._id if self._is_stored else None)}

    def first_chunk(self) -> bytes:
        response = self._response("in_progress", None)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def chunk(self, index: int, emit: Emit) -> bytes:  # noqa: ARG002 (there is one)
        if (alternatives := self._params.alternatives) is not None:
            self._logprobs += chat_logprobs(emit.logprobs, alternatives, self._names)["content"]
        return b"".join(self._take(delta) for delta in self._reader.push(emit.text, emit.token_starts))

    def finish_chunk(self, index: int, end: End) -> bytes:  # noqa: ARG002
        self._cut = end.reason is FinishReason.LENGTH
        return b"".join(self._take(delta) for delta in self._reader.flush(cut=self._cut)) + self._close()

    def last_chunk(self, usage: CallUsage) -> bytes:
        response = self.response(usage)
        return self._event(response["status"], response=response)

    def error_chunk(self, error: ApiError) -> bytes:
        failed = self._response("failed", None) | {"error": {"code": error.code, "message": error.message}}
        return self._event("failed", response=failed)

    def body(self, choices: Sequence[tuple[Emit, End]], usage: CallUsage) -> bytes:
        ((emit, end),) = choices
        self.chunk(0, emit)
        self.finish_chunk(0, end)
        return orjson.dumps(self.response(self._with_reasoning(usage)))

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    def response(self, usage: CallUsage) -> dict[str, Any]:
        """Return the response with an ended answer."""
        return self._response("incomplete" if self._cut else "completed", usage)

    def not_kept(self, error: ApiError) -> None:
        """Say in the response that it cannot be continued, and why."""
        self._is_stored, self._not_kept = False, {"store_error": {"code": error.code, "message": error.message}}

    # ---------------------------------------------------------------- items

    def _take(self, delta: dict[str, Any]) -> bytes:
        """Add a delta of a chat."""
        match delta:
            case {"reasoning_content": str(text)}:
                return self._add_text("reasoning", text)
            case {"content": str(text)}:
                return self._add_text("message", text)
            case {"tool_calls": [{"id": call_id, "function": {"name": name}}]}:
                item = {"id": self._item_id("fc"), "type": "function_call", "status": "in_progress"}
                return self._open({**item, "call_id": call_id, "name": name, "arguments": ""})
            case {"tool_calls": [{"function": {"arguments": str(text)}}]}:
                self._items[-1]["arguments"] += text
                return self._event("function_call_arguments.delta", **self._place(), delta=text)
            case _:
                raise AssertionError(delta)

    def _add_text(self, kind: str, text: str) -> bytes:
        events = b"" if self._is_open and self._items[-1]["type"] == kind else self._open_text(kind)
        part = self._items[-1]["content"][0]
        part["text"] += text
        name, members = "reasoning_text", dict[str, Any]()
        if kind == "message":
            name, members, self._logprobs = "output_text", {"logprobs": self._logprobs}, []
            part["logprobs"] = [*part["logprobs"], *members["logprobs"]]
        return events + self._event(f"{name}.delta", **self._place(), content_index=0, delta=text, **members)

    def _open_text(self, kind: str) -> bytes:
        prefix = "msg" if kind == "message" else "rs"
        item: dict[str, Any] = {"id": self._item_id(prefix), "type": kind, "content": []}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            item |= {"status": "in_progress", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item["summary"] = []
        events = self._open(item)
        events += self._event("content_part.added", **self._place(), content_index=0, part=part)
        item["content"] = [part]
        return events

    def _item_id(self, prefix: str) -> str:
        """Return the next item's id, which names its response: a request can refer to it."""
        return f"{prefix}_{self._id}_{len(self._items)}"

    def _open(self, item: dict[str, Any]) -> bytes:
        closed = self._close()
        self._items.append(item)
        self._is_open = True
        return closed + self._event("output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self) -> bytes:
        """End the open item."""
        if not self._is_open:
            return b""
        self._is_open, item, events = False, self._items[-1], b""
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("function_call_arguments.done", **self._place(), **fields)
        else:
            (part,) = item["content"]
            is_message = item["type"] == "message"
            name, members = ("output_text", {"logprobs": part["logprobs"]}) if is_message else ("reasoning_text", {})
            events = self._event(f"{name}.done", **self._place(), content_index=0, text=part["text"], **members)
            events += self._event("content_part.done", **self._place(), content_index=0, part=part)
        if "status" in item:
            item["status"] = "incomplete" if self._cut else "completed"
        return events + self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    # ---------------------------------------------------------------- the whole

    def _response(self, status: str, usage: CallUsage | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_unix_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._params.model,
            "output": self._items,
            "reasoning": {"effort": self._params.reasoning_effort, "summary": None},
            "service_tier": "default",
            "truncation": "disabled",
            "usage": usage and usage.of_items(),
            **self._params.repeated,
            "store": self._is_stored,
            **self._not_kept,
        }

    def _event(self, event: str, /, **fields: Any) -> bytes:
        kind = f"response.{event}"
        data = orjson.dumps({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def input_item(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """Write an item of a request as the list of its input has it: whole, a message's text as parts."""
    full_item = {"type": "message", **item, "id": item_id}
    if full_item["type"] in ("message", "function_call", "function_call_output"):
        full_item.setdefault("status", "completed")
    if full_item["type"] == "reasoning":
        full_item.setdefault("summary", [])
    if full_item["type"] == "message" and isinstance(text := item.get("content"), str):
        is_assistant = full_item["role"] == "assistant"
        part = (
            {"type": "output_text", "text": text, "annotations": []}
            if is_assistant
            else {"type": "input_text", "text": text}
        )
        full_item["content"] = [part]
    return full_item
