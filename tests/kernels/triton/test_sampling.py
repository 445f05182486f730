"""The device's choices are those of the host's chooser in numpy, token for token."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.on_device import sized
from weft.domain.request import Sampling
from weft_kernels.triton import sampling
from weft_runner.core.sampling import logit_adjustments
from weft_runner.core.token_mask import token_mask
from weft_runner.model import SamplingArgs, random_bits, sample
from weft_runner.model.cuda.gpu_sampler import GpuSampler

EXAMPLES = settings.default.max_examples  # `make test-long` has more
MAX_ROWS = sized(gpu=4, interpreted=2)
NAN, INF = math.nan, math.inf

pytestmark = pytest.mark.gpu


# ---- argmax


def likeliest(logits: torch.Tensor, device: torch.device) -> tuple[list[int], list[float]]:
    tokens = torch.full((len(logits),), -7, dtype=torch.int32, device=device)
    peaks = torch.empty(len(logits), device=device)
    sampling.argmax(logits.to(device), tokens, peaks)
    return tokens.tolist(), peaks.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 100, sampling.SHARE, sampling.SHARE + 1, 2 * sampling.SHARE + 77])
def test_the_likeliest_is_found_wherever_it_is(vocab: int, device: torch.device) -> None:
    places = sorted({0, vocab // 2, vocab - 1})
    logits = torch.randn(len(places), vocab, generator=torch.Generator().manual_seed(0))
    for row, place in enumerate(places):
        logits[row, place] = 50.0
    assert likeliest(logits, device) == (places, [50.0] * len(places))


def test_the_lowest_id_is_the_likeliest_among_equals(device: torch.device) -> None:
    logits = torch.full((4, sampling.SHARE + 10), -3.0)
    logits[1, [5, sampling.SHARE + 2]] = 2.0
    logits[2, 1:] = torch.tensor([0.0, -0.0]).repeat(sampling.SHARE)[: sampling.SHARE + 9]
    logits[3, 7:] = -0.0
    logits[3, 9] = 0.0
    assert likeliest(logits, device) == ([0, 5, 1, 7], [-3.0, 2.0, 0.0, 0.0])


def test_rows_of_any_stride_are_read(device: torch.device) -> None:
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(1))
    assert likeliest(logits[:, 3:80], device)[0] == logits[:, 3:80].argmax(dim=1).tolist()


BROKEN = {
    "NaN": [1.0, NAN, 2.0],
    "negative NaN": [1.0, -NAN, 2.0],
    "NaN beside infinity": [INF, NAN, 2.0],
    "infinity": [1.0, INF, 2.0],
    "nothing possible": [-INF, -INF, -INF],
}


def test_rows_without_a_finite_largest_have_no_token_and_the_others_do(device: torch.device) -> None:
    logits = torch.tensor([*BROKEN.values(), [-INF, 3.0, -INF], [-3e38, 3e38, 1e-45]])
    tokens, peaks = likeliest(logits, device)
    assert tokens == [-1] * len(BROKEN) + [1, 1]
    assert peaks == pytest.approx([NAN, NAN, NAN, INF, -INF, 3.0, 3e38], nan_ok=True)


# ---- draw


def drawn(
    logits: torch.Tensor, draws: Sequence[SamplingArgs], device: torch.device, listed: int = sampling.LISTED
) -> list[int | None]:
    """Choose tokens on the device, as an executor would ask for it."""
    assert len(logits) == len(draws)
    logits = logits.to(device)
    places = [
        (row, token, value)
        for row, draw in enumerate(draws)
        if draw.shifts is not None
        for token, value in zip(draw.shifts.tokens, draw.shifts.values, strict=True)
    ]
    if places:
        rows, tokens, values = zip(*places, strict=True)
        shifted = torch.empty_like(logits)
        sampling.shift(shifted, logits, put(rows, device), put(tokens, device), put(values, device, torch.float64))
        logits = shifted
    bits = [random_bits(draw.sampling.seed, draw.sampling.choice, draw.position) for draw in draws]
    chosen = torch.full((len(draws),), -7, dtype=torch.int32, device=device)
    sampling.DeviceSampler(len(draws) + 1, logits.shape[1], device, listed).draw(
        logits,
        chosen,
        put(bits, device, torch.int64),
        put([draw.sampling.temperature for draw in draws], device, torch.float64),
        put([draw.sampling.top_p for draw in draws], device, torch.float64),
        nucleus=any(draw.sampling.top_p < 1.0 for draw in draws),
    )
    return [None if token == -1 else token for token in chosen.tolist()]


def put(x: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(x, dtype=dtype, device=device)


def assert_same(
    logits: torch.Tensor, draws: list[SamplingArgs], device: torch.device, listed: int = sampling.LISTED
) -> None:
    expected = [None if choice is None else choice.token for choice in sample(logits.numpy(force=True), draws)]
    assert drawn(logits, draws, device, listed) == expected


ROWS = {
    "normal": lambda x: x * 3,
    "narrow": lambda x: x * 1e-3,
    "wide": lambda x: x * 1e3,
    "beyond": lambda x: x * 1e37,
    "many ties": lambda x: np.round(x),
    "all equal": lambda x: x * 0 + 1.5,
    "zeros of both signs": lambda x: np.copysign(0.0, x),
    "round zero": lambda x: np.round(x) * 1e-3 * x,
    "denormals": lambda x: x * 1e-41,
    "half impossible": lambda x: np.where(x < 0, -np.inf, x),
    "one possible": lambda x: np.where(x < x.max(axis=1, keepdims=True), -np.inf, x),
    "one likely": lambda x: np.where(x < x.max(axis=1, keepdims=True), x, x + 50),
    "exponential tail": lambda x: -np.abs(x) * 20,
    "a broken row": lambda x: np.where(np.arange(len(x))[:, None] == 0, np.nan, x),
}
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 20.0]) | st.floats(0.05, 2.0),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 0.9, 1.0 - 2**-53, 1.0]) | st.floats(0.0, 1.0),
)
shifted_samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 1.0]) | st.floats(0.05, 2.0),
    top_p=st.sampled_from([0.5, 1.0]),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(
        st.integers(-2, 45), st.floats(-100, 100) | st.sampled_from([1e39, -1e39, 1e-20]), max_size=5
    ).map(lambda bias: tuple(bias.items())),
)


cut_samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 1e-6, 1.0]) | st.floats(0.05, 20.0),
    top_p=st.sampled_from([0.5, 1.0]),
    top_k=st.sampled_from([0, 0, 2**32 - 1]) | st.integers(1, 50),
    min_p=st.sampled_from([0.0, 0.0, 1e-30, 1.0]) | st.floats(0, 1),
    repetition_penalty=st.just(1.0) | st.floats(0.1, 10),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.dictionaries(st.integers(0, 39), st.floats(-9, 9), max_size=3).map(lambda bias: tuple(bias.items())),
    min_tokens=st.sampled_from([0, 4]),
    bad_words=st.sampled_from([(), ((3,), (1, 2))]),
)


def logits_of(kind: str, n_rows: int, vocab: int, seed: int) -> torch.Tensor:
    made = ROWS[kind](np.random.default_rng(seed).standard_normal((n_rows, vocab)))
    return torch.from_numpy(np.asarray(made, np.float32))


@pytest.mark.parametrize("kind", ROWS)
@settings(max_examples=max(1, EXAMPLES // 16))
@given(
    samplings=st.lists(samplings, min_size=1, max_size=MAX_ROWS),
    vocab=st.integers(1, 500) | st.sampled_from([sampling.SHARE, sampling.SHARE + 1]),
    seed=st.integers(0, 2**32 - 1),
    position=st.integers(0, 10**6),
)
def test_the_device_draws_what_numpy_draws(
    kind: str, samplings: list[Sampling], vocab: int, seed: int, position: int, device: torch.device
) -> None:
    draws = [SamplingArgs(sampling, position + row) for row, sampling in enumerate(samplings)]
    assert_same(logits_of(kind, len(draws), vocab, seed), draws, device)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # biases that leave no float
@settings(max_examples=EXAMPLES // 4)
@given(
    samplings=st.lists(shifted_samplings, min_size=1, max_size=3),
    answer=st.lists(st.integers(0, 39), max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_logits_are_shifted_as_numpy_shifts_them(
    samplings: list[Sampling], answer: list[int], seed: int, device: torch.device
) -> None:
    draws = [
        SamplingArgs(sampling, row, logit_adjustments(sampling, answer[row:])) for row, sampling in enumerate(samplings)
    ]
    assert_same(logits_of("normal", len(draws), 40, seed), draws, device)


@pytest.mark.parametrize("kind", ROWS)
@settings(max_examples=max(1, EXAMPLES // 16))
@given(
    samplings=st.lists(cut_samplings, min_size=1, max_size=MAX_ROWS),
    answer=st.lists(st.integers(0, 39), max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_scaled_banned_and_cut_is_what_numpy_has(
    kind: str, samplings: list[Sampling], answer: list[int], seed: int, device: torch.device
) -> None:
    draws = [
        SamplingArgs(sampling, row, logit_adjustments(sampling, answer[row:], (7, 8, 7), eos=(5,)))
        for row, sampling in enumerate(samplings)
    ]
    logits = logits_of(kind, len(draws), 40, seed)
    before = logits.clone()
    found = GpuSampler(len(draws), 40, device).tokens(logits.to(device), draws).tolist()
    assert found == [-1 if choice is None else choice.token for choice in sample(logits.numpy(force=True), draws)]
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "log probabilities are of the raw logits"


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("beside", [{}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_k": 40}, {"min_p": 0.5}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_a_row_that_is_broken_has_no_token_however_it_is_cut(
    cut: Any, beside: Any, broken: float, device: torch.device
) -> None:
    logits = logits_of("normal", 3, 100, 0)
    logits[1, 6] = broken
    draws = [SamplingArgs(Sampling(seed=row, temperature=0.7, **cut), row) for row in range(2)]
    draws.append(SamplingArgs(Sampling(seed=2, temperature=0.7, **beside), 2))
    found = GpuSampler(3, 100, device).tokens(logits.to(device), draws).tolist()
    assert found[1] == -1
    assert found == [-1 if choice is None else choice.token for choice in sample(logits.numpy(), draws)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all equal", "narrow", "many ties", "normal"])
def test_a_bin_with_more_tokens_than_are_listed_is_searched_in_the_row(kind: str, device: torch.device) -> None:
    draws = [SamplingArgs(Sampling(seed=row, temperature=1.0, top_p=p), 1) for row, p in enumerate([0.3, 0.95, 1.0])]
    assert_same(logits_of(kind, len(draws), 1500, 0), draws, device, listed=16)


def test_a_vocabulary_as_large_as_a_models_is_drawn_from_alike(device: torch.device) -> None:
    draws = [SamplingArgs(Sampling(seed=row, temperature=1.0, top_p=0.9 + 0.1 * row), 5) for row in range(2)]
    assert_same(logits_of("normal", 2, 128_256, 4), draws, device)


def test_scratch_that_was_used_before_does_not_show(device: torch.device) -> None:
    sampler, vocab = sampling.DeviceSampler(3, 300, device), 300
    for seed in range(3):
        logits = logits_of("normal", 3 - seed, vocab, seed)
        draws = [SamplingArgs(Sampling(seed=seed, temperature=0.8, top_p=0.7), row) for row in range(len(logits))]
        chosen = torch.full((len(draws),), -7, dtype=torch.int32, device=device)
        sampler.draw(
            logits.to(device),
            chosen,
            put([random_bits(seed, 0, row) for row in range(len(draws))], device, torch.int64),
            put([0.8] * len(draws), device, torch.float64),
            put([0.7] * len(draws), device, torch.float64),
        )
        assert chosen.tolist() == [choice and choice.token for choice in sample(logits.numpy(force=True), draws)]


@pytest.mark.parametrize("vocab", [1, 31, 33, 300, sampling.SHARE + 33])
def test_masked_rows_draw_what_numpy_draws_beside_rows_without_a_mask(vocab: int, device: torch.device) -> None:
    numbers = np.random.default_rng(vocab)
    biased = Sampling(seed=5, temperature=1.0, logit_bias=((0, 1.5),))
    draws = [
        SamplingArgs(s, 3, logit_adjustments(s, ()), token_mask(allowed, None, vocab))
        for s, allowed in (
            (Sampling(), ()),
            (Sampling(), [vocab - 1]),
            (Sampling(seed=1, temperature=1.0, top_p=0.9), np.flatnonzero(numbers.random(vocab) < 0.2).tolist()),
            (Sampling(seed=2, temperature=0.7), ()),
            (biased, np.flatnonzero(numbers.random(vocab) < 0.6).tolist()),
            (Sampling(), [0]),
        )
    ]
    logits = logits_of("normal", len(draws), vocab, 1)
    logits[5, 0] = -INF
    found = GpuSampler(len(draws), vocab, device).tokens(logits.to(device), draws).tolist()
    assert found == [-1 if choice is None else choice.token for choice in sample(logits.numpy(force=True), draws)]
    assert found[5] == -1


def test_padding_and_tokens_outside_the_vocabulary_are_passed_over(device: torch.device) -> None:
    logits = torch.arange(10.0, device=device).view(2, 5)
    shifted = torch.empty_like(logits)
    rows, tokens = put([0, -1, 1, 1, 0], device), put([1, 2, -1, 5, 4], device)
    sampling.shift(shifted, logits, rows, tokens, put([0.5, 1.0, 1.0, 1.0, -2.0], device, torch.float64))
    assert shifted.tolist() == [[0.0, 1.5, 2.0, 3.0, 2.0], [5.0, 6.0, 7.0, 8.0, 9.0]]
    sampling.shift(shifted, logits, rows[:0], tokens[:0], put([], device, torch.float64))
    assert torch.equal(shifted, logits)


# ---- whole batches over a model's vocabulary

TEMPERATURES = (0.01, 0.7, 1.0, 3.0, 100.0)
TOP_P = (1.0, 0.9, 0.1, 1e-6)
Make = Callable[[random.Random, int, int], SamplingArgs]  # of a row and a vocabulary


def mixed_logits(n_rows: int, vocab: int) -> torch.Tensor:
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


def random_sampling(rng: random.Random, row: int, *, top_p: float) -> Sampling:
    return Sampling(seed=rng.getrandbits(63), temperature=TEMPERATURES[row % len(TEMPERATURES)], top_p=top_p)


def plain_args(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    return SamplingArgs(Sampling(), row)


def drawn_args(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    return SamplingArgs(random_sampling(rng, row, top_p=TOP_P[row % len(TOP_P)]), row)


def whole_args(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    """No row cuts: the device then launches less."""
    return SamplingArgs(random_sampling(rng, row, top_p=1.0), row)


def shifted_args(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    """Biases and penalties; every third row greedy, every fourth without any."""
    base = Sampling() if row % 3 == 0 else random_sampling(rng, row, top_p=0.9)
    bias = tuple((token, rng.uniform(-5, 5)) for token in rng.sample(range(vocab), min(vocab, 20)))
    if row % 4 == 0:
        return SamplingArgs(base, row)
    shifted = Sampling(
        seed=base.seed, temperature=base.temperature, top_p=base.top_p, frequency_penalty=0.5, presence_penalty=0.25,
        logit_bias=bias,
    )  # fmt: skip
    return SamplingArgs(shifted, row, logit_adjustments(shifted, rng.choices(range(vocab), k=50)))


def cut_args(rng: random.Random, row: int, vocab: int) -> SamplingArgs:
    """Repetition penalty, banned tokens, min_p and top_k; some rows have one of the last two alone."""
    base = random_sampling(rng, row, top_p=TOP_P[row % len(TOP_P)])
    tokens = rng.choices(range(vocab), k=60)
    cut = replace(
        base, top_k=(0, 1, 40, vocab // 2)[row % 4], min_p=(0.0, 0.05, 1.0)[row % 3], repetition_penalty=1.25,
        presence_penalty=0.5, logit_bias=((tokens[0], 3.0),), bad_words=((tokens[1],), (tokens[2], tokens[3])),
    )  # fmt: skip
    return SamplingArgs(cut, row, logit_adjustments(cut, tokens[:3], tokens[3:]))


BATCHES: dict[str, Make] = {
    "likeliest": plain_args,
    "drawn": drawn_args,
    "drawn from all of it": whole_args,
    "shifted": shifted_args,
    "scaled, banned and cut": cut_args,
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("vocab", sized(gpu=(257, 32000, 128256, 151936), interpreted=(100,)))
def test_batches_of_all_sorts_of_rows_draw_what_numpy_draws(vocab: int, batch: str, device: torch.device) -> None:
    rng, n_rows = random.Random(vocab), sized(gpu=64, interpreted=8)
    logits = mixed_logits(n_rows, vocab)
    draws = [BATCHES[batch](rng, row, vocab) for row in range(n_rows)]
    found = GpuSampler(n_rows, vocab, device).tokens(logits.to(device), draws).tolist()
    assert found == [-1 if choice is None else choice.token for choice in sample(logits.numpy(), draws)]
