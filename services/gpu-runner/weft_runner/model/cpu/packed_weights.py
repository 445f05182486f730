"""A base packed for the native kernels: each tensor is read once from the mapped file, packed, and let go again.

So loading needs the packed model and one tensor beside it. The embedding stays where it is, in the file's mapping: a
step reads a row of it for each token. Layouts: `weft_kernels/cpu/src/pack.h`. Where packed matrices go is the matter of
a `MatrixStore`: memory here, a file in `tiers/packed_file.py`.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from weft.domain.model.families import HeadNorms
from weft.domain.model.spec import ModelSpec, RopeSpec
from weft.domain.model.tensors import EMBEDDING, HEAD, NORM
from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.structs import ABI, ACTIVATIONS, BF16, FP32, INT8, KINDS, Layer, Matrix, ModelStruct, Rope
from weft_kernels.cpu.threads import ThreadPool
from weft_runner.model.arrays import NATIVE_KINDS, Array, check_finite, native
from weft_runner.model.checkpoint import Checkpoint
from weft_runner.model.lora import GATE_UP, sites_of
from weft_runner.model.partition import Partition
from weft_runner.model.rope import inverse_frequencies
from weft_runner.model.tiers.matrices import MatrixRows, MatrixStore, matrix_shapes

LINE = 64  # bytes
MATRICES = ("qkv", "o", "gate_up", "down")  # of a layer, as `Layer` calls those of its sites
NO_BIASES: Mapping[str, Array] = {}


class RowPacker:
    """The MatrixPacker of `kind`, with the threads of `pool`."""

    version = f"abi{ABI}"

    def __init__(self, library: Library, pool: ThreadPool, kind: int) -> None:
        self._library, self._pool, self.kind = library, pool, kind

    def n_bytes(self, n_out: int, n_in: int) -> int:
        """Bytes of `n_out` packed rows, without scales."""
        return self._library.packed_bytes(self.kind, n_out, n_in)

    def scale_bytes(self, n_out: int) -> int:
        """Bytes of int8's scales, which have a place of their own."""
        return -(-n_out // 16) * 64 if self.kind == INT8 else 0

    def pack(self, weight: Array, to: int, scale: int | None) -> None:
        """`to`, `scale`: where its first row goes. fp16 goes through fp32: bf16 cannot hold its fraction."""
        source = native(weight)
        self._library.pack(
            self._pool, source.ctypes.data, NATIVE_KINDS[source.dtype], source.strides[0] // source.itemsize,
            (source.shape[0], source.shape[1]), to, self.kind, scale=scale,
        )  # fmt: skip

    def fingerprint(self) -> str:
        """Fingerprint of how numbers are packed: a small matrix's. Other kernels may pack otherwise."""
        matrix = np.linspace(-1.0, 1.0, 32 * 192, dtype=np.float32).reshape(32, 192) ** 2
        packed, scale = MappedMemory(self.n_bytes(32, 192)), np.zeros(32, np.float32)
        self.pack(matrix, packed.address, scale.ctypes.data if self.kind == INT8 else None)
        return hashlib.sha256(packed.array().tobytes() + scale.tobytes()).hexdigest()


class PackedMemory:
    """The MatrixStore of a model that fits: one piece of memory, as small matrices of their own lie on small pages."""

    def __init__(self, packer: RowPacker, part: Partition) -> None:
        self._packer = packer
        self._memory = MappedMemory(sum(self._matrix_bytes(*shape) for shape in matrix_shapes(part)))
        self._taken = 0
        self._kept: list[Array] = []

    def add(self, rows: MatrixRows) -> tuple[int, int | None]:
        n_out, n_in = rows.shape
        address = self._memory.address + self._taken
        self._taken += self._matrix_bytes(n_out, n_in)
        scale = np.zeros(-(-n_out // 16) * 16, np.float32) if self._packer.kind == INT8 else None
        done = 0
        for weight in rows.in_order():
            to = address + self._packer.n_bytes(done, n_in)
            self._packer.pack(weight, to, None if scale is None else scale[done:].ctypes.data)
            done += weight.shape[0]
        return address, None if scale is None else self._keep(scale)

    def embed(self, embedding: Array) -> int:
        """A view of the file, converted where the kernels cannot read it (fp16)."""
        check_finite(EMBEDDING, embedding)
        return self._keep(native(embedding))

    def _matrix_bytes(self, n_out: int, n_in: int) -> int:
        return -(-self._packer.n_bytes(n_out, n_in) // LINE) * LINE

    def _keep(self, tensor: Array) -> int:
        self._kept.append(tensor)
        return tensor.ctypes.data


class PackedWeights:
    """`model` is what the native step reads; it points into memory that lives as long as this. `kv` is set later."""

    def __init__(
        self, store: MatrixStore, checkpoint: Checkpoint, dtype: str, page_tokens: int, part: Partition
    ) -> None:
        """Pack every matrix.

        Raises WeightsInvalid (NaN or infinite numbers), StoppedAtStart, and what `store` raises.
        """
        self._store, self._checkpoint, self._part = store, checkpoint, part
        self._kind = KINDS[dtype]
        self._kept: list[object] = []
        spec = part.local
        layers = (Layer * spec.layers)(*(self._layer(index) for index in part.layers))
        self._kept.append(layers)
        embedding, head = self._embedding(), self._head()
        ropes = (Rope * len(spec.ropes))(*(self._rope(rope, spec.head_dim) for rope in spec.ropes))
        self._kept.append(ropes)
        self.model = ModelStruct(
            layers=spec.layers, hidden=spec.hidden_size, inner=spec.intermediate_size, heads=spec.heads,
            kv_heads=spec.kv_heads, head_dim=spec.head_dim, vocab=head.n_out,
            kind=FP32 if self._kind == FP32 else BF16, eps=spec.norm_eps, layer=layers,
            embedding=embedding if part.begins else None,
            norm=self._vector(NORM, np.asarray(checkpoint.norm, np.float32) / np.float32(spec.logit_divisor)),
            head=head, rope=ropes, ropes=len(ropes), kv=None, page_tokens=page_tokens,
            embedding_kind=NATIVE_KINDS.get(checkpoint.embedding.dtype, FP32), **arithmetic_of(spec),
        )  # fmt: skip

    def _rope(self, rope: RopeSpec, head_dim: int) -> Rope:
        short, long = (self._keep(inverse_frequencies(rope, head_dim, long=long)) for long in (False, True))
        return Rope(short, long, rope.attention_factor, rope.rotated_size(head_dim))

    def _layer(self, index: int) -> Layer:
        layer = self._part.layer(self._checkpoint.layer(index))
        name, family = f"model.layers.{index}", self._part.whole.family
        norms = (
            "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm",
        )  # fmt: skip
        made = {norm: self._vector(f"{name}, {norm}", getattr(layer, norm)) for norm in norms}
        matrices = [
            self._matrix(name, layer.projections, parts, layer.biases, beside=len(parts) > 1 and site == GATE_UP)
            for site, parts in enumerate(sites_of(family))
        ]
        rope = -1 if layer.spec.rope is None else layer.spec.rope
        packed = Layer(**made, **dict(zip(MATRICES, matrices, strict=True)), window=layer.spec.window, rope=rope)
        self._checkpoint.release_layer(index)
        return packed

    def _matrix(
        self,
        name: str,
        tensors: Mapping[str, Array],
        parts: Sequence[str],
        biases: Mapping[str, Array] = NO_BIASES,
        *,
        beside: bool = False,
    ) -> Matrix:
        rows = MatrixRows(name, {part: tensors[part] for part in parts}, beside)
        n_out, n_in = rows.shape
        data, scale = self._store.add(rows)
        given = {part: biases[part].astype(np.float32) for part in parts if part in biases}
        wide = np.concatenate(MatrixRows(f"{name} biases", given, beside).in_order()) if given else None
        bias = self._vector(f"{name} biases", wide)
        return Matrix(data=data, scale=scale, bias=bias, n_in=n_in, n_out=n_out, kind=self._kind)

    def _head(self) -> Matrix:
        """Return this rank's part of the head, on the stage that has it."""
        if not self._part.ends:
            return Matrix()
        name = EMBEDDING if self._checkpoint.spec.tied_embeddings else HEAD
        head = self._matrix(name, {name: self._checkpoint.head[self._part.head]}, (name,))
        self._checkpoint.release(name)
        return head

    def _embedding(self) -> int | None:
        address = self._store.embed(self._part.embedding(self._checkpoint.embedding))
        self._checkpoint.release(EMBEDDING)
        return address

    def _vector(self, name: str, tensor: Array | None) -> int | None:
        """Keep numbers in fp32; None: there are none."""
        if tensor is None:
            return None
        check_finite(name, tensor)
        return self._keep(np.array(tensor, np.float32, order="C"))

    def _keep(self, tensor: Array) -> int:
        self._kept.append(tensor)
        return tensor.ctypes.data


def arithmetic_of(spec: ModelSpec) -> dict[str, float]:
    """Return the factors, caps and kinds of a model's arithmetic, by the names that `ModelStruct` has for them.

    The factor of queries is fp32 also on the way where it is D ** -0.5.
    """
    usual, family = float(1 / np.sqrt(np.float32(spec.head_dim))), spec.family
    return {
        "embedding_scale": spec.embedding_scale, "residual_scale": spec.residual_scale, "score_cap": spec.score_cap,
        "query_scale": usual if spec.attention_scale is None else spec.attention_scale, "logit_cap": spec.logit_cap,
        "activation": ACTIVATIONS[spec.activation], "gated": family.gated, "layer_norm": family.layer_norm,
        "row_norms": family.head_norms is HeadNorms.ALL, "query_growth": spec.query_growth,
        "growth_tokens": spec.growth_tokens,
    }  # fmt: skip


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
