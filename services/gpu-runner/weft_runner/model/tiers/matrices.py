"""Matrices as executors pack them, and where packed ones go."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from weft_runner.model.arrays import Array, check_finite
from weft_runner.model.partition import Partition

UNIT_ROWS = 32  # of gate, and of up, by turns: what the native step computes together


@dataclass(frozen=True, slots=True, eq=False)
class MatrixRows:
    """Projections of one input under each other; each has a multiple of 16 outputs (but a head that is alone).

    `beside`: by turns, so many rows of each as a unit of work takes of it.
    """

    name: str
    parts: Mapping[str, Array]  # [outputs, inputs] by name
    beside: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        weights = [*self.parts.values()]
        return sum(weight.shape[0] for weight in weights), weights[0].shape[1]

    def in_order(self) -> list[Array]:
        """Views, in the order in which their rows are packed. Raises WeightsInvalid (NaN or infinite numbers)."""
        for part, weight in self.parts.items():
            check_finite(f"{self.name}.{part}", weight)
        weights = [*self.parts.values()]
        if not self.beside:
            return weights
        turns = zip(*(in_runs(weight, UNIT_ROWS) for weight in weights), strict=True)
        return [rows for turn in turns for rows in turn]


class MatrixStore(Protocol):
    """Where packed matrices go. They come in the order in which a step reads them, the head last."""

    def add(self, rows: MatrixRows) -> tuple[int | None, int | None]:
        """Addresses of the packed numbers and of int8's scales; None: they are there only while a step needs them."""
        ...

    def embed(self, embedding: Array) -> int | None:
        """[V, H] as it is stored, or [0, H]. The address of its rows as BF16 or FP32; None as above."""
        ...


class MatrixPacker(Protocol):
    """Packs rows of matrices to the form that an executor's kernels read. `version`: of that form, for names."""

    @property
    def version(self) -> str: ...

    def n_bytes(self, n_out: int, n_in: int) -> int:
        """Of so many packed rows; without scales."""
        ...

    def scale_bytes(self, n_out: int) -> int:
        """Of scales that have a place of their own, behind the matrix; 0: there are none."""
        ...

    def pack(self, weight: Array, to: int, scale: int | None) -> None:
        """`to`, `scale`: where its first row goes."""
        ...

    def fingerprint(self) -> str:
        """Of how numbers are packed: that of a small matrix."""
        ...


def in_runs(rows: Array, count: int) -> Iterator[Array]:
    """So many rows at a time: views."""
    return (rows[begin : begin + count] for begin in range(0, len(rows), count))


def matrix_shapes(part: Partition) -> Iterator[tuple[int, int]]:
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
