"""An answer on its way to the client: one ASGI response, streamed or whole.

No status line is sent before a runner has begun: errors until then are HTTP errors, later ones an SSE error event. A
client that goes away is noticed while waiting as well as while sending, streamed or not.

Of several choices each has its own finish, and the response ends with the last of them. A choice that fails ends the
response with its error, as an error of the engine does in vLLM: OpenAI's answers have no place for an error of one.
"""

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.domain.request import FinishReason
from weft_gateway.errors import ApiError
from weft_gateway.openai.answer import Answer, encoded
from weft_gateway.openai.response_format import PING

PING_S = 15.0  # a stream idle this long gets a comment: proxies give up a silent one after 30 to 60 s mostly
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamingCompletion(Response):
    """Sends what the answers of a request produce. It owns them: whatever ends this response ends them all."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer
        self._group, self._encoder = answer.group, answer.encoder
        self._headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        self._open = dict(enumerate(answer.group.answers))  # those whose finish is not sent yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (ASGI's form)
        watch = asyncio.create_task(self._watch(receive), name=f"watch {self._answer.request_id}")
        try:
            with contextlib.suppress(OSError):  # the socket broke while sending: the watcher notices the same
                await (self._send_stream(send) if self._answer.params.stream else self._send_whole(send))
        finally:
            watch.cancel()
            self._answer.leave()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._answer.client_gone()

    async def _send_whole(self, send: Send) -> None:
        try:
            body = await self._answer.whole()
        except ApiError as error:
            return await self._send_error(send, error)
        if body is not None:
            own = {"content-type": self._encoder.media_type, **self._encoder.headers}
            headers = [(name.encode(), value.encode()) for name, value in own.items()]
            await _send(send, 200, [*headers, *self._headers], body)
        return None

    async def _send_error(self, send: Send, error: ApiError) -> None:
        headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
        await _send(send, error.status, headers, self._encoder.error_body(error))

    async def _send_stream(self, send: Send) -> None:
        await self._group.wait()
        first = self._encoder.first_chunk()
        chunk = await self._next_chunk()
        if self._group.client_gone:
            return None
        if not chunk and (error := self._answer.error):
            return await self._send_error(send, error)
        await send({"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS, *self._headers]})
        chunk = first + chunk
        while not self._group.over:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            awake = await self._group.wait(PING_S)
            chunk = await self._next_chunk() if awake else PING
        if not self._group.client_gone:
            chunk += await self._next_chunk()  # the end may have come while something was sent
            await self._answer.before_end()
            await send({"type": "http.response.body", "body": chunk + self._rest(), "more_body": False})
        return None

    async def _next_chunk(self) -> bytes:
        """What has gathered for each choice, and its finish once it has one."""
        chunk = b""
        for index, answer in tuple(self._open.items()):
            finish, emit = answer.finish, answer.take()
            if emit:
                encode = lambda index=index, emit=emit: self._encoder.chunk(index, emit)  # noqa: E731
                chunk += await encoded(len(emit.logprobs), encode)
            if finish and finish.reason not in (FinishReason.CANCELLED, FinishReason.FAILED):
                chunk += self._encoder.finish_chunk(index, finish.reason, finish.stop)
                del self._open[index]
        return chunk

    def _rest(self) -> bytes:
        """What follows the choices: the end, or an error and nothing."""
        error = self._answer.error
        return self._encoder.error_chunk(error) if error else self._encoder.last_chunk(self._answer.usage)


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
