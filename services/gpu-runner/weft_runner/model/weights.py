"""Base weights as the reference executor wants them: of one dtype, and projections that read the same input stacked.

Stacking q|k|v and gate|up makes one matrix product of three or two.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from weft.domain.model.config import ModelSpec
from weft.domain.model.tensors import BIASED, EMBEDDING, HEAD, NORM
from weft_runner.model.arrays import Array, check_finite
from weft_runner.model.checkpoint import Checkpoint, Files, LoadProgress, open_checkpoint
from weft_runner.model.host_tensors import tensor_of
from weft_runner.model.partition import Partition

Pack = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer; matrices are [out, in], or packed (int32, `weft_kernels.triton.int4`).

    What a family does not have is None; `window` 0: all tokens are seen. `rotates`: q and k are, by their positions.
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
    rotates: bool = True


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
        """Return a layer (`model.decoder.LayerSource`): all are here."""
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
    progress: LoadProgress | None = None,
) -> ModelWeights:
    """The model, converted and stacked, on `device`: all of it, or `part`. Norms are fp32.

    `pack`: what makes the layers' matrices and the head of the stored numbers, once these are on the device; None: they
    are in `dtype`. `progress`: see `open_checkpoint`. Raises WeightsInvalid, StoppedAtStart.
    """
    part, checkpoint = part or Partition(spec), open_checkpoint(files, spec, stopping, progress)
    embedding = _converted(EMBEDDING, part.embedding(checkpoint.embedding), dtype, device)
    shared, head = spec.tied_embeddings and part.begins, EMBEDDING if spec.tied_embeddings else HEAD

    def matrix(name: str, array: Array) -> torch.Tensor:
        if pack is None:
            return _converted(name, array, dtype, device)
        return pack(_converted(name, array, tensor_of(array).dtype, device))

    tied = embedding if part.ends and part.size == 1 else embedding[part.head]
    return ModelWeights(
        embedding=embedding,
        layers=tuple(stacked_layer(checkpoint, part, layer, dtype, device, matrix) for layer in part.layers),
        norm=_converted(NORM, checkpoint.norm, torch.float32, device),
        head=tied if shared and pack is None else matrix(head, checkpoint.head[part.head]),
    )


def stacked_layer(
    checkpoint: Checkpoint,
    part: Partition,
    index: int,
    dtype: torch.dtype,
    device: torch.device | str,
    matrix: Callable[[str, Array], torch.Tensor],
) -> LayerWeights:
    """Norms and biases on `device`, matrices as `matrix` makes them of their parts' names and stored numbers."""
    layer = part.layer(checkpoint.layer(index))
    where = f"of layer {index}" + (f", part {part.rank} of {part.size}" if part.size > 1 else "")

    def of(name: str, array: Array) -> torch.Tensor:
        return matrix(f"{name} {where}", array)

    def bias(name: str, array: Array) -> torch.Tensor:
        return _converted(f"{name} {where}", array, dtype, device)

    def norm(name: str, array: Array) -> torch.Tensor:
        return _converted(f"{name} {where}", array, torch.float32, device)

    def stack(arrays: Mapping[str, Array], *names: str) -> torch.Tensor:
        return torch.cat([of(name, arrays[name]) for name in names])

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
        rotates=layer.rotates,
    )
    checkpoint.release_layer(index)
    return stacked


def _converted(name: str, array: Array, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """On the CPU in `dtype` already: the view itself, where its rows follow each other."""
    check_finite(name, array)
    return tensor_of(array).to(device, dtype).contiguous()
