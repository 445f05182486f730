"""Choosing tokens against transformers' own warpers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from weft.domain.request import Sampling
from weft_runner.core.sampling import logit_adjustments
from weft_runner.model import SamplingArgs, sample

NO_TOKENS = torch.zeros(1, 1).long()
finite_logits = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=60)


def chosen_of(logits: torch.Tensor, sampling: Sampling, n: int) -> list[int]:
    """What one row chooses at positions 0..n-1."""
    draws = [SamplingArgs(sampling, position, logit_adjustments(sampling, ())) for position in range(n)]
    return [choice.token for choice in sample(logits.repeat(n, 1).numpy(), draws) if choice is not None]


@given(finite_logits, st.dictionaries(st.integers(0, 59), st.floats(-100, 100, width=32), max_size=8))
def test_biases_are_those_of_transformers(values, bias):
    bias = {token: value for token, value in bias.items() if token < len(values)}
    row = torch.tensor(values)
    theirs = row[None]
    if bias:
        theirs = SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()})(NO_TOKENS, row[None])
    assert chosen_of(row, Sampling(logit_bias=tuple(bias.items())), 1) == [int(theirs.argmax())]


@pytest.mark.parametrize("temperature", [0.3, 4.0])
@pytest.mark.parametrize("top_p", [0.2, 0.55, 0.9, 0.999])
def test_the_tokens_that_top_p_keeps_are_those_of_transformers(temperature, top_p):
    row = torch.randn(24, generator=torch.Generator().manual_seed(int(1000 * top_p))) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)])
    warped = warpers(NO_TOKENS, row[None])[0]
    probabilities = torch.softmax(warped, -1)
    drawn = set(chosen_of(row, Sampling(seed=11, temperature=temperature, top_p=top_p), 3000))
    assert drawn <= set(torch.isfinite(warped).nonzero().flatten().tolist())
    assert drawn >= set((probabilities > 0.01).nonzero().flatten().tolist()), "1 % of 3,000 draws miss once in 10^13"


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=12, temperature=1.5, top_k=5),
        Sampling(seed=13, temperature=0.7, min_p=0.1),
        Sampling(seed=14, temperature=4.0, min_p=0.3, top_k=9),
        Sampling(seed=15, temperature=2.0, min_p=0.01, top_k=8, top_p=0.8),
    ],
    ids=lambda s: f"min_p {s.min_p}, top_k {s.top_k}, top_p {s.top_p}",
)
def test_the_tokens_that_min_p_top_k_and_top_p_keep_are_those_of_transformers(sampling):
    """In vLLM's order, each on what the one before has kept."""
    row = torch.randn(24, generator=torch.Generator().manual_seed(sampling.seed)) * 2
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    warped = LogitsProcessorList([*warpers, TopPLogitsWarper(sampling.top_p)])(NO_TOKENS, row[None])[0]
    kept = set(torch.isfinite(warped).nonzero().flatten().tolist())
    assert 1 < len(kept) < 24
    assert set(chosen_of(row, sampling, 5000)) == kept


tokens = st.lists(st.integers(0, 9), min_size=1, max_size=12)
rows = st.lists(st.floats(-30, 30, width=32), min_size=10, max_size=10)


@given(rows, tokens, tokens, st.sampled_from([0.5, 1.25, 2.0]))
def test_the_repetition_penalty_over_prompt_and_answer_is_that_of_transformers(values, prompt, answer, penalty):
    row = torch.tensor(values)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), row[None].clone())
    sampling = Sampling(repetition_penalty=penalty)
    assert likeliest(row, sampling, prompt, answer) == int(theirs.argmax())


@given(rows, tokens, st.lists(tokens.map(tuple), min_size=1, max_size=9))
def test_what_bad_words_ban_is_what_transformers_bans(values, answer, words):
    """Theirs takes prompt and answer for one text, so theirs gets the answer alone."""
    row = torch.tensor([*values, -1000.0])  # one that is never banned
    banned = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    theirs = banned(torch.tensor([answer]), row[None].clone())
    assert likeliest(row, Sampling(bad_words=tuple(words)), [1, 2], answer) == int(theirs.argmax())


@given(rows, tokens, st.integers(0, 14))
def test_before_min_tokens_the_answers_ends_are_banned_as_in_transformers(values, answer, min_tokens):
    row, ends = torch.tensor(values), [0, 4, 7]
    at_least = MinNewTokensLengthLogitsProcessor(2, min_tokens, torch.tensor(ends))
    theirs = at_least(torch.tensor([[1, 2, *answer]]), row[None].clone())
    sampling = Sampling(min_tokens=min_tokens, stop_token_ids=(4, 7))
    assert likeliest(row, sampling, [1, 2], answer, eos=(0,)) == int(theirs.argmax())


def likeliest(row: torch.Tensor, sampling: Sampling, prompt, answer, eos=()) -> int:
    (found,) = sample(row[None].numpy(), [SamplingArgs(sampling, 0, logit_adjustments(sampling, answer, prompt, eos))])
    assert found is not None
    return found.token
