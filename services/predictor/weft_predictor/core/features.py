"""A prompt as a sparse vector: hashed word 1-2-grams and character 3-4-grams, plus the prompt's size class.

The hash is our own and the same in every process and release (Python's `hash` of a string changes with each start).
All grams of one kind are hashed in a handful of numpy calls over the whole text, so the cost grows slowly with length.
"""

import re
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

MAX_CHARS = 4_096  # the gateway cuts there too; cost is bounded whatever comes
Index = NDArray[np.int64]
Value = NDArray[np.float64]

_WORD = re.compile(r"\w+|[^\w\s]")
# Odd multipliers of a polynomial hash modulo 2^64, one starting value per kind of gram so that kinds do not collide.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_WORD_1, _WORD_2, _CHAR_3, _CHAR_4, _SIZE = (np.uint64(k * 0xD6E8FEB86659FD93 % 2**64) for k in range(1, 6))


@dataclass(frozen=True, slots=True)
class Features:
    """Sparse vector: sorted unique `index` [k] in [0, dim), `value` [k]. Index 0 is the constant 1."""

    index: Index
    value: Value


def features(text: str, prompt_tokens: int, dim: int) -> Features:
    """Features of a prompt. `dim` is a power of two. Each block of grams has Euclidean norm 1 before hashing."""
    assert dim & (dim - 1) == 0, f"dim {dim} is not a power of two"
    text = " ".join(text[:MAX_CHARS].lower().split())
    words, chars = _word_hashes(text), _char_codes(text)
    blocks = (
        words * _BASE + _WORD_1,
        (words[:-1] * _BASE + words[1:]) * _BASE + _WORD_2,
        _grams(chars, 3) + _CHAR_3,
        _grams(chars, 4) + _CHAR_4,
        _size_classes(prompt_tokens, len(text)),
    )
    return _merge([_block(keys, dim) for keys in blocks])


def _word_hashes(text: str) -> NDArray[np.uint64]:
    return np.array([crc32(word.encode()) for word in _WORD.findall(text)], dtype=np.uint64)


def _char_codes(text: str) -> NDArray[np.uint64]:
    padded = f" {text} "  # the edges of the text are features as well
    return np.frombuffer(padded.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)


def _grams(codes: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    count = max(len(codes) - n + 1, 0)
    keys = np.zeros(count, dtype=np.uint64)
    for i in range(n):
        keys = keys * _BASE + codes[i : i + count]
    return keys


def _size_classes(prompt_tokens: int, chars: int) -> NDArray[np.uint64]:
    """Two indicators: prompt tokens and characters, in steps of a factor 2^(1/2)."""
    classes = [int(2 * np.log2(1 + prompt_tokens)), 1_000 + int(2 * np.log2(1 + chars))]
    return np.array(classes, dtype=np.uint64) * _BASE + _SIZE


def _block(keys: NDArray[np.uint64], dim: int) -> tuple[Index, Value]:
    """Distinct columns of a block with sublinear counts (1 + log n), normalised to length 1."""
    mixed = keys ^ (keys >> np.uint64(31))
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    index, counts = np.unique((mixed >> np.uint64(8)) & np.uint64(dim - 1), return_counts=True)
    value: Value = 1.0 + np.log(counts.astype(np.float64))
    norm = float(np.sqrt(value @ value))
    return index.astype(np.int64), value / (norm or 1.0)


def _merge(blocks: list[tuple[Index, Value]]) -> Features:
    index = np.concatenate([np.zeros(1, dtype=np.int64), *(i for i, _ in blocks)])
    value = np.concatenate([np.ones(1), *(v for _, v in blocks)])
    unique, inverse = np.unique(index, return_inverse=True)
    summed: Value = np.bincount(inverse, weights=value).astype(np.float64, copy=False)
    return Features(unique, summed)
