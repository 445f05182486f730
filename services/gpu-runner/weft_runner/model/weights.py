"""Base weights as the reference executor wants them: of one dtype, and projections that read the same input stacked.

Stacking q|k|v and gate|up makes one matrix product of three or two.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from weft.domain.model.spec import LayerSpec, ModelSpec
from weft.domain.model.tensors import EMBEDDING, HEAD, NORM
from weft_runner.model.arrays import Array, check_finite
from weft_runner.model.checkpoint import Checkpoint, Files, LoadProgress, open_checkpoint
from weft_runner.model.host_tensors import tensor_of
from weft_runner.model.lora import DOWN, GATE_UP, OUT, QKV, sites_of
from weft_runner.model.partition import Partition

Pack = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer; matrices are [out, in], or packed (int32, `weft_kernels.triton.int4`).

    What a family does not have is None. Norms are [H], or [2, H] with LayerNorm: what is multiplied with, and added.
    """

    qkv: torch.Tensor  # [(heads + 2 kv_heads) * D, H]
    o: torch.Tensor  # [H, heads * D]
    gate_up: torch.Tensor  # [2 I, H], or [I, H] of an MLP without a gate
    down: torch.Tensor  # [H, I]
    attention_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None  # of as many numbers as the matrix has outputs, as all biases
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [D], or [heads * D]
    k_norm: torch.Tensor | None = None  # [D], or [kv_heads * D]
    spec: LayerSpec = field(default_factory=LayerSpec)


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """The whole model, or a rank's part of it; `head` is `embedding`, or rows of it, when the two are tied.

    The head is packed where the layers' matrices are, tied or not; the embedding never is.
    """

    embedding: torch.Tensor  # [V, H]; [0, H] of a stage that does not begin the model
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H], or [2, H] with LayerNorm
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
    layer, sites = part.layer(checkpoint.layer(index)), sites_of(part.whole.family)
    where = f"of layer {index}" + (f", part {part.rank} of {part.size}" if part.size > 1 else "")

    def of(name: str, array: Array) -> torch.Tensor:
        return matrix(f"{name} {where}", array)

    def bias(name: str, array: Array) -> torch.Tensor:
        return _converted(f"{name} {where}", array, dtype, device)

    def norm(name: str, array: Array | None) -> torch.Tensor | None:
        return None if array is None else _converted(f"{name} {where}", array, torch.float32, device)

    def stack(site: int) -> torch.Tensor:
        parts = [of(name, layer.projections[name]) for name in sites[site]]
        return torch.cat(parts) if len(parts) > 1 else parts[0]  # one alone may be a view of the mapped file

    def biases(site: int) -> torch.Tensor | None:
        found = [bias(name, layer.biases[name]) for name in sites[site] if name in layer.biases]
        return torch.cat(found) if found else None

    stacked = LayerWeights(
        qkv=stack(QKV),
        o=stack(OUT),
        gate_up=stack(GATE_UP),
        down=stack(DOWN),
        attention_norm=norm("the norm before attention", layer.attention_norm),
        attention_post_norm=norm("the norm behind attention", layer.attention_post_norm),
        mlp_norm=norm("the norm before the MLP", layer.mlp_norm),
        mlp_post_norm=norm("the norm behind the MLP", layer.mlp_post_norm),
        qkv_bias=biases(QKV),
        o_bias=biases(OUT),
        gate_up_bias=biases(GATE_UP),
        down_bias=biases(DOWN),
        q_norm=norm("q_norm", layer.q_norm),
        k_norm=norm("k_norm", layer.k_norm),
        spec=layer.spec,
    )
    checkpoint.release_layer(index)
    return stacked


def _converted(name: str, array: Array, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """On the CPU in `dtype` already: the view itself, where its rows follow each other."""
    check_finite(name, array)
    return tensor_of(array).to(device, dtype).contiguous()
