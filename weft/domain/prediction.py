"""Predicted lengths: what a gateway asks its predictor before it submits a request. 0 tokens: no prediction."""

from dataclasses import dataclass
from typing import Annotated

from weft.domain.bounds import MAX_NAME_CHARS, Any32, Bound, ModelName, Namespace, PoolName, Trace


@dataclass(frozen=True, slots=True)
class PredictItem:
    """A prediction for all answers of one request. `request_id` has no index of an answer.

    The predictor keeps the features of the prompt under this id until the outcomes of the answers arrive.
    """

    request_id: Annotated[str, Bound(MAX_NAME_CHARS, subject="a request id")]
    prompt_text: Annotated[str, Bound(1 << 16, subject="a prompt")]
    pool: PoolName
    model_name: ModelName  # the base's for the base
    prompt_tokens: Any32
    max_tokens: Any32
    namespace: Namespace = ""  # of the caller; "" when keys are off
    traceparent: Trace = ""  # W3C trace context of a request that is sampled


@dataclass(frozen=True, slots=True)
class Prediction:
    """The distribution of the output tokens: the median, and what 10, 90 and 99 % of real lengths stay within.

    `bucket_tokens`: what S3 reserves, the upper edge of the likeliest bucket; 0: of a model without buckets.
    """

    request_id: str
    p50_tokens: int = 0
    p90_tokens: int = 0
    model_version: str = ""
    p10_tokens: int = 0
    p99_tokens: int = 0
    bucket_tokens: int = 0
