"""The features of predicted prompts, kept until the outcome of their request arrives.

Bounded in bytes, the oldest are dropped first. Measured on random words (94, 425 and 7,994 columns): 64 MiB hold the
prompts of 58,000 requests of 40 characters, 18,000 of 185, or 1,000 of the longest. A prompt's text is a tenth of that,
but would be hashed a second time for its outcome (0.15 to 1.5 ms), and prompts would stay in memory. What an outcome
without features teaches is in `predictor.py`.

Every choice of a client's request is a request of its own (ID/0, ID/1, ...); the gateway asks for one prediction under
the id of the first choice, and the features serve all of them.
"""

import re
from collections import OrderedDict

import numpy as np

from weft_predictor.core.features import FeatureRows, Features

LIMIT_BYTES = 64 << 20
ENTRY_BYTES = 400  # of an entry beside its numbers: two arrays, their owner, the id, the dictionary's slot (measured)
_CHOICE = re.compile(
    r"(.+)/[0-9]{1,9}", re.ASCII | re.DOTALL
)  # what precedes the slash ends in "-" and hexadecimal digits


class FeatureCache:
    """Features by prompt, in 8 bytes a column."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[str, Features] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, request_id: str, x: Features) -> None:
        """Keep the features of a request's prompt."""
        key, _ = _prompt_of(request_id)
        self._drop(key)
        self._entries[key] = x
        self.size_bytes += _size(x)
        while self.size_bytes > self._limit_bytes:
            self._drop(next(iter(self._entries)))

    def take(self, request_id: str) -> Features | None:
        """The features of a request's prompt. Other choices may still need those of a choice."""
        key, is_choice = _prompt_of(request_id)
        found = self._entries.get(key)
        if found is not None and not is_choice:
            self._drop(key)
        return found

    def _drop(self, key: str) -> None:
        if (gone := self._entries.pop(key, None)) is not None:
            self.size_bytes -= _size(gone)


def compact(rows: FeatureRows, count: int) -> list[Features]:
    """The features of each of `count` prompts, as arrays of their own with 4 bytes a number."""
    ends = np.cumsum(np.bincount(rows.row, minlength=count)).tolist()
    index, value = rows.index.astype(np.int32), rows.value.astype(np.float32)
    return [
        Features(index[start:end].copy(), value[start:end].copy()) for start, end in zip([0, *ends], ends, strict=False)
    ]


def _prompt_of(request_id: str) -> tuple[str, bool]:
    match = _CHOICE.fullmatch(request_id)
    return (match[1], True) if match else (request_id, False)


def _size(x: Features) -> int:
    return x.index.nbytes + x.value.nbytes + ENTRY_BYTES
