"""When the served encoder's network is retrained, on which answered prompts, and for how much CPU time (S3, section 3).

The latest answered prompts are kept as token ids. After MIN_SAMPLES new ones the whole network is trained on them, in a
CPU time that is at most a share of the time in which answers were generated. A candidate that was not promoted doubles
the number of prompts until the next, so that answers that do not drift cost next to nothing. Training on mispredicted
prompts alone, as S3 does, is no better on two sets of answers and worse on a third (docs/predictor.md).

All tenants share a network, so it learns as what is shared in `RidgeModel` does: while one tenant is the only one that
has ever taught.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.domain.prediction import PredictItem
from weft.domain.request import Outcome
from weft_predictor.core.encoder import EncoderClasses
from weft_predictor.core.feature_cache import FeatureCache
from weft_predictor.core.features import FeatureRows
from weft_predictor.core.length_model import ObservationResult
from weft_predictor.core.promotion import PromotedModel
from weft_predictor.core.ridge_model import RidgeModel

WAITING_BYTES = 16 << 20  # of token ids whose answers are not there yet
WINDOW, MIN_SAMPLES, MAX_SAMPLES = 2_000, 1_000, 64_000
FIRST_CPU_S, MAX_CPU_S = 30.0, 600.0  # 1,000 prompts take 6 to 13 s at 1.5M
MAX_TOKENS = 1_000_000
MAX_REQUEST_S = 3_600.0  # one outcome counts at most that much time of generation


@dataclass(frozen=True, slots=True)
class AnsweredIds:
    """A prompt as the network reads it, and the length of its answer."""

    ids: NDArray[np.int32]
    adapter: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """What to train: `network` by name, on `samples`, for at most `cpu_s`."""

    network: str
    samples: Sequence[AnsweredIds]
    cpu_s: float


class Retraining:
    """Beside the model, in the thread that owns it. `cpu_share`: of the time of generation."""

    def __init__(self, model: PromotedModel, cpu_share: float) -> None:
        self._model, self._cpu_share = model, cpu_share
        self._waiting = FeatureCache(WAITING_BYTES)
        self._samples: deque[AnsweredIds] = deque(maxlen=WINDOW)
        self._network = ""
        self._new, self._wanted, self._needed_s = 0, MIN_SAMPLES, FIRST_CPU_S
        self._generated_until_s = -math.inf
        self.credit_s = 0.0  # CPU time that may be used now

    def predicted(self, items: Sequence[PredictItem]) -> None:
        """Keep the prompts' token ids until their answers are there."""
        if (network := self._learning_network()) is None:
            return
        rows = [network.tokenize(item.prompt_text) for item in items]
        row = np.repeat(np.arange(len(rows)), [len(ids) for ids in rows])
        index = np.array([token for ids in rows for token in ids], dtype=np.int64)
        self._waiting.put([item.request_id for item in items], FeatureRows(row, index, np.zeros(len(index))))

    def observed(self, outcome: Outcome, result: ObservationResult) -> None:
        """An answer that the model has learned is a sample; an answer that was cut off is none."""
        if self._learning_network() is None or result.lesson == "duplicate":
            return
        self._count_generation(outcome.finished_unix_ms / 1_000, outcome.total_ms / 1_000)
        prompt = self._waiting.take(outcome.request_id)
        if prompt is None or result.loss is None:
            return
        tokens = min(max(outcome.completion_tokens, 1), MAX_TOKENS)
        self._samples.append(AnsweredIds(np.asarray(prompt.index, np.int32), outcome.model_name, tokens))
        self._new += 1

    def due(self) -> TrainingSet | None:
        """What to train now; None: nothing. The caller reports its end with `ended`."""
        if self._learning_network() is None or self._model.candidate is not None or self._new < self._wanted:
            return None
        if self._needed_s > min(self.credit_s, MAX_CPU_S):
            return None
        self._new, self._wanted = 0, min(2 * self._wanted, MAX_SAMPLES)
        return TrainingSet(self._network, list(self._samples), self.credit_s)

    def ended(self, cpu_s: float, *, out_of_time: bool) -> None:
        """A training took that long. One that was ended by its limit is tried again with twice as much."""
        self.credit_s -= cpu_s
        self._needed_s = 2 * self._needed_s if out_of_time else min(max(FIRST_CPU_S, 2 * cpu_s), MAX_CPU_S)

    def accepts(self, network: str) -> bool:
        """Whether a candidate that was trained from `network` may still be offered."""
        learning = self._learning_network()
        return learning is not None and learning.name == network and self._model.candidate is None

    def _learning_network(self) -> EncoderClasses | None:
        """The served network while it may learn. With another one, or another tenant, what was gathered is gone."""
        served = self._model.served
        features = served.featurizer if isinstance(served, RidgeModel) and served.shared_learns else None
        network = features if isinstance(features, EncoderClasses) else None
        if (name := network.name if network else "") != self._network:
            self._network, self._new, self._wanted, self._needed_s = name, 0, MIN_SAMPLES, FIRST_CPU_S
            self._samples.clear()
            self._waiting = FeatureCache(WAITING_BYTES)
        return network

    def _count_generation(self, end_s: float, total_s: float) -> None:
        """Time in which some answer was generated counts once, however many were."""
        if end_s < self._generated_until_s - MAX_REQUEST_S:
            self._generated_until_s = -math.inf  # an earlier outcome's clock was ahead: what ends now counts again
        begin_s = max(end_s - min(total_s, MAX_REQUEST_S), self._generated_until_s)
        self.credit_s = min(self.credit_s + self._cpu_share * max(end_s - begin_s, 0.0), MAX_CPU_S)
        self._generated_until_s = max(self._generated_until_s, end_s)
