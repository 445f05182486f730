"""A base on disk: views of the mapped files, and everything that is wrong with one is named before it is read."""

import json
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from harness.model_configs import config_of
from weft.domain.model.config import parse_spec
from weft.domain.model.families import FAMILIES, Family
from weft.domain.model.packed import stacked_shapes, vector_numbers
from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import model_tensors
from weft.telemetry.progress import ByteProgress
from weft_runner.errors import StoppedAtStart, WeightsInvalid
from weft_runner.model import Checkpoint, check_finite, open_checkpoint
from weft_runner.model.checkpoint import INDEX, SINGLE
from weft_runner.model.host_tensors import array_of, tensor_of
from weft_runner.model.lora import sites_of
from weft_runner.model.weights import load_weights

Q0 = "model.layers.0.self_attn.q_proj"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def spec_of(architecture: str = "Qwen2ForCausalLM", **change: Any) -> ModelSpec:
    return parse_spec({"architectures": [architecture], **SIZES, **change})


def family_spec(family: Family, **change: Any) -> ModelSpec:
    """Read a configuration of a family with all the biases that it may have, and three layers."""
    own = {"layer_types": ["full_attention"] * 3} if family.recurrent else {}
    return parse_spec(config_of(family, **SIZES, **dict.fromkeys(family.bias_flags, True), **own, **change))


def tensors_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in model_tensors(spec)}


def write(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> dict[str, Path]:
    """Write a base as transformers does: one file, or shards and their index."""
    if shards == 1:
        save_file(tensors, folder / SINGLE)
    else:
        names = sorted(tensors)
        where: dict[str, str] = {}
        for number in range(shards):
            shard = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            save_file({name: tensors[name] for name in names[number::shards]}, folder / shard)
            where |= dict.fromkeys(names[number::shards], shard)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return files_of(folder)


def files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


def is_mapped(path: Path, tensor: torch.Tensor) -> bool:
    """The tensor lies in this process's mapping of the file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return any(
        int(first, 16) <= tensor.data_ptr() < int(last, 16) for first, last in (line[0].split("-") for line in lines)
    )


def resident_bytes(path: Path) -> int:
    """Return the resident bytes of this process's mappings of a file, as the kernel counts them."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            counted = line.endswith(str(path))
        elif counted and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total


each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


@pytest.mark.parametrize("shards", [1, 3])
@each_family
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tensor_is_a_view_in_its_stored_dtype(tmp_path, family, dtype, shards):
    spec = family_spec(family)
    tensors = tensors_of(spec, dtype)
    checkpoint = open_checkpoint(write(tmp_path, tensors, shards), spec)
    for name, tensor in tensors.items():
        read = checkpoint.tensor(name)
        assert tensor_of(read).dtype is dtype
        assert torch.equal(tensor_of(read), tensor)
        assert read.ctypes.data == checkpoint.tensor(name).ctypes.data, "no copy was made"


def test_a_layer_has_what_its_family_has(tmp_path):
    spec = spec_of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=9, max_window_layers=2)
    tensors = tensors_of(spec)
    checkpoint = open_checkpoint(write(tmp_path, tensors), spec)
    layer = checkpoint.layer(2)
    assert list(layer.projections) == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert torch.equal(tensor_of(layer.projections["down_proj"]), tensors["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(tensor_of(layer.biases["v_proj"]), tensors["model.layers.2.self_attn.v_proj.bias"])
    assert (layer.q_norm, layer.k_norm, layer.spec.window, checkpoint.layer(1).spec.window) == (None, None, 9, 0)
    assert torch.equal(tensor_of(checkpoint.head), tensors["lm_head.weight"])


@each_family
def test_projections_biases_and_norms_of_a_layer_are_those_of_its_tensors(tmp_path, family):
    """A module that holds several projections is cut into views of its rows; norms are what is multiplied with."""
    spec = family_spec(family)
    tensors = tensors_of(spec, torch.bfloat16)
    checkpoint = open_checkpoint(write(tmp_path, tensors), spec)
    layer, prefix = checkpoint.layer(1), "model.layers.1"
    assert set(layer.projections) == set(family.projections)
    assert set(layer.biases) == set(spec.biases)
    for module, held in family.modules.items():
        for parts, end in ((layer.projections, "weight"), (layer.biases, "bias")):
            if held[0] in parts:
                whole = torch.cat([tensor_of(parts[name]) for name in held])
                assert torch.equal(whole, tensors[f"{prefix}.{module}.{end}"])
        first = layer.projections[held[0]]
        assert first.ctypes.data == checkpoint.tensor(f"{prefix}.{module}.weight").ctypes.data, "no copy was made"

    def norm(name: str) -> torch.Tensor:
        scaled = tensors[f"{name}.weight"].float() + family.norm_offset
        return torch.stack([scaled, tensors[f"{name}.bias"].float()]) if family.layer_norm else scaled

    found = (layer.attention_norm, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm)
    for name, array in zip(family.norms.value, found, strict=True):
        assert (array is None) == (name == "")
        assert array is None or torch.equal(tensor_of(array).float(), norm(f"{prefix}.{name}"))
    assert torch.equal(tensor_of(checkpoint.norm).float(), norm("model.norm"))
    sizes = {"none": None, "each": (16, 16), "all": (64, spec.kv_size)}[family.head_norms.value]
    assert (None if layer.q_norm is None or layer.k_norm is None else (len(layer.q_norm), len(layer.k_norm))) == sizes
    if layer.q_norm is not None:
        stored = tensors[f"{prefix}.self_attn.q_norm.weight"].float()
        assert torch.equal(tensor_of(layer.q_norm).float(), stored + family.norm_offset)


@each_family
def test_weights_are_stacked_site_by_site_whatever_modules_they_lie_in(tmp_path, family):
    spec = family_spec(family)
    files = write(tmp_path, tensors_of(spec))
    stored, layer = open_checkpoint(files, spec).layer(2), load_weights(files, spec).layers[2]
    stacks = (layer.qkv, layer.o, layer.gate_up, layer.down)
    biases = (layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias)
    for names, weight, bias in zip(sites_of(family), stacks, biases, strict=True):
        assert torch.equal(weight, torch.cat([tensor_of(stored.projections[name]) for name in names]))
        assert (bias is None) == (names[0] not in spec.biases)
        assert bias is None or torch.equal(bias, torch.cat([tensor_of(stored.biases[name]) for name in names]))
    assert [tuple(weight.shape) for weight in stacks] == list(stacked_shapes(spec))
    norms = [getattr(layer, name) for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")]
    vectors = [one for one in (*norms, *biases, layer.q_norm, layer.k_norm) if one is not None]
    assert sum(one.numel() for one in vectors) == vector_numbers(spec)


def test_weights_for_the_reference_are_stacked_and_in_fp32(tmp_path):
    spec = spec_of("Qwen3ForCausalLM", tie_word_embeddings=True)
    tensors = tensors_of(spec, torch.bfloat16)
    weights = load_weights(write(tmp_path, tensors), spec)
    layer, prefix = weights.layers[1], "model.layers.1.self_attn"
    stacked = torch.cat([tensors[f"{prefix}.{name}_proj.weight"] for name in "qkv"]).float()
    assert torch.equal(layer.qkv, stacked)
    assert layer.q_norm is not None
    assert torch.equal(layer.q_norm, tensors[f"{prefix}.q_norm.weight"].float())
    assert layer.qkv_bias is None
    assert weights.head is weights.embedding


def test_pages_of_what_was_read_leave_memory_and_come_back(tmp_path):
    spec = spec_of("LlamaForCausalLM", hidden_size=512, intermediate_size=2048, num_attention_heads=32)
    tensors = tensors_of(spec)
    path = write(tmp_path, tensors)[SINGLE]
    checkpoint = open_checkpoint({SINGLE: path}, spec)
    layer = checkpoint.layer(1)
    size = sum(tensor.nbytes for tensor in layer.projections.values())
    assert resident_bytes(path) < size // 4, "opening reads nothing but headers"
    total = sum(float(tensor.sum()) for tensor in layer.projections.values())
    assert resident_bytes(path) >= size
    checkpoint.release_layer(1)
    assert resident_bytes(path) < size // 4
    assert sum(float(tensor.sum()) for tensor in layer.projections.values()) == total


def test_loading_needs_no_second_copy_of_a_model_that_is_stored_as_it_is_computed(tmp_path):
    spec = spec_of()
    files = write(tmp_path, tensors_of(spec))
    weights = load_weights(files, spec)
    assert all(is_mapped(files[SINGLE], t) for t in (weights.embedding, weights.head, weights.layers[2].down))
    assert not is_mapped(files[SINGLE], weights.layers[2].qkv), "three tensors in one"


def test_a_view_outlives_its_checkpoint_and_its_file(tmp_path):
    spec = spec_of()
    tensors = tensors_of(spec)
    files = write(tmp_path, tensors)
    view = open_checkpoint(files, spec).tensor(f"{Q0}.weight")
    files[SINGLE].unlink()
    assert torch.equal(tensor_of(view), tensors[f"{Q0}.weight"])


def test_loading_stops_between_two_tensors(tmp_path):
    spec = spec_of()
    asked = iter(range(100))
    checkpoint = open_checkpoint(write(tmp_path, tensors_of(spec)), spec, lambda: next(asked) > 3)
    checkpoint.tensor("model.norm.weight")
    with pytest.raises(StoppedAtStart, match=r"model\.layers"):
        checkpoint.layer(0)


def test_a_header_that_is_not_padded_is_read(tmp_path):
    """Numbers then lie at odd addresses; safetensors allows it and its own writer never does it."""
    spec = spec_of()
    tensors = tensors_of(spec, torch.bfloat16)
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # an odd length
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data)
    checkpoint = open_checkpoint(files_of(tmp_path), spec)
    assert all(torch.equal(tensor_of(checkpoint.tensor(name)), tensor) for name, tensor in tensors.items())


# ---- refusals


def refusal(files: dict[str, Path], spec: ModelSpec) -> str:
    with pytest.raises(WeightsInvalid) as caught:
        open_checkpoint(files, spec)
    return str(caught.value)


Change = Callable[[dict[str, torch.Tensor]], Any]
WRONG: dict[str, tuple[Change, str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), "config.json asks for model.norm.weight, which is in no file"),
    "missing bias": (lambda t: t.pop(f"{Q0}.bias"), f"config.json asks for {Q0}.bias"),
    "extra": (lambda t: t.update({"model.extra": torch.ones(2)}), "model.extra is no part of a Qwen2ForCausalLM"),
    "extra bias": (lambda t: t.update({"model.norm.bias": torch.ones(2)}), "model.norm.bias is no part"),
    "layer too many": (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}), "layers.3"),
    "misshaped": (lambda t: t.update({f"{Q0}.weight": torch.ones(3, 4)}), r"is \[3, 4\], it has to be \[64, 48\]"),
    "transposed": (lambda t: t.update({k: t[k].t().contiguous() for k in [f"{Q0}.weight"]}), r"is \[48, 64\]"),
    "a buffer": (lambda t: t.update({"model.position_ids": torch.arange(3)}), "model.position_ids is no part"),
    "float64": (lambda t: t.update({"model.norm.weight": torch.ones(48).double()}), "F64; served are: F32, F16, BF16"),
    "int8": (lambda t: t.update({f"{Q0}.weight": torch.ones(64, 48, dtype=torch.int8)}), r"quantised.*q_proj.*I8"),
    "fp8": (lambda t: t.update({f"{Q0}.weight": torch.ones(64, 48).to(torch.float8_e4m3fn)}), r"quantised.*F8_E4M3"),
    "gptq": (
        lambda t: t.update({f"{Q0}.qweight": torch.ones(6, 64, dtype=torch.int32)}) or t.pop(f"{Q0}.weight"),
        r"quantised.*qweight",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_that_are_not_those_of_the_config_are_named(tmp_path, fault, shards):
    spec = spec_of()
    change, message = WRONG[fault]
    tensors = tensors_of(spec)
    change(tensors)
    assert re.search(message, refusal(write(tmp_path, tensors, shards), spec))


def test_of_many_faults_some_are_named_and_the_rest_counted(tmp_path):
    spec = spec_of()
    tensors = {name: tensor for name, tensor in tensors_of(spec).items() if not name.endswith(".bias")}
    assert refusal(write(tmp_path, tensors), spec).count("bias") == 4
    assert "and 5 more" in refusal(files_of(tmp_path), spec)


def test_rotary_tables_and_a_tied_head_are_let_be(tmp_path):
    spec = spec_of("LlamaForCausalLM", tie_word_embeddings=True)
    tensors = tensors_of(spec)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    checkpoint = open_checkpoint(write(tmp_path, tensors), spec)
    assert checkpoint.head.ctypes.data == checkpoint.embedding.ctypes.data


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> dict[str, Path]:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return files_of(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({f"{Q0}.weight": "gone.safetensors"}), "gone.safetensors is not there"),
        (lambda m: m.update({f"{Q0}.weight": "../up.safetensors"}), "without a path"),
        (lambda m: m.update({f"{Q0}.weight": "/etc/up.safetensors"}), "without a path"),
        (lambda m: m.update({"model.extra": "model-00001-of-00002.safetensors"}), "has no tensor model.extra"),
        (lambda m: m.update({f"{Q0}.weight": 3}), "weight_map"),
        (lambda m: m.clear(), "no weights"),
    ],
)
def test_an_index_that_is_wrong_is_named(tmp_path, change, words):
    spec = spec_of()
    write(tmp_path, tensors_of(spec), shards=2)
    assert words in refusal(rewrite_index(tmp_path, change), spec)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}"])
def test_an_index_that_is_none_is_named(tmp_path, text):
    spec = spec_of()
    write(tmp_path, tensors_of(spec), shards=2)
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal(files_of(tmp_path), spec)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    spec = spec_of()
    tensors = tensors_of(spec)
    write(tmp_path, tensors, shards=2)
    names = sorted(tensors)
    both = {name: tensors[name] for name in [*names[0::2], names[1]]}
    save_file(both, tmp_path / "model-00001-of-00002.safetensors")
    assert f"{names[1]} is in another file too" in refusal(files_of(tmp_path), spec)


def test_a_torn_or_empty_file_is_named(tmp_path):
    spec = spec_of()
    path = write(tmp_path, tensors_of(spec))[SINGLE]
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert SINGLE in refusal({SINGLE: path}, spec)
    path.unlink()
    assert SINGLE in refusal({SINGLE: path}, spec)


# ---- numbers


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.randoms(use_true_random=False),
)
def test_a_number_that_is_not_finite_is_named_by_its_place(dtype, shape, wrong, rng: random.Random):
    tensor = torch.full(shape, -torch.finfo(dtype).max, dtype=dtype)
    check_finite("t", array_of(tensor))
    at = tuple(rng.randrange(size) for size in shape)
    tensor[at] = wrong
    with pytest.raises(WeightsInvalid, match=rf"t is NaN or infinite at \[{', '.join(map(str, at))}\]"):
        check_finite("t", array_of(tensor))


@pytest.mark.parametrize("at", [0, (1 << 18) - 1, 1 << 18, (1 << 19) + 6])
def test_every_chunk_is_looked_at(at):
    tensor = torch.zeros((1 << 19) + 7, dtype=torch.bfloat16)
    check_finite("t", array_of(tensor))
    tensor[at] = float("nan")
    with pytest.raises(WeightsInvalid, match=rf"\[{at}\]"):
        check_finite("t", array_of(tensor))


@pytest.mark.parametrize("name", [n for n, _ in model_tensors(spec_of()) if "layers.1" in n or "layers" not in n])
def test_no_tensor_escapes_the_look(tmp_path, name):
    spec = spec_of()
    tensors = tensors_of(spec)
    tensors[name].view(-1)[-1] = float("nan")
    files = write(tmp_path, tensors)
    assert isinstance(open_checkpoint(files, spec), Checkpoint)
    with pytest.raises(WeightsInvalid, match="NaN or infinite"):
        load_weights(files, spec)


def test_the_bytes_of_weights_are_counted_as_they_are_loaded(tmp_path):
    spec, progress = spec_of(), ByteProgress()
    tensors = tensors_of(spec)
    load_weights(write(tmp_path, tensors, 3), spec, progress=progress)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert progress.now == ("loading", size, size)
