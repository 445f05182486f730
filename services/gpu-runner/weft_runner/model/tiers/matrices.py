"""Matrices as executors pack them, and where packed ones go."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.domain.model.packed import stacked_shapes
from weft_runner.model.arrays import Array, check_finite
from weft_runner.model.partition import Partition

UNIT_ROWS = 32  # of gate, and of up, by turns: what the native step computes together


@dataclass(frozen=True, slots=True, eq=False)
class MatrixRows:
    """Projections of one input under each other; each has a multiple of 16 outputs (but a head that is alone).

    `beside`: in turns of UNIT_ROWS rows of each, which a unit of work takes.
    """

    name: str
    parts: Mapping[str, Array]  # [outputs, inputs] by name
    beside: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        weights = [*self.parts.values()]
        return sum(weight.shape[0] for weight in weights), weights[0].shape[1]

    def in_order(self) -> list[Array]:
        """View the rows in the order in which they are packed. Raises WeightsInvalid (NaN or infinite numbers)."""
        for part, weight in self.parts.items():
            check_finite(f"{self.name}.{part}", weight)
        weights = [*self.parts.values()]
        if not self.beside:
            return weights
        turns = zip(*(in_runs(weight, UNIT_ROWS) for weight in weights), strict=True)
        return [rows for turn in turns for rows in turn]


class MatrixStore(Protocol):
    """A taker of packed matrices. They come in the order in which a step reads them, the head last."""

    def add(self, rows: MatrixRows) -> tuple[int | None, int | None]:
        """Return the addresses of the packed numbers and of int8's scales; None: they are there only during a step."""
        ...

    def embed(self, embedding: Array) -> int | None:
        """Take [V, H] as stored, or [0, H]. Returns the address of its rows as BF16 or FP32; None as `add`."""
        ...


class MatrixPacker(Protocol):
    """Packs rows of matrices to the form that an executor's kernels read. `version`: of that form, for names."""

    @property
    def version(self) -> str: ...

    def n_bytes(self, n_out: int, n_in: int) -> int:
        """Return the bytes of `n_out` packed rows, without scales."""
        ...

    def scale_bytes(self, n_out: int) -> int:
        """Return the bytes of scales that have a place of their own, behind the matrix; 0: there are none."""
        ...

    def pack(self, weight: Array, to: int, scale: int | None) -> None:
        """Pack a matrix. `to`, `scale`: where its first row goes."""
        ...

    def fingerprint(self) -> str:
        """Return a digest of a small packed matrix, which tells how numbers are packed."""
        ...


def in_runs(rows: Array, count: int) -> Iterator[Array]:
    """View `count` rows at a time."""
    return (rows[begin : begin + count] for begin in range(0, len(rows), count))


def matrix_shapes(part: Partition) -> Iterator[tuple[int, int]]:
    """Yield the numbers of outputs and inputs of every packed matrix."""
    spec = part.local
    for _ in range(spec.layers):
        yield from stacked_shapes(spec)
    if part.ends:
        yield spec.vocab_size // part.size, spec.hidden_size
