"""The answers to one call, as the API gives them: a body or a stream, an error, the tokens used.

No status line is sent before a runner has begun: errors until then are HTTP errors, later ones an SSE error event. A
client that goes away is noticed while waiting as well as while sending, streamed or not.

Several choices end each by itself, and the response ends with the last of them. A choice that fails ends the response
with its error, as an error of the engine does in vLLM: OpenAI's answers have no place for an error of one.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from weft.domain.request import DraftUse, FinishReason
from weft.telemetry.logs import kv
from weft_gateway.core.events import Emit, End, Failure, Finish, PreparedRequest
from weft_gateway.errors import ApiError, Internal, from_failure
from weft_gateway.hints import ignored_header
from weft_gateway.openai.call import AnswerEncoder, Call, ModelEndpoint
from weft_gateway.openai.response_format import PING
from weft_gateway.openai.usage import CallUsage
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.rate_limits import AdmittedCall
from weft_gateway.shell.request_manager import PendingAnswer

THREAD_LOGPROBS = 256  # tokens with log probabilities that other requests wait for; more are encoded in a thread
STATE_BYTES = 64  # of a hidden state: about the work of one such token
PING_S = 15.0  # a stream idle this long gets a comment: proxies give up a silent one after 30 to 60 s mostly
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
log = logging.getLogger(__name__)


class Answer(Response):
    """The answers to a call, in their order, from its submission: sent over HTTP, or read by who calls `leave` then.

    `requests`: one for each prompt of the call; the answers to the first prompt come first. `admitted`: within which
    limits, to be settled at the end. It owns its answers: whatever ends it ends them all.
    """

    def __init__(
        self,
        state: AppState,
        endpoint: ModelEndpoint[Any],
        call: Call,
        requests: Sequence[PreparedRequest],
        encoder: AnswerEncoder,
        admitted: AdmittedCall | None,
    ) -> None:
        super().__init__()
        self._state, self._endpoint, self._admitted = state, endpoint, admitted
        self.call, self._requests, self._encoder = call, requests, encoder
        self._event = asyncio.Event()
        answers = sum(request.n for request in requests)
        self.choices = tuple([PendingAnswer(self._event.set, call.route.model_name) for _ in range(answers)])
        self._open = dict(enumerate(self.choices))  # those whose finish is not sent yet
        self._own_headers = {"x-weft-model-digest": call.digest} | (admitted.headers if admitted else {})
        self._own_headers |= ignored_header(call.params.ignored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (ASGI's form)
        watch = asyncio.create_task(self._watch(receive), name=f"watch {self._requests[0].request_id}")
        try:
            with contextlib.suppress(OSError):  # the socket broke while sending: the watcher notices the same
                await (self._send_stream(send) if self.call.params.stream else self._send_whole(send))
        finally:
            watch.cancel()
            self.leave()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abandon()

    async def wait(self) -> None:
        """Wait for something new. At the end it returns at once."""
        await self._event.wait()
        if not self.over:
            self._event.clear()

    async def wait_within(self, timeout_s: float) -> bool:
        """Wait for something new; False: there was nothing in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            return False
        return True

    @property
    def over(self) -> bool:
        """Every answer has ended, or one has failed. Asked at every step."""
        running = False
        for answer in self.choices:
            if answer.finish is None:
                running = True
            elif answer.finish.end.failure:
                return True
        return not running

    @property
    def _ends(self) -> list[Finish]:
        return [choice.finish for choice in self.choices if choice.finish]

    @property
    def _failure(self) -> Failure | None:
        return next((end.end.failure for end in self._ends if end.end.failure), None)

    @property
    def client_gone(self) -> bool:
        """The client went away before the end."""
        return self._failure is None and any(end.end.reason is FinishReason.CANCELLED for end in self._ends)

    @property
    def error(self) -> ApiError | None:
        """Return the named error of the first failed choice."""
        failure = self._failure
        return from_failure(failure) if failure else None

    @property
    def usage(self) -> CallUsage:
        """The used tokens: each prompt once, and the tokens of every ended answer."""
        prompt_tokens = sum(len(request.prompt) for request in self._requests)
        completion_tokens = sum(end.outcome.completion_tokens for end in self._ends)
        uses = None if self.call.params.expected is None else [end.draft_use for end in self._ends]
        draft_use = None if uses is None else DraftUse(*(sum(use[at] for use in uses) for at in range(2)))
        reasoning_tokens = self._encoder.reasoning_tokens
        return CallUsage(prompt_tokens, completion_tokens, self._cached_tokens, reasoning_tokens, draft_use)

    @property
    def _cached_tokens(self) -> int:
        """Count the tokens of the prompts that no answer had to compute: of several, the first to run computes them."""
        if len(self.choices) == 1:
            return self.choices[0].cached_tokens or 0
        counts, drawn = [answer.cached_tokens for answer in self.choices], self.call.params.drawn
        prompts = [counts[first : first + drawn] for first in range(0, len(counts), drawn)]
        return sum(min((count for count in prompt if count is not None), default=0) for prompt in prompts)

    async def full_body(self) -> bytes | None:
        """The body, once every choice has ended; None: the client went away before. Raises ApiError."""
        while not self.over:
            await self.wait()
        if self.client_gone:
            return None
        if error := self.error:
            raise error
        ended = self._best()
        numbers = sum(len(emit.logprobs) + len(emit.prompt_logprobs) for emit, _ in ended)
        numbers += sum(len(emit.state) // STATE_BYTES for emit, _ in ended)
        encode, usage = self._encoder.body, self.usage
        body = await asyncio.to_thread(encode, ended, usage) if numbers > THREAD_LOGPROBS else encode(ended, usage)
        return await self._before_end() or body

    async def _before_end(self) -> bytes | None:
        """Do what the endpoint does with a whole answer before its client gets the end; see `ModelEndpoint`."""
        before_end = None if self._failure or self.client_gone else self._endpoint.before_end
        return await before_end(self._state, self.call, self._encoder, self.usage) if before_end else None

    def _best(self) -> list[tuple[Emit, End]]:
        """Return the `n` of `best_of` answers to each prompt that are likeliest a token, the best first; or all."""
        drawn, n = self.call.params.drawn, self.call.params.n
        ended, answers = list[tuple[Emit, End]](), self.choices
        for index, answer in enumerate(answers):
            assert answer.finish
            of_prompt = answers[index - index % drawn].prompt_logprobs  # they come with its first answer
            emit = (answer.take() or Emit("", ""))._replace(prompt_logprobs=of_prompt)
            ended.append((emit, answer.finish.end))
        if drawn == n:
            return ended
        prompts = [ended[first : first + drawn] for first in range(0, len(ended), drawn)]
        return [choice for choices in prompts for choice in sorted(choices, key=_mean_logprob, reverse=True)[:n]]

    def _abandon(self) -> None:
        """Tell the machine that nothing reads the answers any more. Harmless after the end."""
        for request in self._requests:
            self._state.manager.client_gone(request.request_id)

    def leave(self) -> None:
        """End running requests; then settle, count and log the call."""
        self._abandon()
        usage, manager, trace = self.usage, self._state.manager, self.call.trace
        if self._admitted:
            manager.limits.settle(self._admitted, usage.total_tokens)
        error = self.error or (None if self.over else Internal(""))
        status = 499 if self.client_gone else error.status if error else 200
        code = error.code if error else "client_gone" if status == 499 else ""
        first = self._requests[0]
        manager.count_answer(first.route.model_name, first.namespace, status, code)
        if trace:
            attributes = self._encoder.span_attributes
            trace.answered(self.call.params, self._requests, self._ends, usage, attributes, status, error)
        log.info("finished", extra=kv(**self._access(usage, status, error)))

    def _access(self, usage: CallUsage, status: int, error: ApiError | None) -> dict[str, object]:
        """Collect the fields of the access log: caller, model and result, without prompt or answer."""
        first, params, ends = self._requests[0], self.call.params, self._ends
        user = params.safety_identifier or params.user
        fields = {
            "request_id": first.request_id,
            "model": first.route.model_name,
            "namespace": first.namespace or None,
            "user": hashlib.sha256(user.encode()).hexdigest()[:16] if user else None,
            "status": status,
            "code": error and error.code,
            "reason": ",".join(sorted({end.end.reason.name for end in ends})),
            "duration_ms": max((end.outcome.total_ms for end in ends), default=0),
            "ttft_ms": min((end.outcome.ttft_ms for end in ends if end.ttft_s is not None), default=None),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens or None,
            "n": first.n if first.n > 1 else None,
            "prompts": len(self._requests) if len(self._requests) > 1 else None,
            "trace_id": self.call.trace and self.call.trace.trace_id,
        }
        return {name: value for name, value in fields.items() if value is not None}

    # ---------------------------------------------------------------- over HTTP

    async def _send_whole(self, send: Send) -> None:
        try:
            body = await self.full_body()
        except ApiError as error:
            return await self._send_error(send, error)
        if body is not None:
            headers = {"content-type": self._encoder.media_type, **self._encoder.headers, **self._own_headers}
            await _send(send, 200, headers, body)
        return None

    async def _send_error(self, send: Send, error: ApiError) -> None:
        await _send(send, error.status, error.headers(), self._encoder.error_body(error))

    async def _send_stream(self, send: Send) -> None:
        start, begun, over = _start(200, _SSE_HEADERS | self._own_headers), False, False
        counted = False  # every choice has begun
        with contextlib.closing(IdleWatch(self._event.set, asyncio.get_running_loop())) as idle:
            while not over:
                await self.wait()
                over = self.over  # asked before the chunk is made: what comes meanwhile is the next one's
                if not counted:
                    counted = all(answer.cached_tokens is not None for answer in self.choices)
                    self._encoder.cached_tokens = self._cached_tokens
                first = b"" if begun else self._encoder.first_chunk()
                chunk = await self._next_chunk()
                if over and self.client_gone:
                    return None
                if not begun:
                    if not chunk and (error := self.error):
                        return await self._send_error(send, error)
                    begun = True
                    idle.begin()
                    await send(start)
                chunk = first + chunk
                if over:
                    await self._before_end()
                    chunk += self._rest()
                if chunk or idle.due:
                    await send({"type": "http.response.body", "body": chunk or PING, "more_body": not over})
                    idle.sent()
        return None

    async def _next_chunk(self) -> bytes:
        """Write the new text of each choice, and its finish at the end."""
        chunk = b""
        for index, answer in tuple(self._open.items()):
            finish, emit = answer.finish, answer.take()
            if emit and len(emit.logprobs) > THREAD_LOGPROBS:
                chunk += await asyncio.to_thread(self._encoder.chunk, index, emit)
            elif emit:
                chunk += self._encoder.chunk(index, emit)
            if finish and finish.end.reason not in (FinishReason.CANCELLED, FinishReason.FAILED):
                chunk += self._encoder.finish_chunk(index, finish.end)
                del self._open[index]
        return chunk

    def _rest(self) -> bytes:
        """What follows the choices: the end, or an error and nothing."""
        error = self.error
        return self._encoder.error_chunk(error) if error else self._encoder.last_chunk(self.usage)


class IdleWatch:
    """Calls `wake` if a begun stream sends nothing for PING_S; then `due` is set.

    Its timer is set once in that time and not at each chunk, of which there are thousands a second.
    """

    def __init__(self, wake: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._wake, self._loop = wake, loop
        self._sent_at, self.due = 0.0, False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.sent()
        self._timer = self._loop.call_later(PING_S, self._on_timer)

    def sent(self) -> None:
        self._sent_at, self.due = self._loop.time(), False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        left_s = self._sent_at + PING_S - self._loop.time()
        if left_s <= 0:
            self.due, left_s = True, PING_S
            self._wake()
        self._timer = self._loop.call_later(left_s, self._on_timer)


def _mean_logprob(choice: tuple[Emit, End]) -> float:
    logprobs = choice[0].logprobs
    return sum(entry.logprob.logprob for entry in logprobs) / max(1, len(logprobs))


def _start(status: int, headers: dict[str, str]) -> Message:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def _send(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    await send(_start(status, headers | {"content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body, "more_body": False})
