"""Base weights as the reference executor wants them: of one dtype, and projections that read the same input stacked.

Stacking q|k|v and gate|up makes one matrix product of three or two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from weft_runner.errors import WeightsInvalid
from weft_runner.model.checkpoint import BIASED, EMBEDDING, HEAD, NORM, Checkpoint, Files, open_checkpoint
from weft_runner.model.spec import ModelSpec

FINITE_CHUNK = 1 << 18  # numbers; 12.7 GB/s of bf16 on two cores of a Xeon with AMX, 1.1 with torch.isfinite
# dtype -> integer of the same width, all bits but the sign, the exponent's bits: all of these set is NaN or infinite
_BITS = {
    torch.float32: (torch.int32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer; matrices are [out, in]. What a family does not have is None; `window` 0: all tokens are seen."""

    attention_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * D, H]
    o: torch.Tensor  # [H, heads * D]
    mlp_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 I, H]
    down: torch.Tensor  # [H, I]
    qkv_bias: torch.Tensor | None = None  # [(heads + 2 kv_heads) * D]
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None  # [D]
    window: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """The whole model; `head` is `embedding` itself when the two are tied."""

    embedding: torch.Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H]


def load_weights(
    files: Files,
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    stopping: Callable[[], bool] = lambda: False,
) -> ModelWeights:
    """The whole model, converted and stacked. Raises WeightsInvalid, StoppedAtStart."""
    checkpoint = open_checkpoint(files, spec, stopping)
    embedding = _converted(EMBEDDING, checkpoint.embedding, dtype)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_stacked(checkpoint, layer, dtype) for layer in range(spec.layers)),
        norm=_converted(NORM, checkpoint.norm, dtype),
        head=embedding if spec.tied else _converted(HEAD, checkpoint.head, dtype),
    )


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises WeightsInvalid where a number is NaN or infinite: one of them can spoil a whole batch.

    Numbers are looked at as integers, in chunks that stay in the cache: no copy of the tensor is made.
    """
    integer, magnitude, exponent = _BITS[tensor.dtype]
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), FINITE_CHUNK):
        chunk = flat[start : start + FINITE_CHUNK]
        if int((chunk.view(integer) & magnitude).max()) >= exponent:
            at = start + int(torch.isfinite(chunk).logical_not().nonzero()[0])
            index = [int(i) for i in torch.unravel_index(torch.tensor(at), tensor.shape)]
            raise WeightsInvalid(f"{name} is NaN or infinite at {index}")


def _stacked(checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> LayerWeights:
    layer = checkpoint.layer(index)

    def of(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _converted(f"{name} of layer {index}", tensor, dtype)

    def maybe(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else of(name, tensor)

    def stack(tensors: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor:
        return torch.cat([of(name, tensors[name]) for name in names])

    stacked = LayerWeights(
        attention_norm=of("input_layernorm", layer.attention_norm),
        qkv=stack(layer.projections, *BIASED),
        o=of("o_proj", layer.projections["o_proj"]),
        mlp_norm=of("post_attention_layernorm", layer.mlp_norm),
        gate_up=stack(layer.projections, "gate_proj", "up_proj"),
        down=of("down_proj", layer.projections["down_proj"]),
        qkv_bias=stack(layer.biases, *BIASED) if layer.biases else None,
        q_norm=maybe("q_norm", layer.q_norm),
        k_norm=maybe("k_norm", layer.k_norm),
        window=layer.window,
    )
    checkpoint.release_layer(index)
    return stacked


def _converted(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stored in `dtype` already: the view itself."""
    check_finite(name, tensor)
    return tensor.to(dtype)
