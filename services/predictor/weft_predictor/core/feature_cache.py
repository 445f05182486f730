"""The features of predicted prompts, kept until the outcome of their request arrives.

Bounded in bytes, the oldest are dropped first. Measured on random words (94, 425 and 7,994 columns), 64 MiB hold the
prompts of 60,000 requests of 40 characters. They hold 18,000 of 185 characters, or 1,000 of the longest. A prompt's
text takes a tenth, but would be hashed a second time for its outcome (0.15 to 1.5 ms). Prompts would also stay in
memory. `ridge_model.py` says how an outcome without features teaches.

Every choice of a client's request is a separate request (ID/0, ID/1, ...). The gateway asks for a single prediction
under the id without an index, and all choices share the features.
"""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from weft_predictor.core.features import FeatureRows, Features

LIMIT_BYTES = 64 << 20
ENTRY_BYTES = 350  # overhead of an entry: the array, the id, the dictionary's slot (measured)
Packed = NDArray[np.int32]  # [2, k]: the columns, and the bits of their values in 32-bit floating point


class FeatureCache:
    """Features by prompt, in 8 bytes a column."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[str, Packed] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, request_ids: list[str], rows: FeatureRows) -> None:
        """Keep the features of each request's prompt. A prompt without a request id is not kept."""
        packed = np.stack([rows.index.astype(np.int32), rows.value.astype(np.float32).view(np.int32)])
        start = 0
        for request_id, count in zip(request_ids, np.bincount(rows.row, minlength=len(request_ids)), strict=True):
            if request_id:
                key, _ = _split_choice(request_id)
                self._drop(key)
                self._entries[key] = x = packed[:, start : start + count].copy()
                self.size_bytes += x.nbytes + ENTRY_BYTES
            start += count
        while self.size_bytes > self._limit_bytes:
            self._drop(next(iter(self._entries)))

    def take(self, request_id: str) -> Features | None:
        """Take the features of a request's prompt. The features of a choice stay, for the remaining choices."""
        key, is_choice = _split_choice(request_id)
        x = self._entries.get(key)
        if x is None:
            return None
        if not is_choice:
            self._drop(key)
        return Features(x[0], x[1].view(np.float32))

    def _drop(self, key: str) -> None:
        if (removed := self._entries.pop(key, None)) is not None:
            self.size_bytes -= removed.nbytes + ENTRY_BYTES


def _split_choice(request_id: str) -> tuple[str, bool]:
    """Split a request's id into the part before the choice, and whether it had a choice (a number after a slash)."""
    key, slash, choice = request_id.rpartition("/")
    return (key, True) if slash and key and choice.isdigit() else (request_id, False)
