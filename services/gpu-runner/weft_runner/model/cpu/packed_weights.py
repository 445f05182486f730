"""A base packed for the native kernels: each tensor is read once from the mapped file, packed, and let go again.

So loading needs the packed model and one tensor beside it. The embedding stays where it is, in the file's mapping: a
step reads a row of it for each token. Layouts: `weft_kernels/cpu/src/pack.h`.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from weft.domain.model.tensors import BIASED, EMBEDDING, HEAD, NORM
from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.pool import ThreadPool
from weft_kernels.cpu.structs import BF16, FP32, INT4, INT8, Layer, Matrix, ModelStruct
from weft_runner.model.checkpoint import Checkpoint
from weft_runner.model.partition import Partition
from weft_runner.model.rope import inverse_frequencies
from weft_runner.model.weights import check_finite

LINE = 64  # bytes
UNIT_ROWS = 32  # of gate, and of up, by turns: what the native step computes together
KINDS = {"bf16": BF16, "fp32": FP32, "int8": INT8, "int4": INT4}
_STORED = {torch.bfloat16: BF16, torch.float32: FP32}


class PackedWeights:
    """`model` is what the native step reads; it points into memory that lives as long as this. `kv` is set later."""

    def __init__(
        self, library: Library, pool: ThreadPool, checkpoint: Checkpoint, dtype: str, page_tokens: int, part: Partition
    ) -> None:
        """Raises WeightsInvalid (NaN or infinite numbers), StoppedAtStart."""
        self._library, self._pool, self._checkpoint, self._part = library, pool, checkpoint, part
        self._kind = KINDS[dtype]
        self._kept: list[object] = []
        spec = part.local
        # One piece, in the order in which a step reads it: small matrices of their own would lie on small pages.
        self._memory = MappedMemory(sum(self._matrix_bytes(*shape) for shape in _matrices(part)))
        self._taken = 0
        layers = (Layer * spec.layers)(*(self._layer(index) for index in part.layers))
        self._kept.append(layers)
        embedding, head = self._embedding(), self._head()
        self.model = ModelStruct(
            layers=spec.layers, hidden=spec.hidden_size, inner=spec.intermediate_size, heads=spec.heads,
            kv_heads=spec.kv_heads, head_dim=spec.head_dim, vocab=head.n_out,
            kind=FP32 if self._kind == FP32 else BF16, eps=spec.norm_eps, layer=layers,
            embedding=embedding.data_ptr() if part.begins else None, norm=self._vector(NORM, checkpoint.norm),
            head=head,
            inverse_frequency=self._keep(inverse_frequencies(spec).contiguous()), kv=None,
            embedding_kind=_STORED[embedding.dtype], page_tokens=page_tokens, rope_scale=1.0,
        )  # fmt: skip

    def _layer(self, index: int) -> Layer:
        layer = self._part.layer(self._checkpoint.layer(index))
        name = f"model.layers.{index}"
        biases = [layer.biases[q] for q in BIASED] if layer.biases else None
        packed = Layer(
            attention_norm=self._vector(f"{name}.input_layernorm", layer.attention_norm),
            mlp_norm=self._vector(f"{name}.post_attention_layernorm", layer.mlp_norm),
            q_norm=None if layer.q_norm is None else self._vector(f"{name}.q_norm", layer.q_norm),
            k_norm=None if layer.k_norm is None else self._vector(f"{name}.k_norm", layer.k_norm),
            qkv=self._matrix(name, layer.projections, BIASED, biases),
            o=self._matrix(name, layer.projections, ("o_proj",)),
            gate_up=self._matrix(name, layer.projections, ("gate_proj", "up_proj"), beside=True),
            down=self._matrix(name, layer.projections, ("down_proj",)),
            window=layer.window,
        )
        self._checkpoint.release_layer(index)
        return packed

    def _matrix(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        parts: Sequence[str],
        biases: Sequence[torch.Tensor] | None = None,
        *,
        beside: bool = False,
    ) -> Matrix:
        """Projections of one input under each other; each has a multiple of 16 outputs (but a head that is alone).

        `beside`: by turns, so many rows of each as a unit of work takes of it.
        """
        weights = [tensors[part] for part in parts]
        for part, weight in zip(parts, weights, strict=True):
            check_finite(f"{name}.{part}", weight)
        if beside:
            turns = zip(*(weight.split(UNIT_ROWS) for weight in weights), strict=True)
            weights = [rows for turn in turns for rows in turn]
        n_out, n_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        address = self._memory.address + self._taken
        self._taken += self._matrix_bytes(n_out, n_in)
        scale = torch.zeros(-(-n_out // 16) * 16) if self._kind == INT8 else None
        done = 0
        for weight in weights:
            self._pack(weight, address, done, scale)
            done += weight.shape[0]
        return Matrix(
            data=address, scale=None if scale is None else self._keep(scale),
            bias=None if biases is None else self._vector(f"{name} biases", torch.cat([b.float() for b in biases])),
            n_in=n_in, n_out=n_out, kind=self._kind,
        )  # fmt: skip

    def _matrix_bytes(self, n_out: int, n_in: int) -> int:
        return -(-self._library.packed_bytes(self._kind, n_out, n_in) // LINE) * LINE

    def _pack(self, weight: torch.Tensor, to: int, done: int, scale: torch.Tensor | None) -> None:
        """Rows `done` and on. fp16 goes through fp32: bf16 cannot hold its fraction."""
        source = weight if weight.dtype in _STORED else weight.float()
        offset = self._library.packed_bytes(self._kind, done, source.shape[1])
        self._library.pack(
            self._pool, source.data_ptr(), _STORED[source.dtype], source.stride(0), (source.shape[0], source.shape[1]),
            to + offset, self._kind, scale=None if scale is None else scale[done:].data_ptr(),
        )  # fmt: skip

    def _head(self) -> Matrix:
        """Of the stage that has it, this rank's part of the vocabulary."""
        if not self._part.ends:
            return Matrix()
        name = EMBEDDING if self._checkpoint.spec.tied_embeddings else HEAD
        head = self._matrix(name, {name: self._part.head(self._checkpoint.head)}, (name,))
        self._checkpoint.release(name)
        return head

    def _embedding(self) -> torch.Tensor:
        """[V, H], [0, H] of a later stage: a view of the file, converted where the kernels cannot read it (fp16)."""
        embedding = self._part.embedding(self._checkpoint.embedding)
        check_finite(EMBEDDING, embedding)
        if embedding.dtype not in _STORED:
            embedding = embedding.float()
        self._checkpoint.release(EMBEDDING)
        self._kept.append(embedding)
        return embedding

    def _vector(self, name: str, tensor: torch.Tensor) -> int:
        check_finite(name, tensor)
        return self._keep(tensor.to(torch.float32, copy=True).contiguous())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _matrices(part: Partition) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of every packed matrix."""
    spec = part.local
    hidden, inner = spec.hidden_size, spec.intermediate_size
    for _ in range(spec.layers):
        yield from (
            (spec.q_size + 2 * spec.kv_size, hidden),
            (hidden, spec.q_size),
            (2 * inner, hidden),
            (hidden, inner),
        )
    if part.ends:
        yield spec.vocab_size // part.size, hidden


def unsupported_reason(part: Partition) -> str:
    """What the native kernels cannot compute of this part of a model; empty when they can."""
    spec, whole, ranks = part.local, part.whole, f" / {part.size} ranks" if part.size > 1 else ""
    sizes = {"hidden_size": whole.hidden_size, "intermediate_size": whole.intermediate_size}
    odd = [f"{name} {size}{ranks}" for name, size in sizes.items() if size % (16 * part.size)]
    if spec.head_dim % 16:
        odd.append(f"head_dim {spec.head_dim}")
    if odd:
        return f"{', '.join(odd)}: the CPU kernels compute sizes that are multiples of 16"
    if spec.head_dim > 256:
        return f"head_dim {spec.head_dim}: the CPU kernels compute heads of at most 256"
    if spec.heads % spec.kv_heads:
        return f"{spec.heads} heads share {spec.kv_heads} KV heads unevenly"
    return ""
