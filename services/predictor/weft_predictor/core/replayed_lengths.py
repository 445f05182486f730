"""A length model with given predictions: for traces without text, for scenarios, for an oracle.

A prediction is found by its request's id, else by its prompt's text. A gateway makes new ids, so a trace sent through a
gateway writes its key into the prompt.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import Outcome
from weft.domain.strict_json import is_int, parse_object
from weft_predictor.core.length_model import Arrays, ObservationResult
from weft_predictor.errors import BadData

VERSION = "replayed"
MAX_LINE_BYTES, MAX_LINES, MAX_ANSWER_TOKENS = 1 << 16, 10_000_000, 1_000_000
QUANTILES = ("p10", "p50", "p90", "p99")


class ReplayedLengths:
    """A LengthModel that learns nothing. An unknown request has no prediction (0 tokens)."""

    version, learned, adapters = VERSION, 0, 0
    coverage: float | None = None

    def __init__(self, predictions: Mapping[str, Prediction], scale: float = 1.0) -> None:
        """Take the predictions by key. The mapping is read at each call."""
        self._predictions, self.scale = predictions, scale

    def predict_batch(self, items: Sequence[PredictItem]) -> list[Prediction]:
        return [self._predict(item) for item in items]

    def observe(self, outcome: Outcome) -> ObservationResult:
        del outcome
        return ObservationResult("unknown")

    def save(self) -> Arrays:
        return {}

    def _predict(self, item: PredictItem) -> Prediction:
        prediction = self._predictions.get(item.request_id) or self._predictions.get(item.prompt_text)
        if prediction is None:
            return Prediction(item.request_id)
        p50, p90, p10, p99, bucket = (
            math.ceil(min(tokens * self.scale, 2**31 - 1))
            for tokens in (
                prediction.p50_tokens,
                prediction.p90_tokens,
                prediction.p10_tokens,
                prediction.p99_tokens,
                prediction.bucket_tokens,
            )
        )
        return Prediction(item.request_id, p50, p90, VERSION, p10, p99, bucket)


def parse(lines: Iterable[bytes]) -> dict[str, Prediction]:
    """Read predictions by key from JSON lines: `key` (string), `p10` <= `p50` <= `p90` <= `p99` in tokens; perhaps
    `bucket`.

    Raises BadData with the line and its fault.
    """
    predictions: dict[str, Prediction] = {}
    for number, line in enumerate(lines, 1):
        try:
            if number > MAX_LINES:
                raise ValueError(f"more than {MAX_LINES} lines")
            key, prediction = _parse_line(line)
        except ValueError as error:
            raise BadData(f"line {number}: {error}") from error
        predictions[key] = prediction
    return predictions


def _parse_line(line: bytes) -> tuple[str, Prediction]:
    record = parse_object(line, max_bytes=MAX_LINE_BYTES)
    key = record.get("key")
    if not isinstance(key, str) or not key:
        raise ValueError(f"key is {key!r}, not a string of characters")
    p10, p50, p90, p99, bucket = (_tokens(name, record.get(name)) for name in (*QUANTILES, "bucket"))
    if not 1 <= p10 <= p50 <= p90 <= p99:
        raise ValueError(f"p10, p50, p90 and p99 are {p10}, {p50}, {p90} and {p99}: not within 1.. and in order")
    return key, Prediction(key, p50, p90, VERSION, p10, p99, bucket)


def _tokens(name: str, value: Any) -> int:
    value = 0 if value is None and name == "bucket" else value
    if not is_int(value) or not 0 <= value <= MAX_ANSWER_TOKENS:
        raise ValueError(f"{name} is {value!r}, not within 0..{MAX_ANSWER_TOKENS} tokens")
    return value
