"""The gateway's span of a request, by the semantic conventions of generative AI (OpenTelemetry, GenAI spans).

It has names, ids and numbers alone: nothing of prompt or answer. `gen_ai.request.stop_sequences` is left out for that:
stop texts are written by users, and agents take them from their prompts.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft.domain.request import FinishReason
from weft.telemetry.tracing import Attribute, RequestSpan
from weft_gateway.core.events import Finish, PreparedRequest
from weft_gateway.errors import ApiError
from weft_gateway.openai.usage import CallUsage

if TYPE_CHECKING:
    from weft_gateway.openai.schema import Common

REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}  # as answers name them


class RequestTrace:
    """A request that is sampled. It ends once: answered or refused."""

    def __init__(self, span: RequestSpan, operation: str) -> None:
        """`operation`: `gen_ai.operation.name`, as chat or text_completion."""
        self._span, self._operation = span, operation
        self.traceparent, self.trace_id = span.traceparent, span.trace_id

    def answered(
        self, params: "Common", requests: Sequence[PreparedRequest], ends: Sequence[Finish], usage: CallUsage,
        members: Mapping[str, Attribute | None], status: int, error: ApiError | None,
    ) -> None:  # fmt: skip
        """`requests`: one for each prompt of the call; `members`: attributes of its API."""
        request = requests[0]
        model, sampling = request.route.model_name, request.sampling
        ttft_s = min((end.ttft_s for end in ends if end.ttft_s is not None), default=None)
        attributes: dict[str, Attribute | None] = {
            "gen_ai.response.model": model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.time_to_first_chunk": ttft_s if params.stream else None,
            "gen_ai.request.stream": params.stream,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k else None,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
            "gen_ai.request.choice.count": request.n if request.n > 1 else None,
            "gen_ai.response.finish_reasons": [REASONS.get(one.end.reason, one.end.reason.value) for one in ends],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
            **members,
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
        self, model: str | None, attributes: Mapping[str, Attribute | None], status: int | None, error: str
    ) -> None:
        about = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "weft",
            "gen_ai.request.model": model,
            "http.response.status_code": status,
        }
        self._span.end(f"{self._operation} {model or ''}".strip(), {**about, **attributes}, error)
