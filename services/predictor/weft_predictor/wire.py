"""Protobuf <-> core types."""

from weft.wire.v1 import common_pb2, predictor_pb2
from weft_predictor.core.predictor import Observed, Predicted, Query


def query(item: predictor_pb2.PredictItem) -> Query:
    """What is asked."""
    return Query(item.prompt_text, item.adapter, item.prompt_tokens)


def prediction(request_id: str, predicted: Predicted) -> predictor_pb2.Prediction:
    """What is answered."""
    return predictor_pb2.Prediction(
        request_id=request_id,
        p50_tokens=predicted.p50_tokens,
        p90_tokens=predicted.p90_tokens,
        bucket=predicted.bucket,
    )


def observed(outcome: common_pb2.Outcome) -> Observed:
    """What is learned. An answer that was cut off is a lower bound, also where the sender did not say so."""
    asked = Query(outcome.prompt_text, outcome.model_name, outcome.prompt_tokens)
    return Observed(asked, outcome.completion_tokens, outcome.censored or outcome.finish_reason in _CUT_OFF)


_CUT_OFF = (
    common_pb2.FINISH_REASON_LENGTH,
    common_pb2.FINISH_REASON_CANCELLED,
    common_pb2.FINISH_REASON_FAILED,
)
