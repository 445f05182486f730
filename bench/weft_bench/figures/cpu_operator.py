"""The LoRA operator alone (Punica, section 7.1): y += scale (x A) B of one projection, a token a row.

512 MB are read before each run: adapters come from memory, as in a model. Baselines are torch's, in the faster of bf16
and fp32.
"""

import ctypes
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from weft_bench.cpu_machine import MEMORY_BYTES
from weft_bench.cpu_shapes import IDENTICAL, POPULARITIES, RANK
from weft_bench.drive.cpu import Bench
from weft_bench.drive.engine import Batch, alternating, paired
from weft_bench.drive.lora import GATHER, LOOP, baselines
from weft_bench.roofline import Work
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.memory import HUGE, MappedMemory
from weft_kernels.cpu.structs import BF16, ModelStruct, SegmentStruct, StepStruct
from weft_kernels.cpu.threads import ThreadPool, cpu_quota
from weft_runner.model import Partition
from weft_runner.model.cpu.adapters import CpuAdapterStore
from weft_runner.model.host_tensors import arrays_of
from weft_stage.errors import WrongAdapter
from weft_stage.gpu_models import Scale, peft_tensors, spec_of
from weft_stage.lines import Line
from weft_stage.shapes import BF16_BYTES, Shape

SITE, SCALE, OURS = 1, 0.5, "SGMV"  # the site of o_proj
SWEPT_BYTES, ASLEEP_S = 512 << 20, 0.01  # until spinning threads have gone to sleep
LARGEST_ERROR = 0.03  # of bf16 sums in another order, relative to the largest value


def operator(bench: Bench) -> Iterator[Line]:
    """Measure every batch size and popularity. Raises WrongAdapter."""
    try:
        library = load()
    except NativeUnavailable as error:
        bench.run.say(f"skipped: operator: {error}")
        return
    threads, width, sizes = bench.options.threads or cpu_quota(), bench.amounts.operator_width, bench.amounts
    torch.set_num_threads(threads)
    swept = torch.ones(SWEPT_BYTES // 4)
    layers = math.ceil(HUGE / (2 * BF16_BYTES * RANK * width))  # an adapter takes a large page, as of a whole model
    spec = spec_of(Shape(width, layers, heads=width // 16, kv_heads=1, inner=16, vocab=16), context=16)
    tensors = [peft_tensors(spec, {"o_proj": RANK}, slot, torch.bfloat16) for slot in range(max(sizes.operator_rows))]
    a, b = (torch.stack([next(t for name, t in each.items() if part in name) for each in tensors])
            for part in ("lora_A", "lora_B"))  # fmt: skip
    with library.pool(threads) as pool:
        store = CpuAdapterStore(library, pool, Partition(spec), len(tensors), BF16)
        for slot, each in enumerate(tensors):
            store.put(slot, store.build(arrays_of(each), Scale(SCALE)))
        for rows in sizes.operator_rows:
            for batch in (Batch(rows, kind) for kind in (POPULARITIES if rows > 1 else (IDENTICAL,))):
                slots = sorted(slot for slot in batch.adapters if slot is not None)
                x, y = torch.randn(rows, width), torch.zeros(rows, width)
                runs: dict[tuple[str, str], Callable[[], None]] = {
                    (OURS, ""): native(library, pool, slots, store, x, y)
                }
                for dtype in (torch.bfloat16, torch.float32):
                    for name, add in baselines(a.to(dtype), b.mT.contiguous().to(dtype), slots, SCALE).items():
                        runs[name, str(dtype)] = partial(add, y.to(dtype, copy=True), x.to(dtype))
                expected = torch.zeros_like(y)
                baselines(a.float(), b.mT.float(), slots, SCALE)[LOOP](expected, x)
                runs[OURS, ""]()
                case = f"LoRA {width} -> {width}, rank {RANK}, batch {rows}, {batch.popularity}{bench.label}"
                if not (error := float((y - expected).abs().max() / expected.abs().max())) < LARGEST_ERROR:
                    raise WrongAdapter(f"{case}: off by {error:.2g} of the largest value")

                def seconds(key: tuple[str, str], runs: dict[tuple[str, str], Callable[[], None]] = runs) -> float:
                    swept.sum()
                    time.sleep(ASLEEP_S)
                    began = time.perf_counter()
                    runs[key]()
                    return time.perf_counter() - began

                times = alternating(list(runs), sizes.repetitions, seconds)
                work = Work(2 * BF16_BYTES * len({*slots}) * RANK * width, 4 * rows * RANK * width)
                yield from _lines(bench, case, work, times)


def _lines(bench: Bench, case: str, work: Work, times: dict[tuple[str, str], list[float]]) -> Iterator[Line]:
    ours, line = times[OURS, ""], bench.run.origin().line
    bound_s = work.bound_s(bench.machine.rates(MEMORY_BYTES))
    yield line(case, "time", median(ours) * 1e6, "us", baseline=bound_s * 1e6, bound_fraction=bound_s / median(ours))
    for name in (LOOP, GATHER):
        theirs = min((seconds for key, seconds in times.items() if key[0] == name), key=median)
        target = ">= 1" if bench.usual else None
        yield line(case, f"{name}'s time / ours", paired(theirs, ours), "x", target=target)


def native(
    library: Library, pool: ThreadPool, slots: list[int], store: CpuAdapterStore, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], None]:
    """Return the work y += what the adapters in these slots make of x, both fp32, by the kernels of a step."""
    rows, width = x.shape
    starts = [row for row, slot in enumerate(slots) if row == 0 or slot != slots[row - 1]]
    segments = (SegmentStruct * len(starts))(
        *(SegmentStruct(start, end, slots[start]) for start, end in zip(starts, [*starts[1:], rows], strict=True))
    )
    model = ModelStruct(
        layers=1, hidden=width, inner=16, heads=width // 16, kv_heads=1, head_dim=16, vocab=16, kind=BF16,
        page_tokens=16,
    )  # fmt: skip
    workspace = MappedMemory(library.workspace_bytes(model, rows, store.site_rank, 0))
    step = StepStruct(
        n_tokens=rows, n_segments=len(segments), last=1, segments=ctypes.addressof(segments),
        slots=ctypes.addressof(store.table), workspace=workspace.address, workspace_bytes=workspace.n_bytes,
    )  # fmt: skip

    def run(alive: object = (segments, workspace)) -> None:
        del alive
        library.lora(pool, model, step, SITE, (width, width), x.data_ptr(), y.data_ptr())

    return run
