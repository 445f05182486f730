"""Ours and the peers, in turn, on the same prompts and adapters: rates of each, and ratios of the same round.

A round asks every worker first for one token a row and then for the whole run, with prompts nobody saw before.
Prefill is the first time; the decode rate is that of the tokens after the first, over the difference of the two.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from weft_bench.cpu_decode import paired
from weft_bench.cpu_shapes import prompts
from weft_bench.peers.worker import Ran, Worker
from weft_stage.errors import WrongAdapter


@dataclass(frozen=True, slots=True)
class Load:
    """A batch: the folder of each row's adapter, prompts of `prompt_tokens`, `tokens` answers each."""

    adapters: tuple[str | None, ...]
    prompt_tokens: int
    tokens: int
    vocab: int

    @property
    def rows(self) -> int:
        return len(self.adapters)


@dataclass(frozen=True, slots=True)
class Round:
    """One worker's two runs; seconds. The same one twice where a token is all that is asked for."""

    prefill_s: float
    whole_s: float

    def step_s(self, load: Load) -> float:
        """Return the mean decode step: without the first token and what it took."""
        return (self.whole_s - self.prefill_s) / (load.tokens - 1)


def rounds(
    workers: Sequence[Worker], load: Load, repetitions: int, rng: random.Random, advanced: Callable[[int], None]
) -> dict[str, list[Round]]:
    """Run `repetitions` rounds after one that warms up, by the worker's name; each round begins with the next worker.

    Raises WrongAdapter, PeerFailed.
    """
    measured: dict[str, list[Round]] = {worker.name: [] for worker in workers}
    for number in range(repetitions + 1):
        first = prompts(rng, load.rows, load.prompt_tokens, load.vocab)
        whole = prompts(rng, load.rows, load.prompt_tokens, load.vocab)
        turn = number % len(workers)
        for worker in (*workers[turn:], *workers[:turn]):
            prefill_s = checked(worker.name, load, 1, worker.run(first, 1))
            whole_s = prefill_s
            if load.tokens > 1:
                whole_s = checked(worker.name, load, load.tokens, worker.run(whole, load.tokens))
            advanced(1)
            if number:
                measured[worker.name].append(Round(prefill_s, whole_s))
    return measured


def checked(name: str, load: Load, tokens: int, ran: Ran) -> float:
    """Return the run's seconds, once it is sure that every row got its tokens from its adapter. Raises WrongAdapter."""
    if ran.adapters != load.adapters or len(set(ran.adapters)) != len(set(load.adapters)):
        raise WrongAdapter(f"{name} ran rows with the adapters {ran.adapters}, asked for were {load.adapters}")
    if ran.tokens != (tokens,) * load.rows:
        raise WrongAdapter(f"{name} made {ran.tokens} tokens, asked for were {tokens} each")
    return ran.seconds


def best(candidates: Mapping[str, Sequence[Round]], seconds: Callable[[Round], float]) -> str:
    """Choose among several settings of a peer the one that takes the fewest of these seconds: the peer's best.

    A setting that decodes fastest need not prefill fastest: each metric has its own.
    """
    return min(candidates, key=lambda name: median(map(seconds, candidates[name])))


def times_as_fast(ours: Sequence[Round], theirs: Sequence[Round], seconds: Callable[[Round], float]) -> float:
    """Return theirs / ours, the median over the rounds."""
    return paired([seconds(round_) for round_ in theirs], [seconds(round_) for round_ in ours])
