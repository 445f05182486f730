"""The constants of the offload cost model, measured on this machine with what the cuda executor itself uses.

The disk as for the cpu executor (`tiers.disk_rates`). Copies are those of pinned memory on a stream of their own.
Products are the executor's on matrices of the model's largest shape, more of them than caches hold; attention is our
kernels' with the model's heads. Under Triton's interpreter the same code runs, and its figures mean nothing.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import linear

from weft.domain.model.packed import stacked_shapes
from weft.domain.model.spec import ModelSpec
from weft_kernels.plan import plan_rows
from weft_kernels.triton import int4
from weft_kernels.triton.attention import prefill_block
from weft_runner.model.cuda.attention import TritonAttention
from weft_runner.model.cuda.device import DTYPES, CopyStream, Gpu, PinnedMemory
from weft_runner.model.cuda.executor import DECODE_CHUNK, processors
from weft_runner.model.cuda.step import DeviceStep, StepTables
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.step import StepInput, StepRow
from weft_runner.model.tiers import disk_rates
from weft_runner.model.tiers.disk_rates import MEMORY_BYTES, Clock, DiskStream, median_s
from weft_runner.offload.machine import MachineRates, Table, check_machine
from weft_runner.offload.policy import Formats, WeightsFormat
from weft_runner.offload.sizes import model_sizes

ROWS = (1, 8, 32, 128, 512, 2048)
COPY_BYTES, WEIGHT_BYTES, KV_BYTES = 256 << 20, 512 << 20, 256 << 20  # at most, of a GPU
INTERPRETED_BYTES = 64 << 10  # of each, where nothing is measured
CONTEXT, PAGE_TOKENS, OVERLAP_ROWS = 512, 16, 32
PRODUCTS_S = 4.0


@torch.inference_mode()
def measure_gpu_rates(
    folder: Path, spec: ModelSpec, formats: Sequence[WeightsFormat], gpu: Gpu, most_bytes: int,
    clock: Clock = time.perf_counter,
) -> MachineRates:  # fmt: skip
    """Some seconds. `formats`: whose products are measured, the first one's beside reads. `most_bytes`: of the GPU at a
    time, that may be taken. Raises DiskUnusable, MachineInvalid.
    """
    most = most_bytes if gpu.is_real else INTERPRETED_BYTES
    products = {name: _Bench(spec, name, gpu, most, clock).products() for name in formats[1:]}
    bench = _Bench(spec, formats[0], gpu, most, clock)
    with disk_rates.scratch_file(folder) as path:
        n_bytes, write = disk_rates.disk_write(path, clock)
        read = disk_rates.disk_read(path, n_bytes, clock)
        reading = DiskStream(path, n_bytes, os.O_RDONLY, disk_rates.written(MEMORY_BYTES))
        to_device, to_host = bench.copies()
        attention, flops = bench.attention()
        rates = MachineRates(
            disk_read=read,
            disk_write=write,
            to_device=to_device,
            to_host=to_host,
            memory_read=bench.memory_read(),
            attention=attention,
            host_attention=to_device,  # attention on the host is not computed: as if KV came first
            attention_flops_per_s=flops,
            products={formats[0]: bench.products(), **products},
            one_memory=False,
            overlap=disk_rates.beside_share(reading, bench, clock),
        )
    check_machine(rates)
    return rates


class _Bench:
    """One GPU, and matrices of the model's largest shape on it."""

    def __init__(self, spec: ModelSpec, weights: WeightsFormat, gpu: Gpu, most_bytes: int, clock: Clock) -> None:
        """`most_bytes`: of each kind of what it works on."""
        self._spec, self._gpu, self._clock, self._most = spec, gpu, clock, most_bytes
        self._at, self._dtype, self._sms = gpu.device, DTYPES[weights], processors(gpu.device)
        n_out, n_in = max(stacked_shapes(spec), key=lambda shape: shape[0] * shape[1])
        generator = torch.Generator(self._at).manual_seed(0)
        source = torch.randn(n_out, n_in, generator=generator, device=self._at, dtype=self._dtype)
        matrix = int4.pack(source) if weights == "int4" else source
        size = matrix.numel() * matrix.element_size()
        whole = min(model_sizes(spec, Formats(weights, executor="cuda")).weights, most_bytes, WEIGHT_BYTES)
        self._matrices = [matrix, *(matrix.clone() for _ in range(max(0, whole // size - 1)))]
        self._x = torch.randn(ROWS[-1], n_in, generator=generator, device=self._at, dtype=self._dtype)
        self._n_out, self._numbers = n_out, n_out * n_in

    def products(self) -> Table:
        """Seconds for each number of a matrix by rows."""

        def all_s(rows: int) -> float:
            return self._time_s(lambda: [self._product(matrix, rows) for matrix in self._matrices])

        numbers = len(self._matrices) * self._numbers
        return disk_rates.product_table(ROWS, all_s, numbers, self._clock, within_s=PRODUCTS_S, times=8)

    def run(self, until: Callable[[], bool]) -> int:
        """Products of a batch, one after the other. See `disk_rates.Work`."""
        done = 0
        while not until():
            self._product(self._matrices[0], OVERLAP_ROWS)
            self._gpu.wait()
            done += 1
        return done

    def copies(self) -> tuple[float, float]:
        """Bytes a second to the device and from there."""
        n_bytes = min(COPY_BYTES, self._most)
        host, stream = PinnedMemory(n_bytes, self._at), CopyStream(self._at)
        device = torch.zeros(n_bytes, dtype=torch.uint8, device=self._at)
        try:
            return (
                n_bytes / self._time_s(lambda: _finish(stream.copy([(device, host.tensor)], None))),
                n_bytes / self._time_s(lambda: _finish(stream.copy([(host.tensor, device)], None))),
            )
        finally:
            host.close()

    def memory_read(self) -> float:
        """Bytes a second of the device's own memory."""
        numbers = torch.ones(min(COPY_BYTES, self._most) // 4, device=self._at)
        return numbers.numel() * 4 / self._time_s(lambda: numbers.sum())

    def attention(self) -> tuple[float, float]:
        """(bytes of KV a second by rows of one token, operations a second by prompts), of one layer."""
        spec, context = self._spec, max(1, min(CONTEXT, self._spec.max_positions) // PAGE_TOKENS) * PAGE_TOKENS
        token, each = 2 * spec.kv_size * self._dtype.itemsize, context // PAGE_TOKENS
        rows = max(1, min(64, min(KV_BYTES, self._most) // (context * token)))
        one = KvCache(replace(spec, by_layer=spec.by_layer[:1]), rows * each, PAGE_TOKENS, self._dtype, self._at)
        pages = [tuple(range(i * each, (i + 1) * each)) for i in range(rows)]
        decode = [StepRow(i, i + 1, context - 1, own, samples=True) for i, own in enumerate(pages)]
        prompt = [StepRow(0, context, 0, pages[0], samples=True)]
        decode_s, prompt_s = (self._attend_s(one, step) for step in (decode, prompt))
        return rows * context * token / decode_s, 2 * context * context * spec.q_size / prompt_s

    def _attend_s(self, kv: KvCache, rows: list[StepRow]) -> float:
        tokens, spec = rows[-1].end, self._spec
        step = StepInput([0] * tokens, tuple(rows), plan_rows([None] * tokens, {}))
        tile = prefill_block(spec.heads, spec.kv_heads, spec.head_dim, self._dtype)
        tables = StepTables.of(step, DECODE_CHUNK, tile)
        here = DeviceStep(tables.shape, self._at)
        here.write(tables)
        attention = TritonAttention(kv.tensor, here, self._sms, tile, spec.query_scale, spec.score_cap)
        q = torch.ones(tokens, spec.heads, spec.head_dim, dtype=self._dtype, device=self._at)
        return self._time_s(lambda: attention.attend(q, 0, 0))

    def _product(self, matrix: torch.Tensor, rows: int) -> None:
        if int4.is_packed(matrix):
            int4.linear(self._x[:rows], matrix, self._n_out, sms=self._sms)
        else:
            linear(self._x[:rows], matrix)

    def _time_s(self, launch: Callable[[], object]) -> float:
        """The median of a few, after one that compiles."""

        def run() -> None:
            launch()
            self._gpu.wait()

        run()
        return max(1e-9, median_s(run, self._clock))


def _finish(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
