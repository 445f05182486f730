"""Prompts with a known length law, made from a seed: a word sets the length, an adapter multiplies it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

import pytest

from weft_predictor.core.length_model import LengthModel, ObservationResult, Observed, Query

TASKS = {"name": 24, "list": 60, "explain": 150, "essay": 450}
TOPICS = ("rivers", "engines", "bread", "history", "planets", "markets", "birds", "glass")
FACTORS = {"acme/plain": 1.0, "acme/brief": 0.3, "globex/chatty": 3.0}

_ids = count()


@dataclass(frozen=True)
class Answer:
    """A prompt and how long its answer was."""

    query: Query
    tokens: int
    censored: bool = False


def teach(model: LengthModel, answer: Answer) -> ObservationResult:
    """A request's whole way: predicted, answered, observed."""
    model.predict_batch([answer.query], max_context_tokens=2_048)
    return model.observe(
        Observed(answer.query.request_id, answer.query.adapter, answer.tokens, censored=answer.censored)
    )


def query_of(text: str, adapter: str, prompt_tokens: int = 0) -> Query:
    """A prompt in a request of its own."""
    return Query(text, adapter, prompt_tokens, f"r{next(_ids)}")


@dataclass(frozen=True)
class World:
    """Draws prompts whose real length is lognormal around task x adapter x `drift`."""

    rng: Random
    sigma: float = 0.4

    def median(self, query: Query, drift: float = 1.0) -> float:
        return TASKS[query.prompt_text.split()[0]] * FACTORS[query.adapter] * drift

    def query(self, adapter: str | None = None) -> Query:
        task, topic = self.rng.choice(list(TASKS)), self.rng.choice(TOPICS)
        filler = " ".join(self.rng.choice(TOPICS) for _ in range(self.rng.randrange(4)))
        return query_of(f"{task} something about {topic} {filler}", adapter or self.rng.choice(list(FACTORS)), 8)

    def answers(self, count: int, *, adapter: str | None = None, drift: float = 1.0) -> Iterator[Answer]:
        for _ in range(count):
            query = self.query(adapter)
            tokens = self.median(query, drift) * math.exp(self.rng.gauss(0.0, self.sigma))
            yield Answer(query, max(1, round(tokens)))


@pytest.fixture
def world() -> Callable[[int], World]:
    return lambda seed: World(Random(seed))
