"""How fast native steps attend with a model's heads: rows of one token over KV in memory, to all keys and to the best
ones, and prompts.

Steps of a model whose matrices are hardly there (64 hidden numbers), so that attention is what they take. KV is that of
all layers, more than caches hold. What the same rows take without a context is subtracted.
"""

import time
from collections.abc import Callable

import numpy as np

from weft.domain.model.config import ModelSpec
from weft.domain.model.packed import kv_token_bytes
from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.pool import ThreadPool
from weft_kernels.cpu.structs import ATTENTION_BLOCK, BF16, FP32, INT4, Layer, Matrix, ModelStruct, StepStruct
from weft_runner.offload.policy import KvFormat

HIDDEN = 64  # numbers of a row between layers, and inner ones
KV_BYTES = 96 << 20
CONTEXT, MOST_ROWS, PAGE_TOKENS = 512, 32, 16
PROMPT_LAYERS = 2
BEST = 0.1  # of the keys, of sparse attention
REPEATS = 3

Clock = Callable[[], float]


def attention_rates(
    library: Library, pool: ThreadPool, spec: ModelSpec, kv: KvFormat, clock: Clock = time.perf_counter
) -> tuple[float, float, float]:
    """(bytes of KV a second by rows of one token that attend to all keys, and to the best ones, operations a second by
    prompts); 0 where steps are too short.
    """
    context = min(CONTEXT, spec.max_positions) // PAGE_TOKENS * PAGE_TOKENS
    if not context:
        return 0.0, 0.0, 0.0
    token = spec.layers * kv_token_bytes(spec, kv, int4=kv == "int4")
    rows = min(MOST_ROWS, max(1, KV_BYTES // (context * token)))
    bench = _Attention(library, pool, spec, kv, rows * context // PAGE_TOKENS, clock)
    decode_s, sparse_s = bench.decode_s(rows, context) - (alone_s := bench.decode_s(rows, 1)), 0.0
    bench.attend_to(BEST, context)
    sparse_s = bench.decode_s(rows, context) - alone_s
    bench.attend_to(0.0, context)
    prompt_s = bench.prompt_s(context)
    flops = 2 * context * context * spec.q_size * min(PROMPT_LAYERS, spec.layers)
    return (
        rows * context * token / decode_s if decode_s > 0.0 else 0.0,
        rows * context * token / sparse_s if sparse_s > 0.0 else 0.0,
        flops / prompt_s if prompt_s > 0.0 else 0.0,
    )


class _Attention:
    """The model, its KV, and steps."""

    def __init__(
        self, library: Library, pool: ThreadPool, spec: ModelSpec, kv: KvFormat, pages: int, clock: Clock
    ) -> None:
        kind = FP32 if kv == "fp32" else BF16
        self._library, self._pool, self._spec, self._clock = library, pool, spec, clock
        self._kept: list[object] = []
        ones = np.ones(max(HIDDEN, spec.head_dim), np.float32)
        norm = self._address(ones)
        layer = Layer(
            attention_norm=norm, mlp_norm=norm,
            q_norm=norm if spec.qk_norm else None, k_norm=norm if spec.qk_norm else None,
            qkv=self._matrix(spec.q_size + 2 * spec.kv_size, HIDDEN, kind), o=self._matrix(HIDDEN, spec.q_size, kind),
            gate_up=self._matrix(2 * HIDDEN, HIDDEN, kind), down=self._matrix(HIDDEN, HIDDEN, kind),
        )  # fmt: skip
        layers = (Layer * spec.layers)(*[layer] * spec.layers)
        for one, window in zip(layers, spec.windows, strict=True):
            one.window = window
        self._kv = MappedMemory(pages * PAGE_TOKENS * spec.layers * kv_token_bytes(spec, kv, int4=kv == "int4"))
        numbers = self._kv.array().view(np.uint16)  # small ones, and not alike: of keys with one score all are the best
        numbers[:] = np.random.default_rng(0).integers(0x3C00, 0x3C80, len(numbers), np.uint16)
        self._pages = pages
        embedding = np.full((1, HIDDEN), 0x3F80, np.uint16)  # of ones, in bf16
        self._kept += [layers, layer]
        self._model = ModelStruct(
            layers=spec.layers, hidden=HIDDEN, inner=HIDDEN, heads=spec.heads, kv_heads=spec.kv_heads,
            head_dim=spec.head_dim, vocab=16, kind=kind, eps=1e-5, layer=layers, embedding=self._address(embedding),
            norm=norm, head=self._matrix(16, HIDDEN, kind), kv=self._kv.address, page_tokens=PAGE_TOKENS,
            kv_kind=INT4 if kv == "int4" else kind,
            inverse_frequency=self._address(np.full(spec.head_dim // 2, 0.5, np.float32)), rope_scale=1.0,
        )  # fmt: skip

    def decode_s(self, rows: int, context: int) -> float:
        """Of a step of `rows` rows that attend to `context` tokens each, in all layers."""
        of_row = self._pages // rows
        made = [(i, i + 1, context - 1, i * of_row) for i in range(rows)]
        return self._step_s(rows, made, self._spec.layers)

    def attend_to(self, share: float, tokens: int) -> None:
        """The best keys of so many tokens; 0: all."""
        self._model.top_share, self._model.score_positions = share, -(-tokens // ATTENTION_BLOCK) * ATTENTION_BLOCK
        self._scores = MappedMemory(4 * 16 * self._pool.threads * self._model.score_positions)
        self._model.scores = self._scores.address

    def prompt_s(self, tokens: int) -> float:
        """Of a prompt in some of the layers."""
        layers = min(PROMPT_LAYERS, self._spec.layers)
        return self._step_s(tokens, [(0, tokens, 0, 0)], layers) - self._step_s(1, [(0, 1, 0, 0)], layers)

    def _step_s(self, n_tokens: int, rows: list[tuple[int, int, int, int]], layers: int) -> float:
        tokens, table = np.zeros(n_tokens, np.int32), np.arange(self._pages, dtype=np.int32)
        of_rows, hidden = np.array(rows, np.int32), np.zeros((n_tokens, HIDDEN), np.float32)
        workspace = MappedMemory(self._library.workspace_bytes(self._model, n_tokens, 0, 0))
        step = StepStruct(
            n_tokens=n_tokens, n_rows=len(rows), first=0, last=layers, tokens=tokens.ctypes.data,
            rows=of_rows.ctypes.data, page_table=table.ctypes.data, hidden=hidden.ctypes.data,
            workspace=workspace.address, workspace_bytes=workspace.n_bytes,
        )  # fmt: skip
        best = float("inf")
        for _ in range(REPEATS):
            began = self._clock()
            self._library.run(self._pool, self._model, step)
            best = min(best, self._clock() - began)
        return best

    def _matrix(self, n_out: int, n_in: int, kind: int) -> Matrix:
        source = np.full((n_out, n_in), 1.0 / n_in, np.float32)
        memory = MappedMemory(self._library.packed_bytes(kind, n_out, n_in))
        self._library.pack(self._pool, source.ctypes.data, FP32, n_in, (n_out, n_in), memory.address, kind)
        self._kept.append(memory)
        return Matrix(data=memory.address, scale=None, bias=None, n_in=n_in, n_out=n_out, kind=kind)

    def _address(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.float32 | np.uint16]]") -> int:
        self._kept.append(array)
        return array.ctypes.data
