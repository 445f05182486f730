"""The length model: a ridge on features of the prompt, adapter offsets, calibrated quantiles.

The features are hashed grams (the default, `features.py`), or the output of an encoder for the prompt (S3's form,
`encoder.py`). All the rest is the same.

    log length  ~  ridge(features)  +  offset(group)            = centre
    error       =  (log length - centre) / scale(centre)        = score
    p10 ... p99 =  exp(centre + scale(centre) * quantile of the group's scores)

An outcome is first scored against the present model, then learned (prequential), so the reported coverage is honest. An
outcome names its request; `FeatureCache` has the features of the request's prompt. If they are gone, the outcome's
prediction gives back its centre. The adapter's offset and calibration learn from it; the ridge does not.

A group is a tenant's adapter. A tenant has separate groups, and from its first outcome a separate ridge, so that no
flood of outcomes from elsewhere moves its predictions. A tenant begins with the shared parts: the first ridge, the
groups of all tenants of an adapter, the pooled group. The shared parts learn while a single tenant has ever taught.
With a second tenant they stay unchanged, because twenty outcomes of any sender move a young ridge anywhere. An outcome
teaches a ridge at most MAX_ERROR scales (Huber 1964).
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.domain.lru import LruDict
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import FinishReason, Outcome
from weft_predictor.core.conformal import MIN_LEVEL, WINDOW, ConformalCalibrator, ConformalCalibrators
from weft_predictor.core.feature_cache import FeatureCache
from weft_predictor.core.features import MAX_CHARS, Features, Featurizer, HashedGrams
from weft_predictor.core.length_model import TARGET, Arrays, ObservationResult
from weft_predictor.core.offsets import Group, Offsets
from weft_predictor.core.residual_scale import OCTAVES, ResidualScale
from weft_predictor.core.ridge import Ridge
from weft_predictor.errors import CorruptModel, OtherLayout

DIM = 131_072
LEVELS = (0.1, 0.5, None, 0.99)  # None: the calibrated bound
COLD_LOG_TOKENS = math.log(128.0)
COLD_SCALE = 0.8  # p90 of a cold model: 128 * e^(0.8 * 1.6) = 465 tokens
MAX_LOG_TOKENS = math.log(1e6)
COVERAGE_WINDOW = 1_000
PART_CHARS = 4_096  # characters computed at once: more leaves the cache, and is slower
MAX_SEEN = 20_000  # request ids of outcomes: a repeated outcome does not teach twice
MAX_OWN = 64  # tenants with a separate ridge of 1 MiB; further tenants use the shared ridge and separate offsets
MAX_ERROR = 3.0  # scales: 2 % of Alpaca's answers are farther off
LAYOUT = 2  # of a checkpoint
_CUT_OFF = (FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.FAILED)


@dataclass(frozen=True, slots=True)
class Regression:
    """A ridge and the scale of its errors by predicted length."""

    ridge: Ridge
    scale: ResidualScale

    def copy(self) -> "Regression":
        ridge, scale = self.ridge, self.scale
        return Regression(
            Ridge(ridge.weight.copy(), ridge.variance.copy(), ridge.base),
            ResidualScale(scale.scale.copy(), scale.count.copy()),
        )

    def learn(self, x: Features, real: float, offset: float) -> float:
        """Learn a log length. Return the ridge's earlier prediction."""
        base = self.ridge.predict(x)
        centre = min(max(base + offset, 0.0), MAX_LOG_TOKENS)
        bound = MAX_ERROR * self.scale.scale_at(centre)
        error = min(max(real - centre, -bound), bound)
        self.scale.learn(centre, error)
        self.ridge.learn(x, centre + error - offset)
        return base


class RidgeModel:
    """A LengthModel. Not thread-safe: it has a single owner. `scale` multiplies every prediction (experiments)."""

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
        self.ridge, self.offsets, self.residual_scale = ridge, offsets, residual_scale  # shared by all tenants
        self.calibrators = calibrators
        self.hits: deque[bool] = deque(maxlen=COVERAGE_WINDOW)
        self._teacher: str | None = None  # of the shared parts: the first tenant
        self._shared_learns = True  # at most a single tenant has ever taught
        self._shared = Regression(ridge, residual_scale)
        self._of_tenants: LruDict[str, Regression] = LruDict(MAX_OWN)
        self.features = FeatureCache()
        self._seen: LruDict[str, None] = LruDict(MAX_SEEN)

    @classmethod
    def cold(cls, family: str, *, dim: int = DIM) -> "RidgeModel":
        """Make a model without outcomes: a median of 128 tokens, a wide margin. `family` names it in `version`."""
        ridge, calibrators = Ridge.cold(dim, COLD_LOG_TOKENS), ConformalCalibrators(target=TARGET)
        return cls(family, ridge, Offsets(), ResidualScale.cold(COLD_SCALE), calibrators)

    @property
    def version(self) -> str:
        """Return the fit's name, the number of outcomes learned since, and the scale unless it is 1."""
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
        """Predict items. A prediction does not depend on the rest of its batch.

        On a Zen 4 core with hashed grams, a prompt of 40 characters takes 22 us (150 us in a batch of 1). A prompt of
        185 characters takes 54 us (190 us).
        """
        predicted, version = list[Prediction](), self.version
        for part in _parts(items):
            rows, buckets = self.featurizer.rows([(item.prompt_text, item.prompt_tokens) for item in part])
            regressions = {item.namespace: self._regression(item.namespace) for item in part}
            predicted_rows = {id(entry): entry.ridge.predict_rows(rows).tolist() for entry in regressions.values()}
            for row, (item, bucket) in enumerate(zip(part, buckets, strict=True)):
                group, regression = (item.namespace, item.model_name), regressions[item.namespace]
                centre = self._centre(predicted_rows[id(regression)][row], group)
                calibrator, scale = self.calibrators.of_group(group), regression.scale.scale_at(centre)
                scores = (calibrator.bound() if level is None else calibrator.quantile(level) for level in LEVELS)
                tokens = (_tokens(centre + scale * score, self.scale) for score in scores)
                p10, p50, p90, p99 = accumulate(tokens, max)
                predicted.append(Prediction(item.request_id, p50, p90, version, p10, p99, bucket))
            if any(item.request_id for item in part):
                self.features.put([item.request_id for item in part], rows)
        return predicted

    def observe(self, outcome: Outcome) -> ObservationResult:
        """Learn an outcome, once. A cut-off answer is a lower bound of its length, never a short answer."""
        if outcome.request_id in self._seen:
            return ObservationResult("duplicate")
        self._seen[outcome.request_id] = None
        group, x = (outcome.namespace, outcome.model_name), self.features.take(outcome.request_id)
        regression = self._regression(outcome.namespace)
        base = regression.ridge.predict(x) if x is not None else self._base_of(outcome, group)
        if base is None:
            return ObservationResult("unknown")
        centre = self._centre(base, group)
        scale = regression.scale.scale_at(centre)
        score = (_log_tokens(outcome.completion_tokens) - centre) / scale
        censored = outcome.censored or outcome.finish in _CUT_OFF
        if censored and (score := self.calibrators.of_group(group).impute_censored(score)) is None:
            return ObservationResult("censored")
        self._teacher = outcome.namespace if self._teacher is None else self._teacher
        self._shared_learns &= outcome.namespace == self._teacher
        loss = self._loss(group, score) * scale if x is not None and not censored else None
        covered = self.calibrators.learn(group, score, shared=self._shared_learns)
        self._learn(x, group, base, centre + scale * score)
        self.hits.append(covered)
        self.learned += 1
        return ObservationResult("partial" if x is None else "learned", covered, loss)

    def _learn(self, x: Features | None, group: Group, base: float, real: float) -> None:
        """Learn a real length, `real` in log tokens. `base`: the prediction of the tenant's ridge, if it knows the
        prompt."""
        tenant, adapter = group
        if self._shared_learns:
            shared = base if x is None else self._shared.learn(x, real, self.offsets.of_group(("", adapter)))
            self.offsets.learn(("", adapter), real - shared, self.learned)
        if tenant:
            if x is not None:
                base = self._of_tenants.touch(tenant, self._shared.copy).learn(x, real, self.offsets.of_group(group))
            self.offsets.learn(group, real - base, self.learned)

    def _regression(self, tenant: str) -> "Regression":
        """Return the regression used for a tenant now."""
        return self._of_tenants.get(tenant, self._shared)

    def _loss(self, group: Group, score: float) -> float:
        """Sum the quantile losses of p50 and p90, in scales."""
        calibrator = self.calibrators.of_group(group)
        losses = ((0.5, score - calibrator.quantile(0.5)), (TARGET, score - calibrator.bound()))
        return sum(max(level * error, (level - 1.0) * error) for level, error in losses)

    def _base_of(self, outcome: Outcome, group: Group) -> float | None:
        """Recover the ridge's part of the prediction used to schedule a request; None: unknown.

        The offset at the time of the prediction is subtracted, not the present offset. Otherwise each request in flight
        would teach an error already learned again, and the offset would run away.
        """
        version = self._learned_at(outcome.model_version)
        offset = self.offsets.at_version(group, version) if version is not None else None
        if offset is None or not outcome.predicted_p50_tokens:
            return None
        p50_tokens = outcome.predicted_p50_tokens / self.scale - 0.5  # it was rounded up
        return self._centre_of_median(math.log(max(p50_tokens, 0.5)), group) - offset

    def _learned_at(self, version: str) -> int | None:
        """Read the outcomes learned at a version of this model under the same scale; None: another model's version."""
        family, _, learned = version.removesuffix(self._scale_suffix).rpartition("+")
        ours = family == self.family and learned.isdecimal() and version.endswith(self._scale_suffix)
        return int(learned[:18]) if ours else None

    def _centre(self, base: float, group: Group) -> float:
        return min(max(base + self.offsets.of_group(group), 0.0), MAX_LOG_TOKENS)

    def _centre_of_median(self, log_p50: float, group: Group) -> float:
        """Find the centre with this predicted median: the fixed point of centre = median - scale(centre) * score.

        The median score is near 0 and the scale changes little within an octave, so a few rounds settle it.
        """
        score, centre, scale = self.calibrators.of_group(group).quantile(0.5), log_p50, self._regression(group[0]).scale
        for _ in range(4):
            centre = min(max(log_p50 - scale.scale_at(centre) * score, 0.0), MAX_LOG_TOKENS)
        return centre

    # ---- the checkpoint: plain arrays

    def save(self) -> Arrays:
        """Copy the model to arrays. `meta`: JSON as bytes with layout, family, learned, adapter names, calibration
        levels. The ridge: `weight` and `variance` [dim]. The residual scale. The windows of offsets and calibrators: an
        array each, with their lengths."""
        groups = {None: self.calibrators.pooled, **self.calibrators.by_group}
        offsets = dict(self.offsets.items())
        meta = {
            "layout": LAYOUT,
            "family": self.family,
            "features": self.featurizer.name,
            "learned": self.learned,
            "base": self.ridge.base,
            "offset_groups": list(offsets),
            "offset_priors": [self.offsets.prior(group) for group in offsets],
            "teacher": self._teacher,
            "shared_learns": self._shared_learns,
            "own": list(self._of_tenants),
            "groups": [[name, group.level, group.prior, group.draws] for name, group in groups.items()],
        }
        return {
            "meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
            "weight": self.ridge.weight.copy(),
            "variance": self.ridge.variance.copy(),
            "spread_scale": self.residual_scale.scale.copy(),
            "spread_count": self.residual_scale.count.copy(),
            "own_weight": _stack(
                [regression.ridge.weight for regression in self._of_tenants.values()], len(self.ridge.weight)
            ),
            "own_variance": _stack(
                [regression.ridge.variance for regression in self._of_tenants.values()], len(self.ridge.weight)
            ),
            "own_spread_scale": _stack([regression.scale.scale for regression in self._of_tenants.values()], OCTAVES),
            "own_spread_count": _stack([regression.scale.count for regression in self._of_tenants.values()], OCTAVES),
            "hits": np.array(self.hits, dtype=np.bool_),
            **_pack("offset", offsets.values()),
            **_pack("group", (group.scores() for group in groups.values())),
        }

    @staticmethod
    def features_of(arrays: Arrays) -> str:
        """Read the name of a saved model's features. Raises CorruptModel, KeyError, ValueError."""
        return str(_meta(arrays)["features"])

    @classmethod
    def load(cls, arrays: Arrays, featurizer: Featurizer | None = None) -> "RidgeModel":
        """Restore a model of the same features from the output of `save`. Raises CorruptModel, KeyError or ValueError
        otherwise."""
        meta = _meta(arrays)
        if (name := meta["features"]) != (featurizer.name if featurizer else ""):
            raise CorruptModel(f"it reads the features of {name or 'hashed grams'}")
        dim = len(arrays["weight"])
        if dim & (dim - 1):
            raise CorruptModel(f"{dim} weights are not a power of two")
        offsets = Offsets()
        windows = zip(meta["offset_groups"], meta["offset_priors"], _unpack("offset", arrays), strict=True)
        for group, prior, window in windows:
            offsets.restore(_group(group), window, float(prior))
        calibrators = ConformalCalibrators(target=TARGET)
        for (name, level, prior, draws), window in zip(meta["groups"], _unpack("group", arrays), strict=True):
            fits = 0 <= prior <= len(window) <= WINDOW and window
            if not fits or not MIN_LEVEL <= level <= 1.0 or draws < 0:
                raise CorruptModel(f"a group of {len(window)} scores, {prior} made up, at level {level}")
            group = ConformalCalibrator(window, target=TARGET, prior=prior)
            group.level, group.draws = level, draws
            if name is None:
                calibrators.pooled = group
            else:
                calibrators.by_group[_group(name)] = group
        base, learned = float(meta["base"]), int(meta["learned"])
        if not math.isfinite(base) or learned < 0:
            raise CorruptModel(f"base {base}, {learned} outcomes")
        shared = _regression(arrays, "", base, dim)
        model = cls(str(meta["family"]), shared.ridge, offsets, shared.scale, calibrators, learned, featurizer)
        model._teacher = None if meta["teacher"] is None else str(meta["teacher"])
        model._shared_learns = bool(meta["shared_learns"])
        for row, tenant in enumerate(meta["own"]):
            model._of_tenants[str(tenant)] = _regression(arrays, "own_", base, dim, row)
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


def _meta(arrays: Arrays) -> Any:
    """Read the description of a saved model. Raises OtherLayout for a model of another version."""
    meta = json.loads(arrays["meta"].tobytes())
    if (layout := int(meta["layout"])) != LAYOUT:
        raise OtherLayout(layout, LAYOUT)
    return meta


def _group(names: Any) -> Group:
    tenant, adapter = names
    return str(tenant), str(adapter)


def _log_tokens(tokens: float) -> float:
    """Return the logarithm of any length, between a single token and the largest prediction."""
    return min(math.log(tokens), MAX_LOG_TOKENS) if tokens >= 1 else 0.0


def _tokens(log_tokens: float, scale: float) -> int:
    """Return the tokens of a logarithm, rounded up, at least 1. Bounded, so that any scale fits the wire."""
    return max(1, math.ceil(min(math.exp(min(log_tokens, MAX_LOG_TOKENS)) * scale, 2**31 - 1)))


def _pack(name: str, windows: Iterable[list[float]]) -> dict[str, NDArray[Any]]:
    rows = list(windows)
    flat = np.array([value for row in rows for value in row], dtype=np.float64)
    return {f"{name}_values": flat, f"{name}_lengths": np.array([len(row) for row in rows], dtype=np.int64)}


def _unpack(name: str, arrays: Mapping[str, NDArray[Any]]) -> list[list[float]]:
    lengths = arrays[f"{name}_lengths"]
    values = _vector(arrays[f"{name}_values"], f"{name}_values", int(lengths.sum()))
    ends = np.cumsum(lengths)
    return [values[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


def _stack(rows: list[NDArray[Any]], columns: int) -> NDArray[Any]:
    return np.stack(rows) if rows else np.zeros((0, columns))


def _regression(arrays: Arrays, prefix: str, base: float, dim: int, row: int | None = None) -> Regression:
    def vector(name: str, length: int, *, positive: bool = True) -> NDArray[Any]:
        array = arrays[prefix + name]
        return _vector(array if row is None else array[row], prefix + name, length, positive=positive)

    weight, variance = vector("weight", dim, positive=False), vector("variance", dim)
    scale = ResidualScale(vector("spread_scale", OCTAVES).copy(), vector("spread_count", OCTAVES).copy())
    return Regression(Ridge(weight.astype(np.float32), variance.astype(np.float32), base), scale)


def _vector(vector: NDArray[Any], name: str, length: int, *, positive: bool = False) -> NDArray[Any]:
    if vector.shape != (length,) or not np.isfinite(vector).all() or (positive and not (vector > 0).all()):
        raise CorruptModel(f"{name} is not {length} {'positive' if positive else 'finite'} numbers")
    return vector
