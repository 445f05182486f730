"""Choosing tokens against transformers' own warpers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from weft.domain.request import Sampling
from weft_runner.core.sampling import logit_adjustments
from weft_runner.model.sampling import SamplingArgs, sample

NO_TOKENS = torch.zeros(1, 1).long()
finite_logits = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=60)


def chosen_of(logits: torch.Tensor, sampling: Sampling, n: int) -> list[int]:
    """What one row chooses at positions 0..n-1."""
    draws = [SamplingArgs(sampling, position, logit_adjustments(sampling, ())) for position in range(n)]
    return [choice.token for choice in sample(logits.repeat(n, 1), draws) if choice is not None]


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
