"""Our reading of a config against PEFT itself: same modules, same ranks, same scales, and its own files pass."""

import json
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.numerics import near
from harness.random_models import FAMILIES, random_model
from tests.unit.artifacts.making import MODEL_CONFIG
from weft.artifacts.adapter_config import parse_adapter_config
from weft.artifacts.verify import check_finite, verdict_of, verify_model
from weft.domain.model.adapter import check_adapter
from weft.domain.model.config import parse_model_config
from weft.domain.model.safetensors import Header, read_header

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CONFIGS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 3, "lora_alpha": 5, "target_modules": ATTENTION, "use_rslora": True},
    {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
    {"r": 2, "lora_alpha": 4, "target_modules": r".*\.[01]\.(?:self_attn\.[qk]|mlp\.down)_proj"},
    {"r": 2, "lora_alpha": 4, "target_modules": ATTENTION, "exclude_modules": ["1.self_attn.q_proj"]},
    {"r": 2, "lora_alpha": 4, "target_modules": ATTENTION, "layers_to_transform": [1]},
    {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ATTENTION,
        "rank_pattern": {"model.layers.0.self_attn.q_proj": 2, r"layers\.\d+\.self_attn\.v_proj": 6, "q_proj": 5},
        "alpha_pattern": {"k_proj": 32, r"[qv]_proj": 3},
    },
]


def header_of(path: Path) -> Header:
    with path.open("rb") as file:
        header = read_header(file, path.stat().st_size, max_bytes=8 << 20)
        check_finite(file, header)
    return header


@pytest.mark.parametrize("config", CONFIGS)
def test_modules_ranks_and_scales_are_those_of_peft(config: dict[str, Any], tmp_path: Path) -> None:
    import peft
    import transformers

    llama = {name: value for name, value in MODEL_CONFIG.items() if name not in ("architectures", "model_type")}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama))
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    model.save_pretrained(tmp_path / "adapter")

    shape = parse_model_config((tmp_path / "base" / "config.json").read_bytes())
    verify_model(shape, {"model.safetensors": header_of(tmp_path / "base" / "model.safetensors")}, 1)
    spec = parse_adapter_config((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    pairs = check_adapter(spec, header_of(tmp_path / "adapter" / "adapter_model.safetensors"), shape, max_rank=64)
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and name.endswith("_proj")
    }
    assert {pair.module: (pair.rank, pair.scale) for pair in pairs} == {
        name: (module.r["default"], pytest.approx(module.scaling["default"])) for name, module in layers.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_bases_and_adapters_of_every_family_pass_as_transformers_and_peft_save_them(
    family: str, seed: int, tmp_path: Path
) -> None:
    """Modules that hold several projections have one A, and are in the verdict by their own names."""
    model = random_model(tmp_path, family, seed, adapters=2, shard_size="100KB")
    shape = parse_model_config(model.files["config.json"].read_bytes())
    weights = {name: header_of(path) for name, path in model.files.items() if name.endswith(".safetensors")}
    assert verify_model(shape, weights, 1).architecture == model.spec.architecture
    for name in model.adapters:
        spec = parse_adapter_config((tmp_path / name / "adapter_config.json").read_bytes())
        header = header_of(tmp_path / name / "adapter_model.safetensors")
        modules = check_adapter(spec, header, shape, max_rank=64)
        assert 2 * len(modules) == len(header.tensors)
        verdict = verdict_of(spec, modules, shape, 1)
        assert set(verdict.target_modules) == {module.module.rpartition(".")[2] for module in modules}
        assert set(verdict.target_modules) <= {name.rpartition(".")[2] for name in shape.family.modules}
        assert verdict.warnings == ()


TRAINED = {
    "r": 8, "lora_alpha": 16, "target_modules": "all-linear", "rank_pattern": {"q_proj": 3},
    "alpha_pattern": {"v_proj": 5},
}  # fmt: skip
ALL_IN = {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}
LOOK_AROUND = (
    r"(?:\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:self_attn|mlp).*?\.(?:(?:q|k|v|o|gate|up|down)_proj))"
)


@dataclass
class Brought:
    """A folder as it may come: what of its configuration is written otherwise, which tensors are not in its file."""

    config: dict[str, Any] = field(default_factory=dict)
    without: str = "nothing"
    warning: str = ""


BROUGHT = {
    "look-ahead": Brought({"target_modules": LOOK_AROUND}),
    "look-behind": Brought({"exclude_modules": r".*(?<=k_)proj"}, r"k_proj"),
    "flags": Brought({"target_modules": r"(?i).*_PROJ"}, warning="was not compared with the tensors"),
    "all-linear": Brought({"target_modules": "all-linear"}),
    "other architectures' names": Brought(
        {"target_modules": ["q_proj", "v_proj", "fc1", "qkv"]}, "(?:k|o|gate|up|down)_proj", "'fc1', 'qkv'"
    ),
    "half of fused projections": Brought(
        {}, r"layers\.0\..*(?:k|v)_proj|layers\.1\..*(?:q|up)_proj", "nothing for model.layers.0.self_attn.k_proj"
    ),
    "some layers": Brought(ALL_IN | {"layers_to_transform": [1], "layers_pattern": "layers"}, r"layers\.0\."),
    "one layer": Brought(ALL_IN | {"layers_to_transform": 1, "layers_pattern": ["layers"]}, r"layers\.0\."),
    "anchored keys": Brought(
        {
            "rank_pattern": {"^model.layers.[0-9]+.self_attn.q_proj$": 3, "q_proj": 9},
            "alpha_pattern": {r".*\.layers\.1\..*(?:q|k|gate)_proj$": 128, "gate_proj|up_proj": 1},
        }
    ),
    "look-around in keys": Brought(
        {
            "rank_pattern": {r"(?!.*mlp).*(?=q_)q_proj": 3},
            "alpha_pattern": {r"^(?!.*layers\.0\.).*(?<=self_attn\.)(?!v)\w_proj": 128, r"\w+(?<!gate_)proj": 3},
        }
    ),
    "ranks with flags": Brought({"rank_pattern": {r"(?i:Q)_proj": 3}}, warning="ranks come from the tensors"),
    "keys of no module": Brought(
        {"alpha_pattern": {"base_model.model.q_proj": 1, "v_proj": 5}}, warning="match no module of the file"
    ),
    "fields of the future": Brought({"_note": "monday", "future_option": {"a": 1}}, warning="'_note', 'future_option'"),
    "PEFT's defaults": Brought({"r": None, "lora_alpha": None, "use_rslora": None, "exclude_modules": None}),
    "transposed": Brought({"fan_in_fan_out": True}, warning="fan_in_fan_out is True"),
    "biases that the base has not": Brought({"bias": "lora_only"}, warning="bias is 'lora_only'"),
    "minor components": Brought({"init_lora_weights": "mica"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from harness.random_models import write_adapters, write_base

    folder = tmp_path_factory.mktemp("brought")
    write_base(
        folder / "base", "llama", 5, vocab_size=112, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    write_adapters(folder, [TRAINED], 5)
    return folder


@pytest.mark.numeric
@pytest.mark.filterwarnings("ignore")  # of PEFT's, about the same
@pytest.mark.parametrize("name", BROUGHT)
def test_what_peft_serves_is_served_from_its_tensors_with_a_warning(name: str, trained: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from harness.random_models import OracleModel, Rows, native_executor, reference_executor

    brought = BROUGHT[name]
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path, weights = tmp_path / "a0" / "adapter_config.json", tmp_path / "a0" / "adapter_model.safetensors"
    written = json.loads(path.read_text()) | {"init_lora_weights": True} | brought.config
    path.write_text(json.dumps({key: value for key, value in written.items() if value is not None}))
    save_file({k: v for k, v in load_file(weights).items() if not re.search(brought.without, k)}, weights)

    model = OracleModel(tmp_path, ("a0",))
    config = parse_adapter_config(path.read_bytes())
    modules = check_adapter(config, header_of(weights), model.spec, max_rank=64)
    warnings = verdict_of(config, modules, model.spec, 1).warnings
    assert len(warnings) == bool(brought.warning)
    assert brought.warning in "".join(warnings)
    tokens = random.Random(name).sample(range(112), 20)
    truth, base = model.logits("a0", tokens)[-1], model.logits("", tokens)[-1]
    assert (truth - base).abs().max() > 1
    for make in (reference_executor, native_executor):
        rows = Rows(model, make(model, 64, 16), 64, 16)
        rows.add("all", tokens, "a0")
        near("fp32: largest error of a logit", rows.step({"all": len(tokens)})["all"], truth, 1e-3)
