"""config.json, weights, adapters' tensors, sampling: each alone."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from weft_kernels.plan import SegmentPlan
from weft_runner.errors import AdapterInvalid, ModelUnsupported, WeightsInvalid
from weft_runner.memory.adapter_files import map_tensors
from weft_runner.memory.kv_cache import KvCache
from weft_runner.memory.lora_table import LoraTable
from weft_runner.model.lora import build_adapter
from weft_runner.model.reference import ReferenceExecutor
from weft_runner.model.spec import RopeSpec, parse_spec
from weft_runner.model.step import Step, StepRow, check_step
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
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, {7, 8}),
        ({"eos_token_id": None}, {}, set()),
        ({}, {"eos_token_id": 9}, {9}),
    ],
)
def test_the_end_of_sequence_comes_from_the_generation_config_first(small_config, config, generation, eos):
    base = {k: v for k, v in small_config.items() if k != "eos_token_id"}
    assert parse_spec(base | config, generation).eos == eos


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "rope"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(small_config, change, word):
    with pytest.raises(ModelUnsupported, match=word):
        parse_spec(small_config | change)


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
    def scale_of(self, module: str) -> float:
        return 1.0 if module else 0.0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop(next(k for k in t if "lora_B" in k)), "lora_B"),
        (lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.ones(2)}), "no module"),
        (lambda t: t.update({k.replace("layers.1", "layers.7"): v for k, v in list(t.items())}), "no module"),
        (lambda t: t.update({next(k for k in t if "lora_A" in k): torch.ones(4, 5)}), "do not fit"),
        (lambda t: t.update({k.replace("q_proj", "qq_proj"): v for k, v in list(t.items())}), "module|projection"),
        (lambda t: t.clear(), "no tensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(world, change, word):
    tensors = map_tensors(world.write_adapter("a") / "adapter_model.safetensors")
    change(tensors)
    with pytest.raises(AdapterInvalid, match=word):
        build_adapter(tensors, One(), world.spec)


def test_an_adapter_keeps_its_true_ranks_and_counts_its_bytes(world):
    tensors = map_tensors(world.write_adapter("a", rank=3, modules=("q_proj", "v_proj")) / "adapter_model.safetensors")
    adapter = build_adapter(tensors, One(), world.spec)
    assert (adapter.rank, adapter.site_rank) == (3, 6)
    assert adapter.n_bytes == sum(t.numel() * 4 for t in tensors.values())
    assert [site is None for site in adapter.sites[0]] == [False, True, True, True]


# ---- the executor's seam


def one_row_step(tokens: tuple[int, ...], position: int = 0) -> Step:
    row = StepRow(0, len(tokens), position, (1, 0), samples=True)
    return Step(tokens, (row,), SegmentPlan(len(tokens), ()))


def executor_of(world) -> ReferenceExecutor:
    spec = world.spec
    weights = load_weights({p.name: p for p in world.base.iterdir()}, spec)
    return ReferenceExecutor(spec, weights, KvCache(spec, 2, 4), LoraTable(spec, 1))


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
