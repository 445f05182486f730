"""The native executor: the reference's numbers, and a row's own bits whatever happens around it.

The property: play any script of steps (who runs, how many of its tokens, beside whom, in which order, on which pages,
with how many threads), and each logit that it produces equals, bit for bit, that of the same token decoded alone.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.family_shapes import OTHER_FAMILIES, SLOW_FAMILIES, shape_of
from harness.int4 import rounded_to_int4
from harness.native_library import native_library
from harness.native_models import Scales, adapter_tensors, as_tensor, make_step, write_model
from harness.numerics import near, within
from harness.waiting import PATIENCE_S
from weft.domain.model.spec import ModelSpec
from weft_kernels.cpu import INT8, CallRefused, Library, ModelStruct, StepStruct, load
from weft_runner.memory_estimate import page_bytes
from weft_runner.model import Executor, Files, Partition, open_checkpoint, read_spec
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.model.cpu.packed_weights import unsupported_reason
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.reference.executor import ReferenceExecutor
from weft_runner.model.weights import ModelWeights, load_weights

LEVELS = native_library().levels

PAGES, SLOTS, MAX_ROWS = 256, 8, 64
MAX_EXECUTORS = 32  # that stay in memory at a time: all of them are gigabytes
MAX_ROUNDING_RATIO = 2.0
TOP_SHARE, MIN_KEYS = 0.3, 16  # of sparse attention
Made = TypeVar("Made", bound=Executor)
Script = list[list[tuple[int, int]]]  # steps of (sequence, how many of its next tokens)
Logits = dict[tuple[int, int], torch.Tensor]  # (sequence, position) -> the row of logits
TILE32 = ("amx_bf16", "avx512", "avx2")
SAME_BITS = [level for level in LEVELS if level in TILE32]  # of those that this CPU has
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = (
    dict.fromkeys(ALL, 8), {"q_proj": 3, "v_proj": 5, "down_proj": 1}, dict.fromkeys(ALL, 33), {"up_proj": 16},
    {"k_proj": 64, "o_proj": 2, "gate_proj": 17, "up_proj": 31}, dict.fromkeys(ALL, 1),
)  # fmt: skip
WINDOWS = {  # windows shorter than the context, heads of 96: three groups of int4 KV
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 96, "head_dim": 96,
    "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 37,
}  # fmt: skip
FAMILIES = {
    "llama": {},  # heads of 32: attention on tiles
    "mistral": {  # windows shorter than the context, heads of 16: attention on vectors
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 96, "head_dim": 16,
        "num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 37,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64, "num_key_value_heads": 4,
        "num_attention_heads": 4, "attention_bias": False,
    },
}  # fmt: skip
OTHERS = {family: shape_of(family, 2) for family in OTHER_FAMILIES}


def with_levels(cases: Iterable[tuple[str, ...]]) -> list[object]:
    """Pair cases with levels: each case with the best level and one more in turn. The slow tier has every pair."""
    return [
        pytest.param(*case, level, id="-".join((*case, level)), marks=() if usual else pytest.mark.slow)
        for index, case in enumerate(cases)
        for number, level in enumerate(LEVELS)
        for usual in [number in (0, index % len(LEVELS)) and SLOW_FAMILIES.isdisjoint(case)]
    ]


@cache
def library(level: str) -> Library:
    """To find one asks the compiler."""
    return load(level)


@dataclass(frozen=True, eq=False)
class Stage:
    """One model's files, the ranks of the adapter in each slot, and the executors made of it so far."""

    files: Files
    spec: ModelSpec
    ranks: tuple[dict[str, int], ...] = RANKS

    @lru_cache(MAX_EXECUTORS)  # noqa: B019 (emptied with the module)
    def native(self, level: str, dtype: str, threads: int = 1, page_tokens: int = 16) -> CpuExecutor:
        """`dtype`: of the weights, with `+int4` also of KV; `+top` with sparse attention."""
        weights, *others = dtype.split("+")
        made = CpuExecutor(
            library(level), open_checkpoint(self.files, self.spec), dtype=weights,
            kv_dtype="int4" if "int4" in others else "auto", top_share=TOP_SHARE if "top" in others else 0.0,
            threads=threads, pages=PAGES * 16 // page_tokens, page_tokens=page_tokens,
            slots=max(SLOTS, len(self.ranks)),
        )  # fmt: skip
        return self._with_adapters(made)

    @lru_cache(MAX_EXECUTORS)  # noqa: B019 (as above)
    def reference(self, dtype: str = "fp32") -> ReferenceExecutor:
        table = TorchAdapterStore(self.spec, max(SLOTS, len(self.ranks)))
        weights = load_weights(self.files, self.spec)
        if dtype in ROUNDED:
            weights = rounded(weights, ROUNDED[dtype])
        kv = (Int4KvCache if dtype.endswith("+int4") else KvCache)(self.spec, PAGES, 16)
        return self._with_adapters(ReferenceExecutor(self.spec, weights, kv, table))

    @lru_cache(MAX_EXECUTORS)  # noqa: B019 (as above)
    def expected(self, dtype: str = "fp32") -> Logits:
        """The reference's of a mixed batch, the same for every level. Read only."""
        whole = mixed_batch()
        return play(self.reference(dtype), whole, prompts_then_tokens(whole), list(range(PAGES)), 16)

    @lru_cache(MAX_EXECUTORS)  # noqa: B019 (as above)
    def rounded_products(self, dtype: str) -> Logits:
        """The reference's as in `expected`, with inputs and outputs of the base's products in bf16. Read only."""
        whole, linear = mixed_batch(), torch.nn.functional.linear

        def rounded_linear(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return linear(x.bfloat16().float(), *others).bfloat16().float()

        with mock.patch.object(torch.nn.functional, "linear", rounded_linear):
            return play(self.reference(dtype), whole, prompts_then_tokens(whole), list(range(PAGES)), 16)

    def _with_adapters(self, executor: Made) -> Made:
        for slot, ranks in enumerate(self.ranks):
            executor.adapters.put(slot, executor.adapters.build(self._adapter(slot, **ranks), Scales()))
        return executor

    @lru_cache(MAX_EXECUTORS)  # noqa: B019 (as above)
    def _adapter(self, slot: int, **ranks: int) -> dict[str, torch.Tensor]:
        return adapter_tensors(self.spec, slot, ranks)


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Stage]]:
    @cache
    def make(family: str) -> Stage:
        root: Path = tmp_path_factory.mktemp("models") / family
        files = write_model(root, 7, **(FAMILIES | OTHERS | {"windows": WINDOWS})[family])
        return Stage(files, read_spec(files["config.json"]))

    yield make
    for made in (Stage.native, Stage.reference, Stage.expected, Stage.rounded_products, Stage._adapter):
        made.cache_clear()


@pytest.fixture(scope="module")
def wide_stage(stage_of: Callable[[str], Stage]) -> Stage:
    """A stage with as many adapters as rows: each row of the largest batch may have its own."""
    llama = stage_of("llama")
    return Stage(llama.files, llama.spec, tuple(RANKS[slot % len(RANKS)] for slot in range(MAX_ROWS)))


class Int4KvCache(KvCache):
    """Keys and values as int4 represents them: groups of 64 numbers of a head, or of 32."""

    def write(self, layer: int, token_index: torch.Tensor, keys_values: torch.Tensor) -> None:
        head_dim = keys_values.shape[-1]
        groups = keys_values.reshape(-1, 32 if head_dim % 64 else 64)
        super().write(layer, token_index, rounded_to_int4(groups).view(keys_values.shape))


def rounded_to_int8(matrix: torch.Tensor) -> torch.Tensor:
    """What --dtype int8 computes with: one scale for each output, 127 steps to each side."""
    scale = matrix.abs().amax(dim=1, keepdim=True) / 127
    return (matrix / scale).round() * scale


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"int8": rounded_to_int8, "int4": rounded_to_int4}


def rounded(weights: ModelWeights, of: Callable[[torch.Tensor], torch.Tensor]) -> ModelWeights:
    layers = tuple(
        replace(layer, qkv=of(layer.qkv), o=of(layer.o), gate_up=of(layer.gate_up), down=of(layer.down))
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=of(weights.head))


@dataclass(frozen=True)
class Sequence:
    """Tokens to feed and the adapter's slot."""

    tokens: tuple[int, ...]
    slot: int | None


def play(executor: Executor, sequences: list[Sequence], script: Script, pages: list[int], page_tokens: int) -> Logits:
    """Run the script; what each row that ran gave at its last position."""
    owned = hand_out(sequences, pages, page_tokens)
    executor.clear_pages([page for own in owned for page in own])
    fed = [0] * len(sequences)
    got: Logits = {}
    for row_counts in script:
        rows = []
        for index, count in row_counts:
            sequence, start = sequences[index], fed[index]
            rows.append((sequence.tokens[start : start + count], start, owned[index], sequence.slot))
            fed[index] += count
        logits = as_tensor(executor.run(make_step(rows)))
        got |= {(index, fed[index]): logits[row].clone() for row, (index, _) in enumerate(row_counts)}
    assert fed == [len(sequence.tokens) for sequence in sequences]
    return got


def prompts_then_tokens(whole: list[Sequence]) -> Script:
    """All but the last token of each in one step, and that in another."""
    return [[(i, len(s.tokens) - 1) for i, s in enumerate(whole)], [(i, 1) for i in range(len(whole))]]


def hand_out(sequences: list[Sequence], pages: list[int], page_tokens: int) -> list[list[int]]:
    free = iter(pages)
    return [[next(free) for _ in range(-(-len(s.tokens) // page_tokens))] for s in sequences]


def decoded_alone(executor: Executor, sequences: list[Sequence]) -> Logits:
    """One token a step, one sequence a step: the logits of every position."""
    script = [[(index, 1)] for index, sequence in enumerate(sequences) for _ in sequence.tokens]
    return play(executor, sequences, script, list(range(PAGES)), 16)


def same_bits(got: Logits, alone: Logits) -> None:
    bits = torch.int32
    different = [key for key, row in got.items() if not torch.equal(row.view(bits), alone[key].view(bits))]
    assert not different, f"(sequence, position) with other bits than alone: {different}"


@st.composite
def sequences(draw: st.DrawFn, most: int, longest: int) -> list[Sequence]:
    count = draw(st.integers(1, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(1, longest), min_size=count, max_size=count))
    slots = draw(st.lists(st.sampled_from([None, *range(len(RANKS))]), min_size=count, max_size=count))
    return [
        Sequence(tuple(torch.randint(0, 203, (length,), generator=generator).tolist()), slot)
        for length, slot in zip(lengths, slots, strict=True)
    ]


MIXES = ("distinct", "identical", "base", "some of each")


def slots_of(mix: str, count: int, drawn: random.Random) -> list[int | None]:
    match mix:
        case "distinct":
            return [*drawn.sample(range(MAX_ROWS), count)]
        case "identical":
            return [drawn.randrange(MAX_ROWS)] * count
        case "base":
            return [None] * count
        case _:
            return [drawn.choice((None, 5, drawn.randrange(MAX_ROWS))) for _ in range(count)]


def crowd(drawn: random.Random, lengths: list[int], mix: str) -> list[Sequence]:
    """Sequences of these lengths, whose slots are a mix of `wide_stage`."""
    slots = slots_of(mix, len(lengths), drawn)
    return [Sequence(tuple(drawn.choices(range(203), k=n)), slot) for n, slot in zip(lengths, slots, strict=True)]


@st.composite
def scripts(draw: st.DrawFn, whole: list[Sequence], least: int = 1) -> Script:
    """Draw each sequence in random chunks, in each step a random choice of those that are not done, in random order.

    A step has at least `least` sequences, while that number is left.
    """
    left = [len(sequence.tokens) for sequence in whole]
    drawn = random.Random(draw(st.integers(0, 2**32)))
    script: Script = []
    while any(left):
        running = [index for index, rest in enumerate(left) if rest]
        chosen = drawn.sample(running, drawn.randint(min(least, len(running)), len(running)))
        step = [(index, min(left[index], drawn.choice((1, 1, 2, 5, 16, 33, 300)))) for index in chosen]
        for index, count in step:
            left[index] -= count
        script.append(step)
    return script


@pytest.mark.numeric
@pytest.mark.parametrize(("family", "level"), with_levels((family,) for family in (*FAMILIES, *OTHERS)))
def test_fp32_gives_the_references_logits(stage_of: Callable[[str], Stage], family: str, level: str) -> None:
    stage, whole = stage_of(family), mixed_batch()
    script = prompts_then_tokens(whole)
    native = play(stage.native(level, "fp32"), whole, script, list(range(PAGES)), 16)
    expected = stage.expected()
    for key, row in native.items():
        near("fp32: cpu executor beside the reference", row, expected[key], 5e-4)


def error(stage: Stage, level: str, dtype: str) -> float:
    """Root mean square of a mixed batch's logits less the reference's, as a share of those logits' spread."""
    whole = mixed_batch()
    script = prompts_then_tokens(whole)
    return deviation(play(stage.native(level, dtype), whole, script, list(range(PAGES)), 16), stage.expected(dtype))


def deviation(logits: Logits, expected: Logits) -> float:
    """Root mean square of logits less the expected ones, as a share of these logits' spread."""
    errors = torch.stack([logits[key] - expected[key] for key in logits])
    return float(errors.square().mean().sqrt() / torch.stack([expected[key] for key in logits]).std())


@pytest.mark.numeric
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("level", LEVELS)
def test_bf16_int8_and_int4_are_near_the_reference(
    stage_of: Callable[[str], Stage], family: str, dtype: str, level: str
) -> None:
    """The effect of a rounding depends on the model, so errors are measured by those of rounded products in torch. The
    executor keeps most outputs in fp32, and rounds attention weights and inner products of adapters too.
    """
    stage = stage_of(family)
    ratio = error(stage, level, dtype) / deviation(stage.rounded_products(dtype), stage.expected(dtype))
    within(f"{dtype}: error beside that of products of torch in bf16", ratio, MAX_ROUNDING_RATIO)


@pytest.mark.numeric
@pytest.mark.parametrize("family", ["llama", "qwen3", "windows"])
@pytest.mark.parametrize(("dtype", "bound"), [("fp32+int4", 0.01), ("bf16+int4", 0.25)])
@pytest.mark.parametrize("level", LEVELS)
def test_kv_in_int4_is_near_the_reference_with_kv_rounded_to_it(
    stage_of: Callable[[str], Stage], dtype: str, bound: float, family: str, level: str
) -> None:
    """In fp32 the error is 3e-6 of the logits' spread; one number between two steps that is rounded to the other makes
    it more, and with bf16 there are many.
    """
    within(f"{dtype} KV: error of the spread of logits", error(stage_of(family), level, dtype), bound)


@pytest.mark.numeric
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
@pytest.mark.parametrize("level", LEVELS)
def test_sparse_attention_is_the_references_over_the_best_keys(
    stage_of: Callable[[str], Stage], family: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, whole = stage_of(family), mixed_batch()
    script = prompts_then_tokens(whole)
    native = play(stage.native(level, "fp32+top"), whole, script, list(range(PAGES)), 16)
    all_keys = stage.expected()
    monkeypatch.setattr(torch, "softmax", softmax_of_the_best)
    expected = play(stage.reference(), whole, script, list(range(PAGES)), 16)
    for key, row in native.items():
        near("fp32: sparse attention beside the reference", row, expected[key], 5e-4)
    assert max(float((row - all_keys[key]).abs().max()) for key, row in native.items()) > 0.1


def softmax_of_the_best(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Over the best TOP_SHARE of the keys that are not masked, MIN_KEYS at least."""
    keys = scores.isfinite().sum(dim, keepdim=True)
    k = torch.clamp(torch.ceil(TOP_SHARE * keys.float()).long(), min=MIN_KEYS).minimum(keys)
    last = scores.sort(dim, descending=True).values.gather(dim, k - 1)
    kept = scores.masked_fill(scores < last, -torch.inf)
    return torch.nn.functional.softmax(kept, dim=dim)


CASES = [
    *(("bf16", family) for family in (*FAMILIES, *OTHERS)), ("int8", "llama"), ("int4", "llama"), ("fp32", "llama"),
    ("bf16+int4", "llama"), ("int4+int4", "qwen3"), ("bf16+int4", "windows"), ("fp32+int4", "windows"),
    *(("bf16+top", family) for family in (*FAMILIES, "gemma2")), ("fp32+top", "windows"), ("bf16+int4+top", "windows"),
    ("int8", "starcoder2"), ("int4", "gemma3"), ("bf16+int4", "gemma2"), ("fp32", "olmo3"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "family", "level"), with_levels(CASES))
def test_a_rows_bits_are_its_own(stage_of: Callable[[str], Stage], dtype: str, family: str, level: str) -> None:
    stage = stage_of(family)

    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        whole = data.draw(sequences(most=8, longest=60))
        script = data.draw(scripts(whole))
        threads, page_tokens = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([16, 32, 64]))
        pages = random.Random(data.draw(st.integers(0, 2**32))).sample(range(n := PAGES * 16 // page_tokens), n)
        got = play(stage.native(level, dtype, threads, page_tokens), whole, script, pages, page_tokens)
        same_bits(got, decoded_alone(stage.native(level, dtype), whole))

    holds()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_rows_bits_are_its_own_among_many(wide_stage: Stage, level: str, mix: str) -> None:
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        drawn = random.Random(data.draw(st.integers(0, 2**32)))
        lengths = [drawn.choice((1, 2, 3, 4, 20)) for _ in range(data.draw(st.integers(9, MAX_ROWS)))]
        whole = crowd(drawn, lengths, mix)
        script = data.draw(scripts(whole, least=9))
        dtype = data.draw(st.sampled_from(["bf16", "int8", "int4", "fp32", "bf16+int4"]))
        pages = drawn.sample(range(PAGES), PAGES)
        got = play(wide_stage.native(level, dtype, data.draw(st.sampled_from([1, 2]))), whole, script, pages, 16)
        same_bits(got, decoded_alone(wide_stage.native(level, dtype), whole))

    holds()


@pytest.mark.parametrize("level", LEVELS)
def test_every_number_of_rows_from_one_to_sixty_four(wide_stage: Stage, level: str) -> None:
    """A token of every sequence a step, and each step one of them ends. Each is the beginning of one of eight."""
    drawn, lengths = random.Random(5), list(range(1, MAX_ROWS + 1))
    longest = crowd(drawn, [MAX_ROWS] * 8, "distinct")
    texts = [drawn.randrange(8) for _ in lengths]
    whole = [replace(longest[text], tokens=longest[text].tokens[:n]) for text, n in zip(texts, lengths, strict=True)]
    script = [[(i, 1) for i, n in enumerate(lengths) if n > done] for done in range(MAX_ROWS)]
    assert [len(step) for step in script] == list(range(MAX_ROWS, 0, -1))
    got = play(wide_stage.native(level, "bf16", 2), whole, script, list(range(PAGES)), 16)
    alone = decoded_alone(wide_stage.native(level, "bf16"), longest)
    same_bits(got, {(i, at): alone[texts[i], at] for i, at in got})


@pytest.mark.parametrize("level", LEVELS)
def test_sixty_four_rows_and_prompts_longer_than_a_chunk(stage_of: Callable[[str], Stage], level: str) -> None:
    stage = stage_of("llama")
    generator = torch.Generator().manual_seed(3)
    lengths = [300, *([4] * 63)]
    whole = [
        Sequence(tuple(torch.randint(0, 203, (n,), generator=generator).tolist()), (None, *range(len(RANKS)))[i % 7])
        for i, n in enumerate(lengths)
    ]
    script = [[(i, n - 1) for i, n in enumerate(lengths)], [(i, 1) for i in reversed(range(64))]]
    got = play(stage.native(level, "bf16", 2), whole, script, list(range(PAGES)), 16)
    same_bits(got, decoded_alone(stage.native(level, "bf16"), whole))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4", "fp32", "bf16+int4", "bf16+top"])
@pytest.mark.parametrize("level", SAME_BITS)
def test_levels_of_one_class_give_the_same_bits(stage_of: Callable[[str], Stage], dtype: str, level: str) -> None:
    stage, whole = stage_of("llama"), mixed_batch()
    script = [[(i, len(s.tokens)) for i, s in enumerate(whole)]]
    first, other = stage.native(SAME_BITS[0], dtype), stage.native(level, dtype)
    assert first.numerics_class == other.numerics_class
    same_bits(*(play(executor, whole, script, list(range(PAGES)), 16) for executor in (other, first)))


@pytest.mark.parametrize("level", LEVELS)
def test_a_neighbours_broken_numbers_stay_its_own(stage_of: Callable[[str], Stage], level: str) -> None:
    stage, whole = stage_of("llama"), mixed_batch()
    executor = stage.native(level, "bf16")
    script = [[(i, len(s.tokens)) for i, s in enumerate(whole)]]
    expected = play(executor, whole, script, list(range(PAGES)), 16)
    broken = {name: tensor * np.float32(np.inf) for name, tensor in adapter_tensors(stage.spec, 1, RANKS[1]).items()}
    good = executor.adapters.build(adapter_tensors(stage.spec, 1, RANKS[1]), Scales())
    executor.adapters.put(1, executor.adapters.build(broken, Scales()))
    try:
        got = play(executor, whole, script, list(range(PAGES)), 16)
    finally:
        executor.adapters.put(1, good)
    hurt = {key for key, row in got.items() if not torch.isfinite(row).all()}
    assert hurt == {key for key in got if whole[key[0]].slot == 1}
    same_bits({key: row for key, row in got.items() if key not in hurt}, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_read_before_it_is_written(stage_of: Callable[[str], Stage], family: str, level: str) -> None:
    stage, whole = stage_of(family), mixed_batch()
    executor = stage.native(level, "bf16")
    script = prompts_then_tokens(whole)
    expected = play(executor, whole, script, list(range(PAGES)), 16)
    for byte in (0xFF, 0x7F):  # of no number, whether read as fp32 or as bf16; of a large one
        ctypes.memset(executor._workspace.address, byte, executor._workspace.n_bytes)
        same_bits(play(executor, whole, script, list(range(PAGES)), 16), expected)


def test_layers_in_two_calls_are_layers_in_one(stage_of: Callable[[str], Stage]) -> None:
    stage, whole = stage_of("llama"), mixed_batch()
    executor, pages = stage.native(LEVELS[0], "bf16"), hand_out(mixed_batch(), list(range(PAGES)), 16)
    step = make_step((s.tokens, 0, own, s.slot) for s, own in zip(whole, pages, strict=True))
    done: list[int] = []
    expected = executor.run(step, layer_done=done.append).copy()
    hidden = executor.run(step, first=0, last=1)
    got = executor.run(step, first=1, hidden=hidden, layer_done=done.append)
    assert np.array_equal(got, expected)
    assert done == [0, 1, 1]


@pytest.mark.parametrize(("field", "value"), [
    ("hidden", -16), ("inner", 0), ("heads", 0), ("kv_heads", 0), ("head_dim", 0), ("page_tokens", 0), ("kind", INT8),
])  # fmt: skip
def test_a_model_of_sizes_that_no_kernel_has_is_refused(
    stage_of: Callable[[str], Stage], field: str, value: int
) -> None:
    executor = stage_of("llama").native(LEVELS[0], "bf16")
    model = ModelStruct.from_buffer_copy(executor._base.model)
    setattr(model, field, value)
    with pytest.raises(CallRefused, match="a size is not supported"):
        executor._library.run(executor._pool, model, StepStruct(n_tokens=1, last=1))


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (1, 0), (0, 3)])
def test_layers_that_a_model_does_not_have_are_refused(stage_of: Callable[[str], Stage], first: int, last: int) -> None:
    executor = stage_of("llama").native(LEVELS[0], "bf16")
    with pytest.raises(CallRefused, match="a size is not supported"):
        executor._library.run(executor._pool, executor._base.model, StepStruct(n_tokens=1, first=first, last=last))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_beside_a_step_reads_the_keys_of_a_layer_as_soon_as_it_is_counted(
    stage_of: Callable[[str], Stage], threads: int
) -> None:
    """What it copies when a layer is counted is what is there when the step has ended."""
    stage, prompt = stage_of("llama"), Sequence(tuple(range(1, 60)), None)
    executor = stage.native(LEVELS[0], "bf16", threads=threads)
    pages = hand_out([prompt], list(range(PAGES)), 16)
    step = make_step([(prompt.tokens, 0, pages[0], None)])
    layers, began, early = stage.spec.layers, executor.layer_counter.count, list[torch.Tensor]()
    executor.clear_pages(pages[0])

    def kv_of(layer: int) -> torch.Tensor:
        kv = (ctypes.c_uint8 * (PAGES * executor.page_bytes)).from_address(executor._kv.address)
        return torch.frombuffer(kv, dtype=torch.uint8).view(PAGES, layers, -1)[list(pages[0]), layer].clone()

    def read() -> None:
        for layer in range(layers):
            if executor.layer_counter.wait_for(began + layer + 1, PATIENCE_S):
                early.append(kv_of(layer))

    reader = threading.Thread(target=read)
    reader.start()
    executor.run(step)
    reader.join(PATIENCE_S)
    assert executor.layer_counter.count == began + layers
    assert [torch.equal(one, kv_of(layer)) for layer, one in enumerate(early)] == [True] * layers
    assert not executor.layer_counter.wait_for(began + layers + 1, 0.0)


def test_a_slot_is_empty_once_cleared(stage_of: Callable[[str], Stage]) -> None:
    stage, tokens = stage_of("llama"), (5, 9, 11)
    executor = stage.native(LEVELS[0], "bf16")
    adapter = executor.adapters.build(adapter_tensors(stage.spec, 0, RANKS[0]), Scales())
    script: Script = [[(0, 3)]]
    without = play(executor, [Sequence(tokens, None)], script, [3], 16)
    executor.adapters.put(7, adapter)
    with_it = play(executor, [Sequence(tokens, 7)], script, [3], 16)
    executor.adapters.clear(7)
    cleared = play(executor, [Sequence(tokens, 7)], script, [3], 16)
    same_bits(cleared, without)
    assert not torch.equal(with_it[0, 3], without[0, 3])


def test_an_adapters_bytes_follow_its_true_ranks(stage_of: Callable[[str], Stage]) -> None:
    stage = stage_of("llama")
    store = stage.native(LEVELS[0], "bf16").adapters

    def n_bytes(rank: int) -> int:
        return store.build(adapter_tensors(stage.spec, 0, {"down_proj": rank}), Scales()).n_bytes

    assert n_bytes(48) == 3 * n_bytes(16)
    assert n_bytes(8) < n_bytes(16)


def test_pages_of_int4_kv_are_packed_and_another_class(stage_of: Callable[[str], Stage]) -> None:
    """Pages of int4 have a numerics class of their own: no runner takes them for something else."""
    stage = stage_of("qwen3")
    plain, packed = stage.native(LEVELS[0], "bf16"), stage.native(LEVELS[0], "bf16+int4")
    assert 64 * packed.page_bytes == 18 * plain.page_bytes
    assert packed.page_bytes == page_bytes(stage.spec, "bf16", 16, int4_kv=True)
    assert packed.numerics_class == f"{plain.numerics_class}/kv-int4"
    assert packed.kv_memory.layout == plain.kv_memory.layout.replace("/bf16/", "/int4/")


def test_sizes_that_the_kernels_cannot_compute_are_named(tmp_path: Path) -> None:
    files = write_model(tmp_path / "odd", 0, hidden_size=100, num_attention_heads=4, head_dim=20)
    reason = unsupported_reason(Partition(read_spec(files["config.json"])))
    assert "hidden_size 100, head_dim 20" in reason


def mixed_batch() -> list[Sequence]:
    generator = torch.Generator().manual_seed(11)
    shapes = ((6, 0), (41, 1), (91, 2), (18, None), (2, 3), (65, 4), (20, 4), (33, 5))
    return [Sequence(tuple(torch.randint(0, 203, (n,), generator=generator).tolist()), slot) for n, slot in shapes]
