"""`POST /v1/messages`: Anthropic's form of a chat, as far as it maps to one: texts, tools, reasoning, streamed.

A request becomes one of chats (`MessagesChat`), so everything behind it is the same.
"""

import json
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.errors import ParameterError
from weft_gateway.openai.chat import ChatEndpoint
from weft_gateway.openai.fields import MAX_INT32, Stops, Whole
from weft_gateway.openai.http_requests import caller_of, json_body, json_response
from weft_gateway.openai.messages_format import MessagesEncoder
from weft_gateway.openai.schema import MAX_MESSAGES, ChatRequest, Strict, checked, naming, object_of
from weft_gateway.openai.tokenize import chat_length, in_thread, tokenizer_of
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action
from weft_gateway.tolerance import check_names

PATH = "/v1/messages"
PASSED_ON = ("model", "stream", "temperature", "top_p", "top_k")
OWN_NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "enable_thinking": "thinking"}
_BLOCK_FIELDS = (  # cache_control changes no answer; the others in its line come back with an answer
    "type", "text", "id", "name", "input", "tool_use_id", "content", "is_error", "thinking", "data",
    "cache_control", "citations", "signature", "caller",
)  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountRequest(Strict):
    """`POST /v1/messages/count_tokens`."""

    model: str = Field(min_length=1, max_length=512)
    messages: list[Any] = Field(min_length=1, max_length=MAX_MESSAGES, description="of user and assistant, in turn")
    system: str | list[Any] = Field("", description="a system message before them")
    tools: list[Any] = Field(default_factory=list[Any], description="functions that the model may call")
    tool_choice: dict[str, Any] = Field(default_factory=dict[str, Any], description="auto, any, none, or a tool's name")
    thinking: dict[str, Any] = Field(default_factory=dict[str, Any], description="accepted while it is disabled")

    def check_together(self) -> None:
        if self.thinking not in ({}, {"type": "disabled"}):
            text = "thinking: a model reasons as its chat template has it; leave it out."
            raise ParameterError(text, param="thinking", code="unsupported_value")

    def chat(self) -> dict[str, Any]:
        """Make the parameters of a chat. Raises ParameterError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *_messages(self.messages)],
            "tools": [_tool(tool, index) for index, tool in enumerate(self.tools)],
            "tool_choice": _tool_choice(self.tool_choice),
            "enable_thinking": False if self.thinking else None,
            "parallel_tool_calls": not self.tool_choice.get("disable_parallel_tool_use", False),
        }


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Whole = Field(ge=1, le=MAX_INT32)
    stream: bool = Field(False, description="server-sent events by name, a delta per step")
    stop_sequences: Stops = Field((), description="texts that end the answer; they are not part of it")
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(0, ge=0, le=MAX_INT32)
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any], description="user_id; logged hashed")

    def chat(self) -> dict[str, Any]:
        passed = {name: getattr(self, name) for name in PASSED_ON if name in self.model_fields_set}
        user = self.metadata.get("user_id")
        return {
            **super().chat(),
            **passed,
            "max_completion_tokens": self.max_tokens,
            "stop": list(self.stop_sequences),
            "user": user if isinstance(user, str) else None,
        }


class MessagesChat(ChatRequest):
    """The chat that a request of `POST /v1/messages` asks for."""

    prompt_name: ClassVar[str] = "messages"
    asked_as = OWN_NAMES


def _messages(given: list[Any]) -> list[dict[str, Any]]:
    """Make chat messages; results of tools are messages of their own, before their text. Raises ParameterError."""
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        match message:
            case {"role": "user" | "assistant" as role, "content": str(text)}:
                messages.append({"role": role, "content": text})
            case {"role": "user" | "assistant" as role, "content": [*blocks]}:
                messages += _of_blocks(role, blocks, f"messages[{index}].content")
            case _:
                text = f"messages[{index}]: must be of user or assistant, with content: a text or a list of blocks."
                raise ParameterError(text, param=f"messages[{index}]")
    return messages


def _of_blocks(role: str, blocks: list[Any], where: str) -> list[dict[str, Any]]:
    texts, calls, results = list[str](), list[Any](), list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        if isinstance(block, dict):
            check_names(f"{where}[{index}]", block, _BLOCK_FIELDS)  # pyright: ignore[reportUnknownArgumentType]
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id), **others}:
                results.append({"role": "tool", "tool_call_id": call_id, "content": others.get("content")})
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # models do not get their earlier reasoning
            case _:
                text = f"{where}[{index}]: must be of type text, tool_use, tool_result or thinking."
                raise ParameterError(text, param=f"{where}[{index}]")
    own: dict[str, Any] = {"role": role, "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})
    return [*results, own] if texts or calls or not results else results


def _tool(tool: Any, index: int) -> dict[str, Any]:
    match tool:
        case {"name": str(name), "input_schema": dict(schema), **others} if others.get("type") in (None, "custom"):
            check_names(f"tools[{index}]", others, ("type", "description", "strict", "cache_control"))
            about = {key: others[key] for key in ("description", "strict") if others.get(key)}
            return {"type": "function", "function": {"name": name, **about, "parameters": schema}}
        case _:
            text = f'tools[{index}]: must be {{"name": "...", "description": "...", "input_schema": {{...}}}}.'
            raise ParameterError(text, param=f"tools[{index}]")


def _tool_choice(choice: dict[str, Any]) -> Any:
    check_names("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind in _CHOICES:
            return _CHOICES[kind]
        case _ if not choice:
            return None
        case _:
            raise ParameterError("tool_choice: must be of type auto, any, none or tool.", param="tool_choice")


def _chat(params: CountRequest) -> MessagesChat:
    """Raises ParameterError."""
    with naming(OWN_NAMES):
        return checked(MessagesChat, params.chat())


class MessagesEndpoint(ChatEndpoint):
    """A chat in Anthropic's form."""

    name = "create_message"
    path = PATH
    encoder = MessagesEncoder

    def parse(self, body: bytes) -> MessagesChat:
        return _chat(checked(MessagesRequest, object_of(body)))


MESSAGES = MessagesEndpoint()


async def count_tokens(state: AppState, request: Request) -> Response:
    """Count the tokens of a chat in Anthropic's form."""
    caller = await caller_of(state, request, Action.INFER)
    body = await json_body(request, state.settings.max_body_bytes)
    params = await in_thread(lambda body: _chat(checked(CountRequest, object_of(body))), body)
    pool, tokenizer = await tokenizer_of(state, caller, params.model)
    return json_response({"input_tokens": chat_length(params, pool, tokenizer)})
