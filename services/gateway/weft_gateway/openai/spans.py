"""The gateway's span of a request, by the semantic conventions of generative AI (OpenTelemetry, GenAI spans).

It has names and numbers alone: nothing of prompt or answer.
"""

from collections.abc import Sequence

from weft.domain.request import FinishReason
from weft.telemetry.tracing import RequestSpan
from weft_gateway.core.events import Finish, PreparedRequest
from weft_gateway.errors import ApiError

REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}  # as answers name them


class RequestTrace:
    """A request that is sampled. It ends once: answered or refused."""

    def __init__(self, span: RequestSpan, operation: str) -> None:
        """`operation`: `gen_ai.operation.name`, as chat or text_completion."""
        self._span, self._operation = span, operation
        self.traceparent, self.trace_id = span.traceparent, span.trace_id

    def answered(
        self, requests: Sequence[PreparedRequest], ends: Sequence[Finish], status: int, error: ApiError | None
    ) -> None:
        """`requests`: one for each prompt of the call."""
        request = requests[0]
        model, sampling = request.route.model_name, request.sampling
        attributes = {
            "gen_ai.response.model": model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": request.n if request.n > 1 else None,
            "gen_ai.response.finish_reasons": [REASONS.get(one.end.reason, one.end.reason.value) for one in ends],
            "gen_ai.usage.input_tokens": sum(len(one.prompt) for one in requests),
            "gen_ai.usage.output_tokens": sum(end.outcome.completion_tokens for end in ends),
            "weft.request_id": request.request_id,
            "weft.namespace": request.namespace or None,
            "weft.pool": request.route.pool,
            "weft.ttft_ms": min((end.outcome.ttft_ms for end in ends if end.ttft_s is not None), default=None),
        }
        self._end(model, attributes, status, error.code if error else "")

    def refused(self, model: str | None, error: BaseException) -> None:
        """Before its submission. `model`: that it names, if it could be read."""
        status, code = (error.status, error.code) if isinstance(error, ApiError) else (None, type(error).__name__)
        self._end(model, {}, status, code)

    def _end(
        self, model: str | None, attributes: dict[str, str | int | float | list[str] | None], status: int | None,
        error: str,
    ) -> None:  # fmt: skip
        about = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "weft",
            "gen_ai.request.model": model,
            "http.response.status_code": status,
        }
        self._span.end(f"{self._operation} {model or ''}".strip(), {**about, **attributes}, error)
