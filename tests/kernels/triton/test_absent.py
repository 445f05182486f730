"""What steps launch where no GPU is: of an 8B on meta tensors, where nothing can wait for it, and what that costs."""

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import triton
from triton.runtime import interpreter

from harness.triton_compile import unavailable
from weft_bench.cpu_shapes import DEVICE_SHAPES
from weft_bench.drive import device
from weft_bench.gpu_host import executor_of
from weft_kernels.triton import prepared
from weft_stage.gpu_models import spec_of

CUDA = "weft_runner.model.cuda"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel was launched, and did nothing, and products."""
    counts = Counter[str]()

    def launch(grid: Any, *_: Any, **__: Any) -> None:
        counts[grid.fn.__name__] += 1

    def multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        counts["product"] += 1
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    for module in ("ops", "executor"):
        monkeypatch.setattr(f"{CUDA}.{module}.interpreted_product", multiplied)
    return counts


@pytest.fixture
def absent() -> Any:
    return executor_of(spec_of(DEVICE_SHAPES["8B"], 2048), pages=64, rows=8, tokens=256, graphs=True)


def test_a_captured_step_waits_for_nothing(absent: Any, launched: Counter[str]) -> None:
    """Whatever its tokens, its launches are as many: those of the floor that figures are held against.

    Sums of the library are not counted here, of which there is the last one; prompts have an attention of their own.
    """
    found: dict[str, dict[str, set[int]]] = {}
    for name, forward in absent.forwards():
        launched.clear()
        with torch.inference_mode():
            forward()
        kind, _, tokens = name.partition(" of ")
        found.setdefault(kind, {}).setdefault(tokens.split(", ")[1], set()).add(launched.total())
    decode = {kind: device.launches(absent.spec, adapters=kind == "adapters") - 1 for kind in ("base", "adapters")}
    assert found["decode"] == {kind: {count} for kind, count in decode.items()}
    assert found["prompts"] == {kind: {count + absent.spec.layers} for kind, count in decode.items()}
    assert decode["base"] < 296


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable(linked=True)), reason=unavailable(linked=True) or "")
def test_the_hosts_part_of_a_step_is_measured_without_a_gpu() -> None:
    command = [sys.executable, "-m", "weft_bench.gpu_host", "--model", "tiny", "--runs", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    # embedding, two norms, rotation and KV, attention, silu, the last norm; adapters: shrinks and expands
    for case, count in (("32 rows, base", 7), ("32 rows, adapters", 13), ("prompt of 64 and 31 rows, base", 8)):
        assert f"tiny, {case}, eager: " in done.stdout
        assert f"tiny, {case}, captured: its tables: " in done.stdout
        line = next(line for line in done.stdout.splitlines() if f"{case}, eager" in line)
        assert line.endswith(f", {count} launches"), line


def test_launchers_round_up_as_tritons_helpers_do() -> None:
    for n in range(1, 300):
        assert prepared.next_power_of_2(n) == triton.next_power_of_2(n)
        assert [prepared.cdiv(n, d) for d in range(1, 70)] == [triton.cdiv(n, d) for d in range(1, 70)]
