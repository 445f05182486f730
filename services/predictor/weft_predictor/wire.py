"""Protobuf <-> core types. What a peer sends is bounded here; PeerError ends its stream."""

from weft.domain.text import quoted
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2, predictor_pb2
from weft_predictor.core.length_model import Observed, Predicted, Query

MAX_ID_CHARS = 128  # of a request id: what the store keeps
MAX_NAME_CHARS = 512  # of a served model name
MAX_OUTCOMES = 1_024  # of one message
_CUT_OFF = (
    common_pb2.FINISH_REASON_LENGTH,
    common_pb2.FINISH_REASON_CANCELLED,
    common_pb2.FINISH_REASON_FAILED,
)


def query(item: predictor_pb2.PredictItem) -> Query:
    """Ids and names that are too long are no error: the prediction is made, and nothing of it is kept."""
    fits = len(item.request_id) <= MAX_ID_CHARS
    return Query(item.prompt_text, item.adapter, item.prompt_tokens, item.request_id if fits else "")


def prediction(request_id: str, predicted: Predicted) -> predictor_pb2.Prediction:
    return predictor_pb2.Prediction(
        request_id=request_id,
        p50_tokens=predicted.p50_tokens,
        p90_tokens=predicted.p90_tokens,
        bucket=predicted.bucket,
    )


def observed(outcome: common_pb2.Outcome, scale: float) -> Observed:
    """An outcome of a request. An answer that was cut off is a lower bound, also where the sender did not mark it so.

    A prediction made under another `scale` is not one of this model. Raises PeerError.
    """
    if not 0 < len(outcome.request_id) <= MAX_ID_CHARS:
        raise PeerError(f"an outcome's request id has 1 to {MAX_ID_CHARS} characters, not {len(outcome.request_id)}")
    if len(outcome.model_name) > MAX_NAME_CHARS:
        raise PeerError(
            f"outcome of {quoted(outcome.request_id)}: a model name of {len(outcome.model_name)} characters"
        )
    return Observed(
        request_id=outcome.request_id,
        adapter=outcome.model_name,
        tokens=outcome.completion_tokens,
        censored=outcome.censored or outcome.finish_reason in _CUT_OFF,
        predicted_p50_tokens=outcome.predicted_p50_tokens / scale,
        model_version=outcome.model_version.removesuffix(scale_suffix(scale)),
    )


def scale_suffix(scale: float) -> str:
    """What a model's version carries where its predictions are multiplied."""
    return "" if scale == 1.0 else f"x{scale:g}"
