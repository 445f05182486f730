"""How fast native steps attend with a model's heads: rows of one token over KV in memory, to all keys and to the best
ones, and prompts.

Steps of a model whose matrices are hardly there (64 hidden numbers), so that attention is what they take. KV is that of
all layers, more than caches hold. What the same rows take without a context is subtracted.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from weft.domain.model.config import ModelSpec
from weft.domain.model.packed import kv_token_bytes
from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.structs import ATTENTION_BLOCK
from weft_kernels.cpu.threads import ThreadPool
from weft_runner.model.cpu.synthetic_model import PAGE_TOKENS, Row, SyntheticModel
from weft_runner.offload.policy import KvFormat

HIDDEN = 64  # numbers of a row between layers, and inner ones
KV_BYTES = 96 << 20
CONTEXT, MOST_ROWS = 512, 32
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
    """The model, and steps of it."""

    def __init__(
        self, library: Library, pool: ThreadPool, spec: ModelSpec, kv: KvFormat, pages: int, clock: Clock
    ) -> None:
        small = replace(spec, hidden_size=HIDDEN, intermediate_size=HIDDEN)
        weights = "fp32" if kv == "fp32" else "bf16"
        self._model = SyntheticModel(library, pool, small, weights, distinct=1, pages=pages, int4_kv=kv == "int4")
        self._layers, self._threads, self._pages, self._clock = spec.layers, pool.threads, pages, clock

    def decode_s(self, rows: int, context: int) -> float:
        """Seconds of a step of `rows` rows that attend to `context` tokens each, in all layers."""
        of_row = self._pages // rows
        made = [(i, i + 1, context - 1, i * of_row) for i in range(rows)]
        return self._step_s(rows, made, self._layers)

    def attend_to(self, share: float, tokens: int) -> None:
        """Attend to the best `share` of the keys of up to `tokens` tokens; 0: to all of them."""
        model = self._model.struct
        model.top_share, model.score_positions = share, -(-tokens // ATTENTION_BLOCK) * ATTENTION_BLOCK
        self._scores = MappedMemory(4 * 16 * self._threads * model.score_positions)
        model.scores = self._scores.address

    def prompt_s(self, tokens: int) -> float:
        """Seconds of a prompt of `tokens` tokens in some of the layers."""
        layers = min(PROMPT_LAYERS, self._layers)
        return self._step_s(tokens, [(0, tokens, 0, 0)], layers) - self._step_s(1, [(0, 1, 0, 0)], layers)

    def _step_s(self, n_tokens: int, rows: list[Row], layers: int) -> float:
        step, best = self._model.step(n_tokens, rows, range(layers)), float("inf")
        for _ in range(REPEATS):
            began = self._clock()
            step()
            best = min(best, self._clock() - began)
        return best
