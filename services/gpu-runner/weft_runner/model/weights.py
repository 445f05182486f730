"""Base weights as the reference executor wants them: of one dtype, and projections that read the same input stacked.

Stacking q|k|v and gate|up makes one matrix product of three or two.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from weft.domain.model.config import ModelSpec
from weft.domain.model.tensors import BIASED, EMBEDDING, HEAD, NORM
from weft_runner.errors import WeightsInvalid
from weft_runner.model.checkpoint import Checkpoint, Files, open_checkpoint
from weft_runner.model.partition import Partition

Pack = Callable[[torch.Tensor], torch.Tensor]
FINITE_CHUNK = 1 << 18  # numbers; 12.7 GB/s of bf16 on two cores of a Xeon with AMX, 1.1 with torch.isfinite
# dtype -> integer of the same width, all bits but the sign, the exponent's bits: all of these set is NaN or infinite
_BITS = {
    torch.float32: (torch.int32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer; matrices are [out, in], or packed (int32, `weft_kernels.triton.int4`).

    What a family does not have is None; `window` 0: all tokens are seen.
    """

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
    """The whole model, or a rank's part of it; `head` is `embedding`, or rows of it, when the two are tied.

    The head is packed where the layers' matrices are, tied or not; the embedding never is.
    """

    embedding: torch.Tensor  # [V, H]; [0, H] of a stage that does not begin the model
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H]; of a part, the rows of its vocabulary; [0, H] of a stage that does not end the model

    @property
    def has_head(self) -> bool:
        """After the last layer come logits; else the hidden rows go on to the next stage."""
        return len(self.head) > 0

    @property
    def packed(self) -> bool:
        """Matrices are int4 (`weft_kernels.triton.int4`)."""
        return bool(self.layers) and self.layers[0].qkv.dtype == torch.int32

    def layer(self, index: int) -> AbstractContextManager[LayerWeights]:
        """See `model.decoder.LayerSource`: all are here."""
        return nullcontext(self.layers[index])

    def head_pieces(self) -> Iterator[torch.Tensor]:
        """Rows of the head, in order: in one piece."""
        yield self.head


def load_weights(
    files: Files,
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    stopping: Callable[[], bool] = lambda: False,
    device: torch.device | str = "cpu",
    part: Partition | None = None,
    pack: Pack | None = None,
) -> ModelWeights:
    """The model, converted and stacked, on `device`: all of it, or `part`. Norms are fp32.

    `pack`: what makes the layers' matrices and the head of the stored numbers, once these are on the device; None: they
    are in `dtype`. Raises WeightsInvalid, StoppedAtStart.
    """
    part, checkpoint = part or Partition(spec), open_checkpoint(files, spec, stopping)
    embedding = _converted(EMBEDDING, part.embedding(checkpoint.embedding), dtype, device)
    shared, head = spec.tied_embeddings and part.begins, EMBEDDING if spec.tied_embeddings else HEAD

    def matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _converted(name, tensor, dtype, device) if pack is None else pack(_placed(name, tensor, device))

    return ModelWeights(
        embedding=embedding,
        layers=tuple(stacked_layer(checkpoint, part, layer, dtype, device, matrix) for layer in part.layers),
        norm=_converted(NORM, checkpoint.norm, torch.float32, device),
        head=part.head(embedding) if shared and pack is None else matrix(head, part.head(checkpoint.head)),
    )


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises WeightsInvalid where a number is NaN or infinite: one of them can spoil a whole batch.

    Numbers are compared as integers, in chunks that stay in the cache: no copy of the tensor is made.
    """
    integer, magnitude, exponent = _BITS[tensor.dtype]
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), FINITE_CHUNK):
        chunk = flat[start : start + FINITE_CHUNK]
        if int((chunk.view(integer) & magnitude).max()) >= exponent:
            at = start + int(torch.isfinite(chunk).logical_not().nonzero()[0])
            index = [int(i) for i in torch.unravel_index(torch.tensor(at), tensor.shape)]
            raise WeightsInvalid(f"{name} is NaN or infinite at {index}")


def stacked_layer(
    checkpoint: Checkpoint,
    part: Partition,
    index: int,
    dtype: torch.dtype,
    device: torch.device | str,
    matrix: Callable[[str, torch.Tensor], torch.Tensor],
) -> LayerWeights:
    """Norms and biases on `device`, matrices as `matrix` makes them of their parts' names and stored numbers."""
    layer = part.layer(checkpoint.layer(index))
    where = f"of layer {index}" + (f", part {part.rank} of {part.size}" if part.size > 1 else "")

    def of(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return matrix(f"{name} {where}", tensor)

    def bias(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _converted(f"{name} {where}", tensor, dtype, device)

    def norm(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _converted(f"{name} {where}", tensor, torch.float32, device)

    def stack(tensors: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor:
        return torch.cat([of(name, tensors[name]) for name in names])

    stacked = LayerWeights(
        attention_norm=norm("input_layernorm", layer.attention_norm),
        qkv=stack(layer.projections, *BIASED),
        o=of("o_proj", layer.projections["o_proj"]),
        mlp_norm=norm("post_attention_layernorm", layer.mlp_norm),
        gate_up=stack(layer.projections, "gate_proj", "up_proj"),
        down=of("down_proj", layer.projections["down_proj"]),
        qkv_bias=torch.cat([bias(name, layer.biases[name]) for name in BIASED]) if layer.biases else None,
        q_norm=None if layer.q_norm is None else norm("q_norm", layer.q_norm),
        k_norm=None if layer.k_norm is None else norm("k_norm", layer.k_norm),
        window=layer.window,
    )
    checkpoint.release_layer(index)
    return stacked


def _converted(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """On the CPU in `dtype` already: the view itself, where its rows follow each other."""
    check_finite(name, tensor)
    return tensor.to(device, dtype).contiguous()


def _placed(name: str, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """In the dtype in which it is stored."""
    return _converted(name, tensor, tensor.dtype, device)
