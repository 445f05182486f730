"""Bounds against figures worked out by hand."""

from dataclasses import replace

import pytest

from weft_bench.cpu_shapes import SHAPES
from weft_bench.roofline import (
    Rates,
    Work,
    adapter_work,
    attention_flops,
    base_bytes,
    base_flops,
    kv_bytes,
    lora_bytes,
    lora_flops,
    retention_bound,
)
from weft_stage.shapes import Shape

TINY = Shape(hidden=4, layers=2, heads=2, kv_heads=1, inner=8, vocab=10)


def test_widths_follow_from_a_shape() -> None:
    assert TINY.kv == 2
    assert TINY.layer_weights == 2 * 16 + 2 * 8 + 3 * 32
    assert TINY.weights == 2 * 144 + 40
    assert TINY.lora_width == 36 + 4 + 24


def test_heads_may_be_wider_and_modules_fused() -> None:
    """A read of the same input is one read: q, k and v, and gate and up, are one module each."""
    fused = replace(TINY, architecture="Phi3ForCausalLM", head=3)
    assert (fused.q, fused.kv) == (6, 3)
    assert fused.modules == {
        "self_attn.qkv_proj": (4, 12), "self_attn.o_proj": (6, 4), "mlp.gate_up_proj": (4, 16), "mlp.down_proj": (8, 4),
    }  # fmt: skip
    assert fused.layer_weights == 48 + 24 + 64 + 32
    assert fused.lora_width == 16 + 10 + 20 + 12
    assert attention_flops(fused, tokens=3, context=5) == 4 * 2 * 3 * 5 * 6


def test_bytes_of_a_step_are_weights_keys_and_adapters() -> None:
    assert base_bytes(TINY) == 2 * 328
    assert base_bytes(TINY, 1) == 328
    assert kv_bytes(TINY, rows=3, context=5) == 2 * 2 * 2 * 2 * 3 * 6
    assert lora_bytes(TINY, rank=3) == 2 * 2 * 3 * 64


def test_operations_of_a_step_are_two_for_each_weight_and_token() -> None:
    assert base_flops(TINY, tokens=3, sampled=1) == 2 * 3 * 288 + 2 * 40
    assert attention_flops(TINY, tokens=3, context=5) == 4 * 2 * 3 * 5 * 4
    assert lora_flops(TINY, rank=3, tokens=2) == 2 * 2 * 2 * 3 * 64


@pytest.mark.parametrize(
    ("shape", "base_mb", "adapter_mb"), [("m135", 269, 9.8), ("small", 206, 4.8), ("tiny", 8.0, 0.598)]
)
def test_what_the_benchmarked_models_read(shape: str, base_mb: float, adapter_mb: float) -> None:
    assert base_bytes(SHAPES[shape]) / 1e6 == pytest.approx(base_mb, rel=0.02)
    assert lora_bytes(SHAPES[shape], 16) / 1e6 == pytest.approx(adapter_mb, rel=0.02)


def test_an_adapter_is_read_once_however_many_rows_use_it() -> None:
    shared, apart = adapter_work(TINY, [16], [16, 16, 0]), adapter_work(TINY, [16, 16], [16, 16, 0])
    assert shared.n_bytes == lora_bytes(TINY, 16) == apart.n_bytes / 2
    assert shared.flops == apart.flops == lora_flops(TINY, 16, 2)


def test_retention_by_the_formula() -> None:
    adapters, rates = Work(n_bytes=50, flops=300), Rates(bytes_per_s=100, flops_per_s=600)
    assert retention_bound(1.0, adapters, rates) == pytest.approx(1.0 / (1.0 + 0.5 + 0.5))
    assert retention_bound(1.0, Work(0, 0), rates) == 1.0
