"""Train the quickstart's model and its adapters from nothing.

    python examples/quickstart/train.py              # everything, on two CPU cores in under two hours
    python examples/quickstart/train.py --evaluate   # only measure what is there and write accuracy.md

The base learns all tasks at once behind control tokens, `<s>` alone meaning a copy. Each adapter is then trained with
the base frozen, on prompts without control token. A run with the same seed on the same machine and versions repeats;
on another machine rounding differs, and with it the weights.
"""

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import networks
import peft
import report
import scoring
import tasks
import tokens
import torch
import transformers
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
LOG_EVERY = 250  # steps
LOG_SENTENCES = 100


@dataclass(frozen=True, slots=True)
class Round:
    """One rise and fall of the learning rate."""

    steps: int
    lr: float
    grows: bool  # sentences start short
    weights: dict[str, float]  # how often a task is drawn


ROUNDS = (
    Round(
        steps=6000,
        lr=3e-3,
        grows=True,
        weights={
            "copy": 1.5,
            "upper": 1.0,
            "reverse-words": 2.0,
            "initials": 0.8,
            "digits": 1.2,
            "json": 1.2,
            "cipher": 1.0,
        },
    ),
    # The second round is for what the first leaves unsure: tasks whose answers run out of step with the sentence.
    Round(
        steps=3000,
        lr=1.2e-3,
        grows=False,
        weights={
            "copy": 1.0,
            "upper": 1.0,
            "reverse-words": 1.5,
            "initials": 2.0,
            "digits": 2.0,
            "json": 1.5,
            "cipher": 0.8,
        },
    ),
)

# The bytes of characters beyond ASCII, which the rounds above do not see: only the rows of these tokens in embedding
# and head are trained, so that everything else answers as before.
BYTE_ROUND = Round(
    steps=1600,
    lr=5e-3,
    grows=True,
    weights={
        "copy": 3.0,
        "upper": 1.0,
        "reverse-words": 1.0,
        "initials": 0.5,
        "digits": 1.0,
        "json": 1.0,
        "cipher": 1.0,
    },
)
UNICODE_SHARE = 0.7  # of that round's sentences for the base
ADAPTERS_UNICODE_SHARE = 0.3
MARGIN = 3.0  # between characters and bytes, where a character is next
MARGIN_BATCHES = 96


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    if not options.evaluate:
        train(options)
    print(report.write(options.out, options.sentences, options.batch_tokens))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=HERE, help="folder for model/, adapters/ and the reports (default: this one)")
    add("--evaluate", action="store_true", help="train nothing: measure the model and adapters in --out")
    add(
        "--only",
        choices=("base", "adapters", "bytes"),
        help="train only the base, only the adapters on the base in "
        "--out, or only the base's tokens of bytes with base and adapters in --out",
    )
    add("--adapter", action="append", metavar="NAME", help="train only this adapter; may be repeated (default: all)")
    add("--from-round", type=int, default=1, help="2: go on with the base in --out at its second round (default: 1)")
    add("--seed", type=int, default=0, help="of weights and sentences (default: %(default)s)")
    add("--steps", type=int, help="of each round of the base (default: 6000 and 3000)")
    add("--adapter-steps", type=int, help="of each adapter (default: as networks.py says)")
    add("--adapter-lr", type=float, default=3e-3, help="highest learning rate of adapters (default: %(default)s)")
    add("--batch-tokens", type=int, default=4096, help="tokens a step, padding included (default: %(default)s)")
    add("--sentences", type=int, default=1000, help="held-out sentences a task is measured on (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 2, help="threads for torch (default: all cores)")
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    trains_base = options.only not in ("adapters", "bytes")
    log = Log(options.out / "training_log.jsonl", fresh=trains_base and options.from_round == 1)
    log.write(**report.surroundings())
    for number, round_ in enumerate(ROUNDS, start=1):
        if trains_base and number >= options.from_round:
            train_base(number, round_, options, log)
    for adapter in networks.ADAPTERS:
        if options.only not in ("base", "bytes") and adapter.task in (options.adapter or tasks.TASKS):
            train_adapter(adapter, options, log)
    if options.only in (None, "bytes"):
        train_bytes(options, log)


class Log:
    """A log of a line of JSON now and then; the bar on a terminal is tqdm's."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)

    def write(self, **fields: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(fields) + "\n")


# --- the base ---------------------------------------------------------------------------------------------------------


def train_base(number: int, round_: Round, options: argparse.Namespace, log: Log) -> None:
    """Train all tasks at once; the first round starts from nothing, a later one from the base on disk."""
    torch.manual_seed(options.seed)
    tokenizer = tokens.build_tokenizer()
    model = networks.build_model(tokenizer) if number == 1 else networks.load_base(options.out)
    encoder = tokens.Encoder(tokenizer, options.batch_tokens)
    curriculum = Curriculum(options.steps or round_.steps, grows=round_.grows)

    def draw(rng: random.Random) -> tuple[str, str]:
        (task,) = rng.choices(list(round_.weights), list(round_.weights.values()))
        return tokens.control(task), task

    def measure() -> dict[str, Any]:
        exact = base_accuracy(model, encoder, curriculum.max_chars())
        return {"stage": f"base, round {number}", "max_chars": curriculum.max_chars(), "exact": exact}

    stream = encoder.stream(options.seed + number, draw, curriculum.max_chars)
    fit(model, stream, curriculum, base_optimizers(model, round_.lr), log, measure)
    folder = options.out / "model"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokens.save_tokenizer(tokenizer, folder)


def train_bytes(options: argparse.Namespace, log: Log) -> None:
    """Train the rows of the tokens of bytes, of the base on disk; everything else stays as it is, bit for bit.

    Base and adapters take turns, so that none of them says a byte where it said a character before.
    """
    torch.manual_seed(options.seed)
    tokenizer = tokens.build_tokenizer()
    encoder = tokens.Encoder(tokenizer, options.batch_tokens)
    base, first = networks.load_base(options.out), tokenizer.token_to_id(tokens.byte_token(tokens.BYTES[0]))
    base.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    rows = [base.get_input_embeddings().weight, base.get_output_embeddings().weight]
    begin_rows(rows, first, [encoder.ids[char] for char in tasks.ALPHABET])
    model = networks.with_adapters(base, options.out)
    model.requires_grad_(False)
    for weight in rows:
        weight.requires_grad_(True)
        weight.register_hook(lambda gradient: gradient.index_fill(0, torch.arange(first), 0.0))
    curriculum = Curriculum(options.steps or BYTE_ROUND.steps, grows=BYTE_ROUND.grows)

    def draw(rng: random.Random) -> tuple[str, str]:
        (task,) = rng.choices(list(BYTE_ROUND.weights), list(BYTE_ROUND.weights.values()))
        return tokens.control(task), task

    def batches() -> Iterator[tokens.Batch]:
        of_base = encoder.stream(options.seed, draw, curriculum.max_chars, UNICODE_SHARE)
        of_adapters = {
            adapter.task: encoder.stream(
                options.seed + number,
                lambda _, task=adapter.task: (tokens.BOS, task),
                curriculum.max_chars,
                ADAPTERS_UNICODE_SHARE,
            )
            for number, adapter in enumerate(networks.ADAPTERS, start=1)
        }
        while True:
            for task, of_adapter in of_adapters.items():
                model.set_adapter(task, inference_mode=True)
                yield next(of_adapter)
                for _ in range(3):
                    with model.disable_adapter():
                        yield next(of_base)

    def measure() -> dict[str, Any]:
        chars = curriculum.max_chars()
        exact, beyond = (base_accuracy(base, encoder, chars, unicode) for unicode in (0.0, 1.0))
        return {"stage": "base, bytes", "max_chars": chars, "exact": exact, "exact_unicode": beyond}

    fit(model, batches(), curriculum, [torch.optim.AdamW(rows, lr=BYTE_ROUND.lr, weight_decay=0.0)], log, measure)
    keep_apart(model, batches(), first)
    folder = options.out / "model"
    shutil.rmtree(folder, ignore_errors=True)
    model.unload().save_pretrained(folder)
    tokens.save_tokenizer(tokenizer, folder)


@torch.no_grad()
def begin_rows(weights: list[torch.Tensor], first: int, known: list[int]) -> None:
    """Make rows from `first` on mixtures of known tokens' rows, the same ones in both: a copy is nearly right."""
    mixtures = torch.randn(len(weights[0]) - first, len(known)) / len(known) ** 0.5
    for weight in weights:
        centred = weight[known] - weight[known].mean(0)
        weight[first:] = weight[known].mean(0) + mixtures @ centred


@torch.no_grad()
def keep_apart(model: Any, batches: Iterator[tokens.Batch], first: int) -> None:
    """Lower the logits of the tokens from `first` on by MARGIN where a character is next, not where one of them is.

    Their rows of the head lose a direction of hidden states that tells the two apart, by least squares.
    """
    taught = [(scoring.hidden_states(model, batch), batch.labels) for batch in islice(batches, MARGIN_BATCHES)]
    hidden = torch.cat([states for states, _ in taught])
    labels = torch.cat([labels[labels != tokens.NOT_ASKED] for _, labels in taught])
    direction = torch.linalg.lstsq(hidden, (labels < first).to(hidden.dtype)[:, None]).solution[:, 0]
    model.get_output_embeddings().weight[first:] -= MARGIN * direction


def base_accuracy(model: Any, encoder: tokens.Encoder, max_chars: int, unicode: float = 0.0) -> dict[str, float]:
    """Measure each task behind its control token."""
    of = {task: (model, encoder, tokens.control(task), task, LOG_SENTENCES, max_chars, unicode) for task in tasks.TASKS}
    return {task: scoring.share_exact(scoring.answers(*asked)) for task, asked in of.items()}


def base_optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside the layers, AdamW for embedding, head and norms."""
    inner, outer = [], []
    for name, weight in model.named_parameters():
        (inner if ".layers." in name and weight.ndim == 2 else outer).append(weight)
    return [
        torch.optim.Muon(inner, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


# --- the adapters -----------------------------------------------------------------------------------------------------


def train_adapter(adapter: networks.Adapter, options: argparse.Namespace, log: Log) -> None:
    torch.manual_seed(options.seed)
    encoder = tokens.Encoder(networks.load_tokenizer(options.out), options.batch_tokens)
    model = peft.get_peft_model(networks.load_base(options.out), networks.lora_config(adapter))
    curriculum = Curriculum(options.adapter_steps or adapter.steps, grows=False)

    def measure() -> dict[str, Any]:
        judged = scoring.answers(model, encoder, tokens.BOS, adapter.task, LOG_SENTENCES, tasks.MAX_CHARS)
        return {"stage": adapter.task, "exact": scoring.share_exact(judged)}

    stream = encoder.stream(options.seed, lambda _: (tokens.BOS, adapter.task), curriculum.max_chars, adapter.unicode)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(trained, lr=options.adapter_lr, weight_decay=0.0)]
    fit(model, stream, curriculum, optimizers, log, measure)
    folder = options.out / "adapters" / adapter.task
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


# --- both -------------------------------------------------------------------------------------------------------------


class Curriculum:
    """The progress of a run: the longest sentence and the learning rate of the current step."""

    def __init__(self, steps: int, *, grows: bool = True) -> None:
        self.steps = steps
        self.step = 0
        self.grows = grows

    def max_chars(self) -> int:
        """The longest sentence: from 12 characters to all over the first 35 % of the steps."""
        grown = min(1.0, self.step / (0.35 * self.steps)) if self.grows else 1.0
        return int(12 + (tasks.MAX_CHARS - 12) * grown)

    def lr_scale(self) -> float:
        """The scale of the learning rate: up over at most 100 steps, level, down over the last 60 %."""
        rise = min(100, self.steps // 10)
        return min(1.0, (self.step + 1) / rise, (self.steps - self.step) / (0.6 * self.steps))


def fit(
    model: Any,
    stream: Iterator[tokens.Batch],
    curriculum: Curriculum,
    optimizers: list[torch.optim.Optimizer],
    log: Log,
    measure: Callable[[], dict[str, Any]],
) -> None:
    """Take every step of a run; every LOG_EVERY steps log what `measure` finds."""
    highest = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    losses: list[float] = []
    started = time.monotonic()
    for step in tqdm(range(curriculum.steps), unit="step", disable=None):
        curriculum.step = step
        for optimizer, rates in zip(optimizers, highest, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * curriculum.lr_scale()
        losses.append(fit_step(model, next(stream), optimizers))
        if (step + 1) % LOG_EVERY == 0 or step + 1 == curriculum.steps:
            found = {"step": step + 1, "loss": round(sum(losses) / len(losses), 6), **measure()}
            log.write(**found, stage_s=round(time.monotonic() - started))
            losses.clear()


def fit_step(model: Any, batch: tokens.Batch, optimizers: list[torch.optim.Optimizer]) -> float:
    labels = batch.labels[batch.labels != tokens.NOT_ASKED]
    loss = torch.nn.functional.cross_entropy(scoring.answer_logits(model, batch), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main()
