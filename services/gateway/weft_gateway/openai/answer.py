"""The answers to one request, as the API gives them: a body, an error, the tokens used."""

import asyncio
import logging
from collections.abc import Callable

from weft.domain.request import FinishReason
from weft.telemetry.logs import kv
from weft_gateway.core.events import Emit
from weft_gateway.errors import ApiError, Internal, from_failure
from weft_gateway.openai.logprobs import TokenNames
from weft_gateway.openai.response_format import ResponseEncoder, usage_of
from weft_gateway.openai.schema import Common
from weft_gateway.shell.request_manager import RequestManager
from weft_gateway.shell.response_group import ResponseGroup

THREAD_LOGPROBS = 256  # tokens with log probabilities that are encoded in the loop, at most: some ms
log = logging.getLogger(__name__)


class Answer:
    """Owns the answers of a request from its submission: whoever has it calls `leave` at its end."""

    def __init__(
        self,
        manager: RequestManager,
        params: Common,
        names: TokenNames,
        group: ResponseGroup,
        encoder: type[ResponseEncoder],
    ) -> None:
        request = group.request
        self._manager, self.params, self.group = manager, params, group
        self.request_id = request.request_id
        self.encoder = encoder(params, names, request.request_id, request.arrived_unix_ms // 1000)

    @property
    def error(self) -> ApiError | None:
        """The named error of the first choice that failed."""
        failure = self.group.failure
        return from_failure(failure) if failure else None

    @property
    def usage(self) -> dict[str, int]:
        return usage_of(len(self.group.request.prompt), self.group.completion_tokens)

    async def whole(self) -> bytes | None:
        """The body, once every choice has ended; None: the client went away before. Raises ApiError."""
        while not self.group.over:
            await self.group.wait()
        if self.group.client_gone:
            return None
        if error := self.error:
            raise error
        ended: list[tuple[Emit, FinishReason]] = []
        for answer in self.group.answers:
            assert answer.finish
            ended.append((answer.take() or Emit("", ""), answer.finish.reason))
        logprobs = sum(len(emit.logprobs) for emit, _ in ended)
        return await encoded(logprobs, lambda: self.encoder.body(ended, self.usage))

    def client_gone(self) -> None:
        """Nothing reads the answers any more. Harmless after the end."""
        self._manager.client_gone(self.request_id)

    def leave(self) -> None:
        """The end: what still runs is ended, and the request is counted and logged."""
        self.client_gone()
        error = self.error or (None if self.group.over else Internal(""))
        status = 499 if self.group.client_gone else error.status if error else 200
        self._manager.metrics.count_request(self.group.request.route.model_name, status)
        log.info("finished", extra=kv(**self._access(status, error)))

    def _access(self, status: int, error: ApiError | None) -> dict[str, object]:
        """The access log's fields: who asked which model, what came of it. Nothing of prompt or answer."""
        request, ends = self.group.request, [one.finish for one in self.group.answers if one.finish]
        first = min((end.outcome.ttft_ms for end in ends if end.ttft_s is not None), default=None)
        fields = {
            "request_id": request.request_id,
            "model": request.route.model_name,
            "namespace": request.namespace or None,
            "status": status,
            "code": error and error.code,
            "reason": ",".join(sorted({end.reason.name for end in ends})),
            "duration_ms": max((end.outcome.total_ms for end in ends), default=0),
            "ttft_ms": first,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": self.group.completion_tokens,
            "n": request.n if request.n > 1 else None,
        }
        return {name: value for name, value in fields.items() if value is not None}


async def encoded(logprobs: int, encode: Callable[[], bytes]) -> bytes:
    """In a thread where so many log probabilities are encoded that other requests would wait."""
    return await asyncio.to_thread(encode) if logprobs > THREAD_LOGPROBS else encode()
