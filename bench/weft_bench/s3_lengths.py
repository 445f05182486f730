"""Prompts, answers and predictions of public traces, for `weft bench s3`.

A prediction is a distribution, and never learned from the requests that are served. Where a trace stores a class or a
score for each prompt, the lengths of a random half, class by class, are what the other half is predicted to have.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import kendalltau

from weft.domain.prediction import Prediction, PredictItem
from weft_bench.data import rows
from weft_bench.figures.predict import alpaca_rows
from weft_predictor_train.training import split, train

LEVELS = (0.1, 0.5, 0.9, 0.99)
PROMPT_TOKENS = 70  # of LMSYS, whose trace has none: the mean that its authors state
TAU = 0.50  # of the noisy predictions of ShareGPT, as learned rankings of chat reach it
SCORE_CLASSES = 20
TAU_SAMPLE = 4_000
TOO_NOISY = 8.0  # standard deviations of the log length


@dataclass(frozen=True, slots=True)
class Answered:
    """A request of a trace. Tokens; `output_tokens` without the end."""

    prompt_tokens: int
    output_tokens: int
    predicted: Prediction

    def exactly(self) -> "Answered":
        """Return the request as an oracle predicts it."""
        tokens = self.output_tokens + 1
        return replace(self, predicted=Prediction("", tokens, tokens, "oracle", tokens, tokens, tokens))


def lmsys(path: Path, seed: int) -> list[Answered]:
    """Read LMSYS chats of vicuna-13b, with the five classes that a BERT predicted (Qiu et al., 2404.08509)."""
    return _by_class([(int(row["pred_5class"]), PROMPT_TOKENS, int(row["output_tokens"])) for row in rows(path)], seed)


def sharegpt(path: Path, seed: int) -> list[Answered]:
    """Read ShareGPT conversations; a score is the log length with noise that makes Kendall's tau `TAU`, 0.50."""
    lengths = [(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in rows(path)]
    tokens = np.array([output for _, output in lengths], dtype=float)
    scores = noisy(np.log(tokens), TAU, np.random.default_rng(seed))
    edges = np.quantile(scores, np.linspace(0, 1, SCORE_CLASSES + 1)[1:-1])
    labels = np.searchsorted(edges, scores)
    return _by_class([(int(label), *pair) for label, pair in zip(labels, lengths, strict=True)], seed)


def alpaca(path: Path, seed: int) -> list[Answered]:
    """Read Alpaca's unbiased rows as our own ridge predicts them, trained on the other 80 %."""
    del seed
    parts = split(alpaca_rows([path]))
    items = [PredictItem("", row.prompt, "", row.adapter, row.prompt_tokens, 0) for row in parts.measure]
    predictions = train(parts).predict_batch(items)
    return [
        Answered(row.prompt_tokens, max(1, row.tokens - 1), predicted)
        for row, predicted in zip(parts.measure, predictions, strict=True)
    ]


TRACES: Mapping[str, tuple[str, Callable[[Path, int], list[Answered]]]] = {  # file, and how it is read
    "LMSYS": ("ssjf_lmsys_predictions.csv.gz", lmsys),
    "ShareGPT": ("sharegpt_8k_lengths.csv.gz", sharegpt),
    "Alpaca": ("alpaca_15k.jsonl.gz", alpaca),
}


def tau_of(served: Sequence[Answered]) -> float:
    """Return Kendall's tau of the predicted median and the length."""
    some = served[:TAU_SAMPLE]
    return _tau([one.predicted.p50_tokens for one in some], [one.output_tokens for one in some])


def noisy(values: NDArray[np.float64], tau: float, chance: np.random.Generator) -> NDArray[np.float64]:
    """Add normal noise to the values, as strong as brings their rank correlation down to `tau`."""
    noise, low, high = chance.standard_normal(len(values)), 0.0, TOO_NOISY
    some = chance.permutation(len(values))[:TAU_SAMPLE]
    while high - low > 0.01:
        middle = (low + high) / 2
        reached = _tau(values[some], values[some] + middle * noise[some])
        low, high = (middle, high) if reached > tau else (low, middle)
    return values + high * noise


def _tau(a: ArrayLike, b: ArrayLike) -> float:
    tau: Any = kendalltau(a, b)
    return float(tau.statistic)


def _by_class(labelled: Sequence[tuple[int, int, int]], seed: int) -> list[Answered]:
    """Return requests of (class, prompt, output): one half, in random order, predicted from the other half."""
    order = random.Random(f"{seed}/halves").sample(labelled, len(labelled))
    half = len(order) // 2
    lengths: defaultdict[int, list[int]] = defaultdict(list)
    for label, _, tokens in order[:half]:
        lengths[label].append(tokens + 1)
    predicted = dict[int, Prediction]()
    for label, of_class in lengths.items():
        p10, p50, p90, p99 = (max(1, round(float(tokens))) for tokens in np.quantile(of_class, LEVELS))
        predicted[label] = Prediction("", p50, p90, "classes", p10, p99)
    return [Answered(prompt, tokens, predicted[label]) for label, prompt, tokens in order[half:]]
