"""A prompt as a sparse vector: hashed word 1-2-grams and character 3-4-grams, plus the prompt's size class.

The hash is defined here and is the same in every process and release (Python's `hash` of a string changes with each
start). All grams of a kind are hashed in a handful of numpy calls over all prompts of a batch. So the cost grows slowly
with their number and length.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

MAX_CHARS = 4_096  # the gateway cuts there too; the bound of a prompt's cost
Index = NDArray[np.int64]
Value = NDArray[np.float64]
AnyIndex = NDArray[np.int64] | NDArray[np.int32]
AnyValue = NDArray[np.float64] | NDArray[np.float32]
Codes = tuple[NDArray[np.uint64], Index]  # codes in the order of the prompts, and the prompt of each code

_UNIGRAM_PATTERN = re.compile(r"\w+|[^\w\s]")
# Odd multipliers of a polynomial hash modulo 2^64, with a starting value per kind of gram so that kinds do not collide.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_UNIGRAM, _BIGRAM, _CHAR_3, _CHAR_4, _SIZE = (np.uint64(k * 0xD6E8FEB86659FD93 % 2**64) for k in range(1, 6))


@dataclass(frozen=True, slots=True)
class Features:
    """A sparse vector: sorted unique `index` [k] in [0, dim), `value` [k]. Index 0 is the constant 1."""

    index: AnyIndex
    value: AnyValue


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """The features of several prompts, in their order. `row` [k]: the prompt's number; `index`, `value` [k] as
    above."""

    row: Index
    index: Index
    value: Value


class Featurizer(Protocol):
    """A reader of prompts for a ridge. `name` identifies the kind of features ("": hashed grams)."""

    name: str
    dim: int

    def rows(self, prompts: Sequence[tuple[str, int]]) -> tuple[FeatureRows, Sequence[int]]:
        """Read the features of prompts (text, tokens), and the reservation of S3 for each (0: no buckets)."""
        ...


class HashedGrams:
    """A prompt's words and characters: see `feature_rows`. `dim` is a power of two."""

    name = ""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def rows(self, prompts: Sequence[tuple[str, int]]) -> tuple[FeatureRows, Sequence[int]]:
        return feature_rows(prompts, self.dim), [0] * len(prompts)


def feature_rows(prompts: Sequence[tuple[str, int]], dim: int) -> FeatureRows:
    """Read the features of prompts (text, tokens) at once, with a fixed number of numpy calls.

    `dim` is a power of two. Each block of grams has Euclidean norm 1 before hashing. A row's bits do not depend on
    further rows: every sum is taken in the order of the row's entries.
    """
    assert dim & (dim - 1) == 0, f"dim {dim} is not a power of two"
    texts = [" ".join(text[:MAX_CHARS].lower().split()) for text, _ in prompts]
    unigrams, chars = _unigram_hashes(texts), _char_codes(texts)
    blocks = (
        _keys(_grams(*unigrams, 1), _BASE, _UNIGRAM),
        _keys(_grams(*unigrams, 2), _BASE, _BIGRAM),
        _keys(_grams(*chars, 3), np.uint64(1), _CHAR_3),
        _keys(_grams(*chars, 4), np.uint64(1), _CHAR_4),
        _keys(_size_classes([tokens for _, tokens in prompts], texts), _BASE, _SIZE),
    )
    return _merge(*_weigh(blocks, dim), len(texts), dim)


def _unigram_hashes(texts: Sequence[str]) -> Codes:
    rows = [[crc32(unigram.encode()) for unigram in _UNIGRAM_PATTERN.findall(text)] for text in texts]
    hashes = np.array([code for row in rows for code in row], dtype=np.uint64)
    return hashes, _row_of([len(row) for row in rows])


def _char_codes(texts: Sequence[str]) -> Codes:
    padded = [f" {text} " for text in texts]  # the edges of the text are features as well
    codes = np.frombuffer("".join(padded).encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    return codes, _row_of([len(text) for text in padded])


def _row_of(lengths: Sequence[int]) -> Index:
    return np.repeat(np.arange(len(lengths)), lengths)


def _grams(codes: NDArray[np.uint64], row: Index, n: int) -> Codes:
    count = max(len(codes) - n + 1, 0)
    keys = np.zeros(count, dtype=np.uint64)
    for i in range(n):
        keys = keys * _BASE + codes[i : i + count]
    inside = row[:count] == row[n - 1 : n - 1 + count]  # no gram reaches into the next prompt
    return keys[inside], row[:count][inside]


def _size_classes(tokens: Sequence[int], texts: Sequence[str]) -> Codes:
    """Code two indicators a prompt: its tokens and its characters, in steps of a factor 2^(1/2)."""
    classes = [int(2 * log2(1 + n)) for n in tokens] + [1_000 + int(2 * log2(1 + len(text))) for text in texts]
    return np.array(classes, dtype=np.uint64), np.tile(np.arange(len(texts)), 2)


def _keys(codes: Codes, factor: np.uint64, start: np.uint64) -> Codes:
    return codes[0] * factor + start, codes[1]


def _weigh(blocks: Sequence[Codes], dim: int) -> tuple[Index, Value]:
    """Weigh the distinct columns of each block and row by sublinear counts (1 + log n). Each block has length 1.

    Returns places (row * dim + column) and values.
    """
    keys = np.concatenate([keys for keys, _ in blocks])
    block = np.concatenate([row * len(blocks) + number for number, (_, row) in enumerate(blocks)])
    mixed = keys ^ (keys >> np.uint64(31))
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    column = ((mixed >> np.uint64(8)) & np.uint64(dim - 1)).astype(np.int64)
    places, counts = np.unique(block * dim + column, return_counts=True)
    block, column = places // dim, places % dim
    value: Value = 1.0 + np.log(counts.astype(np.float64))
    norm = np.sqrt(np.bincount(block, weights=value * value))
    return block // len(blocks) * dim + column, value / norm[block]


def _merge(places: Index, value: Value, rows: int, dim: int) -> FeatureRows:
    """Add up blocks with a common column of a row, and give each row its constant."""
    unique, inverse = np.unique(np.concatenate([np.arange(rows) * dim, places]), return_inverse=True)
    summed = np.bincount(inverse, weights=np.concatenate([np.ones(rows), value]))
    return FeatureRows(unique // dim, unique % dim, summed.astype(np.float64, copy=False))
