"""`Sampler`: tokens sampled from logits by the native library (`src/weft_sampling.h`). Pointers are ints; no torch.

The tokens are those of the numpy statement of the same arithmetic, on every level: see `src/sampling.cpp`.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from weft_kernels.cpu.errors import CallRefused
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.structs import CODES

MAX_TOP = 20
SAMPLING_ARGS = np.dtype(
    [(name, np.uint64) for name in ("seed", "choice", "position")]
    + [(name, np.float64) for name in ("temperature", "top_p", "min_p")]
    + [(name, np.uintp) for name in ("shifted", "shift", "bias", "scale", "mask")]
    + [(name, np.int32) for name in ("n_shifted", "n_top", "top_k", "given")],
    align=True,
)
SAMPLED = np.dtype(
    [
        ("token", np.int32), ("n_top", np.int32), ("logprob", np.float32), ("reserved", np.int32),
        ("top_token", np.int32, (MAX_TOP,)), ("top_logprob", np.float32, (MAX_TOP,)),
    ],
    align=True,
)  # fmt: skip
_CODES = {**CODES, -2: "a size, a temperature, a token, min_p, top_k or a number of log probabilities is out of bounds"}


class Sampler:
    """One caller at a time: it owns the workspace. `level` is an index of weft_cpu.h's levels."""

    def __init__(self, library: ctypes.CDLL, level: int) -> None:
        self._sample, self._level = library.weft_sample, level
        self._workspace_bytes = library.weft_sample_workspace_bytes
        self._sample.argtypes = (
            [ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32]
            + [ctypes.c_void_p] * 3
            + [ctypes.c_int64]
        )
        self._sample.restype = ctypes.c_int32
        self._workspace_bytes.argtypes, self._workspace_bytes.restype = [ctypes.c_int32], ctypes.c_int64
        self._vocab = 0
        self._workspace = MappedMemory(0)
        self._out = np.empty(0, SAMPLED)

    def sample(
        self, logits: int, row_stride: int, vocab: int, n_rows: int, draws: npt.NDArray[np.void] | None = None
    ) -> npt.NDArray[np.void]:
        """Sample a SAMPLED for each row of float32 logits [n_rows, vocab] at the address `logits` (stride in elements).

        `draws`: SAMPLING_ARGS of each row (the arrays they point to live until this returns); None: the likeliest token
        of each row and no log probabilities. The result is valid until the next call. Raises CallRefused.
        """
        self._grow(vocab, n_rows)
        rows = None if draws is None else draws.ctypes.data
        code = self._sample(
            self._level, logits, row_stride, vocab, n_rows, rows, self._out.ctypes.data, self._workspace.address,
            self._workspace.n_bytes,
        )  # fmt: skip
        if code:
            raise CallRefused("weft_sample", code, _CODES[code])
        return self._out[:n_rows]

    def _grow(self, vocab: int, n_rows: int) -> None:
        if vocab != self._vocab:
            self._workspace = MappedMemory(max(self._workspace_bytes(vocab), 0))
            self._vocab = vocab
        if n_rows > len(self._out):
            self._out = np.empty(n_rows, SAMPLED)
