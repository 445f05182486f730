"""What benchmarks of the CPU engine are given here: little."""

import pytest

from weft_bench import cpu_machine
from weft_bench.cpu_shapes import SHAPES
from weft_kernels.cpu import Library
from weft_stage.shapes import Shape

SMALLEST = Shape(hidden=32, layers=1, heads=2, kv_heads=1, inner=48, vocab=64)
MEMORY_BYTES = 1 << 20
PEAK = Library.peak


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called tiny computes next to nothing, and the machine is measured for a moment only."""
    monkeypatch.setitem(SHAPES, "tiny", SMALLEST)
    monkeypatch.setattr(cpu_machine, "MEMORY_BYTES", MEMORY_BYTES)
    monkeypatch.setattr(cpu_machine, "WORKING_SETS", (MEMORY_BYTES // 2, MEMORY_BYTES))
    monkeypatch.setattr(cpu_machine, "TORCH_SIZE", 64)
    monkeypatch.setattr(Library, "peak", lambda library, pool: PEAK(library, pool, 1 << 12))
