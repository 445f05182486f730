"""Plans of where each matrix of an adapter comes from and goes to, made once for all files of one layout.

Adapters of one recipe have the same header, byte for byte. What follows from a header takes milliseconds of Python,
which running steps would wait for (the GIL); with a plan at hand a load is a few additions to addresses.
"""

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.domain.model.spec import ModelSpec
from weft_kernels.cpu.library import Library
from weft_kernels.cpu.structs import LoraSiteStruct, LoraSliceStruct, PackJob
from weft_kernels.cpu.threads import ThreadPool
from weft_runner.model.arrays import NATIVE_KINDS, Array
from weft_runner.model.lora import SITES, AdapterPairs, LoraPair, Scales, scale_of, sites_of
from weft_runner.model.partition import Partition

SLICE_BYTES = 256 << 10  # of the file: some 20 us
N_SITES = len(SITES)
_LINE = 64
_ADDRESSES = 1 << 64
Structs = npt.NDArray[Any]
Slices = Iterator[None]  # each step of it does a slice of the work


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """An adapter in memory that begins at 0, from a file that is mapped at 0.

    `jobs`: PackJob; `ends`: of each job in the sum of what all read; `sites` [L * 4]: LoraSiteStruct; `modules`: the
    names by which these have their scales, in the order of the present slices of `sites`.
    """

    jobs: Structs
    ends: Sequence[int]
    sites: Structs
    modules: Sequence[str]
    n_bytes: int
    rank: int
    site_rank: int

    def sites_at(self, address: int, scales: Scales) -> Structs:
        """Sites of an adapter at this address. Raises AdapterInvalid: a scale that is no number."""
        sites = self.sites.copy()
        present = sites["slice"]["rank"] > 0
        sites["a"][present[:, 0]] += np.uint64(address)
        sites["slice"]["b"][present] += np.uint64(address)
        ranks = sites["slice"]["rank"][present].tolist()
        sites["slice"]["scale"][present] = [scale_of(scales, *of) for of in zip(self.modules, ranks, strict=True)]
        return sites

    def jobs_at(self, address: int, file: int) -> Structs:
        """Jobs of an adapter at this address, from a file that is mapped there."""
        jobs = self.jobs.copy()
        jobs["to"] += np.uint64(address)
        jobs["source"][jobs["rows"] > 0] += np.uint64(file)
        return jobs


class Planner:
    """Makes plans for one part of a model."""

    def __init__(self, library: Library, part: Partition, kind: int) -> None:
        self._library, self._kind = library, kind
        self._sizes: dict[tuple[int, int, int], int] = {}
        self._starts = tuple(_starts(names, part.local) for names in sites_of(part.whole.family))

    def plan(self, pairs: AdapterPairs, file: int = 0) -> tuple[Plan, list[Array]]:
        """The plan, and what its jobs read: the pairs' tensors, or copies of those that the native code cannot read."""
        writing = _Writing(file, self._packed_bytes)
        by_site = [site for layer in pairs for site in layer]
        sites = (LoraSiteStruct * len(by_site))()
        for index, site in enumerate(by_site):
            if site:
                sites[index] = self._site(writing, site, self._starts[index % N_SITES])
        modules = [pair.module for site in by_site for pair in site]
        plan = Plan(
            jobs=_array((PackJob * len(writing.jobs))(*writing.jobs)), ends=writing.ends, sites=_array(sites),
            modules=modules, n_bytes=writing.end,
            rank=max((pair.rank for site in by_site for pair in site), default=0),
            site_rank=max((sum(pair.rank + pair.rank % 2 for pair in site) for site in by_site), default=0),
        )  # fmt: skip
        return plan, writing.kept

    def _site(self, writing: "_Writing", site: Sequence[LoraPair], starts: Mapping[str, int]) -> LoraSiteStruct:
        """A tensor rank may have none of the rows of A; what all ranks have makes the whole.

        Projections of one module have one A, which is there once.
        """
        own = [i == 0 or pair.a is not site[i - 1].a for i, pair in enumerate(site)]
        rows = [pair.a for pair, new in zip(site, own, strict=True) if new and len(pair.a)]
        a = writing.add(rows, pad_in=32) if rows else writing.end
        struct, before = LoraSiteStruct(a=a, rank=sum(map(len, rows)), n_slices=len(site)), 0
        for i, (pair, new) in enumerate(zip(site, own, strict=True)):
            before += site[i - 1].rank if new and i else 0
            at, out_start = writing.add([pair.b], pad_in=2), starts[pair.projection] + pair.out_start
            struct.slice[i] = LoraSliceStruct(at, before, pair.rank, out_start, pair.n_out)
        return struct

    def _packed_bytes(self, n_out: int, n_in: int, pad_in: int) -> int:
        """Whole cache lines. Each size is asked for once: an adapter has hundreds of matrices of a few sizes."""
        size = (n_out, n_in, pad_in)
        if (known := self._sizes.get(size)) is None:
            n_bytes = self._library.packed_bytes(self._kind, n_out, n_in, pad_in=pad_in)
            known = self._sizes[size] = -(-n_bytes // _LINE) * _LINE
        return known


class _Writing:
    """The jobs of a plan so far; `end`: of the adapter's memory."""

    def __init__(self, file: int, packed_bytes: Callable[[int, int, int], int]) -> None:
        self.jobs, self.ends, self.kept, self.end = list[PackJob](), list[int](), list[Array](), 0
        self._file, self._packed_bytes = file, packed_bytes

    def add(self, matrices: Sequence[Array], *, pad_in: int) -> int:
        """Matrices [rows, n_in] under each other, packed as one. Where it begins."""
        dtype, begin = matrices[0].dtype, self.end
        if dtype not in NATIVE_KINDS or any(matrix.dtype != dtype for matrix in matrices):
            matrices = [matrix.astype(np.float32) for matrix in matrices]  # of one kind that the native code knows
        parts = [np.ascontiguousarray(matrix) for matrix in matrices]
        n_in, rows = parts[0].shape[1], tuple(part.shape[0] for part in parts)
        source = tuple((part.ctypes.data - self._file) % _ADDRESSES for part in parts)
        self.jobs.append(PackJob(source, begin, rows, NATIVE_KINDS[parts[0].dtype], n_in, pad_in))
        self.ends.append((self.ends[-1] if self.ends else 0) + sum(part.nbytes for part in parts))
        self.kept += parts
        self.end += self._packed_bytes(sum(rows), n_in, pad_in)
        return begin


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPacking:
    """Jobs of a plan at their addresses. `kept`: what has to live until all are done."""

    jobs: Structs
    ends: Sequence[int]
    kept: object

    def slices(self, library: Library, pool: ThreadPool, kind: int) -> Slices:
        """Each packs some more. Before the first, the caller brings into memory what they read and write."""
        library.touch(self.jobs.ctypes.data, len(self.jobs), kind)
        return self._slices(library, pool, kind)

    def _slices(self, library: Library, pool: ThreadPool, kind: int) -> Slices:
        first = done = 0
        while first < len(self.jobs):
            last = min(bisect_left(self.ends, done + SLICE_BYTES, first) + 1, len(self.jobs))
            library.pack_jobs(pool, self.jobs.ctypes.data + first * self.jobs.itemsize, last - first, kind)
            first, done = last, self.ends[last - 1]
            yield


def _array(structs: "ctypes.Array[Any]") -> Structs:
    return np.frombuffer(bytearray(structs), np.dtype(structs._type_))


def _starts(names: Sequence[str], spec: ModelSpec) -> dict[str, int]:
    """Return the column at which each projection begins in its site's output."""
    starts: dict[str, int] = {}
    at = 0
    for name in names:
        starts[name] = at
        at += spec.projection(name)[1]
    return starts
