"""The device's choices against the host's, token for token: likeliest, drawn, shifted, and rows that have none."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from weft.domain.request import Sampling
from weft_bench.gpu_check import CheckContext, Checks, Differs
from weft_runner.core.sampling import logit_adjustments
from weft_runner.model.cuda.gpu_sampler import GpuSampler
from weft_runner.model.sampling import SamplingArgs, sample

VOCABULARIES, TINY_VOCABULARIES = (257, 32000, 128256, 151936), (100,)
TEMPERATURES = (0.01, 0.7, 1.0, 3.0, 100.0)
TOP_P = (1.0, 0.9, 0.1, 1e-6)
Make = Callable[[random.Random, int, int], SamplingArgs]


def checks(context: CheckContext) -> Checks:
    for vocab in context.of(VOCABULARIES, TINY_VOCABULARIES):
        for name, make in (
            ("likeliest", _plain), ("drawn", _drawn), ("drawn from all of it", _whole), ("shifted", _shifted),
            ("scaled, banned and cut", _cut),
        ):  # fmt: skip
            yield f"vocabulary of {vocab}, {name}", partial(_same, context, vocab, make)


def _same(context: CheckContext, vocab: int, make: Make) -> None:
    rng = random.Random(vocab)
    (n_rows,) = context.of((64,), (4,))
    logits = _logits(n_rows, vocab)
    draws = [make(rng, row, vocab) for row in range(n_rows)]
    expected = [None if choice is None else choice.token for choice in sample(logits.numpy(), draws)]
    chooser = GpuSampler(n_rows, vocab, context.device)
    found = [None if token < 0 else token for token in chooser.tokens(logits.to(context.device), draws).tolist()]
    wrong = [row for row in range(n_rows) if found[row] != expected[row]]
    if wrong:
        row = wrong[0]
        raise Differs(
            f"{len(wrong)} of {n_rows} rows; the first, {row}: {found[row]}, not {expected[row]}: {draws[row]}"
        )


def _logits(n_rows: int, vocab: int) -> torch.Tensor:
    """Sharp and flat rows, rows with ties, with impossible tokens, all alike, and broken ones."""
    logits = torch.randn(n_rows, vocab, generator=torch.Generator().manual_seed(vocab))
    for row in range(n_rows):
        match row % 8:
            case 1:
                logits[row] *= 8
            case 2:
                logits[row] = (logits[row] * 2).round() / 2
            case 3:
                logits[row, vocab // 3 :] = -math.inf
            case 4:
                logits[row] = 1.5
            case 5 if row % 16 == 5:
                logits[row, row % vocab] = math.nan
            case 6 if row % 16 == 6:
                logits[row, row % vocab] = math.inf
            case _:
                logits[row] *= 3
    return logits


def _sampling(rng: random.Random, row: int, *, top_p: float) -> Sampling:
    return Sampling(seed=rng.getrandbits(63), temperature=TEMPERATURES[row % len(TEMPERATURES)], top_p=top_p)


def _plain(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    del rng, vocab
    return SamplingArgs(Sampling(), row)


def _drawn(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    del vocab
    return SamplingArgs(_sampling(rng, row, top_p=TOP_P[row % len(TOP_P)]), row)


def _whole(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    """No row cuts: the device then launches less."""
    del vocab
    return SamplingArgs(_sampling(rng, row, top_p=1.0), row)


def _shifted(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    """Biases and penalties; every third row greedy, every fourth without any."""
    base = Sampling() if row % 3 == 0 else _sampling(rng, row, top_p=0.9)
    bias = tuple((token, rng.uniform(-5, 5)) for token in rng.sample(range(vocab), min(vocab, 20)))
    if row % 4 == 0:
        return SamplingArgs(base, row)
    shifted = Sampling(
        seed=base.seed, temperature=base.temperature, top_p=base.top_p, frequency_penalty=0.5, presence_penalty=0.25,
        logit_bias=bias,
    )  # fmt: skip
    return SamplingArgs(shifted, row, logit_adjustments(shifted, rng.choices(range(vocab), k=50)))


def _cut(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    """Repetition penalty, banned tokens, min_p and top_k; some rows have one of the last two alone."""
    base = _sampling(rng, row, top_p=TOP_P[row % len(TOP_P)])
    tokens = rng.choices(range(vocab), k=60)
    cut = replace(
        base, top_k=(0, 1, 40, vocab // 2)[row % 4], min_p=(0.0, 0.05, 1.0)[row % 3], repetition_penalty=1.25,
        presence_penalty=0.5, logit_bias=((tokens[0], 3.0),), bad_words=((tokens[1],), (tokens[2], tokens[3])),
    )  # fmt: skip
    return SamplingArgs(cut, row, logit_adjustments(cut, tokens[:3], tokens[3:]))
