"""What masks of structured outputs add to decode steps: the same batch with and without a grammar, in turn.

The model is random, so its tokenizer is made: byte-level, with every byte, and words of letters and digits as long as
real vocabularies have them. Both grammars are JSON schemas of which no answer ends within the run, so that every row
has a mask in every step: one long string, whose masks have most tokens, and records with names, numbers and choices.
"""

import json
from collections.abc import Iterator
from itertools import count, islice, product
from pathlib import Path
from statistics import median
from string import ascii_lowercase, digits
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from llguidance import LLMatcher

from weft_bench.cpu_context import Context
from weft_bench.cpu_decode import PROMPT_TOKENS, alternating, paired, steady
from weft_bench.cpu_engine import Ask, Sizes, Subject
from weft_bench.cpu_shapes import prompts
from weft_stage.lines import Line

ROWS = 32
SPECIAL = ("<unk>", "<s>", "</s>")
NONE = "no grammar"
SCHEMAS: dict[str, dict[str, Any]] = {
    "a string": {"type": "object", "properties": {"text": {"type": "string", "minLength": 5000}}, "required": ["text"]},
    "records": {
        "type": "array",
        "minItems": 1000,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "role": {"enum": ["user", "owner", "guest"]},
            },
            "required": ["name", "age", "role"],
            "additionalProperties": False,
        },
    },
}
TARGET = "<= 0.05"


def masks_case(context: Context) -> Iterator[Line]:
    """Measure decode steps of base rows, all without a grammar and all with one, in turn."""
    amounts, model = context.options.amounts, context.model
    rows = min(ROWS, max(amounts.batches))
    grammars = {NONE: "", **{name: LLMatcher.grammar_from_json_schema(schema) for name, schema in SCHEMAS.items()}}
    sizes = Sizes(rows=rows, slots=1, context_tokens=PROMPT_TOKENS + amounts.tokens)
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        path = Path(scratch) / "tokenizer.json"
        path.write_text(tokenizer(model.shape.vocab), encoding="utf-8")
        with context.subject(sizes, adapter_bytes=0.0, others={path.name: path}) as subject:
            subject.built.grammars.steps_wait = True  # every row is in every step, however busy the machine is
            for grammar in filter(None, grammars.values()):
                subject.built.grammars.begin(grammar, ())  # compiled: else rows begin one by one
            rounds = (amounts.repetitions + 1) * len(grammars)
            with context.bar(f"{model.name}: masks", rounds) as advanced:

                def run(name: str) -> float:
                    step_s = _step_s(context, subject, grammars[name], rows)
                    advanced(1)
                    return step_s

                steps = alternating(list(grammars), amounts.repetitions, run)
            reporter, plain_s = context.on(subject), median(steps[NONE])
            for name in SCHEMAS:
                case, step_s = f"batch {rows}, {name}", median(steps[name])
                yield reporter.line(case, "decode step", step_s * 1e3, "ms", baseline=plain_s * 1e3)
                share = paired(steps[name], steps[NONE]) - 1
                target = TARGET if (model.name, rows) == ("m135", ROWS) else None
                yield reporter.line(case, "masks, of a step without", share, "share", target=target)


def _step_s(context: Context, subject: Subject, grammar: str, rows: int) -> float:
    made = prompts(context.model.rng, rows, PROMPT_TOKENS, context.model.shape.vocab)
    asks = [Ask("", prompt, context.options.amounts.tokens, grammar=grammar) for prompt in made]
    return steady(subject.play(asks), rows, 0).step_s


def tokenizer(vocab_size: int) -> str:
    """Return `tokenizer.json` of `vocab_size` tokens: special ones, every byte, then words."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = [*SPECIAL, *alphabet, *islice(_words(), vocab_size - len(SPECIAL) - len(alphabet))]
    model = tokenizers.models.BPE({token: number for number, token in enumerate(made)}, [])
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(list(SPECIAL))
    assert len(json.loads(built.to_str())["model"]["vocab"]) == vocab_size
    return built.to_str()


def _words() -> Iterator[str]:
    """Yield words, shorter ones first; the first character of each stands for a space."""
    for length in count(2):
        for letters in product(("Ġ" + ascii_lowercase), *[ascii_lowercase] * (length - 1)):
            yield "".join(letters)
        if length <= 4:
            yield from map("".join, product(digits, repeat=length))
