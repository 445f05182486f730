"""The answers to one call, as the API gives them: a body, an error, the tokens used."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

from weft.telemetry.logs import kv
from weft_gateway.core.events import Emit, Finish
from weft_gateway.errors import ApiError, Internal, from_failure
from weft_gateway.openai.response_format import AnswerEncoder, EndedChoice, usage_of
from weft_gateway.openai.schema import Common
from weft_gateway.openai.spans import RequestTrace
from weft_gateway.shell.rate_limits import AdmittedCall
from weft_gateway.shell.request_manager import RequestManager
from weft_gateway.shell.response_group import ResponseGroup

# Called with the encoder and the tokens used once every choice has ended well, before the last bytes are sent. Returns
# the body of an answer that is sent whole where it has become another; None: it stays.
BeforeEnd = Callable[[AnswerEncoder, dict[str, int]], Awaitable[bytes | None]]
THREAD_LOGPROBS = 256  # tokens with log probabilities that are encoded in the loop, at most: some ms
STATE_BYTES = 64  # of a hidden state: about the work of one such token
log = logging.getLogger(__name__)


class Answer:
    """Owns the answers to a call from its submission: whoever has it calls `leave` at its end."""

    def __init__(
        self,
        manager: RequestManager,
        group: ResponseGroup,
        params: Common,
        encoder: AnswerEncoder,
        *,
        digest: str,
        trace: RequestTrace | None = None,
        admitted: AdmittedCall | None = None,
        before_end: BeforeEnd | None = None,
    ) -> None:
        """`digest`: of the weights that answer. `admitted`: within which limits, to be settled at the end."""
        self._manager, self.group, self.params, self.encoder = manager, group, params, encoder
        self.digest, self._trace, self._admitted, self._before_end = digest, trace, admitted, before_end
        self.request_id = group.requests[0].request_id

    @property
    def error(self) -> ApiError | None:
        """The named error of the first choice that failed."""
        failure = self.group.failure
        return from_failure(failure) if failure else None

    @property
    def headers(self) -> dict[str, str]:
        """Of an answer that begins: its weights, what is left of the caller's limits."""
        return {"x-weft-model-digest": self.digest} | (self._admitted.headers if self._admitted else {})

    @property
    def usage(self) -> dict[str, int]:
        return usage_of(self.group.prompt_tokens, self.group.completion_tokens)

    async def whole(self) -> bytes | None:
        """The body, once every choice has ended; None: the client went away before. Raises ApiError."""
        while not self.group.over:
            await self.group.wait()
        if self.group.client_gone:
            return None
        if error := self.error:
            raise error
        ended = self._best()
        numbers = sum(len(one.emit.logprobs) + len(one.emit.prompt_logprobs) for one in ended)
        numbers += sum(len(one.emit.state) // STATE_BYTES for one in ended)
        body = await encoded(numbers, lambda: self.encoder.body(ended, self.usage))
        return await self.before_end() or body

    async def before_end(self) -> bytes | None:
        """What the endpoint does with an answer that is whole before its client gets the end; see BeforeEnd."""
        if self._before_end and not self.error and not self.group.client_gone:
            return await self._before_end(self.encoder, self.usage)
        return None

    def _best(self) -> list[EndedChoice]:
        """Of `best_of` answers to each prompt those `n` that are likeliest a token, the likeliest first; or all."""
        drawn, n = self.params.drawn, self.params.n
        ended, answers = list[EndedChoice](), self.group.answers
        for index, answer in enumerate(answers):
            assert answer.finish
            of_prompt = answers[index - index % drawn].prompt_logprobs  # they come with its first answer
            emit = (answer.take() or Emit("", ""))._replace(prompt_logprobs=of_prompt)
            ended.append(EndedChoice(emit, answer.finish.reason, answer.finish.stop))
        if drawn == n:
            return ended
        prompts = [ended[first : first + drawn] for first in range(0, len(ended), drawn)]
        return [one for choices in prompts for one in sorted(choices, key=_mean_logprob, reverse=True)[:n]]

    def client_gone(self) -> None:
        """Nothing reads the answers any more. Harmless after the end."""
        for request in self.group.requests:
            self._manager.client_gone(request.request_id)

    def leave(self) -> None:
        """The end: what still runs is ended, and the request is counted and logged."""
        self.client_gone()
        if self._admitted:
            self._manager.limits.settle(self._admitted, self.group.prompt_tokens + self.group.completion_tokens)
        error = self.error or (None if self.group.over else Internal(""))
        status = 499 if self.group.client_gone else error.status if error else 200
        code = error.code if error else "client_gone" if status == 499 else ""
        first = self.group.requests[0]
        self._manager.count_answer(first.route.model_name, first.namespace, status, code)
        ends = [one.finish for one in self.group.answers if one.finish]
        if self._trace:
            self._trace.answered(self.group.requests, ends, status, error)
        log.info("finished", extra=kv(**self._access(ends, status, error)))

    def _access(self, ends: list[Finish], status: int, error: ApiError | None) -> dict[str, object]:
        """The access log's fields: who asked which model, what came of it. Nothing of prompt or answer."""
        requests = self.group.requests
        first = min((end.outcome.ttft_ms for end in ends if end.ttft_s is not None), default=None)
        user = self.params.safety_identifier or self.params.user
        fields = {
            "request_id": self.request_id,
            "model": requests[0].route.model_name,
            "namespace": requests[0].namespace or None,
            "user": hashlib.sha256(user.encode()).hexdigest()[:16] if user else None,
            "status": status,
            "code": error and error.code,
            "reason": ",".join(sorted({end.reason.name for end in ends})),
            "duration_ms": max((end.outcome.total_ms for end in ends), default=0),
            "ttft_ms": first,
            "prompt_tokens": self.group.prompt_tokens,
            "completion_tokens": self.group.completion_tokens,
            "n": requests[0].n if requests[0].n > 1 else None,
            "prompts": len(requests) if len(requests) > 1 else None,
            "trace_id": self._trace and self._trace.trace_id,
        }
        return {name: value for name, value in fields.items() if value is not None}


def _mean_logprob(choice: EndedChoice) -> float:
    logprobs = choice.emit.logprobs
    return sum(one.logprob.logprob for one in logprobs) / max(1, len(logprobs))


async def encoded(logprobs: int, encode: Callable[[], bytes]) -> bytes:
    """In a thread where so many log probabilities are encoded that other requests would wait."""
    return await asyncio.to_thread(encode) if logprobs > THREAD_LOGPROBS else encode()
