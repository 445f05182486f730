"""What a machine allows: the bytes that a step must read and the operations it must do, over measured rates.

Names as in the literature: h hidden, q = heads x head size, kv = KV heads x head size, i inner, L layers, V vocabulary,
B rows, c context, r rank. A row's embedding and its activations are left out: they matter only once B is in the
hundreds. A bound is the larger of the two times, since reading and computing can overlap; the time an adapter adds is
their sum, since a step that is bound by reading its base has no room left on either side (`retention_bound`).
"""

from dataclasses import dataclass

from weft_stage.shapes import BF16_BYTES, Shape

INT4_BYTES = 9 / 16  # with scales and minima


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine as it was measured: what it reads and what it computes a second."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What must be read, and what must be computed (a multiply-add is two operations)."""

    n_bytes: float
    flops: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.n_bytes + other.n_bytes, self.flops + other.flops)

    def bound_s(self, rates: Rates) -> float:
        """No execution is faster: reading and computing overlap at best."""
        return max(self.n_bytes / rates.bytes_per_s, self.flops / rates.flops_per_s)


def base_bytes(shape: Shape, weight_bytes: float = BF16_BYTES) -> float:
    """Wb: the weights, once a step. `weight_bytes` is 1 for int8, 9/16 for int4 with its scales."""
    return weight_bytes * shape.weights


def kv_bytes(shape: Shape, rows: int, context: float) -> float:
    """Kb: keys and values of `rows` contexts of `context` tokens, with the new token's."""
    return 2 * BF16_BYTES * shape.layers * shape.kv * rows * (context + 1)


def lora_bytes(shape: Shape, rank: int) -> float:
    """Ab: one adapter of this true rank on all modules."""
    return BF16_BYTES * shape.layers * rank * shape.lora_width


def base_flops(shape: Shape, tokens: int, sampled: int) -> float:
    """Matrix products of `tokens` tokens, of which `sampled` go through the head."""
    return 2 * tokens * shape.layers * shape.layer_weights + 2 * sampled * shape.vocab * shape.hidden


def attention_flops(shape: Shape, tokens: int, context: float) -> float:
    """Scores and values of `tokens` tokens that see `context` tokens each, on average."""
    return 4 * shape.layers * tokens * context * shape.q


def lora_flops(shape: Shape, rank: int, tokens: int) -> float:
    """Shrink and expand of `tokens` tokens through an adapter of this rank."""
    return 2 * tokens * shape.layers * rank * shape.lora_width


def decode_work(shape: Shape, rows: int, context: float, weight_bytes: float = BF16_BYTES) -> Work:
    """A decode step of the base."""
    return Work(
        base_bytes(shape, weight_bytes) + kv_bytes(shape, rows, context),
        base_flops(shape, rows, rows) + attention_flops(shape, rows, context),
    )


def prefill_work(shape: Shape, tokens: int, prompts: int = 1, weight_bytes: float = BF16_BYTES) -> Work:
    """Prefill of `prompts` prompts of `tokens` tokens in one step; a token sees half of its prompt on average."""
    return Work(
        base_bytes(shape, weight_bytes) + kv_bytes(shape, prompts, tokens),
        base_flops(shape, prompts * tokens, prompts) + attention_flops(shape, prompts * tokens, (tokens + 1) / 2),
    )


def adapter_work(shape: Shape, ranks: list[int], row_ranks: list[int], tokens: int = 1) -> Work:
    """What adapters add to a step: `ranks` has each adapter of the step once, `row_ranks` each row's (0: the base).

    `tokens`: of each row.
    """
    return Work(
        sum(lora_bytes(shape, rank) for rank in ranks), sum(lora_flops(shape, rank, tokens) for rank in row_ranks)
    )


def retention_bound(base_s: float, adapters: Work, rates: Rates) -> float:
    """The share of its own base rate that a step keeps at best once its adapters' bytes and operations are added.

    base / (base + adapter bytes / bandwidth + adapter operations / peak), with `base_s` as it was measured.
    """
    added_s = adapters.n_bytes / rates.bytes_per_s + adapters.flops / rates.flops_per_s
    return base_s / (base_s + added_s)
