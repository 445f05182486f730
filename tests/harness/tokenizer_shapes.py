"""Small tokenizers in the shapes that public families have, trained here: what differs is in the rows of SHAPES."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "hello there, dear reader of 2024 {} <b>bold</b>  \n\nund über <tool_call>\n{'x': 1}\n</tool_call>"
_MARK = "▁"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
_BYTES = {"alphabet": pre_tokenizers.ByteLevel.alphabet(), "decoder": decoders.ByteLevel()}
_LLAMA2_DECODER = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


@dataclass(frozen=True)
class Shape:
    """A tokenizer. `special`, `plain`: its added tokens; `strips`: the sides of special ones whose spaces they take."""

    special: Sequence[str]
    pre: Any
    eos: str
    bos: str = ""  # stands before a text
    plain: Sequence[str] = ()
    strips: Sequence[str] = ()
    normalizer: Any = None
    byte_fallback: bool = False
    alphabet: Sequence[str] = ()
    decoder: Any = None

    def build(self) -> Tokenizer:
        """Train it on TEXT."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = self.pre, self.decoder
        if self.normalizer:
            tokenizer.normalizer = self.normalizer
        unknown = ["<unk>"] * self.byte_fallback
        trainer = trainers.BpeTrainer(
            vocab_size=340, special_tokens=unknown, initial_alphabet=list(self.alphabet), show_progress=False
        )
        tokenizer.train_from_iterator([TEXT] * 4, trainer)
        spec = json.loads(tokenizer.to_str())
        if self.byte_fallback:
            vocab = spec["model"]["vocab"]
            vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
            spec["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
        tokenizer = Tokenizer.from_str(json.dumps(spec))
        sides: Any = dict.fromkeys(self.strips, True)
        tokenizer.add_special_tokens([AddedToken(token, special=True, **sides) for token in self.special])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.plain])
        if self.bos:
            begin = [(self.bos, tokenizer.token_to_id(self.bos))]
            tokenizer.post_processor = processors.TemplateProcessing(single=f"{self.bos} $A", special_tokens=begin)
        return tokenizer


def _bytes(special: Sequence[str], eos: str, *first: Any, regex: bool = True, **others: Any) -> Shape:
    """Make a shape of bytes. `first`: what splits a text before; `regex`: GPT-2's expression does, too."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    return Shape([eos, *special], pre_tokenizers.Sequence([*first, level]), eos, **_BYTES, **others)


_WORDS = pre_tokenizers.Split(Regex(_LLAMA3), "isolated")
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_TURNS = ("<|im_start|>", "<|im_end|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SHAPES = {
    "gemma": Shape(
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        pre_tokenizers.Split(" ", "merged_with_previous"),
        "<eos>",
        "<bos>",
        plain=["\n\n", "\n\n\n", _MARK * 2, _MARK * 3, "<td>", "</td>", "<b>", "</b>", "<s>", "</s>", "[multimodal]"],
        normalizer=normalizers.Replace(" ", _MARK),
        byte_fallback=True,
        decoder=decoders.Sequence(_LLAMA2_DECODER[:3]),
    ),
    "phi-3": Shape(
        ["<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"],
        None,
        "<|endoftext|>",
        strips=["rstrip"],
        plain=["</s>"],
        normalizer=normalizers.Sequence([normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)]),
        byte_fallback=True,
        decoder=decoders.Sequence(_LLAMA2_DECODER),
    ),
    "mistral": Shape(
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        pre_tokenizers.Metaspace(_MARK, "first", split=False),
        "</s>",
        "<s>",
        byte_fallback=True,
        decoder=decoders.Sequence(_LLAMA2_DECODER),
    ),
    "phi-4": _bytes(["<|im_start|>", "<|im_sep|>", "<|im_end|>"], "<|endoftext|>", _WORDS, regex=False,
                    strips=["lstrip", "rstrip"]),
    "phi-4-mini": _bytes(["<|user|>", "<|system|>", "<|assistant|>", "<|end|>"], "<|endoftext|>", _WORDS, regex=False,
                         plain=["<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"]),
    "granite-3": _bytes(["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"], "<|end_of_text|>", _DIGITS),
    "granite-4": _bytes(["<|start_of_role|>", "<|end_of_role|>"], "<|end_of_text|>", _WORDS, regex=False,
                        plain=_MARKS[2:]),
    "smollm3": _bytes(["<|begin_of_text|>", *_TURNS], "<|im_end|>", _WORDS, regex=False, plain=[*_MARKS, "<code>"]),
    "olmo-2": _bytes(["<|pad|>"], "<|endoftext|>", normalizer=normalizers.NFC(), plain=["|||PHONE|||", "  ", "   "]),
    "olmo-3": _bytes(_TURNS, "<|endoftext|>", _WORDS, regex=False, plain=["<functions>", "</functions>",
                     "<function_calls>", "</function_calls>", "|||PHONE|||"]),
    "starcoder2": _bytes(["<fim_prefix>", "<file_sep>", "<jupyter_code>"], "<|endoftext|>", _DIGITS),
}  # fmt: skip
