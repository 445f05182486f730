"""config.json, weights, adapters' tensors, the reference executor: each alone."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model_configs import config_of
from harness.native_models import adapter_tensors
from harness.ranks import base_of, settings_of
from weft.domain.model.config import parse_spec
from weft.domain.model.families import FAMILIES
from weft.domain.model.tensors import linear_modules, module_size
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
@given(st.sampled_from(FAMILIES), st.data())
def test_pairs_are_the_tensors_of_each_site_in_the_order_of_the_stacked_base(family, data):
    """Any subset of the modules of any layers, each of its own rank, in any dtype, in any order of the file.

    A module that holds several projections has one A, which is each one's, and the rows of its B are theirs in turn.
    """
    spec = parse_spec(config_of(family, head_dim=4))
    modules = {name: (layer, held) for name, layer, held in linear_modules(spec)}
    ranks = data.draw(st.dictionaries(st.sampled_from(list(modules)), st.integers(1, 64), min_size=1, max_size=9))
    dtype = data.draw(st.sampled_from([FLOAT32, FLOAT16, BFLOAT16]))
    tensors: dict[str, Array] = {}
    for name in data.draw(st.permutations(sorted(ranks))):
        n_in, n_out = module_size(spec, modules[name][1])
        tensors[tensor_name(name, "A")] = np.ones((ranks[name], n_in), dtype)
        tensors[tensor_name(name, "B")] = np.arange(n_out * ranks[name]).reshape(n_out, -1).astype(dtype)
    pairs = adapter_pairs(tensors, ByName(), spec)
    assert [len(layer) for layer in pairs] == [len(SITES)] * spec.layers
    found = {(layer, pair.projection): pair for layer, sites in enumerate(pairs) for site in sites for pair in site}
    order = [(layer, name) for layer in range(spec.layers) for site in SITES for name in site]
    assert list(found) == [one for one in order if one in found]
    assert sum(len(modules[name][1]) for name in ranks) == len(found)
    for name, rank in ranks.items():
        layer, held = modules[name]
        mine = [found[layer, projection] for projection in held]
        assert all(pair.a is tensors[tensor_name(name, "A")] for pair in mine)
        assert np.array_equal(np.concatenate([pair.b for pair in mine]), tensors[tensor_name(name, "B")])
        assert {(pair.rank, pair.scale) for pair in mine} == {(rank, ByName().scale_of(name, 1))}
        assert [(pair.n_in, pair.n_out) for pair in mine] == [spec.projection(projection) for projection in held]


class ByName:
    """A scale of its own for each module of a layer."""

    def scale_of(self, module: str, rank: int) -> float:
        return 1.0 + sum(map(ord, module.rpartition(".")[2]))


def tensor_name(module: str, half: str) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"


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
