"""Answered prompts as bytes, for the process that trains. Without scipy, which only training needs."""

import json
from collections.abc import Sequence

import numpy as np

from weft_predictor.checkpoint import pack, unpack
from weft_predictor.core.length_model import Arrays
from weft_predictor.core.retraining import AnsweredIds


def encode_samples(samples: Sequence[AnsweredIds]) -> bytes:
    """What `decode_samples` reads: plain arrays."""
    return pack(
        {
            "ids": np.concatenate([sample.ids for sample in samples]),
            "lengths": np.array([len(sample.ids) for sample in samples], dtype=np.int64),
            "tokens": np.array([sample.tokens for sample in samples], dtype=np.int64),
            "adapters": np.frombuffer(json.dumps([sample.adapter for sample in samples]).encode(), dtype=np.uint8),
        }
    )


def decode_samples(data: bytes) -> list[AnsweredIds]:
    """Raises CorruptModel."""

    def read(arrays: Arrays) -> list[AnsweredIds]:
        ends = np.cumsum(arrays["lengths"])
        adapters = json.loads(arrays["adapters"].tobytes())
        rows = zip(np.split(arrays["ids"], ends[:-1]), adapters, arrays["tokens"].tolist(), strict=True)
        return [AnsweredIds(ids, str(adapter), tokens) for ids, adapter, tokens in rows]

    return unpack(data, read, "standard input")
