"""Lines of batches, run as requests of batch priority for the batch service, which gives them out over one stream.

A line takes the way of a client's request, from its body to its body's answer. What a client would be asked to repeat
(no runner, a full queue) gives the line back instead, after a pause: so often and no more is a line tried. Lines that
end within `GATHER_S` share a message. The end of the stream ends its lines: the batch service gives them out again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from weft.domain.batch import CancelLines, LineEnds, LineReleased, LineResult, LinesHello, RunLine
from weft.domain.request import Priority
from weft.telemetry.logs import kv
from weft.wire.codec.batch import BATCH_TO_GATEWAY, GATEWAY_TO_BATCH, in_messages
from weft.wire.errors import PeerError
from weft.wire.streams import ClientStream
from weft.wire.v1 import batch_pb2
from weft_gateway.core.routes import ANY_NAMESPACE, Principal
from weft_gateway.errors import ApiError, BadRequest, Internal, ServiceUnavailable, Unauthorized, from_failure
from weft_gateway.openai.answer import Answer
from weft_gateway.openai.call import Call, ModelEndpoint
from weft_gateway.openai.chat import CHAT
from weft_gateway.openai.completions import COMPLETIONS
from weft_gateway.openai.embeddings import EMBEDDINGS
from weft_gateway.openai.prepare import submit
from weft_gateway.openai.spans import RequestTrace
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.request_ids import Ids, drawn_ids

LINES_AT_ONCE = 128  # of batches: they wait for runners, and clients' requests have the rest of `max_in_flight`
GATHER_S = 0.01  # ends of lines for one message
RETRY_S = 1.0  # before a line that could not run is given back
DRAIN_S = 1.0  # for what is queued to reach the batch service before the process ends
MAX_ANSWER_BYTES = 8 << 20  # of a line, log probabilities and all
RETRIED = frozenset(
    "rate_limit_exceeded queue_full slo_unattainable shutting_down no_scheduler no_runner_available "
    "model_not_ready runner_full".split()
)
ENDPOINTS: Mapping[str, ModelEndpoint[Any]] = {endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, EMBEDDINGS)}
Key = tuple[str, int]  # batch and line
log = logging.getLogger(__name__)


class LineRunner:
    """A gateway's end of the stream of lines, with the running lines. One event loop owns it."""

    def __init__(self, state: AppState) -> None:
        """Raises NotConfigured."""
        self._state, self._draining = state, False
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._ends: list[LineResult | LineReleased] = []  # that the next message tells
        self._sending: asyncio.TimerHandle | None = None
        self._link: ClientStream[batch_pb2.GatewayToBatch, batch_pb2.BatchToGateway] = ClientStream(
            "batch",
            state.batch.stub.Lines,
            hello=lambda: [GATEWAY_TO_BATCH.encode(self._hello())],
            on_message=self._on_message,
            on_down=self._on_down,
        )
        self._work: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[asyncio.Task[None]]:
        """Keep the stream for the length of the block; the task ends early by `drain`, or by a bug."""
        self._work = asyncio.create_task(self._link.run(), name="lines")
        try:
            yield self._work
        finally:
            self._work.cancel()
            await asyncio.wait([self._work])
            self._end_all()

    async def drain(self) -> None:
        """Take no more lines, return running lines, and end the stream."""
        self._draining = True
        self._send(self._hello())
        for batch_id, line in self._end_all():
            self._ended(LineReleased(batch_id, line, "the gateway drains"))
        self._send_ends()
        self._link.close()
        if self._work:
            await asyncio.wait([self._work], timeout=DRAIN_S)

    def _hello(self) -> LinesHello:
        lines = 0 if self._draining else LINES_AT_ONCE
        return LinesHello(self._state.machine.gateway_id, lines)

    def _send(self, message: LinesHello | LineEnds) -> None:
        """Without a stream the lines are given out again."""
        self._link.send(GATEWAY_TO_BATCH.encode(message))

    def _ended(self, end: LineResult | LineReleased) -> None:
        self._ends.append(end)
        if self._sending is None:
            self._sending = asyncio.get_running_loop().call_later(GATHER_S, self._send_ends)

    def _send_ends(self) -> None:
        ends, self._ends = self._ends, []
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        for results in in_messages(end for end in ends if isinstance(end, LineResult)):
            self._send(LineEnds(results))
        if released := [end for end in ends if isinstance(end, LineReleased)]:
            self._send(LineEnds((), released))

    def _on_message(self, envelope: batch_pb2.BatchToGateway) -> None:
        """Raises PeerError."""
        message = BATCH_TO_GATEWAY.decode(envelope)
        if isinstance(message, CancelLines):
            for line in message.lines:
                if task := self._tasks.pop((message.batch_id, line), None):
                    task.cancel()
        else:
            for line in message.lines:
                self._begin(line)

    def _begin(self, line: RunLine) -> None:
        """Raises PeerError."""
        key = line.batch_id, line.line
        if key in self._tasks:
            raise PeerError(f"line {line.line} of {line.batch_id} runs here already")
        if self._draining:
            self._ended(LineReleased(*key, "the gateway drains"))
        elif len(self._tasks) >= LINES_AT_ONCE:
            raise PeerError(f"more than {LINES_AT_ONCE} lines at once")
        else:
            self._tasks[key] = asyncio.create_task(self._run(line), name=f"line {line.line} {line.batch_id}")

    def _on_down(self, _reason: str) -> None:
        self._end_all()
        self._ends.clear()  # they run again

    def _end_all(self) -> list[Key]:
        """End every line without an answer. Return these lines."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        return list(tasks)

    async def _run(self, line: RunLine) -> None:
        outcome = await self._outcome(line)
        del self._tasks[line.batch_id, line.line]  # its place is free before the batch service learns of it
        self._ended(outcome)

    async def _outcome(self, line: RunLine) -> LineResult | LineReleased:
        """A line's one end."""
        ids = drawn_ids()
        call: Call | None = None
        try:
            call = self._call(line, ids)
            answer = await self._submitted(line, call)
            try:
                body = await self._body(answer)
                usage = answer.usage
            finally:
                answer.leave()
            tokens = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens
            return LineResult(line.batch_id, line.line, 200, ids.client_request_id, body, *tokens)
        except ApiError as error:
            refusal = error
        except Exception:
            log.exception("line failed inside the gateway", extra=kv(request_id=ids.request_id, batch=line.batch_id))
            refusal = Internal(f"The gateway failed on this request; its logs name it {ids.request_id}.")
        if refusal.code in RETRIED:
            await asyncio.sleep(max(RETRY_S, refusal.retry_after_ms / 1000))
            return LineReleased(line.batch_id, line.line, refusal.message)
        return LineResult(line.batch_id, line.line, refusal.status, ids.client_request_id, refusal.body())

    def _call(self, line: RunLine, ids: Ids) -> Call:
        """A batch is its namespace's whatever has become of the key. Raises Unauthorized."""
        principal = Principal(line.namespace) if line.namespace else ANY_NAMESPACE
        if self._state.settings.auth and not line.namespace:
            raise Unauthorized(
                "This batch was made while keys were off, and now they are on: make it again with a key."
            )
        return Call(ids, principal, time.time_ns() // 1_000_000, Priority.BATCH, is_line=True)

    async def _submitted(self, line: RunLine, call: Call) -> Answer:
        """Raises ApiError, which is counted."""
        try:
            endpoint = ENDPOINTS.get(line.endpoint)
            if endpoint is None:
                raise BadRequest(f"url: lines go to {' or '.join(ENDPOINTS)}.")
            tracer, headers = self._state.tracer, {"traceparent": line.traceparent}  # the span of its batch
            if line.traceparent and tracer and (span := tracer.begin(headers, call.arrived_unix_ms)):
                call.trace = RequestTrace(span, endpoint.operation)
            await self._state.manager.arrive(call.ids.request_id, call.priority)
            if failure := self._state.machine.admission.refusal(self._state.manager.clock(), call.priority):
                raise from_failure(failure)
            return await submit(self._state, endpoint, call, line.body)
        except BaseException as error:
            self._state.manager.client_gone(call.ids.request_id)
            if call.trace:
                call.trace.refused(call.model or call.named_model, error)
            if isinstance(error, ApiError):
                self._state.manager.count_answer(call.model, line.namespace, error.status, error.code)
            raise

    async def _body(self, answer: Answer) -> bytes:
        """Run a line's body. Raises ApiError, also for a wait in a pool without runners, whose place is freed."""
        while not answer.over:
            awake = await answer.wait_within(self._state.settings.hold_seconds)
            pool = self._state.machine.routes.pools.get(answer.call.pool.name)
            if not awake and not (pool and pool.ready_runners):
                raise ServiceUnavailable("Its pool has no runner.", code="no_runner_available")
        body = await answer.full_body()
        if body is None:
            raise Internal("The request was ended inside the gateway.")
        if len(body) > MAX_ANSWER_BYTES:
            text = f"The answer has {len(body)} bytes, a line's at most {MAX_ANSWER_BYTES}: ask for less."
            raise BadRequest(text, code="answer_too_large")
        return body
