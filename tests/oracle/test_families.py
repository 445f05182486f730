"""Every family on every executor against transformers + peft: logits at every position that a step tells.

Configurations, adapters, contexts and the way they are cut into steps are drawn from seeds.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch

from harness.random_models import (
    FAMILIES,
    OracleModel,
    Rows,
    native_executor,
    random_model,
    random_spec,
    reference_executor,
)
from weft_runner.model import Executor, open_checkpoint

PAGES, PAGE_TOKENS = 64, 16
LOGIT_TOLERANCE = 5e-4  # logits here are up to 15
MAX_ERROR_RATIO = 2.0  # of our errors beside transformers in fp64 to those of transformers in fp32
NEAR_TIE = 1e-4
ANSWER = 12  # tokens
SEEDS = range(2)
# They have all families' arithmetic.
SURE = ("llama", "ministral3", "gemma2", "gemma3", "olmo3", "phi3", "starcoder2", "granite4")
EXECUTORS: dict[str, Callable[[OracleModel, int, int], Executor]] = {
    "reference": reference_executor,
    "cpu in fp32": native_executor,
}


@pytest.fixture(
    scope="module", params=[name if name in SURE else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> list[OracleModel]:
    """Written once, run by every executor."""
    return [random_model(tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed) for seed in SEEDS]


@pytest.fixture(params=EXECUTORS)
def make_executor(request: pytest.FixtureRequest) -> Callable[[OracleModel], Executor]:
    return lambda model: EXECUTORS[request.param](model, PAGES, PAGE_TOKENS)


Texts = dict[str, tuple[str, list[int]]]  # key -> (adapter, tokens)


class Oracle(NamedTuple):
    """What transformers + peft make of texts in fp64, and the largest error of their own logits in fp32."""

    given: Texts
    exact: dict[str, torch.Tensor]
    error: float


def texts(model: OracleModel, seed: int, count: int) -> Texts:
    """key -> (adapter, tokens): the base and every adapter in turn, longer than any window."""
    rng, names = random.Random(seed), ("", *model.adapters)
    return {
        f"s{i}": (names[i % len(names)], [rng.randrange(model.spec.vocab_size) for _ in range(rng.randint(30, 60))])
        for i in range(count)
    }


def oracle_logits(model: OracleModel, given: Texts) -> dict[str, torch.Tensor]:
    return {key: model.logits(adapter, tokens).double() for key, (adapter, tokens) in given.items()}


def worst_error(
    model: OracleModel, executor: Executor, seed: int, given: Texts, wanted: dict[str, torch.Tensor]
) -> float:
    """The largest difference of a logit from the wanted one, over steps that mix prefill, chunks, decode, adapters."""
    rng, worst = random.Random(seed), 0.0
    rows = Rows(model, executor, PAGES, PAGE_TOKENS, seed)
    for key, (adapter, tokens) in given.items():
        rows.add(key, tokens, adapter)
    while running := [key for key in given if rows.left(key)]:
        rng.shuffle(running)
        told = rows.step({key: min(rows.left(key), rng.choice((1, 1, 1, 2, 7, 33))) for key in running})
        for key, logits in told.items():
            position = len(given[key][1]) - rows.left(key) - 1
            worst = max(worst, float((logits.double() - wanted[key][position]).abs().max()))
    return worst


@pytest.fixture(scope="module")
def oracles(models) -> list[Oracle]:
    """The oracle's logits of 16 texts for each model, in fp64, and how far its own are in fp32."""
    found = list[Oracle]()
    for seed, model in zip(SEEDS, models, strict=True):
        given = texts(model, seed, 16)
        single = oracle_logits(model, given)
        model.model.double()
        exact = oracle_logits(model, given)
        model.model.float()
        found.append(Oracle(given, exact, max(float((single[key] - exact[key]).abs().max()) for key in given)))
    return found


def test_mixed_batches_of_any_adapters_are_as_near_fp64_as_transformers(models, oracles, make_executor):
    """The family's models are judged together: the largest of a few thousand errors is not the same on every CPU."""
    errors = [
        worst_error(model, make_executor(model), seed, oracle.given, oracle.exact)
        for seed, model, oracle in zip(SEEDS, models, oracles, strict=True)
    ]
    theirs = max(oracle.error for oracle in oracles)
    print(f"\n| {models[0].spec.architecture} | {max(errors):.1e} | {max(errors) / theirs:.2f} of transformers' |")
    assert max(errors) < MAX_ERROR_RATIO * theirs
    assert max(errors) < LOGIT_TOLERANCE


def greedy_answers(model: OracleModel, executor: Executor, prompts: Texts) -> dict[str, list[int]]:
    """key -> ANSWER tokens. All rows in one batch: the prompts, of unequal lengths, then a token of each a step."""
    rows = Rows(model, executor, PAGES, PAGE_TOKENS)
    for key, (adapter, tokens) in prompts.items():
        rows.add(key, tokens, adapter, room=ANSWER)
    answers: dict[str, list[int]] = {key: [] for key in prompts}
    for _ in range(ANSWER):
        for key, logits in rows.step({key: rows.left(key) for key in prompts}).items():
            answers[key].append(int(logits.argmax()))
            rows.extend(key, answers[key][-1])
    return answers


def test_greedy_answers_of_one_mixed_batch_are_the_oracles_token_for_token(models, make_executor):
    """Few answers of adapters may be the base's own: else rows that lost their adapters would pass."""
    total = near_ties = changed = of_adapters = 0
    for seed, model in zip(SEEDS, models, strict=True):
        prompts = texts(model, 100 + seed, 10)
        for key, answer in greedy_answers(model, make_executor(model), prompts).items():
            adapter, prompt = prompts[key]
            verdict = model.judge(adapter, prompt, answer, NEAR_TIE)
            assert not verdict.wrong, (adapter, prompt)
            total, near_ties = total + ANSWER, near_ties + verdict.near_ties
            of_adapters += adapter != ""
            changed += adapter != "" and bool(model.judge("", prompt, answer, NEAR_TIE).wrong)
    assert near_ties < 0.1 * total
    assert changed > 0.5 * of_adapters


def test_adapters_windows_and_head_sizes_of_the_seeds_matter(models):
    """Else the test above could not fail: every adapter changes the logits far more than the tolerance."""
    for model in models:
        _, tokens = texts(model, 1, 1)["s0"]
        base = model.logits("", tokens)
        for name in model.adapters:
            assert float((model.logits(name, tokens) - base).abs().max()) > 0.05


def test_a_window_is_the_token_itself_and_those_before_it(tmp_path, family, make_executor):
    """Two texts that differ only outside the window: equal logits exactly when every layer has it."""
    seed = next((seed for seed in range(50) if has_short_windows(family, seed)), None)
    if seed is None:
        assert not any(map(any, (random_spec(family, seed).windows for seed in range(10))))
        pytest.skip("the family has no windows")
    model = random_model(tmp_path / "model", family, seed, adapters=0)
    reach = sum(window - 1 for window in model.spec.windows)  # how far back layer upon layer can look
    tokens = texts(model, 2, 1)["s0"][1] + texts(model, 3, 1)["s0"][1]
    near, far = ([*tokens], [*tokens])
    last = len(tokens) - 1
    far[last - reach - 1] = (far[last - reach - 1] + 1) % model.spec.vocab_size
    near[last - reach] = (near[last - reach] + 1) % model.spec.vocab_size
    same, outside, inside = (last_logits(model, make_executor, ids) for ids in (tokens, far, near))
    assert torch.equal(same, outside)
    assert not torch.equal(same, inside)


def has_short_windows(family: str, seed: int) -> bool:
    """In all layers of `random_model` of that seed, which is not written for this."""
    windows = random_spec(family, seed).windows
    return min(windows) > 0 and sum(windows) < 50


def last_logits(model: OracleModel, make_executor: Callable[[OracleModel], Executor], tokens: list[int]):
    rows = Rows(model, make_executor(model), PAGES, PAGE_TOKENS)
    rows.add("s", tokens)
    return rows.step({"s": len(tokens)})["s"]


@pytest.fixture(scope="module")
def stored(family: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OracleModel]:
    """A model in shards, in that dtype; written once, read by every executor."""

    @cache
    def write(dtype: str) -> OracleModel:
        return random_model(tmp_path_factory.mktemp(dtype), family, 7, adapters=1, shard_size="20KB", dtype=dtype)

    return write


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shards_and_stored_dtypes_are_read_as_transformers_reads_them(stored, make_executor, dtype):
    model = stored(dtype)
    assert sum(name.endswith(".safetensors") for name in model.files) > 2
    assert open_checkpoint(model.files, model.spec).layer(0).projections["q_proj"].dtype.name == dtype
    assert model.spec.dtype == dtype
    given = texts(model, 7, 8)
    assert worst_error(model, make_executor(model), 7, given, oracle_logits(model, given)) < LOGIT_TOLERANCE
