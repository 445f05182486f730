"""A model that reads images, served as its text part: transformers' own logits of text, and adapters of it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.numerics import near
from harness.random_models import (
    OracleModel,
    Rows,
    libraries,
    random_config,
    reference_executor,
    spread,
    spread_adapter,
)
from weft.artifacts.adapter_config import AdapterConfig, parse_adapter_config
from weft.artifacts.verify import verdict_of, verify_model
from weft.domain.model.adapter import AdaptedModule, check_adapter
from weft.domain.model.errors import Reason, Refused
from weft.domain.model.safetensors import Header, read_header
from weft.domain.model.spec import ModelSpec

TOLERANCE = 5e-4
PAGES, PAGE_TOKENS = 32, 16
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "vision_use_head": False,
}  # fmt: skip
IN_TEXT = r".*language_model.*\.(?:q_proj|v_proj|down_proj)"
PATTERNS = {
    "rank_pattern": {"model.language_model.layers.0.self_attn.q_proj": 2},
    "alpha_pattern": {"^model.language_model.layers.1.*v_proj": 40},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "text": {"r": 4, "lora_alpha": 8, "target_modules": IN_TEXT, **PATTERNS},
    "both": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
}


@pytest.fixture(scope="module", params=["language_model.model.", "model.language_model."])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OracleModel:
    """transformers saves the earlier names, and saved the later ones for a while."""
    folder = tmp_path_factory.mktemp("multimodal")
    transformers, peft = libraries()
    torch.manual_seed(3)
    text = random_config("gemma3", random.Random(5)) | {"initializer_range": 0.15, "tie_word_embeddings": True}
    names = ("image_token_index", "boi_token_index", "eoi_token_index")  # of tokens that no text here has
    ids = {name: text["vocab_size"] - 1 - i for i, name in enumerate(names)}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, **ids)
    whole = transformers.Gemma3ForConditionalGeneration(config)
    spread(whole)
    whole.save_pretrained(folder / "base")
    name_text_part(folder / "base" / "model.safetensors", request.param)
    for name, adapter in ADAPTERS.items():
        made = peft.get_peft_model(whole, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **adapter))
        spread_adapter(made)
        made.create_or_update_model_card = lambda _: None
        made.save_pretrained(folder / name)
        whole = made.unload()
    return OracleModel(folder, ("text",))


def name_text_part(path: Path, part: str) -> None:
    tensors = load_file(path)
    assert any(name.startswith("language_model.model.") for name in tensors)
    if part == "model.language_model.":
        renamed = {name.replace("language_model.model.", part): tensor for name, tensor in tensors.items()}
        tensors = {name if name.startswith("model.") else f"model.{name}": tensor for name, tensor in renamed.items()}
    save_file(tensors, path)


def header_of(path: Path) -> Header:
    with path.open("rb") as file:
        return read_header(file, path.stat().st_size, max_bytes=8 << 20)


def checked(folder: Path, spec: ModelSpec) -> tuple[AdapterConfig, tuple[AdaptedModule, ...]]:
    config = parse_adapter_config((folder / "adapter_config.json").read_bytes())
    return config, check_adapter(config, header_of(folder / "adapter_model.safetensors"), spec, max_rank=64)


@pytest.mark.numeric
def test_logits_of_text_are_those_of_the_whole_model(model: OracleModel) -> None:
    """The adapter's patterns name modules as they are within the whole model."""
    rng = random.Random(1)
    rows = Rows(model, reference_executor(model, PAGES, PAGE_TOKENS), PAGES, PAGE_TOKENS)
    texts = {adapter: [rng.randrange(model.spec.vocab_size - 20) for _ in range(40)] for adapter in ("", "text")}
    for adapter, tokens in texts.items():
        rows.add(adapter or "base", tokens, adapter)
    wanted = {adapter or "base": model.logits(adapter, tokens) for adapter, tokens in texts.items()}
    at = 0
    for count in (7, 1, 32):
        at += count
        for key, logits in rows.step(dict.fromkeys(wanted, count)).items():
            near("fp32: largest error of a logit", logits, wanted[key][at - 1], TOLERANCE)
    assert float((model.logits("text", texts[""]) - wanted["base"]).abs().max()) > 0.05


def test_what_reads_images_is_let_be(model: OracleModel) -> None:
    header = header_of(model.files["model.safetensors"])
    assert any("vision_tower." in name for name in header.tensors)
    verdict = verify_model(model.spec, {"model.safetensors": header}, 1)
    assert (verdict.architecture, verdict.layers) == ("Gemma3ForConditionalGeneration", model.spec.layers)
    assert json.loads(model.files["config.json"].read_text())["text_config"]["model_type"] == "gemma3_text"


def test_an_adapter_of_the_text_part_has_its_own_ranks_and_scales(model: OracleModel) -> None:
    config, modules = checked(model.folder / "text", model.spec)
    verdict = verdict_of(config, modules, model.spec, 1)
    assert (verdict.target_modules, verdict.warnings) == (("q_proj", "v_proj", "down_proj"), ())
    read = {module.module: (module.rank, module.scale) for module in modules}
    assert read["model.layers.0.self_attn.q_proj"] == (2, 4.0)
    assert read["model.layers.1.self_attn.v_proj"] == (4, 10.0)
    assert read["model.layers.1.self_attn.q_proj"] == (4, 2.0)


def test_an_adapter_that_changes_what_reads_images_too_is_refused_by_name(model: OracleModel) -> None:
    with pytest.raises(Refused, match=r"model\.vision_tower\..*q_proj.*reads images") as caught:
        checked(model.folder / "both", model.spec)
    assert caught.value.reason == Reason.UNSUPPORTED_ADAPTER
