"""The length model: a ridge on features of the prompt, adapter offsets, calibrated quantiles.

The features are hashed grams (the default, `features.py`), or what an encoder says of the prompt (S3's form,
`encoder.py`); all the rest is the same.

    log length  ~  ridge(features)  +  offset(adapter)          = centre
    error       =  (log length - centre) / scale(centre)        = score
    p10 ... p99 =  exp(centre + scale(centre) * quantile of the adapter's scores)

An outcome is first scored against the model as it is, then learned (prequential), so the coverage that the model
reports is honest. An outcome names its request; `FeatureCache` has the features of that request's prompt. Where they
are gone, the prediction that the request was scheduled with gives its centre back: the adapter's offset and
calibration learn from it, the ridge does not.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.domain.lru import LruDict
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import FinishReason, Outcome
from weft_predictor.core.conformal import WINDOW, ConformalCalibrator, ConformalCalibrators
from weft_predictor.core.feature_cache import FeatureCache
from weft_predictor.core.features import MAX_CHARS, Features, Featurizer, HashedGrams
from weft_predictor.core.length_model import TARGET, Arrays, ObservationResult
from weft_predictor.core.offsets import Offsets
from weft_predictor.core.residual_scale import OCTAVES, ResidualScale
from weft_predictor.core.ridge import Ridge
from weft_predictor.errors import CorruptModel

DIM = 1 << 17
LEVELS = (0.1, 0.5, None, 0.99)  # None: the calibrated bound
COLD_LOG_TOKENS = math.log(128.0)
COLD_SCALE = 0.8  # p90 of a cold model: 128 * e^(0.8 * 1.6) = 465 tokens
MAX_LOG_TOKENS = math.log(1e6)
COVERAGE_WINDOW = 1_000
PART_CHARS = 4_096  # of a batch that is computed at once: more leaves the cache, and is slower
MAX_SEEN = 20_000  # request ids of outcomes: an outcome that arrives again does not teach twice
LAYOUT = 1  # of a checkpoint
_CUT_OFF = (FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.FAILED)


class RidgeModel:
    """A LengthModel. Not thread-safe: one owner. `scale` multiplies every prediction (experiments)."""

    scale = 1.0

    def __init__(
        self,
        family: str,
        ridge: Ridge,
        offsets: Offsets,
        residual_scale: ResidualScale,
        calibrators: ConformalCalibrators,
        learned: int = 0,
        featurizer: Featurizer | None = None,
    ) -> None:
        self.family, self.learned = family, learned
        self.featurizer = featurizer or HashedGrams(len(ridge.weight))
        self.ridge, self.offsets, self.residual_scale = ridge, offsets, residual_scale
        self.calibrators = calibrators
        self.hits: deque[bool] = deque(maxlen=COVERAGE_WINDOW)
        self.features = FeatureCache()
        self._seen: LruDict[str, None] = LruDict(MAX_SEEN)

    @classmethod
    def cold(cls, family: str, *, dim: int = DIM) -> "RidgeModel":
        """A model without outcomes: 128 tokens in the median, with a wide margin. `family` names it in `version`."""
        ridge, calibrators = Ridge.cold(dim, COLD_LOG_TOKENS), ConformalCalibrators(target=TARGET)
        return cls(family, ridge, Offsets(), ResidualScale.cold(COLD_SCALE), calibrators)

    @property
    def version(self) -> str:
        """The fit, how many outcomes were learned since, and the scale where there is one."""
        return f"{self.family}+{self.learned}{self._scale_suffix}"

    @property
    def _scale_suffix(self) -> str:
        return "" if self.scale == 1.0 else f"x{self.scale:g}"

    @property
    def coverage(self) -> float | None:
        return sum(self.hits) / len(self.hits) if self.hits else None

    @property
    def adapters(self) -> int:
        return len(self.offsets)

    def predict_batch(self, items: Sequence[PredictItem]) -> list[Prediction]:
        """A prediction does not depend on the others of its batch.

        On a Zen 4 core, of hashed grams, 22 us each where they have 40 characters (150 us alone), 54 us with 185 (190).
        """
        predicted, version = list[Prediction](), self.version
        for part in _parts(items):
            rows, buckets = self.featurizer.rows([(item.prompt_text, item.prompt_tokens) for item in part])
            for item, shared, bucket in zip(part, self.ridge.predict_rows(rows).tolist(), buckets, strict=True):
                centre, calibrator = self._centre(shared, item.model_name), self.calibrators.of(item.model_name)
                scale = self.residual_scale.of(centre)
                scores = (calibrator.bound() if level is None else calibrator.quantile(level) for level in LEVELS)
                tokens = (_tokens(centre + scale * score, self.scale) for score in scores)
                p10, p50, p90, p99 = accumulate(tokens, max)
                predicted.append(Prediction(item.request_id, p50, p90, version, p10, p99, bucket))
            if any(item.request_id for item in part):
                self.features.put([item.request_id for item in part], rows)
        return predicted

    def observe(self, outcome: Outcome) -> ObservationResult:
        """Learn an outcome, once. An answer that was cut off is a lower bound of its length, never a short answer."""
        if outcome.request_id in self._seen:
            return ObservationResult("duplicate")
        self._seen[outcome.request_id] = None
        adapter, x = outcome.model_name, self.features.take(outcome.request_id)
        if x is not None:
            shared = self.ridge.predict(x)
        elif (known := self._shared_of(outcome)) is not None:
            shared = known
        else:
            return ObservationResult("unknown")
        centre = self._centre(shared, adapter)
        score = (math.log(max(outcome.completion_tokens, 1)) - centre) / self.residual_scale.of(centre)
        censored = outcome.censored or outcome.finish in _CUT_OFF
        if censored and (score := self.calibrators.of(adapter).impute_censored(score)) is None:
            return ObservationResult("censored")
        covered = self._learn(x, adapter, shared, score)
        return ObservationResult("partial" if x is None else "learned", covered)

    def _learn(self, x: Features | None, adapter: str, shared: float, score: float) -> bool:
        centre = self._centre(shared, adapter)
        residual = score * self.residual_scale.of(centre)
        covered = self.calibrators.learn(adapter, score)
        if x is not None:
            self.residual_scale.learn(centre, residual)
            self.ridge.learn(x, centre + residual - self.offsets.of(adapter))
        self.offsets.learn(adapter, centre + residual - shared, self.learned)
        self.hits.append(covered)
        self.learned += 1
        return covered

    def _shared_of(self, outcome: Outcome) -> float | None:
        """The ridge's part of the prediction that a request was scheduled with; None: it cannot be known.

        It is taken out of the offset of then, not of now: else the error that some requests in flight have taught is
        taught once more by each of the others, and the offset runs away.
        """
        then = self._learned_at(outcome.model_version)
        offset = self.offsets.before(outcome.model_name, then) if then is not None else None
        if offset is None or not outcome.predicted_p50_tokens:
            return None
        p50_tokens = outcome.predicted_p50_tokens / self.scale - 0.5  # it was rounded up
        return self._centre_of_median(math.log(max(p50_tokens, 0.5)), outcome.model_name) - offset

    def _learned_at(self, version: str) -> int | None:
        """The outcomes learned at a version of this model under the same scale; None: another model's version."""
        family, _, learned = version.removesuffix(self._scale_suffix).rpartition("+")
        ours = family == self.family and learned.isdecimal() and version.endswith(self._scale_suffix)
        return int(learned[:18]) if ours else None

    def _centre(self, shared: float, adapter: str) -> float:
        return min(max(shared + self.offsets.of(adapter), 0.0), MAX_LOG_TOKENS)

    def _centre_of_median(self, log_p50: float, adapter: str) -> float:
        """The centre whose predicted median this was: the fixed point of centre = median - scale(centre) * score.

        The median score is near 0 and the scale changes little within an octave, so a few rounds settle it.
        """
        score, centre = self.calibrators.of(adapter).quantile(0.5), log_p50
        for _ in range(4):
            centre = min(max(log_p50 - self.residual_scale.of(centre) * score, 0.0), MAX_LOG_TOKENS)
        return centre

    # ---- the checkpoint: plain arrays

    def save(self) -> Arrays:
        """`meta` (JSON as bytes: layout, family, learned, adapter names, calibration levels), the ridge's `weight` and
        `variance` [dim], the residual scale, and the windows of offsets and calibrators as one array each with their
        lengths.
        """
        groups = {"": self.calibrators.pooled, **self.calibrators.by_adapter}
        offsets = dict(self.offsets.items())
        meta = {
            "layout": LAYOUT,
            "family": self.family,
            "features": self.featurizer.name,
            "learned": self.learned,
            "base": self.ridge.base,
            "offset_adapters": list(offsets),
            "groups": [[name, group.level, group.prior, group.draws] for name, group in groups.items()],
        }
        return {
            "meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
            "weight": self.ridge.weight.copy(),
            "variance": self.ridge.variance.copy(),
            "spread_scale": self.residual_scale.scale.copy(),
            "spread_count": self.residual_scale.count.copy(),
            "hits": np.array(self.hits, dtype=np.bool_),
            **_pack("offset", offsets.values()),
            **_pack("group", (group.scores() for group in groups.values())),
        }

    @classmethod
    def load(cls, arrays: Arrays, featurizer: Featurizer | None = None) -> "RidgeModel":
        """The model of `save`, which had the same features. Raises CorruptModel (or KeyError, ValueError) otherwise."""
        meta = json.loads(arrays["meta"].tobytes())
        if (name := meta.get("features", "")) != (featurizer.name if featurizer else ""):
            raise CorruptModel(f"it reads the features of {name or 'hashed grams'}")
        if meta["layout"] != LAYOUT:
            raise CorruptModel(f"layout {meta['layout']}, this version reads {LAYOUT}")
        dim = len(arrays["weight"])
        if dim & (dim - 1):
            raise CorruptModel(f"{dim} weights are not a power of two")
        weight, variance = (_vector(arrays, name, dim).astype(np.float32) for name in ("weight", "variance"))
        offsets = Offsets()
        for adapter, window in zip(meta["offset_adapters"], _unpack("offset", arrays), strict=True):
            offsets.restore(adapter, window)
        calibrators = ConformalCalibrators(target=TARGET)
        for (name, level, prior, draws), window in zip(meta["groups"], _unpack("group", arrays), strict=True):
            if not 0 < len(window) <= WINDOW + prior:
                raise CorruptModel(f"a group of {len(window)} scores")
            group = ConformalCalibrator(window, target=TARGET, prior=prior)
            group.level, group.draws = level, draws
            if name:
                calibrators.by_adapter[name] = group
            else:
                calibrators.pooled = group
        scale = ResidualScale(_vector(arrays, "spread_scale", OCTAVES), _vector(arrays, "spread_count", OCTAVES))
        ridge = Ridge(weight, variance, float(meta["base"]))
        model = cls(str(meta["family"]), ridge, offsets, scale, calibrators, int(meta["learned"]), featurizer)
        model.hits = deque((bool(hit) for hit in arrays["hits"]), maxlen=COVERAGE_WINDOW)
        return model


def _parts(items: Iterable[PredictItem]) -> Iterator[list[PredictItem]]:
    part, chars = list[PredictItem](), 0
    for item in items:
        part.append(item)
        chars += min(len(item.prompt_text), MAX_CHARS)
        if chars >= PART_CHARS:
            yield part
            part, chars = [], 0
    if part:
        yield part


def _tokens(log_tokens: float, scale: float) -> int:
    """Whole tokens, at least 1, rounded up; bounded so that it fits the wire whatever the scale."""
    return max(1, math.ceil(min(math.exp(min(log_tokens, MAX_LOG_TOKENS)) * scale, 2**31 - 1)))


def _pack(name: str, windows: Iterable[list[float]]) -> dict[str, NDArray[Any]]:
    rows = list(windows)
    flat = np.array([value for row in rows for value in row], dtype=np.float64)
    return {f"{name}_values": flat, f"{name}_lengths": np.array([len(row) for row in rows], dtype=np.int64)}


def _unpack(name: str, arrays: Mapping[str, NDArray[Any]]) -> list[list[float]]:
    lengths = arrays[f"{name}_lengths"]
    values = _vector(arrays, f"{name}_values", int(lengths.sum()))
    ends = np.cumsum(lengths)
    return [values[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


def _vector(arrays: Mapping[str, NDArray[Any]], name: str, length: int) -> NDArray[Any]:
    vector = arrays[name]
    if vector.shape != (length,) or not np.isfinite(vector).all():
        raise CorruptModel(f"{name} is not {length} finite numbers")
    return vector
