"""An answer on its way to the client: one ASGI response, streamed or whole.

No status line is sent before admission: errors until then are HTTP errors, later ones an SSE error event. A client that
goes away is noticed while waiting as well as while sending, streamed or not.
"""

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft_gateway.core.events import FinishReason
from weft_gateway.errors import ApiError, Internal, from_failure
from weft_gateway.live import LiveRequest
from weft_gateway.openai.shapes import DONE, PING, Shape, Usage, error_event
from weft_gateway.serve import Serving

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Sends what a live request produces. Owns it: whatever ends this response ends the request."""

    def __init__(self, serving: Serving, live: LiveRequest, shape: Shape, *, stream: bool, include_usage: bool) -> None:
        super().__init__()
        self._serving, self._live, self._shape = serving, live, shape
        self._stream, self._include_usage = stream, include_usage
        self._text: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (ASGI's form)
        watch = asyncio.create_task(self._watch(receive), name=f"watch {self._live.request_id}")
        try:
            with contextlib.suppress(OSError):  # the socket broke while sending: the watcher says the same
                await (self._send_stream(send) if self._stream else self._send_whole(send))
        finally:
            watch.cancel()
            self._serving.client_gone(self._live)
            self._count()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._serving.client_gone(self._live)

    # ---------------------------------------------------------------- whole

    async def _send_whole(self, send: Send) -> None:
        while not self._live.finish:
            self._text.append(await self._live.news() or "")
        self._text.append(await self._live.news() or "")
        if self._gone:
            return None
        if error := self._error():
            return await _send_error(send, error)
        assert self._live.finish
        body = self._shape.whole("".join(self._text), self._live.finish.reason, self._usage())
        return await _send(send, 200, [(b"content-type", b"application/json")], body)

    # ---------------------------------------------------------------- streamed

    async def _send_stream(self, send: Send) -> None:
        text = await self._live.news() or ""
        if self._gone:
            return None
        if not text and (error := self._error()):
            return await _send_error(send, error)
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        chunk = self._shape.first() + (self._shape.chunk(text) if text else b"")
        while not self._live.finish:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await self._next()
        if not self._gone:
            await send({"type": "http.response.body", "body": chunk + self._rest(), "more_body": False})
        return None

    async def _next(self) -> bytes:
        text = await self._live.news(self._serving.settings.ping_seconds)
        if text is None:
            return PING
        return self._shape.chunk(text) if text else b""

    def _rest(self) -> bytes:
        """What follows the text: finish, usage and [DONE], or an error and nothing."""
        if error := self._error():
            return error_event(error.body())
        assert self._live.finish
        usage = self._shape.usage(self._usage()) if self._include_usage else b""
        return self._shape.last(self._live.finish.reason) + usage + DONE

    # ---------------------------------------------------------------- the end

    @property
    def _gone(self) -> bool:
        return self._live.finish is not None and self._live.finish.reason is FinishReason.CANCELLED

    def _error(self) -> ApiError | None:
        finish = self._live.finish
        return from_failure(finish.failure) if finish and finish.failure else None

    def _usage(self) -> Usage:
        return Usage(len(self._live.prepared.prompt_tokens), len(self._live.stream.tokens))

    def _count(self) -> None:
        error = self._error() or (Internal("") if self._live.finish is None else None)
        status = 499 if self._gone else error.status if error else 200
        self._serving.metrics.count_request(self._live.prepared.route.model_name, status)


async def _send_error(send: Send, error: ApiError) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
    await _send(send, error.status, headers, error.body())


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
