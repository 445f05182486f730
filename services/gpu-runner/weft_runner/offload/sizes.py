"""Bytes and numbers of a model, or of a pipeline rank's layers of it, as an offloading executor holds them. Exact.

FlexGen's formulas are OPT's (8 h1^2 + 4 h1 h2 a layer); here the shapes are the model's own: key-value heads of their
own number, three matrices of the MLP, a head that may be tied. Matrices are those that are packed, and begin on pages
of `ALIGN` bytes on every tier, so that a disk can be read past the page cache.
"""

from dataclasses import dataclass

from weft.domain.model.packed import (
    NUMBER_BYTES,
    int4_kv_group,
    kv_token_bytes,
    packed_bytes,
    round_up,
    stacked_shapes,
    vector_numbers,
)
from weft.domain.model.spec import ModelSpec
from weft_runner.errors import PolicyInvalid
from weft_runner.offload.policy import Formats

ALIGN = 4096
NUMBER_OF = {"bfloat16": 2}  # bytes of a number of the embedding as it is stored; fp16 is converted to fp32
RESIDUAL = 4  # bytes of a number of the hidden rows between layers, which are fp32
BOUNCE = 256 << 10  # bytes that a thread transfers at a time where KV of a page and layer is no whole block of a disk
BOUNCE_THREADS = 3
GATHERED_ROWS = 256  # of the embedding that are read from disk at a time, each in whole pages
SLACK_ROWS = 64  # that the kernels' workspace has beyond its tokens, at most


@dataclass(frozen=True, slots=True)
class WeightShape:
    """`matrices`: bytes of each of a layer's (`plan.MATRICES`). `head`: 0 on a rank without it.

    `panel`: bytes of the head that pass through the ring at a time, no more than a matrix.
    """

    layers: int
    matrices: tuple[int, ...]
    head: int
    panel: int


@dataclass(frozen=True, slots=True)
class ModelSizes(WeightShape):
    """`numbers`: of numbers in each matrix of a layer. `file`: bytes of every packed matrix and the embedding.

    `fixed`: of norms, biases and the buffer of embeddings. `kv_token`: of a token in all these layers. `row`: workspace
    of a token in a device batch. `logits_row`: of a row that samples. `embedding_row`: of a token of a step. `adapter`:
    of one of the workload's rank. `context`: most tokens of a sequence. `message_row`: of a row that comes from another
    stage and leaves for one, whole passes at a time.
    """

    numbers: tuple[int, ...]
    head_numbers: int
    file: int
    fixed: int
    kv_token: int
    hidden_row: int
    row: int
    logits_row: int
    embedding_row: int
    adapter: int
    q_size: int
    windows: tuple[int, ...]
    context: int
    message_row: int

    @property
    def layer(self) -> int:
        """Bytes of a layer's matrices."""
        return sum(self.matrices)

    @property
    def weights(self) -> int:
        """Bytes that a pass reads: all layers and the head."""
        return self.layers * self.layer + self.head

    @property
    def panels(self) -> int:
        """In which a head that is not on the device is read."""
        return -(-self.head // self.panel) if self.head else 0

    def attended(self, context: float) -> float:
        """Tokens that a row attends to, the mean of the layers."""
        return sum(min(context, window or context) for window in self.windows) / len(self.windows)


def model_sizes(
    spec: ModelSpec, formats: Formats, *, adapter_rank: int = 0, layers: range | None = None
) -> ModelSizes:  # fmt: skip
    """Return the sizes of `layers` (None: all).

    The first rank has the embedding, the last one the head. Raises PolicyInvalid.
    """
    if formats.kv == "int4" and not int4_kv_group(spec.head_dim):
        raise PolicyInvalid(f"KV in int4 has groups of 64 or 32 numbers, and head_dim is {spec.head_dim}")
    layers = range(spec.layers) if layers is None else layers
    shapes, ends = stacked_shapes(spec), layers.stop == spec.layers
    number = 4 if formats.weights == "fp32" else 2  # of activations in the kernels and of adapters
    on_gpu = formats.executor == "cuda"
    kind = f"cuda {formats.weights}" if on_gpu else formats.weights
    head = round_up(packed_bytes(spec.vocab_size, spec.hidden_size, kind), ALIGN) if ends else 0
    matrices = [round_up(packed_bytes(n_out, n_in, kind), ALIGN) for n_out, n_in in shapes]
    embedding_row = NUMBER_OF.get(spec.dtype, 4) * spec.hidden_size if layers.start == 0 else 0
    rank = adapter_rank + adapter_rank % 2
    widths = max(spec.hidden_size, spec.q_size) + spec.intermediate_size + spec.q_size + 3 * rank
    _, behind, *_ = spec.family.norms.value
    products = max(spec.q_size + 2 * spec.kv_size, spec.hidden_size if behind else 0)  # that are kept in fp32
    row = number * (widths + 3 * 32) + 4 * (products + len(spec.ropes) * spec.head_dim + 1)
    fixed = 4 * (len(layers) * vector_numbers(spec) + spec.hidden_size)
    if on_gpu:  # see `weft_runner.memory_estimate.device_workspace`
        inner = spec.mlp_size + spec.intermediate_size
        row = NUMBER_BYTES[kind] * (2 * spec.hidden_size + spec.q_size + 2 * spec.kv_size + inner)
    else:
        fixed += GATHERED_ROWS * (round_up(embedding_row, ALIGN) + ALIGN) * (layers.start == 0)
    return ModelSizes(
        layers=len(layers),
        matrices=tuple(matrices),
        numbers=tuple(n_out * n_in for n_out, n_in in shapes),
        head=head,
        head_numbers=spec.vocab_size * spec.hidden_size if ends else 0,
        panel=round_up(-(-head // max(1, -(-head // max(matrices)))), ALIGN),
        file=len(layers) * sum(matrices) + head + round_up(spec.vocab_size * embedding_row, ALIGN),
        fixed=fixed,
        kv_token=len(layers) * kv_token_bytes(spec, formats.kv, int4=formats.kv == "int4"),
        hidden_row=RESIDUAL * spec.hidden_size,
        row=row,
        logits_row=4 * spec.vocab_size if ends else 0,
        embedding_row=RESIDUAL * spec.hidden_size if on_gpu else embedding_row,
        adapter=number * rank * len(layers) * sum(map(sum, map(spec.projection, spec.family.projections))),
        q_size=spec.q_size,
        windows=tuple(spec.windows[i] for i in layers),
        context=spec.max_positions,
        message_row=RESIDUAL * spec.hidden_size * (2 - (layers.start == 0) - ends),
    )  # fmt: skip
