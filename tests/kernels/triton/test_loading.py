"""Adapters that come on the copy stream while graphs replay: what runs meanwhile stays right, and what comes is."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.device_models import LLAMA, PAGE_TOKENS, HostAdapter, Pair
from harness.on_device import EXACT_DTYPES, assert_same, name_of, sized
from weft.domain.model.spec import LayerSpec
from weft_runner.model import DeviceAdapter, StepInput
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import StepOf, step_of

pytestmark = pytest.mark.gpu

SPEC = sized(gpu=replace(LLAMA, by_layer=(LayerSpec(),) * 8), interpreted=LLAMA)
ROWS = sized(gpu=8, interpreted=2)
LOADS = sized(gpu=20, interpreted=2)


@pytest.fixture(scope="module", params=EXACT_DTYPES, ids=name_of)
def pair(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield Pair.made(gpu, SPEC, request.param, ROWS, ROWS, graphs=True)
    gpu.free()


def test_a_step_gives_the_same_bits_while_adapters_are_written_beside_it(pair: Pair) -> None:
    """To pages that it does not use."""
    executor = pair.device.executor
    step = _step(pair, list(range(ROWS)))
    expected = executor.run(step).clone()
    for number in range(LOADS):
        loading = Loading(pair, HostAdapter.made(SPEC, 200 + number, pair.dtype))
        ran = 0
        while loading.is_alive() or not ran:
            assert_same(executor.run(step), expected)
            ran += 1
        loading.result()
        assert_same(executor.run(step), expected)
        pair.device.deck.back(loading.pages)
    _give_back(pair, step)


@pytest.mark.slow
def test_a_row_may_use_an_adapter_as_soon_as_it_is_put(pair: Pair) -> None:
    """Put between two steps, used by the next one, whose launch may come before the last copy has ended."""
    executor, slot = pair.device.executor, ROWS
    busy = _step(pair, list(range(ROWS)))
    for number in range(LOADS):
        adapter = HostAdapter.made(SPEC, 300 + number, pair.dtype)
        loading = Loading(pair, adapter)
        while loading.is_alive():
            executor.run(busy)
        executor.adapters.put(slot, loading.result())
        pair.reference.load(slot, adapter)
        pair.decode([slot, *range(1, ROWS)], steps=1)
        executor.adapters.clear(slot)
        pair.reference.evict(slot)
        pair.device.deck.back(loading.pages)
    _give_back(pair, busy)


class Loading:
    """One adapter on its way, built by a thread of its own as the engine's builder does it."""

    def __init__(self, pair: Pair, adapter: HostAdapter) -> None:
        executor = pair.device.executor
        self._store, self._adapter = executor.adapters, adapter
        needed = self._store.device_bytes(adapter.tensors, adapter.scales)
        self.pages = pair.device.deck.deal(-(-needed // executor.page_bytes))
        executor.allocate_adapter_pages(self.pages)
        self._built: DeviceAdapter | None = None
        self._thread = threading.Thread(target=self._build, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> DeviceAdapter:
        self._thread.join()
        assert self._built is not None, "the adapter was not built; the thread's trace is above"
        return self._built

    def _build(self) -> None:
        self._built = self._store.build(self._adapter.tensors, self._adapter.scales, self.pages)


def _step(pair: Pair, slots: list[int]) -> StepInput:
    """A decode step at position 0: it can run any number of times."""
    return step_of([StepOf([3 + slot], 0, pair.device.deck.deal(1), slot) for slot in slots], PAGE_TOKENS)


def _give_back(pair: Pair, step: StepInput) -> None:
    for row in step.rows:
        pair.device.deck.back(row.pages)
