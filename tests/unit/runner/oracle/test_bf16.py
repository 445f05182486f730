"""The cpu executor in bf16 against transformers + peft in fp32 on the same weights, rounded to bf16.

Every position of a text is compared, the text being the oracle's (teacher forcing). Where the oracle's two best logits
are farther apart than twice the largest error, the executor's best token has to be the oracle's; the share of positions
that are nearer is told, and bounded. The yardstick of the errors is transformers + peft in bf16 on the same texts.
"""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle import tokenizer
from quickstart import BASE, QUICKSTART, TASK_OF, long_cases
from random_models import FAMILIES, OracleModel, Rows, native_executor, random_model
from weft_kernels.cpu.errors import NativeUnavailable

pytestmark = pytest.mark.oracle

PAGES, PAGE_TOKENS = 1024, 16
Texts = dict[str, tuple[str, list[int], int]]  # key -> (adapter, tokens, the first whose prediction is compared)


@dataclass(frozen=True)
class Errors:
    """`largest` and `mean` error of a logit, `spread`: standard deviation of the oracle's logits."""

    positions: int
    largest: float
    mean: float
    spread: float
    near: int  # positions whose two best are nearer than twice the largest error
    wrong: int  # of the others, those with another best token

    def __str__(self) -> str:
        return (
            f"{self.positions} positions: logit error at most {self.largest:.4f}, mean {self.mean:.5f} "
            f"(spread {self.spread:.2f}), {self.near / self.positions:.2%} too near to judge, {self.wrong} wrong"
        )


def rounded(source: Path, to: Path, adapters: dict[str, Path]) -> OracleModel:
    """A copy of a base and adapters with every tensor in bf16."""
    for name, folder in {"base": source, **adapters}.items():
        shutil.copytree(folder, to / name)
        for file in (to / name).glob("*.safetensors"):
            save_file({key: tensor.bfloat16() for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    return OracleModel(to, tuple(adapters))


def measure(model: OracleModel, texts: Texts) -> tuple[Errors, Errors]:
    """Of the executor, and of transformers + peft, both in bf16."""
    wanted = oracle_logits(model, texts)
    ours = compare(executor_logits(model, texts), wanted)
    model.model.bfloat16()
    return ours, compare(oracle_logits(model, texts).float(), wanted)


def oracle_logits(model: OracleModel, texts: Texts) -> torch.Tensor:
    return torch.cat([model.logits(adapter, tokens)[first:] for adapter, tokens, first in texts.values()])


def executor_logits(model: OracleModel, texts: Texts) -> torch.Tensor:
    """One token of every text a step, so that every position has its logits told."""
    try:
        executor = native_executor(model, PAGES, PAGE_TOKENS, dtype="bf16")
    except NativeUnavailable as error:
        pytest.skip(f"the native library cannot be built here: {error.reason}")
    rows = Rows(model, executor, PAGES, PAGE_TOKENS)
    for key, (adapter, tokens, _) in texts.items():
        rows.add(key, tokens, adapter)
    found: dict[str, list[torch.Tensor]] = {key: [] for key in texts}
    while running := [key for key in texts if rows.left(key)]:
        for key, logits in rows.step(dict.fromkeys(running, 1)).items():
            found[key].append(logits)
    return torch.cat([torch.stack(found[key])[first:] for key, (_, _, first) in texts.items()])


def compare(found: torch.Tensor, wanted: torch.Tensor) -> Errors:
    error = (found - wanted).abs()
    best = wanted.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 2 * error.max()
    wrong = (found.argmax(-1) != wanted.argmax(-1)) & clear
    largest, mean, spread = float(error.max()), float(error.mean()), float(wanted.std())
    return Errors(len(wanted), largest, mean, spread, int((~clear).sum()), int(wrong.sum()))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bf16_are_near_those_in_fp32(tmp_path, family, record_property):
    """Random weights: no trained model is as sharp, so most positions are near ties and only the errors say much."""
    rng = random.Random(1)
    model = random_model(tmp_path / "fp32", family, 1)
    model = rounded(tmp_path / "fp32" / "base", tmp_path / "bf16", {n: tmp_path / "fp32" / n for n in model.adapters})
    names = ("", *model.adapters)
    texts: Texts = {
        f"s{i}": (names[i % len(names)], [rng.randrange(model.spec.vocab_size) for _ in range(60)], 0)
        for i in range(10)
    }
    errors, theirs = measure(model, texts)
    record_property("bf16", f"{family}: {errors}; transformers: {theirs}")
    assert errors.wrong == 0
    assert errors.mean < 0.8 * theirs.mean
    assert errors.largest < 1.2 * theirs.largest


def test_the_quickstart_in_bf16_gives_the_oracles_tokens(tmp_path, record_property):
    adapters = {task: QUICKSTART / "adapters" / task for name, task in TASK_OF.items() if name != BASE}
    model = rounded(QUICKSTART / "model", tmp_path, adapters)
    texts: Texts = {}
    for i, case in enumerate(long_cases(tuple(TASK_OF), 28, seed=5)):
        prompt = tokenizer().encode(case.prompt).ids
        answer = tokenizer().encode(case.expect, add_special_tokens=False).ids
        texts[f"s{i}"] = ("" if case.model == BASE else TASK_OF[case.model], [*prompt, *answer], len(prompt) - 1)
    errors, theirs = measure(model, texts)
    record_property("bf16", f"quickstart: {errors}; transformers: {theirs}")
    assert errors.wrong == 0
    assert errors.mean < 0.8 * theirs.mean
    assert errors.near < 0.02 * errors.positions
