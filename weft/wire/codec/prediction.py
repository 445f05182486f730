"""Gateway <-> predictor: one call at a time, with everything that gathered while the last one was in flight."""

from collections.abc import Sequence

from weft.domain.prediction import Prediction, PredictItem
from weft.wire.codec.values import MAX_TOKENS, number, text
from weft.wire.errors import PeerError
from weft.wire.v1 import predictor_pb2 as pb

MAX_ITEMS = 1024  # of one call (the contract's bound)


def predict_request(items: Sequence[PredictItem]) -> pb.PredictRequest:
    request = pb.PredictRequest()
    for item in items:
        request.items.add(
            request_id=item.request_id,
            prompt_text=item.prompt_text,
            pool=item.pool,
            adapter=item.model_name,
            prompt_tokens=item.prompt_tokens,
            max_tokens=item.max_tokens,
        )
    return request


def predictions(items: Sequence[PredictItem], response: pb.PredictResponse) -> list[Prediction]:
    """One prediction for each item, in order. Raises PeerError."""
    if [item.request_id for item in items] != [item.request_id for item in response.items]:
        raise PeerError("the predictions are not those of the items")
    version = text(response.model_version, "a predictor's version")
    return [
        Prediction(
            item.request_id,
            number(item.p50_tokens, "p50_tokens", MAX_TOKENS),
            number(item.p90_tokens, "p90_tokens", MAX_TOKENS),
            version,
        )
        for item in response.items
    ]
