"""A model of random weights whose native steps are measured.

It has a model's heads and windows; how wide its rows are and how many layers it has is chosen for what is measured. KV
of its pages is in memory.
"""

from collections.abc import Callable, Sequence

import numpy as np

from weft.domain.model.packed import kv_token_bytes, stacked_shapes
from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import head_norms
from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.structs import BF16, FP32, INT4, INT8, KINDS, Layer, Matrix, ModelStruct, Rope, StepStruct
from weft_kernels.cpu.threads import ThreadPool
from weft_runner.model.cpu.packed_weights import arithmetic_of
from weft_runner.offload.policy import WeightsFormat

PAGE_TOKENS = 16
SOURCE_BYTES = 64 << 20  # of the numbers that are packed, again for each part of a matrix

Row = tuple[int, int, int, int]  # start, end, position, page_offset


class SyntheticModel:
    """`spec`: its shapes. `distinct`: of its layers, that have matrices of their own; the others have the first one's.

    `pages`: of KV, each of PAGE_TOKENS. `struct` may be changed between steps. One thread at a time.
    """

    def __init__(
        self, library: Library, pool: ThreadPool, spec: ModelSpec, weights: WeightsFormat, *,
        distinct: int, pages: int, int4_kv: bool = False,
    ) -> None:  # fmt: skip
        self._library, self._pool, self._spec = library, pool, spec
        self._kept: list[object] = []
        self._kind, self._pages = KINDS[weights], pages
        whole = max(n_out * n_in for n_out, n_in in stacked_shapes(spec))
        self._source = np.random.default_rng(0).standard_normal(min(whole, SOURCE_BYTES // 4), np.float32)
        own = [self._layer() for _ in range(distinct)]
        layers = (Layer * spec.layers)(*(own[i] if i < distinct else own[0] for i in range(spec.layers)))
        for layer, of_layer in zip(layers, spec.by_layer, strict=True):
            layer.window, layer.rope = of_layer.window, -1 if of_layer.rope is None else of_layer.rope
        sizes = [rope.rotated_size(spec.head_dim) for rope in spec.ropes]
        halves = [self._address(np.full(size // 2, 0.5, np.float32)) for size in sizes]
        ropes = (Rope * len(sizes))(*(Rope(at, at, 1.0, size) for at, size in zip(halves, sizes, strict=True)))
        del self._source
        kind = FP32 if weights == "fp32" else BF16  # of what layers compute with, and of KV unless it is in int4
        token = kv_token_bytes(spec, "fp32" if kind == FP32 else "bf16", int4=int4_kv)
        self._kv = MappedMemory(pages * PAGE_TOKENS * spec.layers * token)
        numbers = self._kv.array().view(np.uint16)  # small ones, and not alike: of keys with one score all are the best
        numbers[:] = np.random.default_rng(0).integers(0x3C00, 0x3C80, len(numbers), np.uint16)
        embedding = np.full((1, spec.hidden_size), 0x3F80, np.uint16)  # of ones, in bf16
        self._kept += [layers, own, ropes]
        self.struct = ModelStruct(
            layers=spec.layers, hidden=spec.hidden_size, inner=spec.intermediate_size, heads=spec.heads,
            kv_heads=spec.kv_heads, head_dim=spec.head_dim, vocab=16, kind=kind, eps=1e-5, layer=layers,
            embedding=self._address(embedding), norm=self._ones(2 * spec.hidden_size), head=Matrix(),
            kv=self._kv.address, page_tokens=PAGE_TOKENS, kv_kind=INT4 if int4_kv else kind, rope=ropes,
            ropes=len(ropes), **arithmetic_of(spec),
        )  # fmt: skip

    def step(self, n_tokens: int, rows: Sequence[Row], layers: range) -> Callable[[], None]:
        """What computes a step of these layers, as often as it is called; nothing is sampled."""
        tokens, table = np.zeros(n_tokens, np.int32), np.arange(self._pages, dtype=np.int32)
        hidden = np.ones((n_tokens, self._spec.hidden_size), np.float32)
        of_rows = np.pad(np.array(rows, np.int32), ((0, 0), (0, 1)))  # of short texts
        workspace = MappedMemory(self._library.workspace_bytes(self.struct, n_tokens, 0, 0))

        def run() -> None:
            step = StepStruct(
                n_tokens=n_tokens, n_rows=len(rows), first=layers.start, last=layers.stop, tokens=tokens.ctypes.data,
                rows=of_rows.ctypes.data, page_table=table.ctypes.data, hidden=hidden.ctypes.data,
                workspace=workspace.address, workspace_bytes=workspace.n_bytes,
            )  # fmt: skip
            self._library.run(self._pool, self.struct, step)

        return run

    def _layer(self) -> Layer:
        spec = self._spec
        norm = self._ones(2 * spec.hidden_size)  # LayerNorm adds what lies behind what it multiplies with
        norms = [norm if name else None for name in spec.family.norms.value]
        heads = {name: self._ones(size) for name, size in head_norms(spec)}
        matrices = (self._matrix(n_out, n_in) for n_out, n_in in stacked_shapes(spec))
        return Layer(*norms, heads.get("q_norm"), heads.get("k_norm"), *matrices)

    def _matrix(self, n_out: int, n_in: int) -> Matrix:
        memory = MappedMemory(self._library.packed_bytes(self._kind, n_out, n_in))
        scale = np.ones(-(-n_out // 16) * 16, np.float32) if self._kind == INT8 else None
        part = max(16, len(self._source) // n_in // 16 * 16)
        for done in range(0, n_out, part):
            self._library.pack(
                self._pool, self._source.ctypes.data, FP32, n_in, (min(part, n_out - done), n_in),
                memory.address + self._library.packed_bytes(self._kind, done, n_in), self._kind,
                scale=None if scale is None else scale[done:].ctypes.data,
            )  # fmt: skip
        self._kept.append(memory)
        used = None if scale is None else self._address(scale)
        return Matrix(data=memory.address, scale=used, bias=None, n_in=n_in, n_out=n_out, kind=self._kind)

    def _ones(self, n: int) -> int:
        return self._address(np.ones(n, np.float32))

    def _address(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.float32 | np.uint16]]") -> int:
        self._kept.append(array)
        return array.ctypes.data
