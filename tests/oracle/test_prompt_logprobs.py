"""Log probabilities of prompts against transformers' log softmax over the prompt, by each executor."""

import random
from typing import Any

import pytest
import torch

from harness.numerics import near
from weft.domain.request import FinishReason, PromptLogprobs, Sampling, TokenLogprob
from weft_runner.core.batch import MAX_LOGIT_ROWS

SCORED = Sampling(prompt_logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle(make_oracle, tmp_path_factory):
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
    return make_oracle(tmp_path_factory.mktemp("oracle"), "llama", 5, num_key_value_heads=1, **sizes)


def scores_of(driver: Any, key: str) -> list[TokenLogprob]:
    """Return the scores of a prompt from its second token on, each position once and in order."""
    found: list[TokenLogprob] = []
    for event in driver.events:
        if isinstance(event, PromptLogprobs) and event.request_id == key:
            assert event.first == len(found) + 1
            assert len(event.logprobs) <= MAX_LOGIT_ROWS
            found.extend(event.logprobs)
    return found


def check(oracle: Any, driver: Any, tolerance: float) -> None:
    """Check prompts of several adapters, one longer than a chunk, one of a token, beside a sequence that decodes."""
    rng, prompts = random.Random(3), dict[str, tuple[str, list[int]]]()
    driver.post(driver.request("beside", [5, 6], 30, sampling=Sampling(ignore_eos=True)))
    for n_tokens, adapter in ((2, ""), (1, "a1"), (100, "a3"), (33, ""), (40, "a2")):
        prompt = [rng.randrange(oracle.vocab_size) for _ in range(n_tokens)]
        prompts[f"{n_tokens}"] = adapter, prompt
        driver.post(driver.request(f"{n_tokens}", prompt, n_tokens % 3, adapter, sampling=SCORED))
    driver.finish()
    for key, (adapter, prompt) in prompts.items():
        expected = torch.log_softmax(oracle.logits(adapter, prompt).double(), -1)[:-1]
        scores, ending = scores_of(driver, key), driver.ending(key)
        assert ending.finish is FinishReason.LENGTH
        assert len(driver.answer(key)) == len(prompt) % 3
        own = expected[range(len(prompt) - 1), prompt[1:]]
        near("fp32: log probabilities of prompts", [one.logprob for one in scores], own, tolerance)
        for row, one in zip(expected, scores, strict=True):
            told = [value for _, value in one.top]
            near("fp32: log probabilities of prompts", told, row.topk(3).values, tolerance)
            near("fp32: log probabilities of prompts", told, row[[t for t, _ in one.top]], tolerance)


@pytest.mark.numeric
def test_every_executor_has_those_of_transformers(oracle, drive_each):
    check(oracle, *drive_each(oracle.world))
