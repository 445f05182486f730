"""Named models: memory beside what engines logged, names that are not known, shipped constants."""

import pytest

from weft_sim.performance import BadArchitecture, StepShape, UnknownHardware, architecture, models

LLAMA = "meta-llama/Llama-3.1-8B"
CONFIG = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("hardware", "model", "logged"),
    [
        ("RTX-4090", LLAMA, 41_408),
        ("RTX-PRO-6000", LLAMA, 585_248),
        ("H100-64G", LLAMA, 334_944),
        ("H100-64G", "Qwen/Qwen2.5-7B", 778_016),
    ],
)
def test_kv_memory_is_what_vllm_logged(hardware: str, model: str, logged: int) -> None:
    assert models.performance_model(hardware, model).kv_tokens == pytest.approx(logged, rel=0.06)


def test_weights_are_the_models_parameters() -> None:
    assert models.performance_model("H100", LLAMA).weight_bytes == pytest.approx(2 * 8.03e9, rel=0.001)
    assert models.performance_model("H100", "Qwen/Qwen3-32B", 2).weight_bytes == pytest.approx(2 * 32.76e9, rel=0.002)


def test_a_config_is_as_good_as_a_name() -> None:
    assert architecture(CONFIG) == architecture(LLAMA)


def test_adapters_cost_more_the_more_slots_there_are() -> None:
    step = StepShape(decode_rows=64, context_tokens=16_000, adapters=8)
    base, few, many = (
        models.performance_model("H100", LLAMA, slots=slots, max_rank=16).seconds(step) for slots in (0, 8, 128)
    )
    assert base < few < many


def test_what_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UnknownHardware, match="H200"):
        models.performance_model("V100", LLAMA)
    with pytest.raises(BadArchitecture, match="Qwen3-32B"):
        models.performance_model("H100", "gpt2")
    with pytest.raises(BadArchitecture, match="vocab_size"):
        architecture({name: size for name, size in CONFIG.items() if name != "vocab_size"})
    with pytest.raises(models.UnknownEngine, match="sglang"):
        models.performance_model("H100", LLAMA, engine="none")
    with pytest.raises(models.DoesNotFit, match="more devices"):
        models.performance_model("RTX-4090", "meta-llama/Llama-3.1-70B")
