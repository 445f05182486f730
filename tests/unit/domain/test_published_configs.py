"""Configurations as their models were published: fields that each family's hub repositories have, in their words."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.domain.model.config import parse_spec

TEXT: dict[str, Any] = {
    "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0",
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_as_it_was_published_is_read(name: str) -> None:
    config = TEXT | PUBLISHED[name]
    text = config.get("text_config", config)
    spec = parse_spec(config)
    assert (spec.hidden_size, spec.layers) == (text["hidden_size"], text["num_hidden_layers"])
    assert [spec.architecture] == config["architectures"]


def test_what_they_say_beside_sizes_is_what_is_computed() -> None:
    read = {name: parse_spec(TEXT | config) for name, config in PUBLISHED.items()}
    assert read["gemma-3-1b"].windows == ((512,) * 5 + (0,)) * 4 + (512, 512)
    assert [rope.theta for rope in read["gemma-3-1b"].ropes] == [1e6, 1e4]
    assert [rope.factor for rope in read["gemma-3-4b"].ropes] == [8.0, 1.0]
    assert (read["gemma-3-4b"].kv_heads, read["gemma-3-4b"].vocab_size) == (4, 262_208)
    assert (read["gemma-2-2b"].score_cap, read["gemma-2-2b"].logit_cap) == (50.0, 30.0)
    assert read["phi-4-mini"].short_tokens == 4096
    assert read["phi-4-mini"].ropes[0].rotated_size(read["phi-4-mini"].head_dim) == 96
    assert read["olmo-3-7b"].ropes[0].attention_factor == pytest.approx(1.2079441541679836)
    assert read["granite-4.0-micro"].logit_divisor == 10.0
    assert len(read["starcoder2-3b"].biases) == 6
    assert [i for i, layer in enumerate(read["smollm3-3b"].by_layer) if layer.rope is None] == list(range(3, 36, 4))
