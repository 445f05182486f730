"""config.json, weights, adapters' tensors, the reference executor: each alone."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.native_models import adapter_tensors
from harness.ranks import base_of, settings_of
from weft.domain.model.config import parse_spec
from weft_kernels.plan import SegmentPlan
from weft_runner.errors import AdapterInvalid
from weft_runner.executors import make_executor
from weft_runner.model import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    SITES,
    Array,
    StepInput,
    StepRow,
    adapter_pairs,
    check_step,
    map_tensors,
)

# ---- spec


# ---- weights


# ---- adapters


class One:
    def scale_of(self, module: str, rank: int) -> float:
        return 1.0 if module else 0.0


NO_LAYER = "no such linear layer|no base_model"


def renamed(old: str, new: str) -> Callable[[dict[str, Array]], None]:
    return lambda t: t.update({name.replace(old, new): tensor for name, tensor in list(t.items())})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop(next(k for k in t if "lora_B" in k)), "lora_B"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.weight": np.ones(2, np.float32)}),
            "a whole trained module",
        ),
        (renamed("layers.1", "layers.7"), "has 2 layers"),
        (lambda t: t.update({next(k for k in t if "lora_A" in k): np.ones((4, 5), np.float32)}), "it has to be"),
        (renamed("q_proj", "qq_proj"), "no such linear layer"),
        (renamed("self_attn", "mlp"), NO_LAYER),
        (renamed("layers.1", "layers.01"), NO_LAYER),
        (renamed(".weight", ".bias"), NO_LAYER),
        (lambda t: t.update({next(k for k in t if "lora_A" in k): np.ones((), np.float32)}), "it has to be"),
        (lambda t: t.update({k: v.astype(np.float64) for k, v in t.items()}), "float64"),
        (lambda t: t.update({k: v.astype(np.int8) for k, v in t.items()}), "int8"),
        (lambda t: t.update({k: v[:0] if "lora_A" in k else v[:, :0] for k, v in t.items()}), "it has to be"),
        (lambda t: t.clear(), "no tensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(world, change, word):
    tensors = dict(map_tensors(world.write_adapter("a") / "adapter_model.safetensors"))
    change(tensors)
    with pytest.raises(AdapterInvalid, match=word):
        executor_of(world).adapters.build(tensors, One())


def test_an_adapter_keeps_its_true_ranks_and_counts_its_bytes(world):
    tensors = adapter_tensors(world.spec, 1, {"q_proj": 3, "v_proj": 5, "down_proj": 2})
    adapter = executor_of(world).adapters.build(tensors, One())
    assert (adapter.rank, adapter.site_rank) == (5, 8)
    assert adapter.n_bytes == sum(t.size * 4 for t in tensors.values())
    assert [site is None for site in adapter.sites[0]] == [False, True, True, False]


@settings(deadline=None)
@given(st.data())
def test_pairs_are_the_tensors_of_each_site_in_the_order_of_the_stacked_base(data):
    """Any subset of the projections of any layers, each of its own rank, in any dtype, in any order of the file."""
    spec = parse_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 11,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
        }
    )
    modules = [(layer, name) for layer in range(spec.layers) for site in SITES for name in site]
    ranks = data.draw(st.dictionaries(st.sampled_from(modules), st.integers(1, 256), min_size=1))
    dtype = data.draw(st.sampled_from([FLOAT32, FLOAT16, BFLOAT16]))
    tensors: dict[str, Array] = {}
    for layer, name in data.draw(st.permutations(sorted(ranks))):
        n_in, n_out = spec.projection(name)
        tensors[tensor_name(layer, name, "A")] = np.ones((ranks[layer, name], n_in), dtype)
        tensors[tensor_name(layer, name, "B")] = np.ones((n_out, ranks[layer, name]), dtype)
    pairs = adapter_pairs(tensors, ByName(), spec)
    assert [len(layer) for layer in pairs] == [len(SITES)] * spec.layers
    found = [(layer, pair) for layer, sites in enumerate(pairs) for site in sites for pair in site]
    assert [(layer, pair.projection) for layer, pair in found] == [module for module in modules if module in ranks]
    for layer, pair in found:
        assert pair.a is tensors[tensor_name(layer, pair.projection, "A")]
        assert pair.b is tensors[tensor_name(layer, pair.projection, "B")]
        assert (pair.rank, pair.scale) == (ranks[layer, pair.projection], ByName().scale_of(pair.projection, 1))


class ByName:
    """A scale of its own for each projection."""

    def scale_of(self, module: str, rank: int) -> float:
        return 1.0 + sum(map(ord, module.rpartition(".")[2]))


def tensor_name(layer: int, projection: str, half: str) -> str:
    block = "self_attn" if projection[0] in "qkvo" else "mlp"
    return f"base_model.model.model.layers.{layer}.{block}.{projection}.lora_{half}.weight"


def test_a_scale_that_is_no_number_is_refused(world):
    tensors = map_tensors(world.write_adapter("a") / "adapter_model.safetensors")

    class Wrong:
        def scale_of(self, module: str, rank: int) -> float:
            return math.inf

    with pytest.raises(AdapterInvalid, match="scale"):
        executor_of(world).adapters.build(tensors, Wrong())


# ---- the executor's seam


def one_row_step(tokens: tuple[int, ...], position: int = 0) -> StepInput:
    row = StepRow(0, len(tokens), position, (1, 0), samples=True)
    return StepInput(tokens, (row,), SegmentPlan(len(tokens), ()))


def executor_of(world) -> Any:
    flags = {"kv_pages": 2, "page_tokens": 4, "max_adapters": 1}
    return make_executor(settings_of(**flags), base_of({path.name: path for path in world.base.iterdir()}))


def test_layers_in_two_parts_give_the_whole_and_each_layer_marks_its_end(world):
    step = one_row_step((3, 4, 5, 6, 7))
    check_step(step, page_tokens=4)
    whole = executor_of(world).run(step)
    parts, done = executor_of(world), []
    hidden = parts.run(step, last=1, layer_done=done.append)
    assert hidden.shape == (5, world.spec.hidden_size)
    assert torch.equal(parts.run(step, first=1, hidden=hidden, layer_done=done.append), whole)
    assert done == [0, 1]


def test_keys_and_values_lie_where_the_layout_says(world):
    executor = executor_of(world)
    executor.run(one_row_step((3, 4, 5, 6, 7)))
    tensor = executor._kv.tensor  # [page, L, 2, N, P, D]
    assert tensor.shape == (2, 2, 2, 2, 4, 8)
    assert (tensor[1].abs().sum(-1) > 0).all(), "the first page is full"
    assert (tensor[0, :, :, :, 0].abs().sum(-1) > 0).all()
    assert not tensor[0, :, :, :, 1:].any(), "one token on the second"
    executor.clear_pages([1])
    assert not tensor[1].any()
