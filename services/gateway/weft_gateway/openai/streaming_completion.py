"""An answer on its way to the client: one ASGI response, streamed or whole.

No status line is sent before a runner has begun: errors until then are HTTP errors, later ones an SSE error event. A
client that goes away is noticed while waiting as well as while sending, streamed or not.

Of several choices each has its own finish, and the response ends with the last of them. A choice that fails ends the
response with its error, as an error of the engine does in vLLM: OpenAI's answers have no place for an error of one.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.domain.request import FinishReason
from weft_gateway.core.events import Emit
from weft_gateway.errors import ApiError, Internal, from_failure
from weft_gateway.openai.response_format import DONE, PING, ResponseEncoder, error_event, usage_of
from weft_gateway.openai.validation import ParsedRequest
from weft_gateway.shell.request_manager import RequestManager
from weft_gateway.shell.response_group import ResponseGroup

THREAD_LOGPROBS = 256  # tokens with log probabilities that are encoded in the loop, at most: some ms
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamingCompletion(Response):
    """Sends what the answers of a request produce. It owns them: whatever ends this response ends them all."""

    def __init__(
        self,
        manager: RequestManager,
        parsed: ParsedRequest[Any],
        group: ResponseGroup,
        encoder: type[ResponseEncoder],
    ) -> None:
        super().__init__()
        params, request = parsed.params, group.request
        self._manager, self._group = manager, group
        self._encoder = encoder(params, parsed.tokenizer, request.request_id, request.arrived_unix_ms // 1000)
        self._stream, self._include_usage = params.stream, params.include_usage
        self._open = dict(enumerate(group.answers))  # those whose finish is not sent yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (ASGI's form)
        request_id = self._group.request.request_id
        watch = asyncio.create_task(self._watch(receive), name=f"watch {request_id}")
        try:
            with contextlib.suppress(OSError):  # the socket broke while sending: the watcher notices the same
                await (self._send_stream(send) if self._stream else self._send_whole(send))
        finally:
            watch.cancel()
            self._manager.client_gone(request_id)
            self._count()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._manager.client_gone(self._group.request.request_id)

    async def _send_whole(self, send: Send) -> None:
        while not self._group.over:
            await self._group.wait()
        if self._group.client_gone:
            return None
        if error := self._error():
            return await _send_error(send, error)
        ended: list[tuple[Emit, FinishReason]] = []
        for answer in self._group.answers:
            assert answer.finish
            ended.append((answer.take() or Emit("", ""), answer.finish.reason))
        logprobs = sum(len(emit.logprobs) for emit, _ in ended)
        body = await _encoded(logprobs, lambda: self._encoder.body(ended, self._usage()))
        return await _send(send, 200, [(b"content-type", b"application/json")], body)

    async def _send_stream(self, send: Send) -> None:
        await self._group.wait()
        chunk = await self._next_chunk()
        if self._group.client_gone:
            return None
        if not chunk and (error := self._error()):
            return await _send_error(send, error)
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        chunk = self._encoder.role_chunk() + chunk
        while not self._group.over:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            awake = await self._group.wait(self._manager.settings.ping_seconds)
            chunk = await self._next_chunk() if awake else PING
        if not self._group.client_gone:
            chunk += await self._next_chunk()  # the end may have come while something was sent
            await send({"type": "http.response.body", "body": chunk + self._rest(), "more_body": False})
        return None

    async def _next_chunk(self) -> bytes:
        """What has gathered for each choice, and its finish once it has one."""
        chunk = b""
        for index, answer in tuple(self._open.items()):
            finish, emit = answer.finish, answer.take()
            if emit:
                encode = lambda index=index, emit=emit: self._encoder.chunk(index, emit)  # noqa: E731
                chunk += await _encoded(len(emit.logprobs), encode)
            if finish and finish.reason not in (FinishReason.CANCELLED, FinishReason.FAILED):
                chunk += self._encoder.finish_chunk(index, finish.reason)
                del self._open[index]
        return chunk

    def _rest(self) -> bytes:
        """What follows the choices: usage and [DONE], or an error and nothing."""
        if error := self._error():
            return error_event(error.body())
        return (self._encoder.usage(self._usage()) if self._include_usage else b"") + DONE

    def _error(self) -> ApiError | None:
        """The named error of the first choice that failed."""
        failure = self._group.failure
        return from_failure(failure) if failure else None

    def _usage(self) -> dict[str, int]:
        return usage_of(len(self._group.request.prompt), self._group.completion_tokens)

    def _count(self) -> None:
        error = self._error() or (None if self._group.over else Internal(""))
        status = 499 if self._group.client_gone else error.status if error else 200
        self._manager.metrics.count_request(self._group.request.route.model_name, status)


async def _encoded(logprobs: int, encode: Callable[[], bytes]) -> bytes:
    """In a thread where so many log probabilities are encoded that other requests would wait."""
    return await asyncio.to_thread(encode) if logprobs > THREAD_LOGPROBS else encode()


async def _send_error(send: Send, error: ApiError) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
    await _send(send, error.status, headers, error.body())


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
