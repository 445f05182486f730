"""Adapters that come on the copy stream while graphs replay: what runs meanwhile stays right, and what comes is."""

import threading
from dataclasses import replace
from functools import partial

import torch

from weft.domain.model.config import ModelSpec
from weft_bench.gpu_check import CheckContext, Checks, Differs, assert_same, short
from weft_bench.gpu_check_models import LLAMA, PAGE_TOKENS, TINY, HostAdapter, Pair
from weft_bench.gpu_models import StepOf, step_of
from weft_runner.model.adapter_store import DeviceAdapter
from weft_runner.model.step import StepInput

ROWS, TINY_ROWS = 8, 2
LOADS, TINY_LOADS = 20, 2
LOAD_S = 60.0


def checks(context: CheckContext) -> Checks:
    spec = TINY if context.tiny else replace(LLAMA, layers=8, windows=(0,) * 8)
    (rows,) = context.of((ROWS,), (TINY_ROWS,))
    for dtype in (torch.float32, torch.bfloat16) if context.gpu.is_real else (torch.float32,):
        pair = Pair.made(context, spec, dtype, rows, rows, graphs=True)
        (loads,) = context.of((LOADS,), (TINY_LOADS,))
        yield f"{short(dtype)}, {loads} adapters beside steps", partial(_beside, pair, spec, rows, loads)
        yield f"{short(dtype)}, a row joins as soon as its adapter is put", partial(_joins, pair, spec, rows, loads)
        del pair
        context.gpu.free()


def _beside(pair: Pair, spec: ModelSpec, rows: int, loads: int) -> None:
    """The same step again and again, bit for bit, while pages that it does not use are written to."""
    executor = pair.device.executor
    step = _step(pair, list(range(rows)))
    expected = executor.run(step).clone()
    for number in range(loads):
        loading = Loading(pair, HostAdapter.made(spec, 200 + number, pair.dtype))
        ran = 0
        while loading.is_alive() or not ran:
            assert_same(executor.run(step), expected)
            ran += 1
        loading.result()
        assert_same(executor.run(step), expected)
        pair.device.deck.back(loading.pages)
    _give_back(pair, step)


def _joins(pair: Pair, spec: ModelSpec, rows: int, loads: int) -> None:
    """Put between two steps, used by the next one, whose launch may come before the last copy has ended."""
    executor, slot = pair.device.executor, rows
    busy = _step(pair, list(range(rows)))
    for number in range(loads):
        adapter = HostAdapter.made(spec, 300 + number, pair.dtype)
        loading = Loading(pair, adapter)
        while loading.is_alive():
            executor.run(busy)
        executor.adapters.put(slot, loading.result())
        pair.reference.load(slot, adapter)
        pair.decode([slot, *range(1, rows)], steps=1)
        executor.adapters.clear(slot)
        pair.reference.evict(slot)
        pair.device.deck.back(loading.pages)
    _give_back(pair, busy)


class Loading:
    """One adapter on its way, built by a thread of its own as the engine's builder does it."""

    def __init__(self, pair: Pair, adapter: HostAdapter) -> None:
        executor = pair.device.executor
        self._store, self._adapter = executor.adapters, adapter
        needed = self._store.needs(adapter.tensors, adapter.scales)
        self.pages = pair.device.deck.deal(-(-needed // executor.page_bytes))
        executor.allocate_adapter_pages(self.pages)
        self._built: DeviceAdapter | None = None
        self._thread = threading.Thread(target=self._build, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> DeviceAdapter:
        """Raises Differs when it did not come."""
        self._thread.join(LOAD_S)
        if self._built is None:
            raise Differs("the adapter was not built; the thread's trace is above")
        return self._built

    def _build(self) -> None:
        self._built = self._store.build(self._adapter.tensors, self._adapter.scales, self.pages)


def _step(pair: Pair, slots: list[int]) -> StepInput:
    """A decode step at position 0: it can run any number of times."""
    return step_of([StepOf([3 + slot], 0, pair.device.deck.deal(1), slot) for slot in slots], PAGE_TOKENS)


def _give_back(pair: Pair, step: StepInput) -> None:
    for row in step.rows:
        pair.device.deck.back(row.pages)
