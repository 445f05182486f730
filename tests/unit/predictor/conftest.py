"""Prompts with a known length law, made from a seed: a word sets the length, an adapter multiplies it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import pytest

from weft_predictor.core.predictor import Observed, Query

TASKS = {"name": 24, "list": 60, "explain": 150, "essay": 450}
TOPICS = ("rivers", "engines", "bread", "history", "planets", "markets", "birds", "glass")
FACTORS = {"acme/plain": 1.0, "acme/brief": 0.3, "globex/chatty": 3.0}


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
        return Query(f"{task} something about {topic} {filler}", adapter or self.rng.choice(list(FACTORS)), 8)

    def answers(self, count: int, *, adapter: str | None = None, drift: float = 1.0) -> Iterator[Observed]:
        for _ in range(count):
            query = self.query(adapter)
            tokens = self.median(query, drift) * math.exp(self.rng.gauss(0.0, self.sigma))
            yield Observed(query, max(1, round(tokens)))


@pytest.fixture
def world() -> Callable[[int], World]:
    return lambda seed: World(Random(seed))
