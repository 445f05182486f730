"""Rows of the embedding: all of them in memory, or those of a step's tokens, read from the packed file."""

import numpy as np

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.errors import DiskUnusable, ExecutorLost
from weft_runner.model.tiers.direct_io import PAGE, IoQueue, round_up_to_page
from weft_runner.model.tiers.packed_file import PackedFile, PackedLayout
from weft_runner.offload.sizes import GATHERED_ROWS

GAP_BYTES = 32 << 10  # between two rows that are one read: about what a request takes longer


def gather_bytes(layout: PackedLayout) -> int:
    """Return the bytes that GATHERED_ROWS rows are read into, in whole pages."""
    return GATHERED_ROWS * (round_up_to_page(layout.row_bytes) + PAGE)


class EmbeddingRows:
    """Rows in the dtype in which they are stored. One thread calls it."""

    def __init__(self, packed: PackedFile, *, resident: bool) -> None:
        self._layout, self._resident = packed.layout, resident
        self._file, self._queue = packed.open(), IoQueue()
        self.rows = np.empty((0, self._layout.row_bytes), np.uint8)  # gathered last
        self._memory = MappedMemory(self._layout.embedding_bytes if resident else gather_bytes(self._layout))
        if resident and self._layout.rows:
            self._read(self._memory.address, self._layout.embedding_bytes, self._layout.embedding)

    def gather(self, tokens: np.ndarray, to: np.ndarray) -> int:
        """Tell in `to` (int32 [T]) which row each token is to read. Returns where rows begin. Raises ExecutorLost."""
        if self._resident:
            to[:] = tokens
            return self._memory.address
        ids, of_token = np.unique(tokens, return_inverse=True)
        to[:] = of_token
        if len(ids) > len(self.rows):
            self.rows = np.empty((len(ids), self._layout.row_bytes), np.uint8)
        self._copy((self._layout.embedding + ids.astype(np.int64) * self._layout.row_bytes).tolist())
        return self.rows.ctypes.data

    def close(self) -> None:
        self._queue.close()
        self._file.close()

    def _copy(self, begins: list[int]) -> None:
        """Copy the rows that begin there in the file, in order: what lies close together is one read."""
        n_bytes, runs, used, done = self._layout.row_bytes, list[tuple[int, int]](), 0, 0
        for i, begin in enumerate(begins):
            first, end = begin // PAGE * PAGE, round_up_to_page(begin + n_bytes)
            if runs and first - runs[-1][1] <= GAP_BYTES and used + end - runs[-1][1] <= self._memory.n_bytes:
                used += end - runs[-1][1]
                runs[-1] = runs[-1][0], end
                continue
            if used + end - first > self._memory.n_bytes:
                self._copy_runs(runs, begins[done:i], done)
                runs, used, done = [], 0, i
            runs.append((first, end))
            used += end - first
        self._copy_runs(runs, begins[done:], done)

    def _copy_runs(self, runs: list[tuple[int, int]], begins: list[int], done: int) -> None:
        first, end = np.array(runs, np.int64).T
        at = np.cumsum(end - first) - (end - first)
        try:
            self._queue.read(self._file, np.stack([self._memory.address + at, end - first, first], axis=1))
        except DiskUnusable as error:
            raise ExecutorLost(f"weights are lost: {error}") from error
        of_run = np.searchsorted(first, begins, "right") - 1
        bounce, n_bytes = self._memory.array(), self._layout.row_bytes
        for i, begin in enumerate((at[of_run] + begins - first[of_run]).tolist(), done):
            self.rows[i] = bounce[begin : begin + n_bytes]

    def _read(self, address: int, n_bytes: int, offset: int) -> None:
        try:
            self._file.read(address, n_bytes, offset)
        except DiskUnusable as error:
            raise ExecutorLost(f"weights are lost: {error}") from error
