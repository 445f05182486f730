"""What fewer bits for weights and KV, and sparse attention do to answers, beside bf16.

Each format computes the tokens of known answers one after the other. `exact` is the share of answers that greedy
decoding gives to the last token, `tokens` the share of tokens that are the likeliest. The quickstart's texts are random
sentences of its word list, which it copies. A random model's prompts are 64 random tokens, its answers 32 tokens of
greedy decoding in bf16. Its logits lie close together, so a model that has learnt something keeps more.
"""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weft.domain.model.packed import int4_kv_group
from weft_bench.cases import Accuracy
from weft_bench.cpu_shapes import SHAPES, prompts
from weft_bench.run import Run
from weft_kernels.cpu import NativeUnavailable, cpu_quota, load
from weft_runner.model import Array, open_checkpoint, read_spec
from weft_runner.model.cpu.executor import CpuExecutor
from weft_stage.cpu_models import base_model, cache_dir, files
from weft_stage.errors import EngineRefused
from weft_stage.gpu_models import StepOf, step_of
from weft_stage.lines import Line

# (dtype, kv_dtype, top_share) of the cpu executor; the first format is the baseline
FORMATS = {
    "bf16": ("bf16", "auto", 0.0), "int8": ("int8", "auto", 0.0), "int4": ("int4", "auto", 0.0),
    "int4 KV": ("bf16", "int4", 0.0), "best quarter of keys": ("bf16", "auto", 0.25),
    "best tenth of keys": ("bf16", "auto", 0.1),
}  # fmt: skip
UNITS = {"cross entropy": "nats", "perplexity": "", "exact": "share", "tokens": "share"}
ROWS, PAGE_TOKENS, PAGES = 16, 16, 24  # of a step, of a page, of a row
PROMPT_TOKENS, ANSWER_TOKENS = 64, 32  # of random models
SENTENCE_CHARACTERS, SENTENCE_WORDS = 160, 32  # at most
BOS, EOS, SEP = 0, 1, 2  # of the quickstart's tokenizer, whose other tokens are characters
Text = tuple[list[int], list[int]]  # prompt and answer


def figures(options: Accuracy, run: Run) -> Iterator[Line]:
    """Measure every format of each model. Raises EngineRefused without native kernels."""
    try:
        library, origin = load(), run.origin("tokenizers")
    except NativeUnavailable as error:
        raise EngineRefused(str(error)) from error
    for name in options.only:
        if name in SHAPES:
            base, rng = base_model(options.models or cache_dir(), name, SHAPES[name]), random.Random(options.seed)
            texts = [(prompt, list[int]()) for prompt in prompts(rng, options.texts, PROMPT_TOKENS, SHAPES[name].vocab)]
        else:
            base, texts = options.quickstart / "model", sentences(options.quickstart, options.texts, options.seed)
        spec, expected = read_spec(files(base)["config.json"]), dict[str, float]()
        with run.progress(name, len(FORMATS)) as advance:
            for label, (dtype, kv_dtype, top_share) in FORMATS.items():
                advance(1)
                if kv_dtype == "int4" and not int4_kv_group(spec.head_dim):
                    continue  # heads have no groups for it
                executor = CpuExecutor(
                    library, open_checkpoint(files(base), spec), dtype=dtype, kv_dtype=kv_dtype, top_share=top_share,
                    threads=cpu_quota(), pages=ROWS * PAGES, page_tokens=PAGE_TOKENS, slots=1,
                )  # fmt: skip
                scores = scored(executor, texts)
                expected, case = expected or scores, f"{name} ({label}), {len(texts)} texts"
                for metric, unit in UNITS.items():
                    yield origin.line(case, metric, scores[metric], unit, baseline=expected[metric])


def sentences(quickstart: Path, count: int, seed: int) -> list[Text]:
    """Return sentences to copy, as the quickstart's chat template puts them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(quickstart / "model" / "tokenizer.json"))
    words = (quickstart / "words.txt").read_text(encoding="utf-8").split()
    rng, texts = random.Random(seed), list[Text]()
    while len(texts) < count:
        sentence = " ".join(rng.choices(words, k=rng.randint(1, SENTENCE_WORDS)))
        if len(sentence) <= SENTENCE_CHARACTERS:
            tokens = tokenizer.encode(sentence, add_special_tokens=False).ids
            texts.append(([BOS, *tokens, SEP], [*tokens, EOS]))
    return texts


def scored(executor: CpuExecutor, texts: Sequence[Text]) -> dict[str, float]:
    """Score the executor's answers, by metric. An answer that is empty is filled by greedy decoding."""
    nats, right = [list[float]() for _ in texts], [list[bool]() for _ in texts]
    lengths = [len(answer) or ANSWER_TOKENS for _, answer in texts]

    def following(i: int, logits: Array) -> int | None:
        """Score a token of text i. Returns it, None if it is the last token."""
        answer, at, likeliest, highest = texts[i][1], len(nats[i]), int(logits.argmax()), logits.max()
        if at == len(answer):
            answer.append(likeliest)
        nats[i].append(float(highest + np.log(np.exp(logits - highest).sum()) - logits[answer[at]]))
        right[i].append(likeliest == answer[at])
        return answer[at] if at + 1 < lengths[i] else None

    for begin in range(0, len(texts), ROWS):
        inputs = {i: texts[i][0] for i in range(begin, min(begin + ROWS, len(texts)))}
        computed = dict.fromkeys(inputs, 0)
        while inputs:
            pages = {i: range((i - begin) * PAGES, (i - begin + 1) * PAGES) for i in inputs}
            parts = [StepOf(tokens, computed[i], pages[i], None) for i, tokens in inputs.items()]
            logits = executor.run(step_of(parts, PAGE_TOKENS))
            computed |= {i: computed[i] + len(tokens) for i, tokens in inputs.items()}
            tokens = {i: following(i, row) for i, row in zip(inputs, logits, strict=True)}
            inputs = {i: [token] for i, token in tokens.items() if token is not None}
    total = sum(lengths)
    entropy, exact = sum(map(sum, nats)) / total, sum(map(all, right)) / len(texts)
    return dict(zip(UNITS, (entropy, math.exp(entropy), exact, sum(map(sum, right)) / total), strict=True))
