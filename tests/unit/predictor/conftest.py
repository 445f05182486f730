"""Prompts with a known length law, made from a seed: a word sets the length, an adapter multiplies it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import FinishReason, Outcome
from weft_predictor.core import (
    Arrays,
    ConformalCalibrator,
    EncoderShape,
    LengthModel,
    ObservationResult,
    conformal,
    encoder,
)
from weft_predictor_train.datasets import AnsweredPrompt
from weft_predictor_train.training import Split, split

TASKS = {"name": 24, "list": 60, "explain": 150, "essay": 450}
TOPICS = ("rivers", "engines", "bread", "history", "planets", "markets", "birds", "glass")
FACTORS = {"acme/plain": 1.0, "acme/brief": 0.3, "globex/chatty": 3.0}

_ids = count()


@dataclass(frozen=True)
class Answer:
    """A prompt and how long its answer was."""

    query: PredictItem
    tokens: int
    censored: bool = False


def check_calibrator(calibrator: ConformalCalibrator) -> None:
    """The two views of a calibrator hold the same scores, within the window."""
    scores = calibrator.scores()
    assert sorted(scores) == calibrator._sorted, "the sorted view and the window differ"
    assert 0 <= calibrator.prior <= len(scores) <= max(conformal.WINDOW, calibrator.prior), (
        "the window is over its bound"
    )


class CountingModel:
    """A LengthModel that has learned how many outcomes it got; one of no tokens teaches it nothing."""

    scale, coverage, adapters = 1.0, 0.5, 3

    def __init__(self, learned: int = 0) -> None:
        self.learned = learned

    @property
    def version(self) -> str:
        return f"counting+{self.learned}"

    def predict_batch(self, items: Sequence[PredictItem]) -> list[Prediction]:
        p50 = 10 + self.learned
        return [Prediction(item.request_id, p50, p50 + 10, self.version, 5, p50 + 20) for item in items]

    def observe(self, outcome: Outcome) -> ObservationResult:
        if not outcome.completion_tokens:
            return ObservationResult("censored")
        self.learned += 1
        return ObservationResult("learned", covered=True)

    def save(self) -> Arrays:
        return {"learned": np.array([self.learned])}

    @classmethod
    def load(cls, arrays: Arrays) -> "CountingModel":
        return cls(int(arrays["learned"][0]))


def teach(model: LengthModel, answer: Answer) -> ObservationResult:
    """A request's whole way: predicted, answered, observed."""
    model.predict_batch([answer.query])
    return model.observe(outcome_of(answer))


def outcome_of(answer: Answer, request_id: str = "", **fields: Any) -> Outcome:
    query = answer.query
    fields = {"censored": answer.censored, "finish": FinishReason.EOS} | fields
    fields |= {"prompt_tokens": query.prompt_tokens, "completion_tokens": answer.tokens, "finished_unix_ms": 0}
    return Outcome(request_id or query.request_id, query.pool, query.namespace, query.model_name, "", **fields)


def query_of(text: str, adapter: str, prompt_tokens: int = 0) -> PredictItem:
    """A prompt in a request of its own."""
    return PredictItem(f"r{next(_ids)}", text, "default/pool", adapter, prompt_tokens, 1_000)


@dataclass(frozen=True)
class World:
    """Draws prompts whose real length is lognormal around task x adapter x `drift`."""

    rng: Random
    sigma: float = 0.4

    def median(self, query: PredictItem, drift: float = 1.0) -> float:
        return TASKS[query.prompt_text.split()[0]] * FACTORS[query.model_name] * drift

    def query(self, adapter: str | None = None) -> PredictItem:
        task, topic = self.rng.choice(list(TASKS)), self.rng.choice(TOPICS)
        filler = " ".join(self.rng.choice(TOPICS) for _ in range(self.rng.randrange(4)))
        return query_of(f"{task} something about {topic} {filler}", adapter or self.rng.choice(list(FACTORS)), 8)

    def answers(self, count: int, *, adapter: str | None = None, drift: float = 1.0) -> Iterator[Answer]:
        for _ in range(count):
            query = self.query(adapter)
            tokens = self.median(query, drift) * math.exp(self.rng.gauss(0.0, self.sigma))
            yield Answer(query, max(1, round(tokens)))


def parts_of(seed: int, rows: int) -> Split:
    answers = World(Random(seed)).answers(rows)
    return split(
        AnsweredPrompt(f"{one.query.prompt_text} {i}", one.query.model_name, 8, one.tokens)
        for i, one in enumerate(answers)
    )


def random_weights(shape: EncoderShape) -> dict[str, NDArray[np.float32]]:
    """Each tensor of a network."""
    names, d, h, rng = encoder.NAMES[shape.kind], shape.dim, shape.hidden, np.random.default_rng(7)
    dims: dict[str, tuple[int, ...]] = {names["words"]: (shape.vocab, d), names["positions"]: (shape.positions, d)}
    dims |= {names["types"]: (2, d)} if "types" in names else {}
    dense, norms = [(names["pool"], d, d), ("classifier", d, len(shape.edges))], [names["embed_norm"]]
    for i in range(shape.layers):
        at = f"{names['layer']}.{i}."
        dense += [(at + names[part], d, d) for part in ("query", "key", "value", "out")]
        dense += [(at + names["up"], d, h), (at + names["down"], h, d)]
        norms += [at + names["attention_norm"], at + names["output_norm"]]
    for name, fan_in, fan_out in dense:
        dims |= {f"{name}.weight": (fan_out, fan_in), f"{name}.bias": (fan_out,)}
    for name in norms:
        dims |= {f"{name}.weight": (d,), f"{name}.bias": (d,)}
    return {name: rng.normal(0.0, 0.5, size).astype(np.float32) for name, size in dims.items()}


@pytest.fixture
def world() -> Callable[[int], World]:
    return lambda seed: World(Random(seed))
