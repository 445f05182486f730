"""Every family on every executor against transformers + peft: logits at every position that a step tells.

Configurations, adapters, contexts and the way they are cut into steps are drawn from seeds.
"""

import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch

from harness.numerics import within
from harness.random_models import (
    FAMILIES,
    OracleModel,
    Rows,
    Texts,
    Verdict,
    exact,
    native_executor,
    random_base,
    random_config,
    random_model,
    random_spec,
    reference_executor,
)
from weft_runner.model import Executor, open_checkpoint

PAGES, PAGE_TOKENS = 64, 16
LOGIT_TOLERANCE = 5e-4  # logits here are up to 15
# Of our errors beside transformers in fp64 to those of transformers in fp32. With the inputs of its products permuted,
# transformers itself is at 0.93 to 1.06 (three permutations of three models of each family).
MAX_ERROR_RATIO = 2.0
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


class Oracle(NamedTuple):
    """The logits of transformers + peft for texts, in fp64 and in fp32."""

    texts: Texts
    exact: dict[str, torch.Tensor]
    single: dict[str, torch.Tensor]


def texts(model: OracleModel, seed: int, count: int) -> Texts:
    """key -> (adapter, tokens): the base and every adapter in turn, longer than any window."""
    rng, names = random.Random(seed), ("", *model.adapters)
    return {
        f"s{i}": (names[i % len(names)], [rng.randrange(model.spec.vocab_size) for _ in range(rng.randint(30, 60))])
        for i in range(count)
    }


def played(model: OracleModel, executor: Executor, seed: int, given: Texts) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Play texts in steps that mix prefill, chunks, decode, adapters: (key, position, logits [V]) of told tokens."""
    rng = random.Random(seed)
    rows = Rows(model, executor, PAGES, PAGE_TOKENS, seed)
    for key, (adapter, tokens) in given.items():
        rows.add(key, tokens, adapter)
    while running := [key for key in given if rows.left(key)]:
        rng.shuffle(running)
        told = rows.step({key: min(rows.left(key), rng.choice((1, 1, 1, 2, 7, 33))) for key in running})
        for key, logits in told.items():
            yield key, len(given[key][1]) - rows.left(key) - 1, logits


@pytest.fixture(scope="module")
def oracles(models) -> list[Oracle]:
    """Compute 16 texts of each model."""
    made = list[Oracle]()
    for seed, model in zip(SEEDS, models, strict=True):
        given = texts(model, seed, 16)
        single = model.logits_of(given)
        with exact(model.model):
            made.append(Oracle(given, model.logits_of(given), single))
    return made


@pytest.mark.numeric
def test_mixed_batches_of_any_adapters_are_as_near_fp64_as_transformers(models, oracles, make_executor):
    """A position's error is that of the row of its logits; the ratio of ours to theirs is the mean over positions.

    The mean is geometric: the few positions whose errors are large are those where the model magnifies any rounding,
    and their errors follow from the order of sums. The largest errors are bounded as such.
    """
    ours, theirs, logarithms = list[float](), list[float](), list[float]()
    for seed, model, oracle in zip(SEEDS, models, oracles, strict=True):
        for key, position, logits in played(model, make_executor(model), seed, oracle.texts):
            expected = oracle.exact[key][position]
            errors = [row - expected for row in (logits, oracle.single[key][position])]
            for largest, error in zip((ours, theirs), errors, strict=True):
                largest.append(float(error.abs().max()))
            if ours[-1] and theirs[-1]:  # no error at a first token whose embedding is 0
                logarithms.append(math.log(float(errors[0].norm() / errors[1].norm())))
    ratio = math.exp(sum(logarithms) / len(logarithms))
    print(f"\n| {models[0].spec.architecture} | {max(ours):.1e} | {ratio:.2f} of transformers' |")
    within("fp32: error beside that of transformers", ratio, MAX_ERROR_RATIO)
    within("fp32: largest error of a logit", max(ours), max(LOGIT_TOLERANCE, *theirs))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_of_every_family_computes_in_fp64_alone(family):
    """`exact` fails at a result in fp32. The seeds draw several kinds of rope."""
    for seed in SEEDS:
        model = random_base(family, seed, **random_config(family, random.Random(f"{family} {seed}")))
        tokens = torch.arange(60)[None]
        single = model(tokens).logits
        with exact(model):
            error = (model(tokens).logits - single).abs().max()
        assert 0.0 < error < LOGIT_TOLERANCE
    with exact(model), pytest.raises(AssertionError, match="expected a result in fp64"):
        torch.tensor([0.1], dtype=torch.float32)


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
        answers = greedy_answers(model, make_executor(model), prompts)
        whole = {key: (adapter, [*prompt, *answers[key]]) for key, (adapter, prompt) in prompts.items()}
        logits = model.logits_of(whole)
        of_base = model.logits_of({key: ("", tokens) for key, (adapter, tokens) in whole.items() if adapter})
        for key, (adapter, prompt) in prompts.items():
            judged = slice(len(prompt) - 1, -1)
            verdict = Verdict.of(logits[key][judged], answers[key], NEAR_TIE)
            assert not verdict.wrong, (adapter, prompt)
            total, near_ties = total + ANSWER, near_ties + verdict.near_ties
            if adapter:
                of_adapters += 1
                changed += bool(Verdict.of(of_base[key][judged], answers[key], NEAR_TIE).wrong)
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


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shards_and_stored_dtypes_are_read_as_transformers_reads_them(stored, make_executor, dtype):
    model = stored(dtype)
    assert sum(name.endswith(".safetensors") for name in model.files) > 2
    assert open_checkpoint(model.files, model.spec).layer(0).projections["q_proj"].dtype.name == dtype
    assert model.spec.dtype == dtype
    given = texts(model, 7, 8)
    expected = model.logits_of(given)
    steps = played(model, make_executor(model), 7, given)
    errors = torch.stack([logits - expected[key][position] for key, position, logits in steps])
    within("fp32: largest error of a logit", float(errors.abs().max()), LOGIT_TOLERANCE)
