"""Gateway <-> predictor: one call at a time, with everything that gathered while the last one was in flight.

Supervisor -> predictor: outcomes, which the predictor acknowledges by request id.
"""

from collections.abc import Sequence

from weft.domain.bounds import MAX_REQUEST_TOKENS
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import Outcome
from weft.wire.codec.pairs import Pair
from weft.wire.codec.scheduling import OUTCOME
from weft.wire.codec.values import check_number, check_text
from weft.wire.errors import PeerError
from weft.wire.v1 import predictor_pb2 as pb

MAX_ITEMS = 1024  # of one call or message (the contract's bound)
_ITEM = Pair(PredictItem, pb.PredictItem)


def predict_request(items: Sequence[PredictItem]) -> pb.PredictRequest:
    request = pb.PredictRequest()
    for item in items:
        _ITEM.fill(item, request.items.add())
    return request


def predictions(items: Sequence[PredictItem], response: pb.PredictResponse) -> list[Prediction]:
    """Read one prediction for each item, in order. Raises PeerError."""
    if [item.request_id for item in items] != [item.request_id for item in response.items]:
        raise PeerError("the predictions have other ids than the items, expected one for each item, in order")
    read = [_prediction(item, response.model_version) for item in response.items]
    check_text(response.model_version, "a predictor's version")
    return read


def _prediction(m: pb.Prediction, version: str) -> Prediction:
    p99 = check_number(m.p99_tokens, "p99_tokens", MAX_REQUEST_TOKENS)
    if not m.p10_tokens <= m.p50_tokens <= m.p90_tokens <= p99:
        raise PeerError(
            f"p10, p50, p90 and p99 are {m.p10_tokens}, {m.p50_tokens}, {m.p90_tokens} and {p99}: not in order"
        )
    bucket = check_number(m.bucket_tokens, "bucket_tokens", MAX_REQUEST_TOKENS)
    return Prediction(m.request_id, m.p50_tokens, m.p90_tokens, version, m.p10_tokens, p99, bucket)


def predict_items(request: pb.PredictRequest) -> list[PredictItem]:
    """Read the items of a request. Raises PeerError."""
    check_number(len(request.items), "the number of items in one call", MAX_ITEMS)
    return [_ITEM.decode(item) for item in request.items]


def predict_response(predicted: Sequence[Prediction], version: str) -> pb.PredictResponse:
    """Write predictions. Raises ValueError or TypeError for what is no number of tokens."""
    response = pb.PredictResponse(model_version=version)
    for item in predicted:
        response.items.add(
            request_id=item.request_id,
            p10_tokens=item.p10_tokens,
            p50_tokens=item.p50_tokens,
            p90_tokens=item.p90_tokens,
            p99_tokens=item.p99_tokens,
            bucket_tokens=item.bucket_tokens,
        )
    return response


def observed(request: pb.ObserveRequest) -> list[Outcome]:
    """Read outcomes that a predictor learns from. Raises PeerError."""
    check_number(len(request.outcomes), "the number of outcomes in one message", MAX_ITEMS)
    return [OUTCOME.decode(message) for message in request.outcomes]
