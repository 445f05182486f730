"""Log probabilities of prompts against transformers' log softmax over the prompt, by each executor."""

import random
from typing import Any

import pytest
import torch

from harness.native_library import native_library
from harness.ranks import base_of, settings_of, staged
from weft.domain.request import FinishReason, PromptLogprobs, Sampling, TokenLogprob
from weft_runner.core import MAX_LOGIT_ROWS, BatchLimits
from weft_runner.executors import make_executor

SIZES = {"total_pages": 64, "page_tokens": 16, "max_adapters": 8}
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
        assert [one.logprob for one in scores] == pytest.approx(own.tolist(), abs=tolerance)
        best = expected.topk(3).values
        assert [[value for _, value in one.top] for one in scores] == [
            pytest.approx(row, abs=tolerance) for row in best.tolist()
        ]
        for row, one in zip(expected, scores, strict=True):
            assert [value for _, value in one.top] == pytest.approx(
                row[[t for t, _ in one.top]].tolist(), abs=tolerance
            )


@pytest.mark.parametrize("max_batch_tokens", [512, 20])
def test_the_reference_executor_has_those_of_transformers(oracle, make_driver, max_batch_tokens):
    batch = BatchLimits(max_prefills=2, max_batch_tokens=max_batch_tokens)
    check(oracle, make_driver(oracle.world, batch=batch, max_sequences=16, **SIZES), 1e-4)


def executor_flags(**flags: Any) -> dict[str, Any]:
    return {"kv_pages": SIZES["total_pages"], "page_tokens": 16, "max_adapters": 8, **flags}


def test_the_cpu_executor_has_those_of_transformers(oracle, make_driver):
    native_library()

    def native(files: Any, *_: Any) -> Any:
        return make_executor(settings_of(**executor_flags(executor="cpu", dtype="fp32")), base_of(files))

    check(oracle, make_driver(oracle.world, make_executor=native, **SIZES), 1e-3)


@pytest.mark.slow
def test_stages_have_those_of_transformers(oracle, make_driver):
    files = {path.name: path for path in oracle.world.base.iterdir()}
    with staged(files, 2, **executor_flags()) as executor:
        check(oracle, make_driver(oracle.world, make_executor=lambda *_: executor, **SIZES), 1e-4)
