"""Random models and adapters in memory: a base is made on the device and never passes through a file."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from weft.domain.model.spec import LayerSpec, ModelSpec, RopeSpec
from weft.domain.model.tensors import head_norms, linear_modules, module_size
from weft_kernels.plan import plan_rows
from weft_runner.model import StepInput, StepRow, check_step
from weft_runner.model.weights import LayerWeights, ModelWeights, Pack
from weft_stage.shapes import Shape

STD = 0.02
PROJECTIONS = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip


def spec_of(shape: Shape, context: int) -> ModelSpec:
    """A Llama of this shape."""
    return ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=shape.vocab, hidden_size=shape.hidden,
        intermediate_size=shape.inner, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads, norm_eps=1e-5, max_positions=context, tied_embeddings=False,
        ropes=(RopeSpec(theta=500_000.0),), by_layer=(LayerSpec(),) * shape.layers,
    )  # fmt: skip


@dataclass(slots=True)
class Numbers:
    """Normal numbers, the same for a seed and device. `norm_std`: how far the weights of norms are from one."""

    device: torch.device
    dtype: torch.dtype
    std: float = STD
    norm_std: float = 0.0
    seed: int = 0
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    def matrix(self, *shape: int, std: float | None = None) -> torch.Tensor:
        """Made in the dtype itself: no copy in fp32 is needed beside it."""
        made = torch.empty(shape, device=self.device, dtype=self.dtype)
        return made.normal_(std=self.std if std is None else std, generator=self._generator)

    def norm(self, size: int) -> torch.Tensor:
        """fp32, as executors have the weights of norms."""
        made = torch.ones(size, device=self.device)
        return made.add_(torch.empty_like(made).normal_(generator=self._generator), alpha=self.norm_std)


def random_weights(spec: ModelSpec, numbers: Numbers) -> ModelWeights:
    """The whole model."""
    embedding = numbers.matrix(spec.vocab_size, spec.hidden_size)
    layers = tuple(_layer(spec, numbers, layer) for layer in spec.by_layer)
    head = embedding if spec.tied_embeddings else numbers.matrix(spec.vocab_size, spec.hidden_size)
    return ModelWeights(embedding, layers, _norm(spec, numbers), head)


def with_matrices(layer: LayerWeights, of: Pack) -> LayerWeights:
    """The layer with something made of each of its matrices."""
    return replace(layer, qkv=of(layer.qkv), o=of(layer.o), gate_up=of(layer.gate_up), down=of(layer.down))


def _norm(spec: ModelSpec, numbers: Numbers) -> torch.Tensor:
    """[H], or [2, H] with LayerNorm: what is added is as far from zero as the others from one."""
    weight = numbers.norm(spec.hidden_size)
    return torch.stack((weight, numbers.norm(spec.hidden_size) - 1)) if spec.family.layer_norm else weight


def _layer(spec: ModelSpec, numbers: Numbers, layer: LayerSpec) -> LayerWeights:
    hidden, inner, qkv, family = spec.hidden_size, spec.intermediate_size, spec.q_size + 2 * spec.kv_size, spec.family
    heads = {name: numbers.norm(size) for name, size in head_norms(spec)}

    def bias(name: str, size: int) -> torch.Tensor | None:
        return numbers.matrix(size, std=0.5) if name in spec.biases else None

    before, behind, mlp_before, mlp_behind = (_norm(spec, numbers) if name else None for name in family.norms.value)
    return LayerWeights(
        numbers.matrix(qkv, hidden), numbers.matrix(hidden, spec.q_size), numbers.matrix(spec.mlp_size, hidden),
        numbers.matrix(hidden, inner), before, behind, mlp_before, mlp_behind, bias("q_proj", qkv),
        bias("o_proj", hidden), bias("up_proj", spec.mlp_size), bias("down_proj", hidden), heads.get("q_norm"),
        heads.get("k_norm"), layer,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scale:
    """`Scales` of an adapter whose modules all have the same one."""

    value: float

    def scale_of(self, module: str, rank: int) -> float:
        del module, rank
        return self.value


def peft_tensors(spec: ModelSpec, ranks: Mapping[str, int], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """An adapter as PEFT saves it, on the host: B A x is about as large as x. Projections without a rank have none.

    A module that holds several has the largest of their ranks.
    """
    made, generator = dict[str, torch.Tensor](), torch.Generator().manual_seed(seed)
    for module, _, held in linear_modules(spec):
        if rank := max(ranks.get(name, 0) for name in held):
            (n_in, n_out), key = module_size(spec, held), f"base_model.model.{module}"
            made[f"{key}.lora_A.weight"] = (torch.randn(rank, n_in, generator=generator) * n_in**-0.5).to(dtype)
            made[f"{key}.lora_B.weight"] = (torch.randn(n_out, rank, generator=generator) * 0.3 * rank**-0.5).to(dtype)
    return made


@dataclass(frozen=True, slots=True)
class StepOf:
    """A sequence's part of a step: its new tokens, the first at `position`, its pages, its adapter's slot."""

    tokens: Sequence[int]
    position: int
    pages: Sequence[int]
    slot: int | None


def step_of(parts: Sequence[StepOf], page_tokens: int) -> StepInput:
    """A step of these parts, in this order; every part gets a token."""
    rows, tokens, slots = list[StepRow](), list[int](), list[int | None]()
    for part in parts:
        start = len(tokens)
        tokens += part.tokens
        slots += [part.slot] * len(part.tokens)
        rows.append(StepRow(start, len(tokens), part.position, tuple(part.pages), samples=True))
    used = {slot for slot in slots if slot is not None}
    step = StepInput(tokens, tuple(rows), plan_rows(slots, dict.fromkeys(used, 1)))
    check_step(step, page_tokens)
    return step


def random_tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]
