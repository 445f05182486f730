"""predict(prompt, adapter) -> p50, p90, bucket; observe(outcome). The composition of the other modules.

    log length  ~  ridge(prompt)  +  offset(adapter)            = centre
    error       =  (log length - centre) / spread(centre)       = score
    p50, p90    =  exp(centre + spread(centre) * quantile of the group's scores)

Every outcome is first scored against the model as it is, then learned (prequential), so the coverage it reports is
honest. Not thread-safe: one owner.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft_predictor.core.conformal import Groups
from weft_predictor.core.features import MAX_CHARS, Features, feature_rows, features
from weft_predictor.core.offsets import Offsets
from weft_predictor.core.ridge import Ridge
from weft_predictor.core.spread import Spread

DIM = 1 << 17
TARGET = 0.9
COLD_LOG_TOKENS = math.log(128.0)
COLD_SPREAD = 0.8  # p90 of a cold model: 128 * e^(0.8 * 1.6) = 465 tokens
MAX_LOG_TOKENS = math.log(1e6)
BUCKETS = 10  # S3, section 3: ten equal buckets over the maximum length
COVERAGE_WINDOW = 1_000
PART_CHARS = 4_096  # of a batch that is computed at once: more leaves the cache, and is slower


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt to predict. `adapter` is the served model name, the base's for the base."""

    prompt_text: str
    adapter: str
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Predicted:
    """Output tokens: the median, the bound that covers 90 %, and S3's bucket (0..9) of the median."""

    p50_tokens: int
    p90_tokens: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Observed:
    """A real length. `censored`: the answer would have been at least `tokens` long (a limit, a client that left)."""

    query: Query
    tokens: int
    censored: bool = False


@dataclass(frozen=True, slots=True)
class Learned:
    """What observing did. `covered`: p90 held (None: a censored outcome that taught nothing)."""

    covered: bool | None


class LengthPredictor:
    """The default model: hashed ridge, adapter offsets, calibrated quantiles. See the module's text."""

    def __init__(
        self, family: str, ridge: Ridge, offsets: Offsets, spread: Spread, groups: Groups, learned: int = 0
    ) -> None:
        self.family, self.learned = family, learned
        self.ridge, self.offsets, self.spread, self.groups = ridge, offsets, spread, groups
        self.hits: deque[bool] = deque(maxlen=COVERAGE_WINDOW)

    @classmethod
    def cold(cls, family: str, *, dim: int = DIM) -> "LengthPredictor":
        """Knows nothing yet: 128 tokens in the median, with a wide margin. `family` names it in `version`."""
        ridge = Ridge.cold(dim, COLD_LOG_TOKENS)
        return cls(family, ridge, Offsets(), Spread.cold(COLD_SPREAD), Groups(target=TARGET))

    @property
    def version(self) -> str:
        """Changes when the model does: the fit, then how many outcomes were learned since."""
        return f"{self.family}+{self.learned}"

    @property
    def coverage(self) -> float | None:
        """The share of the latest 1,000 outcomes that p90 covered; None before the first."""
        return sum(self.hits) / len(self.hits) if self.hits else None

    def predict(self, query: Query, *, max_context_tokens: int, scale: float = 1.0) -> Predicted:
        """The quantiles of a prompt's answer. `scale` multiplies them (experiments)."""
        return self.predict_batch((query,), max_context_tokens=max_context_tokens, scale=scale)[0]

    def predict_batch(
        self, queries: Sequence[Query], *, max_context_tokens: int, scale: float = 1.0
    ) -> list[Predicted]:
        """The same for several prompts; what one is told does not depend on the others.

        On a Zen 4 core 22 us each where they have 40 characters (150 us alone), 54 us with 185 (190 us).
        """
        found: list[Predicted] = []
        for part in _parts(queries):
            xs = feature_rows([(query.prompt_text, query.prompt_tokens) for query in part], len(self.ridge.weight))
            for query, shared in zip(part, self.ridge.predict_rows(xs).tolist(), strict=True):
                centre = self._centre(shared, query.adapter)
                p50, p90 = (_tokens(self.quantile_at(centre, query.adapter, level), scale) for level in (0.5, None))
                found.append(Predicted(p50, max(p50, p90), bucket(p50, max_context_tokens)))
        return found

    def quantile_at(self, centre: float, adapter: str, level: float | None) -> float:
        """Log tokens below which `level` of the answers end; None: the calibrated bound."""
        group = self.groups.of(adapter)
        score = group.bound() if level is None else group.quantile(level)
        return centre + self.spread.of(centre) * score

    def observe(self, outcome: Observed) -> Learned:
        """Learn one outcome. A censored one counts as a lower bound, never as a short answer."""
        query, adapter = outcome.query, outcome.query.adapter
        x = features(query.prompt_text, query.prompt_tokens, len(self.ridge.weight))
        centre = self._centre(self.ridge.predict(x), adapter)
        scale = self.spread.of(centre)
        score = (math.log(max(outcome.tokens, 1)) - centre) / scale
        if outcome.censored:
            drawn = self.groups.of(adapter).draw_above(score)
            if drawn is None:
                return Learned(None)
            score = drawn
        return self._learn(x, adapter, centre, score)

    def _learn(self, x: Features, adapter: str, centre: float, score: float) -> Learned:
        residual = score * self.spread.of(centre)
        covered = self.groups.learn(adapter, score)
        self.spread.learn(centre, residual)
        offset, shared = self.offsets.of(adapter), self.ridge.predict(x)
        self.offsets.learn(adapter, centre + residual - shared)
        self.ridge.learn(x, centre + residual - offset)
        self.hits.append(covered)
        self.learned += 1
        return Learned(covered)

    def _centre(self, shared: float, adapter: str) -> float:
        return min(max(shared + self.offsets.of(adapter), 0.0), MAX_LOG_TOKENS)


def _parts(queries: Iterable[Query]) -> Iterator[list[Query]]:
    """Some at a time."""
    part, chars = list[Query](), 0
    for query in queries:
        part.append(query)
        chars += min(len(query.prompt_text), MAX_CHARS)
        if chars >= PART_CHARS:
            yield part
            part, chars = [], 0
    if part:
        yield part


def bucket(tokens: int, max_context_tokens: int) -> int:
    """S3's class of a length: which tenth of the maximum it ends in, 0..9."""
    return min(tokens * BUCKETS // max_context_tokens, BUCKETS - 1)


def _tokens(log_tokens: float, scale: float) -> int:
    """Whole tokens, at least 1, rounded up; bounded so that it fits the wire whatever the scale."""
    return max(1, math.ceil(min(math.exp(min(log_tokens, MAX_LOG_TOKENS)) * scale, 2**31 - 1)))
