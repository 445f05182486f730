"""Trains a network that classifies prompts by the length of their answer (S3, section 3), with torch and transformers.

From scratch, or from a folder with a checkpoint. The same seed gives the same network on the same machine. Measured on
6,200 Alpaca prompts: two to four passes are enough, the third or fourth already learns single prompts by heart.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

from weft_predictor.core import MAX_CHARS, EncoderShape, class_of
from weft_predictor.encoder_files import ACTIVATION, BUCKETS_KEY, FIELDS, EncoderFiles, parse, tokenize_with
from weft_predictor.errors import BadData
from weft_predictor_train.vocabulary import VOCAB, tokenizer_of

Examples = Sequence[tuple[Sequence[int], int]]  # token ids and the class
POSITIONS = 128
BATCH, WEIGHT_DECAY, DROPOUT, MAX_NORM = 32, 0.05, 0.2, 1.0
FROM_SCRATCH, FINE_TUNED = 5e-4, 5e-5  # learning rates
WARM_UP_STEPS, MAX_EPOCHS, PATIENCE = 100, 8, 2
_CLASSES: Mapping[str, tuple[Any, Any, tuple[str, ...]]] = {
    "distilbert": (
        DistilBertForSequenceClassification,
        DistilBertConfig,
        ("dropout", "attention_dropout", "seq_classif_dropout"),
    ),
    "bert": (
        BertForSequenceClassification,
        BertConfig,
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    ),
}


@dataclass(frozen=True, slots=True)
class TrainableNetwork:
    """A network of transformers, its shape, and the bytes of its tokenizer."""

    shape: EncoderShape
    network: Any
    tokenizer: bytes
    learning_rate: float

    def examples(self, prompts: Sequence[str], tokens: Sequence[int]) -> Examples:
        tokenize = tokenize_with(self.tokenizer, self.shape)
        classes = class_of(np.asarray(tokens), self.shape.edges).tolist()
        return [(tokenize(text[:MAX_CHARS]), label) for text, label in zip(prompts, classes, strict=True)]

    def files(self) -> EncoderFiles:
        """The files that predictors read, and transformers too."""
        weights = save(self.network.state_dict(), {"format": "pt"})
        return EncoderFiles(self.network.config.to_json_string().encode(), weights, self.tokenizer)


def from_scratch(
    size: tuple[int, int, int, int], prompts: Sequence[str], edges: Sequence[int], seed: int
) -> TrainableNetwork:
    """Make a DistilBERT of one of `SIZES`, with random weights and a tokenizer made of the prompts."""
    shape = EncoderShape("distilbert", VOCAB, POSITIONS, *size, tuple(edges))
    with _seeded(seed):
        return TrainableNetwork(shape, _network(shape), tokenizer_of(prompts), FROM_SCRATCH)


def from_files(files: EncoderFiles) -> TrainableNetwork:
    """Go on from a checkpoint, with its classes. Raises CorruptModel, BadData for one without a tensor."""
    shape, weights = parse(files)
    network = _network(shape)
    try:
        missing, _ = network.load_state_dict({name: torch.from_numpy(a) for name, a in weights.items()}, strict=False)
    except RuntimeError as error:
        raise BadData(f"the checkpoint does not fit its config.json: {error}") from error
    if missing:
        raise BadData(f"the checkpoint has no {', '.join(missing)}")
    return TrainableNetwork(shape, network, files.tokenizer, FINE_TUNED)


def train_network(
    start: TrainableNetwork, fit: Examples, held_out: Examples, *, seed: int, epochs: int = MAX_EPOCHS,
    batches: Callable[[Sequence[Any]], Iterator[Any]] = iter,
) -> None:  # fmt: skip
    """Give the network the weights with the least held-out loss; ends after PATIENCE epochs without a better one.

    `batches` is passed each epoch's batches and shows how far it is.
    """
    network, rng = start.network, np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=start.learning_rate, weight_decay=WEIGHT_DECAY)
    warm_up, steps = max(min(WARM_UP_STEPS, len(fit) // BATCH), 1), epochs * math.ceil(len(fit) / BATCH)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / warm_up, 1.05 - n / steps))
    best, bad = (math.inf, _copy(network)), 0
    with _seeded(seed):
        for _ in range(epochs):
            network.train()
            for chunk in batches(_batches(fit, rng)):
                optimizer.zero_grad()
                _loss(network, chunk).backward()
                if torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM).isfinite():
                    optimizer.step()
                rates.step()
            if (now := held_out_loss(network, held_out)) < best[0]:
                best, bad = (now, _copy(network)), 0
            elif (bad := bad + 1) >= PATIENCE:
                break
    network.load_state_dict(best[1])
    network.eval()


def held_out_loss(network: Any, held_out: Examples) -> float:
    """Compute the mean cross entropy, without dropout."""
    network.eval()
    with torch.inference_mode():
        return sum(_loss(network, part).item() * len(part) for part in _batches(held_out)) / len(held_out)


def _network(shape: EncoderShape) -> Any:
    """Make a network of this shape, with random weights."""
    classifier, config, dropouts = _CLASSES[shape.kind]
    numbers, labels = asdict(shape), [f"at most {edge} tokens" for edge in shape.edges]
    fields = {field: numbers[name] for name, (field, _) in FIELDS[shape.kind].items()}
    made = config(
        architectures=[classifier.__name__],
        vocab_size=shape.vocab,
        max_position_embeddings=shape.positions,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
        **fields,
        **{ACTIVATION[shape.kind]: "gelu", BUCKETS_KEY: list(shape.edges)},
        **dict.fromkeys(dropouts, DROPOUT),
    )
    return classifier(made)


def _loss(network: Any, examples: Examples) -> torch.Tensor:
    ids = [torch.tensor(row) for row, _ in examples]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    labels = torch.tensor([label for _, label in examples])
    return network(pad_sequence(ids, batch_first=True), attention_mask=mask, labels=labels).loss


def _batches(examples: Examples, rng: np.random.Generator | None = None) -> list[Examples]:
    """Make batches of about the same length each, in random order where there is a generator."""
    order = rng.permutation(len(examples)).tolist() if rng else list(range(len(examples)))
    block = 16 * BATCH if rng else len(order)
    batches: list[Examples] = []
    for begin in range(0, len(order), block):
        part = sorted(order[begin : begin + block], key=lambda i: len(examples[i][0]))
        batches += [[examples[i] for i in part[j : j + BATCH]] for j in range(0, len(part), BATCH)]
    return [batches[i] for i in rng.permutation(len(batches))] if rng else batches


def _copy(network: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Draw from the seed in the block; what is drawn outside does not notice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
