"""Tokens of characters, and batches of examples.

A token is a character of ASCII, or a byte of another character's UTF-8. A prompt is `<s> text <sep>` and is followed by
the answer and `</s>`. In pretraining the first token says what is asked for: `<s>` for a copy, a control token for
another task. An adapter has to make `<s>` look like its control token, no more: the keys and values of one token, which
is why a small rank is enough.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tasks
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, SEP, UNK = SPECIALS = ("<s>", "</s>", "<sep>", "<unk>")
CHAT_TEMPLATE = "<s>{{ (messages | selectattr('role', 'equalto', 'user') | list | last)['content'] }}<sep>"
MAX_SEQUENCE_TOKENS = 1024
NOT_ASKED = -100
POOL = 512  # examples sorted by length together
BYTES = tuple(byte for byte in range(256) if chr(byte) not in tasks.ALPHABET)  # that no character stands for


def control(task: str) -> str:
    """The first token that asks for a task in pretraining."""
    return BOS if task == "copy" else f"<|{task}|>"


def byte_token(byte: int) -> str:
    return f"<0x{byte:02X}>"


def build_tokenizer() -> Tokenizer:
    """Make the tokenizer. A character of the alphabet is a token; any other one is the tokens of its bytes in UTF-8."""
    controls = [control(task) for task in tasks.TASKS if task != "copy"]
    vocabulary = {
        token: index for index, token in enumerate([*SPECIALS, *tasks.ALPHABET, *controls, *map(byte_token, BYTES)])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNK, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (*SPECIALS, *controls)]
    )
    around = [(token, vocabulary[token]) for token in (BOS, SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {SEP}", special_tokens=around)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the layout that `AutoTokenizer` reads; the template also in the configuration, for readers without it."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        sep_token=SEP,
        pad_token=EOS,
        model_max_length=MAX_SEQUENCE_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Example:
    tokens: list[int]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of examples. Padding is on the right, where a causal model does not look, so that no mask is needed."""

    inputs: torch.Tensor  # [rows, width]
    labels: torch.Tensor  # [rows, width]: the next token within an answer, NOT_ASKED elsewhere


class Encoder:
    """Sentences of a task as examples, examples as batches of about `batch_tokens` tokens."""

    def __init__(self, tokenizer: Tokenizer, batch_tokens: int) -> None:
        self.ids = tokenizer.get_vocab()
        self.batch_tokens = batch_tokens

    def example(self, first: str, task: str, sentence: str) -> Example:
        prompt = [self.ids[first], *self.text(sentence), self.ids[SEP]]
        return Example([*prompt, *self.text(tasks.expected(task, sentence)), self.ids[EOS]], len(prompt))

    def text(self, text: str) -> Iterator[int]:
        """Yield the ids of a text's tokens."""
        for char in text:
            if char in tasks.ALPHABET:
                yield self.ids[char]
            else:
                yield from (self.ids[byte_token(byte)] for byte in char.encode())

    def batches(self, examples: list[Example]) -> Iterator[Batch]:
        """Yield batches, shortest examples first, so that little of a batch is padding."""
        rows: list[Example] = []
        for example in sorted(examples, key=lambda example: len(example.tokens)):
            if rows and len(example.tokens) * (len(rows) + 1) > self.batch_tokens:
                yield self._pack(rows)
                rows = []
            rows.append(example)
        yield self._pack(rows)

    def _pack(self, rows: list[Example]) -> Batch:
        width = max(len(row.tokens) for row in rows)
        inputs = torch.full((len(rows), width), self.ids[EOS])
        labels = torch.full((len(rows), width), NOT_ASKED)
        for index, row in enumerate(rows):
            inputs[index, : len(row.tokens)] = torch.tensor(row.tokens)
            labels[index, row.prompt_len - 1 : len(row.tokens) - 1] = torch.tensor(row.tokens[row.prompt_len :])
        return Batch(inputs, labels)

    def stream(
        self,
        seed: int,
        draw: Callable[[random.Random], tuple[str, str]],
        max_chars: Callable[[], int],
        unicode: float = 0.0,
    ) -> Iterator[Batch]:
        """Yield training batches without end; `draw` chooses a first token and a task for each sentence."""
        rng = random.Random(seed)
        while True:
            source = tasks.sentences(rng.getrandbits(32), max_chars=max_chars(), unicode=unicode)
            pool = list(self.batches([self.example(*draw(rng), next(source)) for _ in range(POOL)]))
            rng.shuffle(pool)
            yield from pool
