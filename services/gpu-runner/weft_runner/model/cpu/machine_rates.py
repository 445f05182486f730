"""The constants of the offload cost model, measured on this machine with what the cpu executor itself uses.

The disk is read and written past the page cache, in the blocks and by the threads of the weight stream, into as much
memory as a ring. Products are those of native steps of the model's own layers, more of them than caches hold, with all
that a layer does beside them but attention; that is of native steps with the model's heads (`_attention_rates`).
`overlap` is what is left of products and reads when both run, `duplex` of reads and writes: medians of rounds in which
each runs alone, then both, so that a machine that is slower for a while is so in all three. Every part ends within its
seconds, on any machine. Torch is not needed.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from weft.domain.model.packed import kv_token_bytes
from weft.domain.model.spec import ModelSpec
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.structs import ATTENTION_BLOCK
from weft_kernels.cpu.threads import ThreadPool
from weft_runner.model.cpu.synthetic_model import PAGE_TOKENS, Row, SyntheticModel
from weft_runner.model.tiers import disk_rates
from weft_runner.model.tiers.disk_rates import MEMORY_BYTES, REPEATS, Clock, DiskStream, median_s
from weft_runner.offload.machine import MachineRates, Table, check_machine
from weft_runner.offload.policy import Formats, KvFormat, WeightsFormat
from weft_runner.offload.sizes import model_sizes

HIDDEN = 64  # numbers of a row between layers, and inner ones, where attention is measured
KV_BYTES = 96 << 20
CONTEXT, MAX_DECODE_ROWS = 512, 32
PROMPT_LAYERS = 2
BEST = 0.1  # of the keys, of sparse attention

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WEIGHT_BYTES = 512 << 20  # of packed matrices, at most: a model that a cache holds is read from there, as it is later
PRODUCTS_S = 3.0  # for those of a format
OVERLAP_ROWS = 32
SEQUENCES = ROWS[-1] // PAGE_TOKENS


def measure_rates(
    folder: Path, spec: ModelSpec, formats: Sequence[WeightsFormat], kv: KvFormat, threads: int | None = None,
    most_bytes: int = WEIGHT_BYTES, clock: Clock = time.perf_counter,
) -> MachineRates:  # fmt: skip
    """Some seconds, and `DISK_BYTES` of the disk meanwhile. `most_bytes`: of weights at a time, that may be in memory.

    Raises DiskUnusable, NativeUnavailable, MachineInvalid.
    """
    library = load()
    with disk_rates.scratch_file(folder) as path, library.pool(threads) as pool:
        n_bytes, write = disk_rates.disk_write(path, clock)
        read = disk_rates.disk_read(path, n_bytes, clock)
        memory = library.read_bandwidth(pool, MEMORY_BYTES, REPEATS)
        attention, sparse, flops = _attention_rates(library, pool, spec, kv, clock)
        computing = _Layers(library, pool, spec, formats[0], kv, most_bytes, clock)
        products = {formats[0]: computing.table()}
        for name in formats[1:]:
            products[name] = _Layers(library, pool, spec, name, kv, most_bytes, clock).table()
        reading = DiskStream(path, n_bytes, os.O_RDONLY, disk_rates.written(MEMORY_BYTES))
        rates = MachineRates(
            disk_read=read,
            disk_write=write,
            to_device=(copy := _copy_rate(library, pool, clock)),
            to_host=copy,
            memory_read=memory,
            attention=attention or memory,
            host_attention=attention or memory,
            attention_flops_per_s=flops or library.peak(pool, 1 << 18),
            products=products,
            overlap=disk_rates.beside_share(reading, computing, clock),
            duplex=disk_rates.beside_share(reading, DiskStream(path, n_bytes, os.O_RDWR, reading.memory), clock),
            request_s=disk_rates.request_s(path, n_bytes, (read, write), clock),
            sparse_attention=sparse,
        )
    check_machine(rates)
    return rates


def _copy_rate(library: Library, pool: ThreadPool, clock: Clock) -> float:
    pieces, each = 64, 2 << 20
    memory = MappedMemory(2 * pieces * each)
    ctypes.memset(memory.address, 1, memory.n_bytes)
    places = [memory.address + i * each for i in range(2 * pieces)]
    return pieces * each / median_s(lambda: library.copy(pool, places[:pieces], places[pieces:], each), clock)


class _Layers:
    """A part of the model's layers, as many as `most_bytes` hold but at least one, and steps with few keys."""

    def __init__(
        self, library: Library, pool: ThreadPool, spec: ModelSpec, weights: WeightsFormat, kv: KvFormat,
        most_bytes: int, clock: Clock,
    ) -> None:  # fmt: skip
        sizes = model_sizes(spec, Formats(weights))
        self._layers = max(1, min(spec.layers, min(most_bytes, WEIGHT_BYTES) // sizes.layer))
        part = replace(spec, by_layer=spec.by_layer[: self._layers])
        self._model = SyntheticModel(
            library, pool, part, weights, distinct=self._layers, pages=SEQUENCES, int4_kv=kv == "int4"
        )
        self._numbers, self._clock = sum(sizes.numbers), clock
        self._each = [self._step(OVERLAP_ROWS, range(i, i + 1)) for i in range(self._layers)]

    def run(self, until: Callable[[], bool]) -> int:
        """Layers of a batch, each time the one after the last. See `disk_rates.Work`."""
        done = 0
        while not until():
            self._each[done % self._layers]()
            done += 1
        return done

    def table(self) -> Table:
        """Seconds for each number of a layer's matrices by rows."""
        return disk_rates.product_table(
            ROWS, lambda rows: median_s(self._step(rows, range(self._layers)), self._clock),
            self._layers * self._numbers, self._clock, within_s=PRODUCTS_S, times=2 * REPEATS,
        )  # fmt: skip

    def _step(self, rows: int, layers: range) -> Callable[[], None]:
        """Return a step of `rows` sequences of at most a page."""
        each = -(-rows // SEQUENCES)
        made = [(i, min(i + each, rows), 0, i // each) for i in range(0, rows, each)]
        return self._model.step(rows, made, layers)


def _attention_rates(
    library: Library, pool: ThreadPool, spec: ModelSpec, kv: KvFormat, clock: Clock = time.perf_counter
) -> tuple[float, float, float]:
    """Measure how fast native steps attend with a model's heads, over KV of all layers, more than caches hold.

    Returns (bytes of KV a second by rows of one token that attend to all keys, and to the best ones, operations a
    second by prompts); 0 if steps are too short. What the same rows take without a context is subtracted.
    """
    context = min(CONTEXT, spec.max_positions) // PAGE_TOKENS * PAGE_TOKENS
    if not context:
        return 0.0, 0.0, 0.0
    token = spec.layers * kv_token_bytes(spec, kv, int4=kv == "int4")
    rows = min(MAX_DECODE_ROWS, max(1, KV_BYTES // (context * token)))
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
    """A model whose matrices are hardly there, so that attention is what its steps take."""

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
