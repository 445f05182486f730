"""An answer on its way to the client: one ASGI response, streamed or whole.

No status line is sent before admission: errors until then are HTTP errors, later ones an SSE error event. A client that
goes away is noticed while waiting as well as while sending, streamed or not.

Of several choices each has its own finish, and the answer ends with the last of them. One that fails ends the answer
with its error, as an error of the engine does in vLLM; OpenAI's answers have no place for an error of one choice.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft_gateway.core.events import Emit, FinishReason
from weft_gateway.errors import ApiError, Internal, from_failure
from weft_gateway.openai.response_format import DONE, PING, ResponseEncoder, Usage, error_event
from weft_gateway.openai.schema import Common
from weft_gateway.shell.active_request import Choices
from weft_gateway.shell.request_manager import Serving

THREAD_TOLD = 256  # tokens with log probabilities that are written in the loop, at most: some ms
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamingCompletion(Response):
    """Sends what the choices of a request produce. Owns them: whatever ends this response ends them all."""

    def __init__(self, serving: Serving, choices: Choices, shape: ResponseEncoder, params: Common) -> None:
        super().__init__()
        self._serving, self._choices, self._shape = serving, choices, shape
        self._stream, self._include_usage = params.stream, params.include_usage
        self._open = dict(enumerate(choices))  # those whose finish is not sent yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (ASGI's form)
        watch = asyncio.create_task(self._watch(receive), name=f"watch {self._choices[0].request_id}")
        try:
            with contextlib.suppress(OSError):  # the socket broke while sending: the watcher says the same
                await (self._send_stream(send) if self._stream else self._send_whole(send))
        finally:
            watch.cancel()
            self._serving.client_gone(self._choices)
            self._count()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._serving.client_gone(self._choices)

    # ---------------------------------------------------------------- whole

    async def _send_whole(self, send: Send) -> None:
        while not self._choices.over:
            await self._choices.news()
        if self._choices.gone:
            return None
        if error := self._error():
            return await _send_error(send, error)
        said = [*self._ended()]
        told = sum(len(emit.told) for emit, _ in said)
        body = await _made(told, lambda: self._shape.whole(said, self._usage()))
        return await _send(send, 200, [(b"content-type", b"application/json")], body)

    def _ended(self) -> Iterator[tuple[Emit, FinishReason]]:
        for live in self._choices:
            assert live.finish
            yield live.take() or Emit(""), live.finish.reason

    # ---------------------------------------------------------------- streamed

    async def _send_stream(self, send: Send) -> None:
        await self._choices.news()
        said = await self._said()
        if self._choices.gone:
            return None
        if not said and (error := self._error()):
            return await _send_error(send, error)
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        chunk = self._shape.first() + said
        while not self._choices.over:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            heard = await self._choices.news(self._serving.settings.ping_seconds)
            chunk = await self._said() if heard else PING
        if not self._choices.gone:
            chunk += await self._said()  # the end may have come while something was sent
            await send({"type": "http.response.body", "body": chunk + self._rest(), "more_body": False})
        return None

    async def _said(self) -> bytes:
        """What has gathered for each choice, and its finish once it has one."""
        said = b""
        for index, live in tuple(self._open.items()):
            finish, taken = live.finish, live.take()
            if taken:
                said += await _made(len(taken.told), lambda index=index, taken=taken: self._shape.chunk(index, taken))
            if finish and finish.reason not in (FinishReason.CANCELLED, FinishReason.FAILED):
                said += self._shape.last(index, finish.reason)
                del self._open[index]
        return said

    def _rest(self) -> bytes:
        """What follows the choices: usage and [DONE], or an error and nothing."""
        if error := self._error():
            return error_event(error.body())
        return (self._shape.usage(self._usage()) if self._include_usage else b"") + DONE

    # ---------------------------------------------------------------- the end

    def _error(self) -> ApiError | None:
        """The named error of the first choice that failed."""
        failure = self._choices.failure
        return from_failure(failure) if failure else None

    def _usage(self) -> Usage:
        prompt = len(self._choices[0].prepared.prompt_tokens)
        return Usage(prompt, sum(len(live.stream.tokens) for live in self._choices))

    def _count(self) -> None:
        error = self._error() or (None if self._choices.over else Internal(""))
        status = 499 if self._choices.gone else error.status if error else 200
        self._serving.metrics.count_request(self._choices[0].prepared.route.model_name, status)


async def _made(told: int, make: Callable[[], bytes]) -> bytes:
    """What `make` makes; in a thread where so many log probabilities are told that others would wait."""
    return await asyncio.to_thread(make) if told > THREAD_TOLD else make()


async def _send_error(send: Send, error: ApiError) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
    await _send(send, error.status, headers, error.body())


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
