"""Choosing tokens, as numpy states it: against softmax in double, and by property."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.domain.request import Sampling
from weft_runner.core import SampledToken
from weft_runner.core.sampling import LogitAdjustments, logit_adjustments
from weft_runner.model import SamplingArgs, mass_bits, masses, random_bits, sample
from weft_runner.model import sampling as sampling_module

ROW = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
finite_logits = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=60)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) of a draw's bits."""
    return random_bits(seed, choice, position) / 2**53


def tokens_of(logits: torch.Tensor, sampling: Sampling, n: int, answer: tuple[int, ...] = ()) -> list[int]:
    """What one row chooses at positions 0..n-1."""
    shifts = logit_adjustments(sampling, answer)
    chosen = sample(logits.repeat(n, 1).numpy(), [SamplingArgs(sampling, position, shifts) for position in range(n)])
    return [choice.token for choice in chosen if choice is not None]


def one(logits: torch.Tensor, sampling: Sampling, position: int = 0, answer: tuple[int, ...] = ()) -> SampledToken:
    (choice,) = sample(logits[None].numpy(), [SamplingArgs(sampling, position, logit_adjustments(sampling, answer))])
    assert choice is not None
    return choice


# ---- the draw


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 1 << 20))
def test_a_draw_is_a_pure_number_in_the_unit_interval(seed, choice, position):
    draw = uniform(seed, choice, position)
    assert 0.0 <= draw < 1.0
    assert draw == uniform(seed, choice, position)


def test_draws_of_neighbouring_positions_seeds_and_choices_are_spread_evenly():
    """Chi-squared over 16 cells, 15 degrees of freedom: 50 is beyond one in 10,000 for a fair source."""
    for draws in (
        [uniform(1, 0, i) for i in range(4000)],
        [uniform(i, 0, 1) for i in range(4000)],
        [uniform(1, i, 1) for i in range(4000)],
    ):
        counts = [0] * 16
        for draw in draws:
            counts[int(draw * 16)] += 1
        assert sum((count - 250) ** 2 / 250 for count in counts) < 50
        assert len(set(draws)) == 4000


# ---- probabilities


@given(finite_logits, st.floats(0.05, 20))
def test_masses_are_the_softmax_in_whole_numbers(values, temperature):
    row = np.array(values, np.float32)
    mass = masses(row, 1.0 / temperature)
    exact = [math.exp((float(x) - float(row.max())) * (1.0 / temperature)) * 2.0 ** mass_bits(len(row)) for x in row]
    assert all(abs(m - e) <= 0.5 + 1e-15 * e for m, e in zip(mass.tolist(), exact, strict=True))
    assert int(mass.max()) == 2 ** mass_bits(len(row))


def test_masses_are_as_exact_as_a_double_over_the_whole_range():
    row = np.append(np.linspace(-45, 0, 7000), np.linspace(-1, 0, 1000)).astype(np.float32)
    exact = np.array([math.exp(float(x)) for x in row]) * 2.0 ** mass_bits(len(row))
    assert (np.abs(masses(row, 1.0) - exact) <= 0.5 + 1e-15 * exact).all()


@given(st.integers(1, 2**31 - 1))
def test_the_masses_of_a_whole_vocabulary_never_overflow(vocab):
    assert vocab * 2 ** mass_bits(vocab) < 2**63
    assert mass_bits(vocab) <= 51, "a double holds half a unit of it"


@given(
    finite_logits, st.floats(0.05, 50), st.floats(0.01, 1.0), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1),
    st.integers(0, 100_000),
)  # fmt: skip
@settings(max_examples=4 * settings.default.max_examples)
def test_the_token_is_the_one_that_double_precision_gives_unless_the_draw_is_on_a_border(
    values, temperature, top_p, seed, choice, position
):
    """Softmax, a full stable sort and sums in double: what whole numbers may differ from by their rounding alone."""
    row = torch.tensor(values)
    probabilities = torch.softmax(row.double() / temperature, -1)
    order = torch.argsort(row, descending=True, stable=True)
    mass = torch.cumsum(probabilities[order], -1)
    kept = int(torch.searchsorted(mass, top_p * float(mass[-1])).clamp(max=len(row) - 1))
    target = uniform(seed, choice, position) * float(mass[kept])
    expected = int(order[int(torch.searchsorted(mass, target, right=True).clamp(max=kept))])
    border = min(abs(float(m) - target) for m in [torch.tensor(0.0), *mass]) < 1e-9
    cut = min(abs(float(m) - top_p) for m in mass) < 1e-9
    sampling = Sampling(seed=seed, choice=choice, temperature=temperature, top_p=top_p)
    chosen = one(row, sampling, position).token
    assert chosen == expected or border or cut


@given(finite_logits, st.integers(0, 20), st.floats(0, 2), st.integers(0, 99))
def test_log_probabilities_are_log_softmax_of_the_raw_logits(values, n_top, temperature, position):
    row = torch.tensor(values)
    expected = torch.log_softmax(row.double(), -1)
    sampling = Sampling(
        seed=5, temperature=temperature, top_p=0.9, frequency_penalty=1.0, presence_penalty=-1.5,
        logit_bias=((0, 3.0),), top_logprobs=n_top,
    )  # fmt: skip
    choice = one(row, sampling, position, (0, 0, len(values) - 1))
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(float(expected[choice.token]), abs=1e-6, rel=1e-6)
    order = torch.argsort(row, descending=True, stable=True)[:n_top].tolist()
    assert [token for token, _ in choice.logprob.top] == order
    assert [value for _, value in choice.logprob.top] == pytest.approx(expected[order].tolist(), abs=1e-6, rel=1e-6)


# ---- penalties, biases, edges


@given(
    st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=9),  # so near each other that a penalty decides
    st.lists(st.integers(0, 8), max_size=9),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    st.dictionaries(st.integers(0, 8), st.floats(-4, 4, width=32), max_size=5),
)
def test_penalties_are_what_openai_writes(values, answer, frequency, presence, bias):
    """logit - count * frequency - (count > 0) * presence + bias, at temperature 0."""
    answer = [token % len(values) for token in answer]
    bias = {token % len(values): value for token, value in bias.items()}
    expected = [
        np.float32(x + (bias.get(t, 0.0) - (answer.count(t) * frequency + (t in answer) * presence)))
        for t, x in enumerate(values)
    ]
    sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence, logit_bias=tuple(bias.items()))
    assert one(torch.tensor(values), sampling, 0, tuple(answer)).token == int(np.argmax(expected))


@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.floats(-2, 2),
    st.floats(-2, 2).filter(bool),
    st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=5),
)
def test_every_shift_is_its_bias_less_count_times_frequency_less_presence(answer, frequency, presence, bias):
    shifts = logit_adjustments(
        Sampling(frequency_penalty=frequency, presence_penalty=presence, logit_bias=tuple(bias.items())), ()
    )
    assert shifts is not None
    for n, token in enumerate(answer, start=1):
        shifts.add(token)
        said = answer[:n]
        assert dict(zip(shifts.tokens, shifts.values, strict=True)) == {
            t: bias.get(t, 0.0) - (said.count(t) * frequency + presence) if t in said else bias[t]
            for t in {*said, *bias}
        }


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.integers(0, 20),
    st.integers(0, 12),
    st.sampled_from([1.0, 2.0]),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), max_size=4),
)
@example([6], 0, 0, 1.0, [(6, 7)])
@example([6, 1], 0, 0, 1.0, [(6, 7)])
def test_scales_and_bans_are_a_function_of_prompt_and_answer(answer, cut, min_tokens, repetition, words):
    """Behind a move, too: the numbers of every token, and whether any is left, are those of the whole answer."""
    sampling = Sampling(
        repetition_penalty=repetition, min_tokens=min_tokens, stop_token_ids=(4,), bad_words=tuple(words),
        presence_penalty=0.5, logit_bias=((3, 1.5),),
    )  # fmt: skip
    moved = logit_adjustments(sampling, answer[:cut], (1, 1, 3), eos=(0,))
    assert moved is not None
    for token in answer[cut:]:
        moved.add(token)
    for token in range(10):
        ends = any(
            word[-1] == token and tuple(answer[len(answer) - len(word) + 1 :]) == word[:-1]
            for word in words
            if len(word) <= len(answer) + 1
        )
        banned = ends or (token in (0, 4) and len(answer) < min_tokens)
        bias, repeated = 1.5 if token == 3 else 0.0, token in answer or token in (1, 3)
        penalty = 0.5 if token in answer else 0.0
        scale = repetition if repeated else 1.0
        for logit in (-2.0, 0.0, 2.0):
            y = logit + bias
            y = (y / scale if y > 0 else y * scale) - penalty
            found = adjusted(moved, token, logit)
            assert found == (-math.inf if banned else pytest.approx(y))


def adjusted(shifts: LogitAdjustments, token: int, logit: float) -> float:
    """Adjust a logit as `LogitAdjustments` states it."""
    if token not in shifts.tokens:
        return logit
    place = shifts.tokens.index(token)
    y = logit
    if shifts.biases is not None and shifts.scales is not None:
        y += shifts.biases[place]
        y = y / shifts.scales[place] if y > 0 else y * shifts.scales[place]
    return y + shifts.values[place]


def test_nothing_is_kept_where_nothing_is_shifted():
    assert logit_adjustments(Sampling(temperature=1.0, top_p=0.5, top_logprobs=0), [1, 2, 3]) is None
    bias_alone = logit_adjustments(Sampling(logit_bias=((9, 1.0),)), [1, 2, 3])
    assert bias_alone is not None
    assert list(bias_alone.tokens) == [9], "without penalties what was said is not counted"


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it():
    forced = Sampling(seed=1, temperature=1.0, logit_bias=((3, 100.0),))
    assert set(tokens_of(ROW, forced, 200)) == {3}
    banned = Sampling(seed=1, temperature=1.0, logit_bias=((0, -100.0),))
    assert set(tokens_of(ROW, banned, 2000)) == {1, 2, 3}


def test_tokens_outside_the_row_are_passed_over():
    sampling = Sampling(logit_bias=((4, 100.0), (2**31 - 1, 100.0), (-1, 100.0)))
    assert one(ROW, sampling).token == 0


def test_top_p_keeps_the_smallest_set_that_reaches_it_of_what_min_p_and_top_k_leave_and_the_lower_ids_among_equals():
    reach = ((0.0, {0}), (1e-9, {0}), (0.4, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3}))
    for sampling, kept in (
        *((Sampling(top_p=top_p), kept) for top_p, kept in reach),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(min_p=0.2), {0, 1, 2}),
        (Sampling(min_p=0.2, top_k=9), {0, 1, 2}),
        (Sampling(top_k=3, top_p=0.8), {0, 1}),  # 0.5 + 0.3 of 0.95
        (Sampling(min_p=1.0), {0}),
        (Sampling(top_k=2**32 - 1), {0, 1, 2, 3}),
    ):
        drawn = tokens_of(ROW, replace(sampling, seed=5, temperature=1.0), 800)
        assert set(drawn) == kept, sampling
    ties = torch.tensor([-1.0, 3.0, 3.0, -1.0, 3.0, 3.0])
    assert set(tokens_of(ties, Sampling(seed=2, temperature=0.5, top_k=3), 300)) == {1, 2, 4}
    assert set(tokens_of(ties, Sampling(seed=2, temperature=0.5, min_p=1.0), 300)) == {1, 2, 4, 5}


def test_a_draw_on_a_border_belongs_to_the_likelier_side_of_what_follows(monkeypatch):
    """Four equal tokens hold [0, 1/4), [1/4, 1/2), ... of the mass: a draw of exactly 1/4 is the second one's."""
    row = torch.zeros(4)
    for quarter in range(4):
        for bits, token in (((quarter << 51), quarter), ((quarter + 1 << 51) - 1, quarter)):
            monkeypatch.setattr(sampling_module, "random_bits", lambda *_, bits=bits: bits)
            assert one(row, Sampling(temperature=1.0)).token == token


def test_top_p_that_is_reached_exactly_keeps_no_more():
    row = torch.zeros(4)
    for kept in (1, 2, 3, 4):
        tokens = tokens_of(row, Sampling(seed=kept, temperature=1.0, top_p=kept / 4), 200)
        assert set(tokens) == set(range(kept))
        just_above = tokens_of(row, Sampling(seed=kept, temperature=1.0, top_p=math.nextafter(kept / 4, 1.0)), 200)
        assert set(just_above) == set(range(min(kept + 1, 4)))


def test_among_equals_the_lower_id_is_likelier_to_be_kept():
    """Four equal tokens with nearly all of the probability, top_p just below half: the two lowest ids are kept."""
    row = torch.tensor([-1.0, 3.0, 3.0, -1.0, 3.0, 3.0])
    assert set(tokens_of(row, Sampling(seed=2, temperature=0.5, top_p=0.49), 300)) == {1, 2}
    assert one(row, Sampling()).token == 1
    assert one(torch.tensor([-0.0, 0.0]), Sampling()).token == 0, "both zeros are one number"


@given(finite_logits, st.floats(1e-9, 1e-4), st.integers(0, 99))
def test_a_temperature_near_zero_is_greedy_wherever_the_best_is_clear(values, temperature, position):
    row = torch.tensor([*values, -70.0])
    best, second = row.topk(2).values.tolist()
    if best - second > 0.1:
        assert one(row, Sampling(seed=1, temperature=temperature), position).token == int(row.argmax())


def test_a_huge_temperature_is_a_fair_choice():
    row = torch.tensor([30.0, -30.0, 0.0, -math.inf])
    chosen = tokens_of(row, Sampling(seed=4, temperature=1e6), 3000)
    assert [chosen.count(token) / 3000 for token in range(4)] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=0.04)


def test_impossible_tokens_are_never_drawn_and_never_told():
    row = torch.tensor([-math.inf, 1.0, -math.inf, 2.0])
    sampling = Sampling(seed=6, temperature=100.0, top_logprobs=4)
    assert set(tokens_of(row, sampling, 300)) == {1, 3}
    logprob = one(row, sampling).logprob
    assert logprob is not None
    assert [token for token, _ in logprob.top] == [3, 1]


def test_rows_without_a_finite_maximum_have_no_token_and_the_others_do():
    logits = np.array([[1, 2], [math.nan, 2], [-math.inf, -math.inf], [math.inf, 0], [2, 1]], np.float32)
    for sampling in (Sampling(), Sampling(temperature=1e-3), Sampling(presence_penalty=1.0, top_logprobs=0)):
        chosen = sample(logits, [SamplingArgs(sampling, 1, logit_adjustments(sampling, ()))] * 5)
        assert [choice and choice.token for choice in chosen] == [1, None, None, None, 0]


def test_a_bias_that_leaves_no_finite_maximum_ends_the_row_alone():
    overflow = Sampling(logit_bias=((0, 3.4e38),))
    logits = np.full((2, 2), 3e38, np.float32)
    assert sample(
        logits, [SamplingArgs(overflow, 1, logit_adjustments(overflow, ())), SamplingArgs(Sampling(), 1)]
    ) == [None, SampledToken(0)]


def test_no_rows_choose_nothing():
    assert sample(np.zeros((0, 5), np.float32), []) == []


sampled = st.builds(
    Sampling, seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 20),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 30.0]), top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]), presence_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.sampled_from([(), ((0, 5.0),), ((1, -100.0), (2, 100.0))]),
    top_logprobs=st.none() | st.integers(0, 5),
)  # fmt: skip


@given(st.lists(sampled, min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_a_row_chooses_the_same_whatever_its_batch_mates(samplings, seed, random):
    logits = np.random.default_rng(seed).normal(size=(len(samplings), 40)).astype(np.float32) * 4
    draws = [
        SamplingArgs(s, random.randrange(1000), logit_adjustments(s, [random.randrange(40) for _ in range(9)]))
        for s in samplings
    ]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    order = random.sample(range(len(draws)), len(draws))
    assert [together[i] for i in order] == sample(logits[order], [draws[i] for i in order])
