"""Engines in turn, on the same prompts and adapters.

In a round each worker makes first one token for each row and then all of them, with prompts that are new. The first
time is prefill. The rate of decode is that of the tokens after the first, over the difference of the two.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft_bench.cpu_shapes import prompts
from weft_bench.peers.worker import Ran, Worker
from weft_stage.errors import WrongAdapter


@dataclass(frozen=True, slots=True)
class Load:
    """A batch: the folder of each row's adapter, prompts of `prompt_tokens`, answers of `tokens`."""

    adapters: tuple[str | None, ...]
    prompt_tokens: int
    tokens: int
    vocab: int

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.adapters)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of two runs of a worker. With answers of one token, both are the same run."""

    prefill_s: float
    whole_s: float

    def step_s(self, load: Load) -> float:
        """Return the mean decode step, without the first token."""
        return (self.whole_s - self.prefill_s) / (load.tokens - 1)


def rounds(
    workers: Sequence[Worker], load: Load, repetitions: int, rng: random.Random, advance: Callable[[int], None]
) -> dict[str, list[Round]]:
    """Return `repetitions` rounds of each worker, by name, after a round that warms up.

    The worker that begins changes from round to round. Raises WrongAdapter, PeerFailed.
    """
    measured: dict[str, list[Round]] = {worker.name: [] for worker in workers}
    for number in range(repetitions + 1):
        first = prompts(rng, load.rows, load.prompt_tokens, load.vocab)
        whole = prompts(rng, load.rows, load.prompt_tokens, load.vocab)
        turn = number % len(workers)
        for worker in (*workers[turn:], *workers[:turn]):
            prefill_s = whole_s = checked(worker.name, load, 1, worker.run(first, 1))
            if load.tokens > 1:
                whole_s = checked(worker.name, load, load.tokens, worker.run(whole, load.tokens))
            advance(1)
            if number:
                measured[worker.name].append(Round(prefill_s, whole_s))
    return measured


def checked(name: str, load: Load, tokens: int, ran: Ran) -> float:
    """Return the seconds of a run in which each row made its tokens with its adapter. Raises WrongAdapter."""
    expected = tuple((tokens, adapter) for adapter in load.adapters)
    if ran.rows != expected:
        raise WrongAdapter(f"{name}: expected rows of (tokens, adapter) {expected}, got {ran.rows}")
    return ran.seconds
