"""Scores of answers: how often one is right to the last character, and how clearly.

One pass over the right answer decides both: greedy decoding gives exactly that answer when each of its tokens is the
likeliest after those before it. The gap is the logit of the likeliest token less that of the second.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tasks
import torch
from tokens import NOT_ASKED, Batch, Encoder

HELD_OUT_SEED = 2026


@dataclass(frozen=True, slots=True)
class Answer:
    sentence_len: int
    exact: bool
    smallest_gap: float


def answer_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Compute [asked positions, vocabulary]; works for a plain model and for one with PEFT layers inside."""
    return model.get_output_embeddings()(hidden_states(model, batch))


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """Compute [asked positions, hidden size], behind the last norm."""
    llama = model.get_base_model() if hasattr(model, "get_base_model") else model
    return llama.model(input_ids=batch.inputs, use_cache=False).last_hidden_state[batch.labels != NOT_ASKED]


@torch.inference_mode()
def answers(
    model: Any,
    encoder: Encoder,
    first: str,
    task: str,
    count: int,
    max_chars: int = tasks.MAX_CHARS,
    unicode: float = 0.0,
) -> list[Answer]:
    """Score what the model makes of `count` held-out sentences, of which the share `unicode` has words beyond ASCII."""
    source = tasks.sentences(HELD_OUT_SEED, held_out=True, max_chars=max_chars, unicode=unicode)
    examples = [encoder.example(first, task, sentence) for sentence in itertools.islice(source, count)]
    examples.sort(key=lambda example: len(example.tokens))  # the order in which batches take them
    judged = itertools.chain.from_iterable(_judge(model, batch) for batch in encoder.batches(examples))
    return [Answer(example.prompt_len - 2, *verdict) for example, verdict in zip(examples, judged, strict=True)]


def _judge(model: Any, batch: Batch) -> Iterable[tuple[bool, float]]:
    asked = batch.labels != NOT_ASKED
    logits = answer_logits(model, batch)
    best = logits.topk(2).values
    right = logits.argmax(-1) == batch.labels[asked]
    per_row = asked.sum(-1).tolist()
    for row_right, row_best in zip(right.split(per_row), best.split(per_row), strict=True):
        yield bool(row_right.all()), float((row_best[:, 0] - row_best[:, 1]).min())


def share_exact(judged: list[Answer], min_len: int = 0) -> float:
    chosen = [answer.exact for answer in judged if answer.sentence_len >= min_len]
    return sum(chosen) / len(chosen) if chosen else math.nan
