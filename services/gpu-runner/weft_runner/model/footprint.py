"""What serving a model takes of memory, computed from its description before anything is loaded.

Sizes follow the packed layouts: columns padded to 32 and rows to 16, whole numbers of bytes for each. The reference
executor packs nothing and computes in fp32; the padding makes no difference that matters.
"""

from dataclasses import dataclass
from typing import Literal

from weft_runner.errors import OutOfMemory
from weft_runner.model.spec import ModelSpec

Kind = Literal["bf16", "fp32", "int8"]
BYTES: dict[Kind, int] = {"bf16": 2, "fp32": 4, "int8": 1}  # of a number of a base matrix
ACTIVE_BYTES: dict[Kind, int] = {"bf16": 2, "fp32": 4, "int8": 2}  # of KV, adapters and a row-major embedding
PAD_IN, PAD_OUT = 32, 16
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes beside what the process takes anyway."""

    layers: int
    embedding: int  # with the head
    kv_pages: int
    adapters: int
    workspace: int

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.kv_pages + self.adapters + self.workspace

    def by_part(self) -> str:
        """`layers 1.20 GiB, embedding and head 0.25 GiB, ...`, parts of no bytes left out."""
        parts = {
            "layers": self.layers,
            "embedding and head": self.embedding,
            "KV pages": self.kv_pages,
            "adapters": self.adapters,
            "workspace": self.workspace,
        }
        return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)


def memory_needed(
    spec: ModelSpec, kind: Kind, *, kv_pages: int, page_tokens: int, adapter_bytes: int = 0, workspace_bytes: int = 0
) -> Footprint:
    """`kind`: what base matrices are packed as. Adapters that share the KV pages' budget are no `adapter_bytes`."""
    return Footprint(
        layers=spec.layers * _layer_bytes(spec, kind),
        embedding=_embedding_bytes(spec, kind),
        kv_pages=kv_pages * page_bytes(spec, kind, page_tokens),
        adapters=adapter_bytes,
        workspace=workspace_bytes,
    )


def page_bytes(spec: ModelSpec, kind: Kind, page_tokens: int) -> int:
    """Of one KV page `[L, 2, N, P, D]`."""
    return spec.layers * 2 * spec.kv_heads * page_tokens * spec.head_dim * ACTIVE_BYTES[kind]


def packed_bytes(n_out: int, n_in: int, kind: Kind) -> int:
    """Of one packed base matrix, with an int8 matrix's scales."""
    rows, columns = _up(n_out, PAD_OUT), _up(n_in, PAD_IN)
    return rows * columns * BYTES[kind] + (rows * 4 if kind == "int8" else 0)


def check_memory(needed: Footprint, available: int, limit: str) -> None:
    """Raises OutOfMemory, with the numbers. `limit`: whose memory it is, such as `this machine`."""
    if needed.total > available:
        raise OutOfMemory(
            f"serving needs {_gib(needed.total)} ({needed.by_part()}), and {limit} has {_gib(available)} left: "
            "give it more memory, or ask for fewer KV pages"
        )


def _layer_bytes(spec: ModelSpec, kind: Kind) -> int:
    matrices = sum(packed_bytes(n_out, n_in, kind) for n_in, n_out in map(spec.projection, _PROJECTIONS))
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    biases = spec.q_size + 2 * spec.kv_size if spec.qkv_bias else 0
    return matrices + 4 * (norms + biases)


def _embedding_bytes(spec: ModelSpec, kind: Kind) -> int:
    """The head is packed; tied, it is the embedding too."""
    row_major = 0 if spec.tied else spec.vocab_size * spec.hidden_size * ACTIVE_BYTES[kind]
    return packed_bytes(spec.vocab_size, spec.hidden_size, kind) + row_major + 4 * spec.hidden_size


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
