"""Bytes of a model's matrices as the executors hold them. Layouts: `weft_kernels/cpu/src/pack.h`.

The cpu executor packs matrices, with columns padded to 32 and rows to 16; int8 has a scale for each row, int4 a scale
and a minimum for each group of 64. The reference and the cuda executor hold plain tensors of one dtype; int4 matrices
of the latter have the same codes and bytes in another order (`weft_kernels/triton/int4.py`), and its embedding is bf16.
"""

from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import layer_tensors

PLAIN = {"reference": 4, "cuda bf16": 2, "cuda fp32": 4}  # kinds that hold everything as plain tensors of one dtype
CUDA_INT4 = "cuda int4"
NUMBER_BYTES: dict[str, int] = {  # of KV, of activations
    "bf16": 2, "fp32": 4, "int8": 2, "int4": 2, CUDA_INT4: 2, **PLAIN,
}  # fmt: skip
PAD_IN, PAD_OUT = 32, 16
INT4_GROUP = 64


def packed_bytes(n_out: int, n_in: int, kind: str) -> int:
    """The bytes of one packed base matrix, with the scales of int8 and int4."""
    if kind in PLAIN:
        return n_out * n_in * PLAIN[kind]
    rows, columns = round_up(n_out, PAD_OUT), round_up(n_in, PAD_IN)
    if kind in ("int4", CUDA_INT4):
        return rows * round_up(n_in, INT4_GROUP) * 9 // 16  # 4 bits, and 32 of scale and minimum for 64 of them
    return rows * (columns + 4) if kind == "int8" else rows * columns * NUMBER_BYTES[kind]


def kv_token_bytes(spec: ModelSpec, kind: str, *, int4: bool = False) -> int:
    """The bytes of a token's keys and values in one layer, as an executor of `kind` holds them; `int4`: packed
    (`int4_kv_group`)."""
    if not int4:
        return 2 * spec.kv_size * NUMBER_BYTES[kind]
    group = int4_kv_group(spec.head_dim)
    assert group, f"heads of {spec.head_dim} have no groups: refused before"
    return 2 * spec.kv_size // group * (group // 2 + 4)  # 4 bits a number, and 32 of scale and minimum for a group


def int4_kv_group(head_dim: int) -> int:
    """The size of a head's groups that share a scale and a minimum in int4 KV: 64 or 32; 0: it has none."""
    return next((group for group in (INT4_GROUP, INT4_GROUP // 2) if head_dim % group == 0), 0)


def stacked_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of a layer's four packed matrices, in the order in which a step reads them: q|k|v, o, gate|up,
    down.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return (spec.q_size + 2 * spec.kv_size, hidden), (hidden, spec.q_size), (spec.mlp_size, hidden), (hidden, inner)


def vector_numbers(spec: ModelSpec) -> int:
    """The count of numbers in a layer's norms and biases, which are fp32 in every executor."""
    return sum(shape[0] for _, shape in layer_tensors(spec, 0) if len(shape) == 1)


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not smaller than `number`."""
    return -(-number // multiple) * multiple
