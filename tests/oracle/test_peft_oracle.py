"""Our reading of a config against PEFT itself: same modules, same ranks, same scales, and its own files pass."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.artifacts.making import MODEL_CONFIG
from weft.artifacts.adapter_config import parse_adapter_config
from weft.artifacts.verify import check_finite, verify_model
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


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", range(3))
def test_bases_and_adapters_of_every_family_pass_as_transformers_and_peft_save_them(
    family: str, seed: int, tmp_path: Path
) -> None:
    from harness.random_models import random_model

    model = random_model(tmp_path, family, seed, adapters=2, shard_size="100KB")
    shape = parse_model_config(model.files["config.json"].read_bytes())
    weights = {name: header_of(path) for name, path in model.files.items() if name.endswith(".safetensors")}
    assert verify_model(shape, weights, 1).architecture == model.spec.architecture
    for name in model.adapters:
        spec = parse_adapter_config((tmp_path / name / "adapter_config.json").read_bytes())
        header = header_of(tmp_path / name / "adapter_model.safetensors")
        assert 2 * len(check_adapter(spec, header, shape, max_rank=64)) == len(header.tensors)
