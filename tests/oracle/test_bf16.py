"""The cpu executor in bf16 against transformers + peft in fp32 on the same weights, rounded to bf16.

Every position of a text is compared, the text being the oracle's (teacher forcing). MAXIMUM states how far a logit of
each model may be from the oracle's. One set of texts shows that it is what is measured; on another set no logit may be
farther off, and wherever the oracle's two best logits are farther apart than twice that, the executor's best token has
to be the oracle's. The share of positions that are nearer is told, and bounded. The yardstick of the errors is
transformers + peft in bf16 on the same texts. `pytest -s` prints the rows of the table in docs/numerics.md.
"""

import math
import random
import re
import shutil
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.numerics import within
from harness.quickstart import BASE, QUICKSTART, TASK_OF, tasks, tokenizer
from harness.random_models import FAMILIES, OracleModel, Rows, native_executor, random_model

PAGES, PAGE_TOKENS = 1024, 16
# Twice the largest error of both sets of texts: CPUs of other numerics classes sum in other orders.
MAXIMUM = {
    "llama": 0.82, "mistral": 0.28, "qwen2": 0.31, "qwen3": 0.29, "granite": 0.31, "smollm3": 0.48, "olmo2": 0.17,
    "olmo3": 0.34, "gemma2": 0.27, "gemma3": 1.4, "phi3": 0.1, "starcoder2": 1.0, "granite4": 0.21, "ministral3": 0.96,
    "quickstart": 0.7,
}  # fmt: skip
MAX_STATED = (
    3.0  # beside the largest error of transformers in bf16: ours is below 1.0 times that, the maximum twice ours
)
SEEDS = {"smollm3": 4, "granite4": 2}  # of models; 1 draws one of which transformers itself is far off


@dataclass(frozen=True, slots=True)
class Text:
    """`first`: the position of the first token whose prediction is compared."""

    adapter: str
    tokens: list[int]
    first: int = 0


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of logits: the largest and the mean difference from the oracle's."""

    largest: float
    mean: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Positions of texts, by a maximum error that was stated before."""

    positions: int
    near: int  # the oracle's two best are nearer than twice the maximum
    wrong: int  # of the others, those with another best token
    largest: float  # error of a logit


@dataclass(frozen=True, slots=True)
class Compared:
    """The executor's and transformers' own errors in bf16 on the texts for measuring, and the verdict on the others."""

    ours: Errors
    theirs: Errors
    judged: Judged

    def row(self, name: str) -> str:
        """Return the row of the table in docs/numerics.md."""
        ours, theirs, judged = self.ours, self.theirs, self.judged
        return (
            f"| {name} | {MAXIMUM[name]} | {ours.largest:.4f} | {theirs.largest:.4f} | {ours.mean:.5f} "
            f"| {theirs.mean:.5f} | {judged.near / judged.positions:.2%} of {judged.positions} | {judged.wrong} |"
        )


def rounded(source: Path, to: Path, adapters: dict[str, Path]) -> OracleModel:
    """Copy a base and adapters with every tensor in bf16."""
    for name, folder in {"base": source, **adapters}.items():
        shutil.copytree(folder, to / name)
        for file in (to / name).glob("*.safetensors"):
            save_file({key: tensor.bfloat16() for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    return OracleModel(to, tuple(adapters))


def compare(name: str, model: OracleModel, measured: list[Text], judged: list[Text]) -> Compared:
    wanted, others = oracle_logits(model, measured), oracle_logits(model, judged)
    found = executor_logits(model, [*measured, *judged])
    verdict = judge(torch.cat(found[len(measured) :]), others, MAXIMUM[name])
    model.model.bfloat16()
    theirs = errors(oracle_logits(model, measured).float(), wanted)
    compared = Compared(errors(torch.cat(found[: len(measured)]), wanted), theirs, verdict)
    print(f"\n{compared.row(name)}")
    return compared


def oracle_logits(model: OracleModel, texts: list[Text]) -> torch.Tensor:
    return torch.cat([model.logits(text.adapter, text.tokens)[text.first :] for text in texts])


def executor_logits(model: OracleModel, texts: list[Text]) -> list[torch.Tensor]:
    """Feed one token of every text a step, so that every position has its logits told."""
    executor = native_executor(model, PAGES, PAGE_TOKENS, dtype="bf16")
    rows = Rows(model, executor, PAGES, PAGE_TOKENS)
    keys = [f"s{i}" for i in range(len(texts))]
    for key, text in zip(keys, texts, strict=True):
        rows.add(key, text.tokens, text.adapter)
    found: dict[str, list[torch.Tensor]] = {key: [] for key in keys}
    while running := [key for key in keys if rows.left(key)]:
        for key, logits in rows.step(dict.fromkeys(running, 1)).items():
            found[key].append(logits)
    return [torch.stack(found[key])[text.first :] for key, text in zip(keys, texts, strict=True)]


def errors(found: torch.Tensor, wanted: torch.Tensor) -> Errors:
    error = (found - wanted).abs()
    return Errors(float(error.max()), float(error.mean()))


def judge(found: torch.Tensor, wanted: torch.Tensor, maximum: float) -> Judged:
    """Judge logits [positions, V]."""
    best = wanted.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 2 * maximum
    wrong = (found.argmax(-1) != wanted.argmax(-1)) & clear
    return Judged(len(wanted), int((~clear).sum()), int(wrong.sum()), errors(found, wanted).largest)


def assert_as_stated(compared: Compared, maximum: float) -> None:
    """A maximum that is stated larger than it has to be is far above transformers' own errors."""
    ours, theirs, judged = compared.ours, compared.theirs, compared.judged
    for largest in (ours.largest, judged.largest):
        within("bf16: largest error beside the stated maximum", largest / maximum, 1.0)
    within("bf16: stated maximum beside transformers' largest error", maximum / theirs.largest, MAX_STATED)
    within("bf16: mean error beside that of transformers", ours.mean / theirs.mean, 1.0)
    assert judged.wrong == 0


def random_texts(model: OracleModel, seed: int, count: int) -> list[Text]:
    """Draw texts of 60 tokens; the base and every adapter in turn."""
    rng, names = random.Random(seed), ("", *model.adapters)
    tokens = range(model.spec.vocab_size)
    return [Text(names[i % len(names)], rng.choices(tokens, k=60)) for i in range(count)]


def quickstart_texts(count: int, seed: int) -> list[Text]:
    """Return sentences with their right answers, of which the answers and their ends are compared."""
    sentences = (text for text in tasks().sentences(seed, held_out=True) if len(text) >= 110 and "  " not in text)
    texts: list[Text] = []
    for name, sentence in zip(islice(cycle(TASK_OF), count), sentences, strict=False):
        prompt = tokenizer().encode(sentence).ids
        answer = tokenizer().encode(tasks().expected(TASK_OF[name], sentence), add_special_tokens=False).ids
        texts.append(Text("" if name == BASE else TASK_OF[name], [*prompt, *answer], len(prompt) - 1))
    return texts


@pytest.mark.numeric
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bf16_are_near_those_in_fp32(tmp_path, family):
    """Random weights are blunter than any trained model's, and many positions near ties: docs/numerics.md says more."""
    made = random_model(tmp_path / "fp32", family, SEEDS.get(family, 1))
    model = rounded(tmp_path / "fp32" / "base", tmp_path / "bf16", {n: tmp_path / "fp32" / n for n in made.adapters})
    compared = compare(family, model, random_texts(model, 1, 10), random_texts(model, 2, 10))
    assert_as_stated(compared, MAXIMUM[family])


@pytest.mark.numeric
@pytest.mark.slow
def test_the_quickstart_in_bf16_gives_the_oracles_tokens(tmp_path):
    adapters = {task: QUICKSTART / "adapters" / task for name, task in TASK_OF.items() if name != BASE}
    model = rounded(QUICKSTART / "model", tmp_path, adapters)
    compared = compare("quickstart", model, quickstart_texts(14, seed=5), quickstart_texts(28, seed=6))
    assert_as_stated(compared, MAXIMUM["quickstart"])
    within("bf16: excluded positions of a trained model", compared.judged.near / compared.judged.positions, 0.02)


def test_the_page_states_the_same_maxima():
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    assert dict(re.findall(r"(?m)^\| (\w+) \| ([\d.]+) \|", page)) == {k: str(v) for k, v in MAXIMUM.items()}


def test_judging_finds_another_best_token_and_logits_that_are_too_far_off():
    wanted = torch.tensor([[3.0, 1.0, 0.0], [3.0, 2.9, 0.0], [3.0, 1.0, 0.0]])
    shift = torch.tensor([[0.0, 0.4, 0.0], [-0.4, 0.4, 0.0], [0.0, 0.0, 0.0]])
    assert judge(wanted + shift, wanted, 0.5) == Judged(positions=3, near=1, wrong=0, largest=pytest.approx(0.4))
    shift[2, 1] = 2.5
    assert judge(wanted + shift, wanted, 0.5) == Judged(positions=3, near=1, wrong=1, largest=pytest.approx(2.5))
    shift[0, 2] = torch.nan
    assert math.isnan(judge(wanted + shift, wanted, 0.5).largest)
