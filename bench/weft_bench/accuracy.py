"""`weft bench accuracy`: what fewer bits for weights and KV, and sparse attention do to answers, beside bf16.

A text is a prompt and an answer of known tokens. Each model computes the answer's tokens one after the other, given the
prompt and the answer so far. Cross entropy and perplexity are those of the answers' tokens; `exact` is the share of
answers each of whose tokens is the likeliest, so that greedy decoding gives the answer to the last token; `tokens` is
the share of such tokens.

- quickstart: random sentences of its word list, which it copies and then ends.
- tiny, m135: random weights, and as answers 32 tokens of greedy decoding with bf16. Logits of a random model lie close
  together, and a token that differs makes an answer another one: a model that has learnt something keeps more.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.domain.model.packed import int4_kv_group
from weft_bench.cpu_shapes import SHAPES, prompts
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.model import Array, open_checkpoint, read_spec
from weft_runner.model.cpu.executor import CpuExecutor
from weft_stage.cpu_models import base_model, files
from weft_stage.errors import EngineRefused
from weft_stage.gpu_models import StepOf, step_of
from weft_stage.lines import Line, Origin

# (dtype, kv_dtype, top_share) of the cpu executor, by what cases are called; the first is the baseline. int4 KV is left
# out where heads have no groups for it.
FORMATS = {
    "bf16": ("bf16", "auto", 0.0), "int8": ("int8", "auto", 0.0), "int4": ("int4", "auto", 0.0),
    "int4 KV": ("bf16", "int4", 0.0), "best quarter of keys": ("bf16", "auto", 0.25),
    "best tenth of keys": ("bf16", "auto", 0.1),
}  # fmt: skip
QUICKSTART = "quickstart"
MODELS = (QUICKSTART, "tiny", "m135")
PAGE_TOKENS = 16
PAGES = 24  # of a row: 384 tokens
ROWS = 16  # texts of a step
PROMPT_TOKENS, ANSWER_TOKENS = 64, 32  # of random models
SENTENCE_CHARACTERS, SENTENCE_WORDS = 160, 32
BOS, EOS, SEP = 0, 1, 2  # of the quickstart's tokenizer, whose other tokens are characters
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Text:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a model's texts. `nats`: the mean over the answers' tokens of -log of its probability."""

    nats: float
    exact: float
    tokens: float


def figures(
    models: Sequence[str], n_texts: int, quickstart: Path, folder: Path, seed: int, origin: Origin, bar: Bar
) -> Iterator[Line]:
    """Measure every format of each model. `quickstart`: its folder; `folder`: of random models.

    Raises EngineRefused where the native kernels cannot be had.
    """
    try:
        library = load()
    except NativeUnavailable as error:
        raise EngineRefused(str(error)) from error
    for name in models:
        base = quickstart / "model" if name == QUICKSTART else base_model(folder, name, SHAPES[name])
        texts = sentences(quickstart, n_texts, seed) if name == QUICKSTART else None
        with bar(name, len(FORMATS)) as advanced:
            expected: Score | None = None
            for called, formats in FORMATS.items():
                if formats[1] == "int4" and not int4_kv_group(read_spec(files(base)["config.json"]).head_dim):
                    continue
                executor = _executor(library, base, *formats)
                if texts is None:
                    drawn = prompts(random.Random(seed), n_texts, PROMPT_TOKENS, SHAPES[name].vocab)
                    texts = continued(executor, drawn)
                score = scored(executor, texts)
                expected = expected or score
                case = f"{name} ({called}), {len(texts)} texts"
                for metric, unit, value, of_bf16 in (
                    ("cross entropy", "nats", score.nats, expected.nats),
                    ("perplexity", "", math.exp(score.nats), math.exp(expected.nats)),
                    ("exact", "share", score.exact, expected.exact),
                    ("tokens", "share", score.tokens, expected.tokens),
                ):
                    yield origin.line(case, metric, value, unit, baseline=of_bf16)
                advanced(1)


def sentences(quickstart: Path, count: int, seed: int) -> list[Text]:
    """Make `count` sentences to copy, as the quickstart's chat template puts them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(quickstart / "model" / "tokenizer.json"))
    words, rng = (quickstart / "words.txt").read_text(encoding="utf-8").split(), random.Random(seed)
    texts: list[Text] = []
    while len(texts) < count:
        sentence = " ".join(rng.choices(words, k=rng.randint(1, SENTENCE_WORDS)))
        if len(sentence) <= SENTENCE_CHARACTERS:
            tokens = tokenizer.encode(sentence, add_special_tokens=False).ids
            texts.append(Text((BOS, *tokens, SEP), (*tokens, EOS)))
    return texts


def continued(executor: CpuExecutor, beginnings: Sequence[Sequence[int]]) -> list[Text]:
    """Continue each of these prompts by ANSWER_TOKENS tokens of greedy decoding."""
    answers: list[list[int]] = [[] for _ in beginnings]

    def likeliest(i: int, logits: Array) -> int | None:
        answers[i].append(int(logits.argmax()))
        return answers[i][-1] if len(answers[i]) < ANSWER_TOKENS else None

    play(executor, beginnings, likeliest)
    return [Text(tuple(prompt), tuple(answer)) for prompt, answer in zip(beginnings, answers, strict=True)]


def scored(executor: CpuExecutor, texts: Sequence[Text]) -> Score:
    """Score what the executor makes of the texts' answers."""
    surprises: list[list[float]] = [[] for _ in texts]
    wrong = [0] * len(texts)

    def given(i: int, logits: Array) -> int | None:
        answer, at = texts[i].answer, len(surprises[i])
        highest = logits.max()
        surprises[i].append(float(highest + np.log(np.exp(logits - highest).sum()) - logits[answer[at]]))
        wrong[i] += int(logits.argmax()) != answer[at]
        return answer[at] if at + 1 < len(answer) else None

    play(executor, [text.prompt for text in texts], given)
    total = sum(map(len, surprises))
    return Score(sum(map(sum, surprises)) / total, wrong.count(0) / len(texts), 1 - sum(wrong) / total)


def play(executor: CpuExecutor, beginnings: Sequence[Sequence[int]], token: Callable[[int, Array], int | None]) -> None:
    """Decode after each prompt: `token(i, logits)` is the next one of prompt i, None where it has ended."""
    for begin in range(0, len(beginnings), ROWS):
        fed = dict.fromkeys(range(begin, min(begin + ROWS, len(beginnings))), 0)
        now = {i: list(beginnings[i]) for i in fed}
        while now:
            pages = {i: range((i - begin) * PAGES, (i - begin + 1) * PAGES) for i in now}
            parts = [StepOf(tokens, fed[i], pages[i], None) for i, tokens in now.items()]
            logits = executor.run(step_of(parts, PAGE_TOKENS))
            following = {i: token(i, row) for i, row in zip(now, logits, strict=True)}
            fed |= {i: fed[i] + len(tokens) for i, tokens in now.items()}
            now = {i: [next_token] for i, next_token in following.items() if next_token is not None}


def _executor(library: Library, base: Path, dtype: str, kv_dtype: str, top_share: float) -> CpuExecutor:
    found = files(base)
    checkpoint = open_checkpoint(found, read_spec(found["config.json"]))
    return CpuExecutor(
        library, checkpoint, dtype=dtype, kv_dtype=kv_dtype, top_share=top_share, threads=cpu_quota(),
        pages=ROWS * PAGES, page_tokens=PAGE_TOKENS, slots=1,
    )  # fmt: skip
