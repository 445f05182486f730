"""The LoRA operator alone (Punica, section 7.1): native SGMV beside a loop over adapters and gathered batched products.

y += scale (x A) B of one projection, 4096 -> 4096, as a decode step calls it: a token a row, the rows of an adapter
beside each other. Before each run 512 MB are read and then inputs and outputs: adapters come from memory, and what
the layer has just computed from a cache. A time's bound is that of the adapters' bytes and the FLOPs. The baselines
run in bf16 and in fp32, and the faster of the two counts.
"""

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from weft_bench.charts import Point, roofline
from weft_bench.cpu_context import Context
from weft_bench.cpu_decode import alternating, paired
from weft_bench.cpu_machine import GIGA, MEMORY_BYTES
from weft_bench.gpu_amounts import Batch, Operator
from weft_bench.lora_baselines import Adding, Dense, Weights, gather, loop
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
from weft_stage.lines import MACHINE, Line, newest
from weft_stage.shapes import BF16_BYTES, Shape

PROJECTION, SITE = "o_proj", 1
SWEPT_BYTES = 512 << 20
ASLEEP_S = 0.01
LARGEST_ERROR = 0.03  # of bf16 sums in another order, relative to the largest value
SCALE = 0.5
DTYPES = (torch.bfloat16, torch.float32)
OURS, LOOP, GATHER = "SGMV", "Loop", "Gather-BMM"
RATE, INTENSITY = "rate", "FLOPs a byte"


class Sweep:
    """Reads 512 MB, and waits until threads that torch and the kernels keep spinning have gone to sleep."""

    def __init__(self) -> None:
        self._read = torch.ones(SWEPT_BYTES // 4)

    def __call__(self) -> None:
        self._read.sum()
        time.sleep(ASLEEP_S)


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """Adapters of one rank, as many as the largest batch has rows: in slots of a store, and as plain matrices.

    All lie on large pages, as adapters of whole models do in the store: the number of layers makes each take 2 MiB.
    """

    store: CpuAdapterStore
    plain: dict[torch.dtype, list[Weights]]

    @classmethod
    def of(cls, library: Library, pool: ThreadPool, operator: Operator, rank: int) -> "Adapters":
        numbers = rank * (operator.n_in + operator.widths[0])
        layers = math.ceil(HUGE / (BF16_BYTES * numbers))
        shape = Shape(operator.n_in, layers, heads=operator.n_in // 16, kv_heads=1, inner=16, vocab=16)
        spec = spec_of(shape, context=16)
        store = CpuAdapterStore(library, pool, Partition(spec), operator.most_rows, BF16)
        arenas = {dtype: _on_large_pages(operator.most_rows * numbers, dtype) for dtype in DTYPES}
        plain: dict[torch.dtype, list[Weights]] = {dtype: [] for dtype in DTYPES}
        for slot in range(operator.most_rows):
            tensors = peft_tensors(spec, {PROJECTION: rank}, slot, torch.bfloat16)
            store.put(slot, store.build(arrays_of(tensors), Scale(SCALE)))
            a, b = (
                next(t for name, t in tensors.items() if part in name) for part in ("lora_A", "lora_B")
            )  # layer 0's
            for dtype, arena in arenas.items():
                room = arena[slot * numbers : (slot + 1) * numbers]
                room[: a.numel()], room[a.numel() :] = a.flatten(), b.t().flatten()
                plain[dtype].append((room[: a.numel()].view(a.shape), [room[a.numel() :].view(rank, -1)]))
        return cls(store, plain)


def operator_case(context: Context) -> Iterator[Line]:
    """Measure every rank, batch size and popularity. Raises WrongAdapter."""
    if (library := native_library(context, "operator")) is None:
        return
    threads, amounts = context.options.threads or cpu_quota(), context.options.amounts
    operator = amounts.operator
    torch.set_num_threads(threads)
    sweep = Sweep()
    with library.pool(threads) as pool, context.bar("operator", len(amounts.operator_ranks)) as advanced:
        for rank in amounts.operator_ranks:
            adapters = Adapters.of(library, pool, operator, rank)
            for batch in operator.batches(rank):
                times = measured(library, pool, operator, batch, adapters, amounts.repetitions, sweep)
                yield from _lines(context, operator, batch, times)
            advanced(1)


def native_library(context: Context, case: str) -> Library | None:
    """Load the kernels. None where the options want others or there are none: the case is skipped, and why is said."""
    if context.options.executor == "reference":
        context.said(f"skipped: {case}: the reference executor has no kernels")
        return None
    try:
        return load()
    except NativeUnavailable as error:
        context.said(f"skipped: {case}: {error}")
        return None


def measured(
    library: Library, pool: ThreadPool, operator: Operator, batch: Batch, adapters: Adapters, repetitions: int,
    sweep: Callable[[], object],
) -> dict[str, list[float]]:  # fmt: skip
    """Return the seconds of the operator and of each baseline's better dtype, in rounds. Raises WrongAdapter."""
    drawn = torch.randn(batch.rows, operator.n_in, generator=torch.Generator().manual_seed(batch.rows)).bfloat16()
    x = {dtype: drawn.to(dtype) for dtype in DTYPES}
    y = {dtype: torch.zeros(batch.rows, operator.widths[0], dtype=dtype) for dtype in DTYPES}
    wide, written = x[torch.float32], y[torch.float32]
    runs: dict[tuple[str, torch.dtype], Callable[[], None]] = {
        (OURS, torch.float32): native(library, pool, operator, batch, adapters.store, wide, written)
    }
    expected = torch.zeros_like(written)
    for dtype, plain in adapters.plain.items():
        dense = Dense.of(plain[: batch.n_adapters], batch.adapters, SCALE, drawn.device)
        baselines: dict[str, Adding] = {LOOP: loop(dense), GATHER: gather(dense)}
        for name, add in baselines.items():
            runs[name, dtype] = partial(add, y[dtype], x[dtype])
        if dtype == torch.float32:
            baselines[LOOP](expected, wide)
    runs[OURS, torch.float32]()
    if not (error := float((written - expected).abs().max() / expected.abs().max())) < LARGEST_ERROR:
        raise WrongAdapter(f"{operator.case(batch)}: off by {error:.2g} of the largest value")

    def seconds(of: tuple[str, torch.dtype]) -> float:
        sweep()
        for near in (x[of[1]], y[of[1]]):  # as the layer has just written them
            near.view(torch.uint8).numpy().max()
        began = time.perf_counter()
        runs[of]()
        return time.perf_counter() - began

    found = alternating(list(runs), repetitions, seconds)
    return {
        name: min((times for (whose, _), times in found.items() if whose == name), key=median)
        for name in (OURS, LOOP, GATHER)
    }


def native(
    library: Library, pool: ThreadPool, operator: Operator, batch: Batch, store: CpuAdapterStore, x: torch.Tensor,
    y: torch.Tensor,
) -> Callable[[], None]:  # fmt: skip
    """Return the work y += what the adapters of the batch make of x, both fp32, by the kernels of a step."""
    starts = [row for row, number in enumerate(batch.adapters) if row == 0 or number != batch.adapters[row - 1]]
    ends = [*starts[1:], batch.rows]
    segments = (SegmentStruct * len(starts))(
        *(SegmentStruct(start, end, batch.adapters[start] or 0) for start, end in zip(starts, ends, strict=True))
    )
    model = ModelStruct(
        layers=1, hidden=operator.n_in, inner=16, heads=operator.n_in // 16, kv_heads=1, head_dim=16, vocab=16,
        kind=BF16, page_tokens=16,
    )  # fmt: skip
    workspace = MappedMemory(library.workspace_bytes(model, batch.rows, store.site_rank, 0))
    step = StepStruct(
        n_tokens=batch.rows, n_segments=len(segments), last=1, segments=ctypes.addressof(segments),
        slots=ctypes.addressof(store.table), workspace=workspace.address, workspace_bytes=workspace.n_bytes,
    )  # fmt: skip

    def run(alive: object = (segments, workspace)) -> None:
        del alive
        library.lora(pool, model, step, SITE, (operator.widths[0], operator.n_in), x.data_ptr(), y.data_ptr())

    return run


def _on_large_pages(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(MappedMemory(numbers * dtype.itemsize).array()).view(dtype)


def _lines(context: Context, operator: Operator, batch: Batch, times: dict[str, list[float]]) -> Iterator[Line]:
    case, work, seconds = (
        operator.case(batch) + context.options.label,
        operator.adapters_work(batch),
        median(times[OURS]),
    )
    bound_s = work.bound_s(context.machine.rates(MEMORY_BYTES))
    line = context.origin.line
    yield line(case, "time", seconds * 1e6, "us", baseline=bound_s * 1e6, bound_fraction=bound_s / seconds)
    yield line(case, INTENSITY, work.flops / work.n_bytes, "")
    yield line(case, RATE, work.flops / seconds / GIGA, "GFLOP/s")
    target = ">= 1" if context.options.usual else None
    for name in (LOOP, GATHER):
        yield line(case, f"{name}'s time / ours", paired(times[name], times[OURS]), "x", target=target)


def pictures(lines: Iterable[Line]) -> dict[str, str]:
    """Draw for each machine its roofline with the operator and its baselines, of the newest lines."""
    found: dict[str, dict[str, dict[str, float]]] = {}  # machine -> case -> metric -> value
    for line in newest(lines):
        if line.value is not None and line.case.startswith((MACHINE, "LoRA ")):
            found.setdefault(line.machine, {}).setdefault(line.case, {})[line.metric] = line.value
    return {
        machine: _picture(cases) for machine, cases in found.items() if any(INTENSITY in one for one in cases.values())
    }


def _picture(cases: dict[str, dict[str, float]]) -> str:
    rates = next(values for case, values in cases.items() if case.startswith(MACHINE))
    series: dict[str, list[Point]] = {OURS: [], LOOP: [], GATHER: []}
    for values in cases.values():
        if INTENSITY in values:
            series[OURS].append(Point(values[INTENSITY], values[RATE]))
            for name in (LOOP, GATHER):
                series[name].append(Point(values[INTENSITY], values[RATE] / values[f"{name}'s time / ours"]))
    return roofline("LoRA operator", rates["read bandwidth"], rates["bf16 peak"], series)


def about(lines: Iterable[Line], folder: Path) -> str:
    """Return the pictures of the page, drawn anew below `folder`."""
    shown = list[str]()
    for number, (machine, svg) in enumerate(sorted(pictures(lines).items()), 1):
        path = folder / "pictures" / f"cpu-operator-{number}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg, encoding="utf-8")
        shown.append(
            f"Roofline of the LoRA operator, {machine}:\n\n![{path.stem}]({path.relative_to(folder).as_posix()})"
        )
    return "\n\n".join(shown)
