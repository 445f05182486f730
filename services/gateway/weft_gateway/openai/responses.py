"""`/v1/responses`: OpenAI's newer form of a chat.

A request becomes one of chats (`ResponsesChat`), so everything behind it is the same: templates, tools, sampling. It
brings its whole conversation, or names the response that it continues: the batch service keeps responses for a time.
What is stored is read and written at its tenant's turn, in a thread where it is long.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field, PrivateAttr
from starlette.requests import Request
from starlette.responses import Response

from weft.domain.batch import MAX_CONVERSATION_BYTES, KeptResponse, no_response
from weft.domain.routes import PoolRoute
from weft.telemetry.logs import kv
from weft_gateway import exact_json
from weft_gateway.core.routes import Principal
from weft_gateway.errors import ApiError, BadRequest, InsufficientStorage, NotFound, ParameterError, TooLarge, TooLate
from weft_gateway.hints import HintScope
from weft_gateway.openai.call import Call
from weft_gateway.openai.chat import ChatEndpoint
from weft_gateway.openai.fields import MAX_FLOAT32, MAX_INT32, Bounded, Metadata, Whole
from weft_gateway.openai.http_requests import MAX_ID_CHARS, Query, caller_of, json_body, json_response, listed
from weft_gateway.openai.responses_format import ResponsesEncoder, input_item
from weft_gateway.openai.schema import (
    MAX_CALLER_ID,
    MAX_MESSAGES,
    ChatRequest,
    Strict,
    checked,
    naming,
    object_of,
    text_of,
)
from weft_gateway.openai.tokenize import chat_length, tokenizer_of
from weft_gateway.openai.usage import CallUsage
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action
from weft_gateway.shell.tokenizer import UNKNOWN_CONTEXT_TOKENS
from weft_gateway.tolerance import check_names

log = logging.getLogger(__name__)
MAX_RESPONSE_ID = 160
MAX_REFERRED = 64  # responses whose items one request refers to
MAX_STORED_VALUES = 1 << 19  # of a conversation's JSON: each may take 100 bytes of memory
ITEM_ID = re.compile(r"(?:msg|rs|fc)_(resp_.{1,160})_([0-9]{1,4})")  # of `ResponsesEncoder`
OWN_NAMES = {
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
}
_NEEDED: dict[str, dict[str, str]] = {  # by type of item
    "message": {"role": "a string", "content": "a string or a list of text parts"},
    "function_call": {
        "call_id": "a string", "name": "a string", "arguments": "a string that holds a JSON object",
    },
    "function_call_output": {"call_id": "a string", "output": "a string or a list of text parts"},
    "item_reference": {"id": "a string"},
}  # fmt: skip
INSIDE = {"text": ("format",), "reasoning": ("effort",)}
PASSED_ON = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier", "top_logprobs",
    "top_k", "min_p", "seed", "stop", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "skip_special_tokens", "include_reasoning", "include_stop_str_in_output", "stop_token_ids", "ignore_eos",
    "logit_bias", "structured_outputs", "chat_template_kwargs", "cache_salt", "priority",
)  # fmt: skip
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the second: there is none to include


class ResponsesRequest(Strict):
    """`POST /v1/responses`."""

    api: ClassVar[HintScope | None] = HintScope.RESPONSES

    model: str = Field(min_length=1, max_length=512)
    input: Annotated[str | list[Any], Bounded] = Field(
        max_length=1 << 24, description="a text, or the items of a conversation"
    )
    instructions: str = Field("", description="a system message before the input")
    max_output_tokens: Whole | None = Field(None, ge=1, le=MAX_INT32)
    stream: bool = Field(False, description="server-sent events by name, a delta per step")
    temperature: float = Field(1.0, ge=0, le=MAX_FLOAT32)
    top_p: float = Field(1.0, gt=0, le=1)
    tools: list[Any] = Field(default_factory=list[Any], description="functions that the model may call")
    tool_choice: Annotated[Any, Bounded] = Field(
        "auto", description="none, auto, required, or the function that is called"
    )
    parallel_tool_calls: bool = Field(True, description="an answer may have several calls")
    text: dict[str, Any] = Field(default_factory=dict[str, Any], description="text.format: the form of the answer")
    reasoning: dict[str, Any] = Field(default_factory=dict[str, Any], description="effort: for the chat template")
    include: list[str] = Field(default_factory=list[str], description=f"{LOGPROBS}: of the answer's tokens")
    top_logprobs: Any = Field(None, description="likeliest tokens reported beside each")
    top_k: Any = Field(None, description="as in chats, like those below, to priority")
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    skip_special_tokens: Any = None
    include_reasoning: Any = None
    include_stop_str_in_output: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    logit_bias: Any = None
    structured_outputs: Any = None
    chat_template_kwargs: Any = None
    cache_salt: Any = None
    priority: Any = None
    truncation: str = Field("disabled", description="disabled: a conversation beyond the context is refused")
    previous_response_id: str | None = Field(None, max_length=MAX_RESPONSE_ID, description="what this one continues")
    store: bool | None = Field(None, description="false: it cannot be continued; kept where there is a batch service")
    metadata: Metadata = Field(default_factory=dict[str, str], description="returned as it is; bounded as of batches")
    user: str = Field("", max_length=MAX_CALLER_ID, description="whom the caller asks for; logged hashed")
    safety_identifier: str = Field("", max_length=MAX_CALLER_ID, description="the newer name of user")

    def check_together(self) -> None:
        if isinstance(self.input, list) and not 0 < len(self.input) <= MAX_MESSAGES:
            raise ParameterError(f"input: must have 1 to {MAX_MESSAGES} items.", param="input")
        if self.truncation != "disabled":
            text = "truncation: a conversation is never cut by the gateway; leave out its oldest items."
            raise ParameterError(text, param="truncation", code="unsupported_value")
        for name, names in INSIDE.items():
            check_names(name, getattr(self, name), names)
        if (unknown := next((name for name in self.include if name not in INCLUDED), None)) is not None:
            text = f"include: {unknown[:64]!r} is not there to be included; {', '.join(INCLUDED)} are taken."
            raise ParameterError(text, param="include", code="unsupported_value")


class ResponsesChat(ChatRequest):
    """The chat of a request of `POST /v1/responses`, and the request's fields repeated in its answer."""

    prompt_name: ClassVar[str] = "input"
    api: ClassVar[HintScope | None] = HintScope.ANY  # the hints are taken out of the request
    asked_as = OWN_NAMES
    _params: ResponsesRequest = PrivateAttr()
    _new_items: list[Any] = PrivateAttr(default_factory=list[Any])
    _keep: bool = PrivateAttr(False)
    _conversation: str = PrivateAttr("")
    _written: dict[str, orjson.Fragment] = PrivateAttr(default_factory=dict[str, orjson.Fragment])

    @property
    def params(self) -> ResponsesRequest:
        return self._params

    @property
    def own_items(self) -> list[Any]:
        """The items of the input."""
        return self._new_items

    @property
    def conversation(self) -> str:
        """The id of the first response of the conversation that is continued; "": none is."""
        return self._conversation

    def keep(self, is_kept: bool) -> None:
        """Set whether the response is kept for later requests."""
        self._keep = is_kept

    @property
    def repeated(self) -> dict[str, Any]:
        params = self._params
        return {
            "instructions": params.instructions or None,
            "max_output_tokens": params.max_output_tokens,
            "metadata": params.metadata,
            "parallel_tool_calls": params.parallel_tool_calls,
            "previous_response_id": params.previous_response_id,
            "store": self._keep,
            **self._written,
            "user": params.user or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }

    @classmethod
    def of_params(
        cls,
        params: ResponsesRequest,
        new_items: list[Any] | None = None,
        earlier: Sequence[Any] = (),
        *,
        keep: bool = False,
        conversation: str = "",
    ) -> "ResponsesChat":
        """Make a chat of a request.

        `new_items`: the items of the input, without references. `earlier`: the previous items. `keep`: store the
        response for later requests. `conversation`: the id of the first response. Raises ParameterError, which names
        the parameter of the response.
        """
        new_items = items_of(params) if new_items is None else new_items
        chat = {name: getattr(params, name) for name in PASSED_ON if name in params.model_fields_set}
        chat["messages"] = _messages(params.instructions, earlier, new_items)
        chat["max_completion_tokens"] = params.max_output_tokens
        chat["reasoning_effort"] = params.reasoning.get("effort")
        chat["logprobs"] = LOGPROBS in params.include or bool(params.top_logprobs)
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(params.tools)]
        chat["tool_choice"] = _tool_choice(params.tool_choice)
        chat["response_format"] = _response_format(params.text.get("format"))
        with naming(OWN_NAMES):
            request = checked(cls, chat)
        request._params, request._new_items, request._keep, request._conversation = (
            params,
            new_items,
            keep,
            conversation,
        )
        request.note_ignored(params.ignored)
        repeated = {
            "text": params.text or {"format": {"type": "text"}}, "tool_choice": params.tool_choice,
            "tools": params.tools,
        }  # fmt: skip
        request._written = {name: orjson.Fragment(exact_json.dumps(value)) for name, value in repeated.items()}
        return request


def items_of(params: ResponsesRequest) -> list[Any]:
    """Return the input as items."""
    if isinstance(params.input, str):
        return [{"type": "message", "role": "user", "content": params.input}]
    return params.input


def _messages(instructions: str, earlier: Sequence[Any], new_items: Sequence[Any]) -> list[Any]:
    """Make messages of items. Reasoning, its message and its calls are one message.

    Raises ParameterError.
    """
    messages: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate([*earlier, *new_items], start=-len(earlier)):
        match item:
            case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
                text = text_of(output, f"input[{index}].output")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case {"type": "reasoning", **others}:
                if text := _reasoning(others, f"input[{index}]"):
                    messages.append({"role": "assistant", "content": None, "reasoning_content": text})
            case {"role": role, "content": content, **others} if others.get("type", "message") == "message":
                text, begun = text_of(content, f"input[{index}].content"), messages[-1:]
                if role == "assistant" and begun and begun[0].keys() == {"role", "content", "reasoning_content"}:
                    begun[0]["content"] = text
                else:
                    messages.append({"role": role, "content": text})
            case {"type": "item_reference", "id": str()}:
                messages.append({"role": "assistant", "content": ""})  # until `_continued` has read it
            case _:
                raise _item_fault(item, f"input[{index}]")
    return messages


def _item_fault(item: Any, path: str) -> ParameterError:
    """Name the missing field of an item, or its unknown type."""
    kind = item.get("type", "message") if isinstance(item, dict) else None  # pyright: ignore[reportUnknownMemberType]
    for field, form in _NEEDED.get(kind, {}).items() if isinstance(kind, str) else ():
        if not isinstance(item.get(field), str):
            return ParameterError(f"{path}.{field}: must be {form}.", param=f"{path}.{field}")
    text = f"{path}: expected a message, function_call, function_call_output, reasoning or item_reference"
    return ParameterError(f"{text}, got {str(kind)[:64]!r}." if kind else f"{text}.", param=path)


def _reasoning(item: Mapping[str, Any], path: str) -> str:
    """Return the text of a reasoning item: its content or its summary; "": there is none. Raises ParameterError."""
    for field in ("content", "summary"):
        match item.get(field):
            case None:
                pass
            case [*parts] if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
                if text := "\n".join(part["text"] for part in parts):
                    return text
            case _:
                kind = "reasoning_text" if field == "content" else "summary_text"
                text = f'{path}.{field}: must be a list of {{"type": "{kind}", "text": "..."}}.'
                raise ParameterError(text, param=f"{path}.{field}")
    return ""


def _tool(tool: Any, index: int) -> Any:
    """Make a chat's tool of OpenAI's flat form. Raises ParameterError."""
    match tool:
        case {"type": "function", "name": _, **others}:
            function = {name: value for name, value in others.items() if name != "type" and value is not None}
            return {"type": "function", "function": {"name": tool["name"], **function}}
        case _:
            form = '{"type": "function", "name": "...", "description": "...", "parameters": {...}}'
            raise ParameterError(f"tools[{index}]: must be {form}.", param=f"tools[{index}]")


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case _:
            return choice


def _response_format(form: Any) -> Any:
    match form:
        case {"type": "json_schema", **schema}:
            return {"type": "json_schema", "json_schema": schema}
        case _:
            return form


async def _continued(state: AppState, caller: Principal, pool: PoolRoute, request: ResponsesChat) -> ResponsesChat:
    """Add the responses that it names. Raises NotFound, NotConfigured, ServiceUnavailable, ParameterError."""
    params = request.params
    keep = state.batch.configured and state.settings.store_responses and params.store is not False
    earlier = await _conversation(state, caller, params) if params.previous_response_id else ()
    named = await _named(state, caller, request, sum(map(len, earlier)))
    if not earlier and not named:
        request.keep(keep)
        return request
    context_tokens = pool.max_context_tokens or UNKNOWN_CONTEXT_TOKENS
    tokenizer = state.tokenizers.get(pool.base_digest)
    max_chars = tokenizer.max_chars(context_tokens) if tokenizer else MAX_CONVERSATION_BYTES

    def joined() -> ResponsesChat:
        if _marks([*earlier, *named.values()]) > MAX_STORED_VALUES:
            raise _too_long(params, f"the conversation has more than {MAX_STORED_VALUES} JSON values")
        before, first = _earlier_items(earlier, caller, max_chars)
        if before is None:
            text = f"This model's maximum context length is {context_tokens} tokens. However, the conversation has more"
            raise _too_long(params, f"{text} than {max_chars} characters")
        outputs = {name: _stored(body, caller)["response"]["output"] for name, body in named.items()}
        items = [_referred(item, index, outputs) for index, item in enumerate(request.own_items)]
        return ResponsesChat.of_params(params, items, before, keep=keep, conversation=first)

    return await state.turns.compute(caller.tenant, joined)


async def _conversation(state: AppState, caller: Principal, params: ResponsesRequest) -> Sequence[bytes]:
    """Read the response that a request continues and all before it, the eldest first. Raises ApiError."""
    try:
        return await state.batch.conversation(caller.tenant, params.previous_response_id or "")
    except TooLate as error:
        raise _too_long(params, error.message) from error


def _too_long(params: ResponsesRequest, text: str) -> ParameterError:
    name = "previous_response_id" if params.previous_response_id else "input"
    text = f"{text}. Send the items that still matter as input."
    return ParameterError(text, param=name, code="context_length_exceeded")


async def _named(state: AppState, caller: Principal, request: ResponsesChat, size: int) -> dict[str, bytes]:
    """Read the responses that references of the input name, by id. `size`: bytes read before them. Raises ApiError."""
    bodies = dict[str, bytes]()
    for index, item in enumerate(request.own_items):
        if not _is_reference(item):
            continue
        response_id, _ = _reference(item, index)
        if response_id in bodies:
            continue
        if len(bodies) == MAX_REFERRED:
            text = f"input: items of more than {MAX_REFERRED} responses are referred to; use previous_response_id."
            raise ParameterError(text, param="input")
        (bodies[response_id],) = await state.batch.conversation(caller.tenant, response_id, alone=True)
        size += len(bodies[response_id])
        if size > MAX_CONVERSATION_BYTES:
            raise _too_long(request.params, f"the conversation has more than {MAX_CONVERSATION_BYTES} bytes")
    return bodies


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"  # pyright: ignore[reportUnknownMemberType]


def _reference(item: Mapping[str, Any], index: int) -> tuple[str, int]:
    """Return the response that a reference names, and the place in its output. Raises ParameterError."""
    if match := ITEM_ID.fullmatch(item["id"]):
        return match[1], int(match[2])
    raise _no_item(item, index)


def _referred(item: Any, index: int, outputs: Mapping[str, Sequence[Any]]) -> Any:
    """Return an item of the input, in place of a reference what it names. Raises ParameterError."""
    if not _is_reference(item):
        return item
    response_id, place = _reference(item, index)
    if place >= len(outputs[response_id]):
        raise _no_item(item, index)
    return outputs[response_id][place]


def _no_item(item: Mapping[str, Any], index: int) -> ParameterError:
    text = f"input[{index}]: there is no item {item['id'][:MAX_RESPONSE_ID]!r}; send it whole."
    return ParameterError(text, param=f"input[{index}]")


def _marks(bodies: Sequence[bytes]) -> int:
    """Count the characters that begin JSON values before parsing, including characters inside texts."""
    return sum(body.count(mark) for body in bodies for mark in (b"[", b"{", b","))


def _earlier_items(bodies: Sequence[bytes], caller: Principal, max_chars: int) -> tuple[list[Any] | None, str]:
    """Parse a conversation from its end, and return it with the id of its first response.

    None: it has more characters than the context holds. Raises NotFound.
    """
    parts, chars, first = list[list[Any]](), 0, ""
    for body in reversed(bodies):
        stored = _stored(body, caller)
        first = stored["response"]["id"]
        parts.append([*stored["input"], *stored["response"]["output"]])
        chars += sum(map(_chars, parts[-1]))
        if chars > max_chars:
            return None, first
    return [item for part in reversed(parts) for item in part], first


def _chars(item: Any) -> int:
    """Count the characters that an item adds to a prompt, or fewer."""
    match item:
        case {"type": "reasoning"}:
            return 0
        case {"content": str(text)} | {"output": str(text)}:
            return len(text)
        case {"content": list(parts)} | {"output": list(parts)}:
            return sum(
                len(part["text"]) for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        case _:
            return 0


def _stored(body: bytes, caller: Principal) -> dict[str, Any]:
    """Parse a stored response. A key for some models reads only responses made with that key. Raises NotFound."""
    stored = exact_json.loads(body)
    if caller.models and stored.get("key_id") != caller.key_id:
        raise NotFound(no_response(stored["response"]["id"]))
    return stored


async def _keep(state: AppState, call: Call, encoder: ResponsesEncoder, usage: CallUsage) -> bytes | None:
    """Keep a response before its client has it whole, so that the next request may name it."""
    request, caller = call.params, call.principal
    assert isinstance(request, ResponsesChat)
    if not request.repeated["store"]:
        return None
    response, previous = encoder.response(usage), request.params.previous_response_id or ""

    def stored() -> bytes:
        own_items = orjson.Fragment(exact_json.dumps(request.own_items))
        return orjson.dumps({"key_id": caller.key_id or None, "input": own_items, "response": response})

    try:
        body = await state.turns.compute(caller.tenant, stored)
        if len(body) > MAX_CONVERSATION_BYTES:
            raise TooLarge(f"{len(body)} bytes are more than the {MAX_CONVERSATION_BYTES} of a stored response")
        await state.batch.keep_response(KeptResponse(caller.tenant, response["id"], previous, body))
    except ApiError as error:  # the answer is there all the same, and says that it cannot be continued
        log.warning("response not kept", extra=kv(response_id=response["id"], error=error))
        encoder.not_kept(error)
        if isinstance(error, InsufficientStorage):
            state.manager.shortages.note(error.code)
        return None if request.stream else await asyncio.to_thread(orjson.dumps, encoder.response(usage))
    return None


class ResponsesEndpoint(ChatEndpoint):
    """A chat in OpenAI's newer form."""

    name = "create_response"
    path = "/v1/responses"
    encoder = ResponsesEncoder
    before_end = staticmethod(_keep)

    @staticmethod
    async def completed(state: AppState, call: Call, params: ResponsesChat) -> ResponsesChat:
        return await _continued(state, call.principal, call.pool, params)

    def parse(self, body: bytes) -> ResponsesChat:
        return ResponsesChat.of_params(checked(ResponsesRequest, object_of(body)))


RESPONSES = ResponsesEndpoint()


async def one_response(state: AppState, request: Request) -> Response:
    """Answer with a stored response, by its id."""
    return await _read(state, request, lambda stored: json_response(stored["response"]))


async def _read(state: AppState, request: Request, write: Callable[[dict[str, Any]], Response]) -> Response:
    """Answer with `write` of the stored response named by the path, and of its input. Raises ApiError."""
    caller, response_id = await caller_of(state, request, Action.CONVERSE), request.path_params["response_id"]
    (body,) = await state.batch.conversation(caller.tenant, response_id, alone=True)
    return await state.turns.parse(caller.tenant, lambda stored: write(_stored(stored, caller)), body)


def _no_answer(_stored: dict[str, Any]) -> Response:
    return Response()


async def list_input_items(state: AppState, request: Request) -> Response:
    """List the input of a stored response, without the continued conversation; the last item first."""
    query = Query(request, "after", "limit", "order", "include", "include[]")
    limit, after_id = query.limit(20, 100), query.after_id()
    is_reversed = query.one_of("order", {"asc": False, "desc": True}) is not False

    def page(stored: dict[str, Any]) -> Response:
        items = _identified(stored["input"], request.path_params["response_id"])
        if is_reversed:
            items.reverse()
        ids = [item["id"] for item in items]
        if after_id and after_id not in ids:
            raise ParameterError(f"after: this response has no input item {after_id!r}.", param="after")
        start = ids.index(after_id) + 1 if after_id else 0
        return json_response(listed(items[start : start + limit], start + limit < len(items)))

    return await _read(state, request, page)


def _identified(items: Sequence[Any], response_id: str) -> list[dict[str, Any]]:
    """Give each item a unique id: the client's id, or an id by its place."""
    items_by_id = dict[str, dict[str, Any]]()
    for index, item in enumerate(items):
        own = item.get("id")
        is_known = isinstance(own, str) and 0 < len(own) <= MAX_ID_CHARS and own not in items_by_id
        item_id = own if is_known else f"{response_id}_in_{index}"
        items_by_id[item_id] = input_item(item, item_id)
    return list(items_by_id.values())


async def delete_response(state: AppState, request: Request) -> Response:
    """Forget a response; the responses that continue it cannot be continued any more."""
    caller, response_id = await caller_of(state, request, Action.CONVERSE), request.path_params["response_id"]
    if caller.models:
        await _read(state, request, _no_answer)  # NotFound, unless this key made it
    await state.batch.delete_response(caller.tenant, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(state: AppState, request: Request) -> Response:
    """Refuse to cancel a response: it is answered while its caller waits. Raises BadRequest, NotFound."""
    await _read(state, request, _no_answer)
    raise BadRequest("Cannot cancel a synchronous response.")


async def count_input_tokens(state: AppState, request: Request) -> Response:
    """Count the tokens of a conversation, as a response to it would."""
    caller = await caller_of(state, request, Action.INFER)
    chat = await state.turns.parse(caller.tenant, RESPONSES.parse, await json_body(state, request, caller.tenant))
    pool, tokenizer = await tokenizer_of(state, caller, chat.model)
    chat = await _continued(state, caller, pool, chat)
    count = partial(chat_length, chat, pool, tokenizer)
    tokens = await state.turns.encode(caller.tenant, count, request.is_disconnected)
    return json_response({"object": "response.input_tokens", "input_tokens": tokens}, chat.ignored)
