"""config.json, weights, adapters' tensors, the reference executor: each alone."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from weft.domain.model.config import RopeSpec, parse_spec
from weft_kernels.plan import SegmentPlan
from weft_runner.errors import AdapterInvalid, WeightsInvalid
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
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.reference.adapters import TorchAdapterStore, stack_adapter
from weft_runner.model.reference.executor import ReferenceExecutor
from weft_runner.model.weights import load_weights

# ---- spec


def test_both_ways_of_writing_rope_are_read_alike(small_config):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = small_config | {"rope_theta": 500.0, "rope_scaling": scaling}
    new = {k: v for k, v in small_config.items() if k != "rope_theta"}
    new["rope_parameters"] = {**scaling, "rope_theta": 500.0}
    assert parse_spec(old).rope == parse_spec(new).rope == RopeSpec(500.0, "llama3", 8.0, 1.0, 4.0, 64)


def test_a_plain_llama_2_config_has_default_rope_and_its_own_heads(small_config):
    config = {k: v for k, v in small_config.items() if k not in ("num_key_value_heads", "rope_theta")}
    spec = parse_spec(config)
    assert (spec.kv_heads, spec.head_dim, spec.rope) == (4, 8, RopeSpec(10000.0, original_max_positions=256))
    assert spec.projection("k_proj") == (32, 32)


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": [2, 5]}, {}, {2, 5}),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, {2, 7, 8}),
        ({"eos_token_id": None}, {}, set()),
        ({}, {"eos_token_id": 9}, {9}),
    ],
)
def test_the_end_of_sequence_is_what_any_file_names(small_config, config, generation, eos):
    base = {k: v for k, v in small_config.items() if k != "eos_token_id"}
    assert parse_spec(base | config, generation).eos == eos


# ---- weights


def test_sharded_weights_are_the_same_model_as_one_file(world):
    files = {path.name: path for path in world.base.iterdir()}
    whole = load_weights(files, world.spec)
    tensors = load_file(files["model.safetensors"])
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, world.base / shard)
    files["model.safetensors"].unlink()
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (world.base / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_weights({path.name: path for path in world.base.iterdir()}, world.spec)
    assert torch.equal(whole.embedding, sharded.embedding)
    assert torch.equal(whole.layers[1].qkv, sharded.layers[1].qkv)
    assert torch.equal(whole.head, sharded.head)


@pytest.mark.parametrize("fault", ["missing tensor", "wrong shape", "torn file", "no file", "missing shard"])
def test_weights_that_do_not_fit_are_refused_by_name(world, fault):
    path = world.base / "model.safetensors"
    tensors = load_file(path)
    if fault == "missing tensor":
        del tensors["model.norm.weight"]
    elif fault == "wrong shape":
        tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, path)
    if fault == "torn file":
        path.write_bytes(path.read_bytes()[:100])
    elif fault == "no file":
        path.unlink()
    elif fault == "missing shard":
        (world.base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(WeightsInvalid):
        load_weights({p.name: p for p in world.base.iterdir()}, world.spec)


def test_bfloat16_weights_are_computed_in_fp32(world):
    path = world.base / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    weights = load_weights({p.name: p for p in world.base.iterdir()}, world.spec)
    assert weights.layers[0].down.dtype is torch.float32


# ---- adapters


class One:
    def scale_of(self, module: str, rank: int) -> float:
        return 1.0 if module else 0.0


NO_LAYER = "no such linear layer|no base_model"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop(next(k for k in t if "lora_B" in k)), "lora_B"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.weight": np.ones(2, np.float32)}),
            "a whole trained module",
        ),
        (lambda t: t.update({k.replace("layers.1", "layers.7"): v for k, v in list(t.items())}), "has 2 layers"),
        (lambda t: t.update({next(k for k in t if "lora_A" in k): np.ones((4, 5), np.float32)}), "it has to be"),
        (lambda t: t.update({k.replace("q_proj", "qq_proj"): v for k, v in list(t.items())}), "no such linear layer"),
        (
            lambda t: t.update({k.replace("self_attn", "mlp"): v for k, v in list(t.items())}),
            "no such linear layer|no base_model",
        ),
        (
            lambda t: t.update({k.replace("layers.1", "layers.01"): v for k, v in list(t.items())}),
            "no such linear layer|no base_model",
        ),
        (
            lambda t: t.update({k.replace(".weight", ".bias"): v for k, v in list(t.items())}),
            "no such linear layer|no base_model",
        ),
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
        stack_adapter(adapter_pairs(tensors, One(), world.spec), world.spec)


def test_an_adapter_keeps_its_true_ranks_and_counts_its_bytes(world):
    tensors = map_tensors(world.write_adapter("a", rank=3, modules=("q_proj", "v_proj")) / "adapter_model.safetensors")
    adapter = stack_adapter(adapter_pairs(tensors, One(), world.spec), world.spec)
    assert (adapter.rank, adapter.site_rank) == (3, 6)
    assert adapter.n_bytes == sum(t.size * 4 for t in tensors.values())
    assert [site is None for site in adapter.sites[0]] == [False, True, True, True]


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
    built = stack_adapter(adapter_pairs(tensors, ByName(), spec), spec)
    assert built.rank == max(ranks.values())
    assert built.n_bytes == 4 * sum(tensor.size for tensor in tensors.values())


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
        stack_adapter(adapter_pairs(tensors, Wrong(), world.spec), world.spec)


# ---- the executor's seam


def one_row_step(tokens: tuple[int, ...], position: int = 0) -> StepInput:
    row = StepRow(0, len(tokens), position, (1, 0), samples=True)
    return StepInput(tokens, (row,), SegmentPlan(len(tokens), ()))


def executor_of(world) -> ReferenceExecutor:
    spec = world.spec
    weights = load_weights({p.name: p for p in world.base.iterdir()}, spec)
    return ReferenceExecutor(spec, weights, KvCache(spec, 2, 4), TorchAdapterStore(spec, 1))


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
