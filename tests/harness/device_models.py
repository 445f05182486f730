"""Small random models of every family, and sequences stepped by hand over the cuda and the reference executor."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from harness.int4 import rounded_to_int4
from harness.on_device import assert_logits, sized
from weft.domain.model.families import ATTENTION, BIASED
from weft.domain.model.spec import LayerSpec, ModelSpec, RopeSpec
from weft_kernels.triton import int4
from weft_runner.model import Array, Executor, Partition
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.cuda.offload import activation_split, kv_split, work_bytes
from weft_runner.model.host_tensors import arrays_of
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.reference.executor import ReferenceExecutor
from weft_runner.model.tiers.budget import OffloadBudget
from weft_runner.model.weights import LayerWeights, ModelWeights, Pack
from weft_runner.offload import Budgets
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import (
    PROJECTIONS,
    Numbers,
    Scale,
    StepOf,
    peft_tensors,
    random_tokens,
    random_weights,
    step_of,
    with_matrices,
)
from weft_stage.gpu_placed import Deck

PAGE_TOKENS, MAX_RANK = 16, 64

_LLAMA = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=1000, hidden_size=256, intermediate_size=704, heads=8, kv_heads=2,
    head_dim=64, norm_eps=1e-5, max_positions=1024, tied_embeddings=False, ropes=(RopeSpec(theta=10_000.0),),
    by_layer=(LayerSpec(),) * 3,
)  # fmt: skip
_TINY = replace(
    _LLAMA, vocab_size=64, hidden_size=32, intermediate_size=48, heads=2, kv_heads=1, head_dim=16,
    by_layer=(LayerSpec(),),
)  # fmt: skip
_QWEN3: dict[str, Any] = {"architecture": "Qwen3ForCausalLM", "tied_embeddings": True}
_GRANITE: dict[str, Any] = {
    "architecture": "GraniteForCausalLM", "embedding_scale": 3.0, "residual_scale": 0.3, "attention_scale": 0.1,
    "logit_divisor": 2.0,
}  # fmt: skip
_GEMMA2: dict[str, Any] = {
    "architecture": "Gemma2ForCausalLM", "activation": "gelu", "embedding_scale": 4.0, "score_cap": 3.0,
    "logit_cap": 5.0, "tied_embeddings": True,
}  # fmt: skip
_STARCODER2: dict[str, Any] = {
    "architecture": "Starcoder2ForCausalLM", "activation": "gelu", "biases": (*ATTENTION, "up_proj", "down_proj"),
}  # fmt: skip
_PARTIAL = RopeSpec(theta=10_000.0, share=0.75)
_TWO_ROPES = (RopeSpec(10_000.0, "yarn", 4.0, original_max_positions=64, attention_factor=1.1), RopeSpec(500.0))
LLAMA = sized(gpu=_LLAMA, interpreted=_TINY)
FAMILIES = sized(
    gpu={
        "llama": _LLAMA,
        "llama, rope llama3": replace(
            _LLAMA, ropes=(RopeSpec(500_000.0, "llama3", 8.0, original_max_positions=64),), heads=4, head_dim=128
        ),
        "llama, rope linear, tied": replace(
            _LLAMA, ropes=(RopeSpec(10_000.0, "linear", 2.0),), tied_embeddings=True, head_dim=32
        ),
        "mistral": replace(_LLAMA, architecture="MistralForCausalLM", kv_heads=1, by_layer=(LayerSpec(40),) * 3),
        "smollm3": replace(
            _LLAMA, architecture="SmolLM3ForCausalLM", by_layer=(LayerSpec(), LayerSpec(rope=None), LayerSpec()),
            tied_embeddings=True,
        ),
        "olmo3": replace(
            _LLAMA, architecture="Olmo3ForCausalLM", ropes=_TWO_ROPES,
            by_layer=(LayerSpec(40, 1), LayerSpec(), LayerSpec(23, 1)),
        ),
        "gemma2": replace(_LLAMA, **_GEMMA2, head_dim=256, by_layer=(LayerSpec(40), LayerSpec(), LayerSpec(23))),
        "gemma3": replace(
            _LLAMA, architecture="Gemma3ForCausalLM", activation="gelu", ropes=_TWO_ROPES, head_dim=128,
            by_layer=(LayerSpec(40, 1), LayerSpec(23, 1), LayerSpec()),
        ),
        "phi3": replace(_LLAMA, architecture="Phi3ForCausalLM", heads=4, kv_heads=4, head_dim=96),
        "phi3, partial": replace(_LLAMA, architecture="Phi3ForCausalLM", ropes=(_PARTIAL,), head_dim=128),
        "starcoder2": replace(_LLAMA, **_STARCODER2, by_layer=(LayerSpec(40),) * 3),
        "granite": replace(_LLAMA, **_GRANITE),
        "qwen2": replace(
            _LLAMA, architecture="Qwen2ForCausalLM", biases=BIASED, kv_heads=8,
            by_layer=(LayerSpec(), LayerSpec(23), LayerSpec()),
        ),
        "qwen3": replace(_LLAMA, **_QWEN3, head_dim=128),
    },
    interpreted={
        "llama": _TINY,
        "olmo3": replace(
            _TINY, architecture="Olmo3ForCausalLM", ropes=_TWO_ROPES, by_layer=(LayerSpec(7, 1), LayerSpec())
        ),
        "gemma2": replace(_TINY, **_GEMMA2, by_layer=(LayerSpec(7),)),
        "phi3": replace(_TINY, architecture="Phi3ForCausalLM", ropes=(_PARTIAL,), head_dim=48),
        "starcoder2": replace(_TINY, **_STARCODER2),
        "granite": replace(_TINY, **_GRANITE),
        "qwen3": replace(_TINY, **_QWEN3, head_dim=32),
    },
)  # fmt: skip
ADAPTERS: tuple[dict[str, int], ...] = (
    dict.fromkeys(PROJECTIONS, 16),
    {"q_proj": 4, "v_proj": 8, "down_proj": 64},
    {"q_proj": 8, "k_proj": 64, "v_proj": 3, "o_proj": 16, "gate_proj": 32, "up_proj": 5, "down_proj": 17},
    {"k_proj": 1, "o_proj": 33, "gate_proj": 17},
    {"up_proj": 16},
)


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter as PEFT saves it."""

    tensors: Mapping[str, Array]
    scales: Scale

    @classmethod
    def made(cls, spec: ModelSpec, number: int, dtype: torch.dtype) -> "HostAdapter":
        """Make adapter `number`: its ranks are those of `ADAPTERS`, by turns, its numbers its own."""
        ranks = ADAPTERS[number % len(ADAPTERS)]
        return cls(arrays_of(peft_tensors(spec, ranks, 100 + number, dtype)), Scale(0.5 + 0.25 * (number % 3)))


@dataclass(slots=True)
class Stream:
    """A sequence of given tokens; `position`: how many were fed."""

    tokens: list[int]
    slot: int | None
    pages: list[int]
    position: int = 0


@dataclass(slots=True)
class Driven:
    """Sequences on one executor, adapters in its slots, pages dealt out at random."""

    executor: Executor
    deck: Deck
    sequences: dict[str, Stream] = field(default_factory=dict[str, Stream])
    lent: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def load(self, slot: int, adapter: HostAdapter) -> None:
        """Load an adapter into pages of its own, or memory of its own, as the executor has it."""
        store = self.executor.adapters
        size = store.page_bytes and -(-store.device_bytes(adapter.tensors, adapter.scales) // store.page_bytes)
        pages = self.lent[slot] = self.deck.deal(size)
        self.executor.allocate_adapter_pages(pages)
        store.put(slot, store.build(adapter.tensors, adapter.scales, pages))

    def evict(self, slot: int) -> None:
        self.executor.adapters.clear(slot)
        self.deck.back(list(reversed(self.lent.pop(slot))))  # whoever comes next gets the same ones

    def add(self, key: str, tokens: Sequence[int], slot: int | None, room: int) -> None:
        """Add a sequence. `room`: how many tokens it may have in all."""
        pages = self.deck.deal(-(-room // PAGE_TOKENS))
        self.executor.clear_pages(pages)
        self.sequences[key] = Stream(list(tokens), slot, pages)

    def drop_all(self) -> None:
        for sequence in self.sequences.values():
            self.deck.back(sequence.pages)
        self.sequences.clear()

    def step(self, counts: Mapping[str, int]) -> torch.Tensor:
        """Feed `counts[key]` tokens of each sequence, in this order: logits [rows, V], a copy."""
        parts = list[StepOf]()
        for key, count in counts.items():
            sequence = self.sequences[key]
            tokens = sequence.tokens[sequence.position : sequence.position + count]
            parts.append(StepOf(tokens, sequence.position, sequence.pages, sequence.slot))
            sequence.position += count
        return self.executor.run(step_of(parts, PAGE_TOKENS)).clone()


def device_executor(
    gpu: Gpu, spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype, rows: int, slots: int, *,
    graphs: bool, packed: bool = False, tokens: int = 1,
) -> Driven:  # fmt: skip
    """Make the executor under test of weights on the host. `packed`: as int4; `tokens`: most of a captured prompt."""
    here = moved(weights, gpu.device, dtype)
    here = of_matrices(here, int4.pack) if packed else here
    gpu.sync()
    pages = _pages(spec, rows, slots)
    sizes = Sizes(pages, PAGE_TOKENS, slots, MAX_RANK, rows, spec.max_positions, graphs, tokens=tokens)
    return Driven(CudaExecutor(spec, here, sizes), Deck(pages))


def reference_executor(spec: ModelSpec, weights: ModelWeights, rows: int, slots: int) -> Driven:
    """Make an executor in fp32 on the host."""
    pages = _pages(spec, rows, 0)
    table = TorchAdapterStore(spec, slots)
    return Driven(ReferenceExecutor(spec, weights, KvCache(spec, pages, PAGE_TOKENS), table), Deck(pages, seed=1))


def host_weights(spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    """Make fp32 numbers that `dtype` can hold, large enough that a mistake shows in the logits."""
    numbers = Numbers(torch.device("cpu"), torch.float32, std=1.5 * spec.hidden_size**-0.5, norm_std=0.3)
    return moved(moved(random_weights(spec, numbers), torch.device("cpu"), dtype), torch.device("cpu"), torch.float32)


def moved(weights: ModelWeights, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Move matrices and biases to another dtype and device; norms stay fp32, a tied head stays tied."""
    embedding = weights.embedding.to(device, dtype)
    head = embedding if weights.head is weights.embedding else weights.head.to(device, dtype)
    layers = tuple(_moved_layer(layer, device, dtype) for layer in weights.layers)
    return ModelWeights(embedding, layers, weights.norm.to(device), head)


def of_matrices(weights: ModelWeights, of: Pack) -> ModelWeights:
    """Make something of each of the layers' matrices and of the head."""
    layers = tuple(with_matrices(layer, of) for layer in weights.layers)
    return replace(weights, layers=layers, head=of(weights.head))


@dataclass(slots=True)
class Pair:
    """The same sequences and adapters on the device and on the reference, one held against the other."""

    device: Driven
    reference: Driven
    dtype: torch.dtype
    spec: ModelSpec
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def made(
        cls, gpu: Gpu, spec: ModelSpec, dtype: torch.dtype, rows: int, adapters: int, *, graphs: bool,
        packed: bool = False, tokens: int = 1,
    ) -> "Pair":  # fmt: skip
        """Make both with `adapters` adapters in slots, one free. `packed`: int4 and the numbers it stands for."""
        weights = host_weights(spec, dtype)
        same = of_matrices(weights, rounded_to_int4) if packed else weights
        pair = cls(
            device_executor(gpu, spec, weights, dtype, rows, adapters + 1, graphs=graphs, packed=packed, tokens=tokens),
            reference_executor(spec, same, rows, adapters + 1), dtype, spec,
        )  # fmt: skip
        for number in range(adapters):
            pair.load(number, HostAdapter.made(spec, number, dtype))
        return pair

    @property
    def both(self) -> tuple[Driven, Driven]:
        return self.device, self.reference

    def load(self, slot: int, adapter: HostAdapter) -> None:
        for driven in self.both:
            driven.load(slot, adapter)

    def evict(self, slot: int) -> None:
        for driven in self.both:
            driven.evict(slot)

    def add(self, key: str, length: int, slot: int | None) -> None:
        tokens = random_tokens(self.rng, length, self.spec.vocab_size)
        for driven in self.both:
            driven.add(key, tokens, slot, length)

    def step(self, counts: Mapping[str, int]) -> torch.Tensor:
        """Compare a step. Returns the device's logits."""
        actual, expected = (driven.step(counts) for driven in self.both)
        assert_logits(actual, expected, self.dtype, self.spec.layers)
        return actual

    def decode(self, slots: Sequence[int | None], steps: int = 2, prompt: int = 3) -> None:
        """Run new sequences with these adapters: their prompts in one step, then decode steps."""
        for driven in self.both:
            driven.drop_all()
        keys = [str(row) for row in range(len(slots))]
        for key, slot in zip(keys, slots, strict=True):
            self.add(key, prompt + steps, slot)
        self.step(dict.fromkeys(keys, prompt))
        for _ in range(steps):
            self.step(dict.fromkeys(keys, 1))


def _moved_layer(layer: LayerWeights, device: torch.device, dtype: torch.dtype) -> LayerWeights:
    tensors = {one.name: of for one in fields(layer) if isinstance(of := getattr(layer, one.name), torch.Tensor)}
    moved = {
        name: tensor.to(device) if name.endswith("norm") else tensor.to(device, dtype)
        for name, tensor in tensors.items()
    }
    return replace(layer, **moved)


def _pages(spec: ModelSpec, rows: int, slots: int) -> int:
    """Return the pages of every sequence at some length, and of adapters of the largest rank everywhere."""
    page = spec.layers * 2 * spec.kv_heads * PAGE_TOKENS * spec.head_dim
    widths = sum(sum(spec.projection(name)) for name in PROJECTIONS) * spec.layers * MAX_RANK
    return rows * 40 + slots * (2 * widths // page + 8)


def beside_weights(part: Partition, dtype: str, sizes: Sizes, budget: OffloadBudget) -> Budgets:
    """Return the bytes of device and host for all but weights, by a budget without a plan. Raises PolicyInvalid."""
    split, activations = kv_split(part, dtype, sizes, budget), activation_split(part, sizes, budget)
    work = work_bytes(part, dtype, sizes, split, activations)
    device = split.memory_bytes + activations.memory_bytes + work
    return Budgets(device, split.host_bytes + activations.host_bytes)
