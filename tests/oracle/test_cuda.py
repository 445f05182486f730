"""The cuda executor, recorded decode steps included, against transformers + peft: interpreted, or on a GPU.

Few steps, since an interpreted one takes a second: prompts of all adapters at once, then decode of all (which is a
recorded step), then a mixture of chunks and decode.
"""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.int4 import rounded_to_int4
from harness.interpreter import hurry
from harness.numerics import within
from harness.random_models import FAMILIES, OracleModel, Rows, cuda_executor, random_model, write_adapters, write_base
from harness.ranks import split, staged
from weft_kernels.triton import int4
from weft_runner.model import Executor

pytestmark = pytest.mark.numeric

PAGES, PAGE_TOKENS = 120, 16
LOGIT_TOLERANCE = 5e-4  # as in `test_families`
BF16_TOLERANCE = 0.3  # as in `test_bf16`: logits here are up to 15
SCRIPT = ((33, 20, 12, 30, 9), (1, 1, 1, 1, 1), (1, 7, 1, 2, 16), (1, 1, 1, 1, 1))  # tokens of each sequence in a step
# Small ones, that have together: query heads that share kv heads and kv heads that do not, windows in all, some and no
# layers, adapters of rank 1 and 64, tied and untied heads.
SEEDS = {
    "llama": 0, "mistral": 10, "qwen2": 13, "qwen3": 5, "granite": 0, "smollm3": 0, "olmo2": 13, "olmo3": 8,
    "gemma2": 14, "gemma3": 14, "phi3": 11, "starcoder2": 7, "granite4": 11, "ministral3": 0,
}  # fmt: skip


SMALLEST = "qwen2"


@pytest.fixture(
    scope="module",
    params=[family if family == SMALLEST else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OracleModel:
    return random_model(tmp_path_factory.mktemp(request.param), request.param, SEEDS[request.param])


def play(model: OracleModel, executor: Executor, script: tuple[tuple[int, ...], ...] = SCRIPT) -> float:
    """The largest difference of a logit from the oracle's; the base and every adapter run together."""
    rng, names = random.Random(5), ("", *model.adapters)
    rows = Rows(model, executor, PAGES, PAGE_TOKENS)
    texts = {
        name: [rng.randrange(model.spec.vocab_size) for _ in range(sum(counts))]
        for name, counts in zip(names, zip(*script, strict=True), strict=True)
    }
    for name, tokens in texts.items():
        rows.add(name, tokens, name)
    wanted = {name: model.logits(name, tokens) for name, tokens in texts.items()}
    errors = list[float]()
    for counts in script:
        for name, logits in rows.step(dict(zip(names, counts, strict=True))).items():
            position = len(texts[name]) - rows.left(name) - 1
            errors.append(float((logits - wanted[name][position]).abs().max()))
    return float(torch.tensor(errors).max())  # NaN if an error is NaN


def assert_near(error: float) -> None:
    within("cuda in fp32: largest error of a logit", error, LOGIT_TOLERANCE)


@pytest.mark.gpu
def test_mixed_batches_of_any_adapters_give_the_logits_of_the_oracle(model):
    assert_near(play(model, cuda_executor(model, PAGES, PAGE_TOKENS)))


@pytest.mark.slow
@pytest.mark.gpu
def test_bf16_stays_near_the_oracle(tmp_path):
    """Nothing but rounding. The base is stored in bf16; adapters, stored in fp32, are rounded when they are packed."""
    model = random_model(tmp_path, "mistral", SEEDS["mistral"], dtype="bfloat16")
    error = play(model, cuda_executor(model, PAGES, PAGE_TOKENS, torch.bfloat16), SCRIPT[:3])
    assert error > 0.0
    within("cuda in bf16: largest error of a logit", error, BF16_TOLERANCE)


@pytest.mark.slow
@pytest.mark.gpu
def test_int4_computes_with_the_numbers_that_its_codes_stand_for(tmp_path):
    """Packed from the base as it is stored; the oracle's has these numbers. Activations in fp32 show each mistake."""
    sizes = {"vocab_size": 80, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3}
    write_base(tmp_path / "base", "qwen2", 9, **sizes, num_key_value_heads=1, num_hidden_layers=2)
    all_linear = {"lora_alpha": 8, "target_modules": "all-linear"}
    model = write_adapters(tmp_path, [all_linear | {"r": 3}, all_linear | {"r": 16}], 0)
    executor = cuda_executor(model, PAGES, PAGE_TOKENS, pack=int4.pack)
    assert executor.numerics_class.endswith("/int4/tp1")
    (path,) = (path for name, path in model.files.items() if name.endswith(".safetensors"))
    stored = load_file(path)
    assert "lm_head.weight" in stored
    numbers = {
        name: rounded_to_int4(tensor) if tensor.ndim == 2 and "embed" not in name else tensor
        for name, tensor in stored.items()
    }
    save_file(numbers, path.with_suffix(".new"), {"format": "pt"})
    path.with_suffix(".new").replace(path)  # the executor's mapping stays what it is
    assert_near(play(model, executor, ((17, 7, 3), (1, 1, 1), (4, 1, 2))))


@pytest.mark.slow
@pytest.mark.parametrize("how", [split, staged], ids=["two ranks", "two stages"])
def test_two_devices_give_the_logits_of_the_oracle(tmp_path, how):
    """Both under the interpreter, over Gloo: adapters of rank 1 beside larger ones, in pages of different fill."""
    hurry()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    write_base(tmp_path / "base", "llama", 9, **sizes, num_key_value_heads=2, num_hidden_layers=2)
    some, every = ({"lora_alpha": 8, "target_modules": targets} for targets in (["q_proj", "down_proj"], "all-linear"))
    adapters = [every | {"r": 1}, every | {"r": 16}, every | {"r": 3, "use_rslora": True}, some | {"r": 5}]
    model = write_adapters(tmp_path, adapters, 0)
    flags = {"kv_pages": PAGES, "page_tokens": PAGE_TOKENS, "max_adapters": 4, "dtype": "fp32", "executor": "cuda"}
    with how(model.files, **flags) as executor:
        assert executor.numerics_class.endswith("fp32/tp2" if how is split else "fp32/tp1")
        assert_near(play(model, executor, ((18, 7, 3, 2, 1), (1, 3, 1, 1, 4))))
        assert executor.sent_bytes > 0
