"""Packed matrices in a file: the bytes that an executor has in memory, for weights that do not fit there.

    header    JSON: whose weights these are, the SHA-256 of each region; padded
    regions   each matrix, then int8's scales [outputs, up to a multiple of 16] of it; each begins on a page

Regions come in the order of a step: qkv, o, gate_up, down of each layer, then the head in pieces no larger than the
largest matrix of a layer, then the embedding, row by row as the checkpoint has it (fp16 as fp32). What the file holds
follows from the model, the part of it and the kind of numbers, not from budgets: all runners of a node share it. The
first one to start writes it under a lock, with a few MiB of memory, and gives it its name when it is complete; one that
is damaged, cut short or of another layout is written again. Runners that have the old one open go on with it.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from weft.domain.model.tensors import EMBEDDING
from weft_kernels.cpu.memory import MappedMemory
from weft_runner.errors import DiskUnusable, StoppedAtStart
from weft_runner.model.arrays import BFLOAT16, Array, check_finite, native
from weft_runner.model.partition import Partition
from weft_runner.model.tiers.direct_io import BLOCK, PAGE, DirectFile, round_up_to_page
from weft_runner.model.tiers.matrices import MatrixPacker, MatrixRows, in_runs, matrix_shapes
from weft_runner.offload.plan import MATRICES

FORMAT = 1
LINE = 64  # bytes: scales begin on one
PIECE_ROWS = 64  # of which the head is cut at multiples: a unit of the native product
CHECKERS = 2  # threads that compare a file with its digests
WAIT_S = 0.05  # between two looks at a lock that another runner holds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Region:
    """A packed matrix [n_out, n_in], or a piece of the head, at `offset`: `data_bytes` of numbers, then scales."""

    name: str
    n_out: int
    n_in: int
    offset: int
    data_bytes: int
    scale_bytes: int

    @property
    def n_bytes(self) -> int:
        """The bytes on disk and in a ring."""
        return round_up_to_page(self.data_bytes + self.scale_bytes)


class PackedLayout:
    """Places of all regions. `matrices`: four a layer; `head`: pieces, none of a part that does not end the model."""

    def __init__(self, packer: MatrixPacker, part: Partition, base: str, dtype: str, stored: np.dtype[Any]) -> None:
        """Lay the regions out. `base`: the digest of the model; `stored`: the dtype of its embedding."""
        self._packer, self.dtype, shapes = packer, dtype, [*matrix_shapes(part)]
        of_layers, spec = shapes[: 4 * part.local.layers], part.local
        pieces = list(_pieces(packer, shapes[-1], max(packer.n_bytes(*shape) for shape in of_layers))) * part.ends
        self.row_bytes = spec.hidden_size * (2 if stored == BFLOAT16 else 4)
        self.rows = part.whole.vocab_size if part.begins else 0
        self.identity: dict[str, Any] = {
            "format": FORMAT, "version": packer.version, "packing": packer.fingerprint(), "base": base, "dtype": dtype,
            "embedding": self.row_bytes,
            "layers": [part.layers.start, part.layers.stop], "rank": [part.rank, part.size],
        }  # fmt: skip
        names = [f"layer {layer} {site}" for layer in part.layers for site in MATRICES]
        names += [f"head {i}" for i in range(len(pieces))]
        self._at = round_up_to_page(PAGE + 128 * len(names))
        self.header_bytes = self._at
        made = [self._region(name, *shape) for name, shape in zip(names, [*of_layers, *pieces], strict=True)]
        self.matrices, self.head = made[: len(of_layers)], made[len(of_layers) :]
        self.embedding = self._at
        self.embedding_bytes = round_up_to_page(self.rows * self.row_bytes)
        self.n_bytes = self._at + self.embedding_bytes

    @property
    def regions(self) -> list[Region]:
        """The matrices, in the order of a step."""
        return [*self.matrices, *self.head]

    @property
    def checked(self) -> list[tuple[str, int, int]]:
        """The name, offset and bytes of all that has a digest."""
        matrices = [(region.name, region.offset, region.n_bytes) for region in self.regions]
        return [*matrices, (EMBEDDING, self.embedding, self.embedding_bytes)]

    def _region(self, name: str, n_out: int, n_in: int) -> Region:
        data = -(-self._packer.n_bytes(n_out, n_in) // LINE) * LINE
        made = Region(name, n_out, n_in, self._at, data, self._packer.scale_bytes(n_out))
        self._at += made.n_bytes
        return made


def _pieces(packer: MatrixPacker, head: tuple[int, int], most: int) -> Iterator[tuple[int, int]]:
    """Cut the head into pieces no larger than `most` bytes where rows are not."""
    n_out, n_in = head
    rows = max(1, most // packer.n_bytes(PIECE_ROWS, n_in)) * PIECE_ROWS
    for done in range(0, n_out, rows):
        yield min(rows, n_out - done), n_in


def region_groups(layout: PackedLayout) -> list[list[Region]]:
    """Group the regions of each layer, then of each piece of the head: what passes at a time (`offload.residency`)."""
    layers = [layout.matrices[i : i + len(MATRICES)] for i in range(0, len(layout.matrices), len(MATRICES))]
    return [*layers, *([piece] for piece in layout.head)]


class PackedFile:
    """The MatrixStore of weights on disk; made by `packed_file`. `written`: this process has packed them."""

    def __init__(self, path: Path, layout: PackedLayout, writer: "_Writer | None") -> None:
        self.path, self.layout, self._writer = path, layout, writer
        self.written = writer is not None

    def add(self, rows: MatrixRows) -> tuple[None, None]:
        if self._writer is not None:
            self._writer.matrix(rows)
        return None, None

    def embed(self, embedding: Array) -> None:
        if self._writer is not None:
            self._writer.embedding(embedding)

    def open(self) -> DirectFile:
        """Open it to read from. Raises DiskUnusable."""
        try:
            return DirectFile(self.path)
        except OSError as error:
            raise DiskUnusable(f"{self.path} cannot be opened: {error}") from error


@contextmanager
def packed_file(
    folder: Path, layout: PackedLayout, packer: MatrixPacker, *, disk_bytes: int, stopping: Callable[[], bool]
) -> Generator[PackedFile]:
    """Open the file of this layout in `folder`. While the block runs what is added to it is packed, if need be.

    Raises DiskUnusable: above `disk_bytes`, the disk is full or fails; StoppedAtStart while another runner packs.
    """
    if layout.n_bytes > disk_bytes:
        raise DiskUnusable(
            f"--offload disk {disk_bytes} is below the {layout.n_bytes} bytes of the packed weights: "
            "allow more, or take --dtype int8 or int4"
        )
    path = folder / _name(layout.identity)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DiskUnusable(f"--offload path {folder}: {error}") from error
    try:
        _lock(lock, stopping)
        fault = _fault(path, layout, stopping)
        if not fault:
            yield PackedFile(path, layout, None)
            return
        log.info("weights are packed", extra={"kv": {"path": str(path), "why": fault, "bytes": layout.n_bytes}})
        writer = _Writer(path.with_suffix(".partial"), layout, packer)
        try:
            made = PackedFile(path, layout, writer)
            yield made
            writer.finish(path)
        finally:
            writer.close()
    finally:
        os.close(lock)


def _name(identity: dict[str, Any]) -> str:
    (first, last), (rank, size) = identity["layers"], identity["rank"]
    base = identity["base"].removeprefix("sha256:")
    form = f"v{identity['format']}.{identity['version']}"
    return f"{base}-{identity['dtype']}-{first}-{last}-{rank}of{size}.{form}.packed"


def _lock(file: int, stopping: Callable[[], bool]) -> None:
    """Lock the file for one runner at a time; a process that ends lets go of it."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if stopping():
                raise StoppedAtStart("stopped while another runner packs the weights") from None
            time.sleep(WAIT_S)
        else:
            return


def _fault(path: Path, layout: PackedLayout, stopping: Callable[[], bool]) -> str:
    """Read all of the file and say why it cannot be used; empty where it can."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "there is no such file yet"
    except OSError as error:
        raise DiskUnusable(f"{path}: {error}") from error
    if size != layout.n_bytes:
        return f"it has {size} bytes instead of {layout.n_bytes}: it was cut short, or is no file of packed weights"
    file = DirectFile(path)
    try:
        header = _read_header(file, layout)
        if header.get("identity") != layout.identity:
            return "it is of another model or layout"
        return _damaged(file, layout, header["sha256"], stopping)
    finally:
        file.close()


def _read_header(file: DirectFile, layout: PackedLayout) -> dict[str, Any]:
    memory = MappedMemory(max(layout.header_bytes, 2 << 20))
    file.read(memory.address, layout.header_bytes, 0)
    try:
        header: Any = json.loads(ctypes.string_at(memory.address, layout.header_bytes).rstrip(b"\0"))
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def _damaged(file: DirectFile, layout: PackedLayout, digests: Sequence[str], stopping: Callable[[], bool]) -> str:
    def check(found: tuple[tuple[str, int, int], str]) -> str:
        (name, offset, n_bytes), expected = found
        memory, digest = MappedMemory(BLOCK), hashlib.sha256()
        for done in range(0, n_bytes, BLOCK):
            if stopping():
                raise StoppedAtStart("stopped while packed weights were checked")
            count = min(BLOCK, n_bytes - done)
            file.read(memory.address, count, offset + done)
            digest.update((ctypes.c_char * count).from_address(memory.address))
        return "" if digest.hexdigest() == expected else f"{name} is damaged"

    if len(digests) != len(layout.checked):
        return "its header is damaged"
    with ThreadPoolExecutor(CHECKERS) as threads:
        return next(filter(None, threads.map(check, zip(layout.checked, digests, strict=True))), "")


class _Writer:
    """Regions as they are packed, through one buffer; the header last."""

    def __init__(self, path: Path, layout: PackedLayout, packer: MatrixPacker) -> None:
        self._path, self._layout, self._packer = path, layout, packer
        self._digests: dict[int, str] = {}  # by offset
        self._next = 0  # region of the next matrix
        self._memory = MappedMemory(2 * BLOCK)
        try:
            path.unlink(missing_ok=True)
            disk = os.statvfs(path.parent)
            if (free := disk.f_bavail * disk.f_frsize) < layout.n_bytes:
                raise OSError(errno.ENOSPC, f"{free} are free")
            self._file = DirectFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.posix_fallocate(self._file.fd, 0, layout.n_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskUnusable(
                    f"{path.parent} has no room for {layout.n_bytes} bytes of packed weights: {error.strerror}"
                ) from error
            raise DiskUnusable(f"{path}: {error}") from error

    def matrix(self, rows: MatrixRows) -> None:
        """Pack the next one; the head into all of its pieces."""
        count = 1 if self._next < len(self._layout.matrices) else len(self._layout.head)
        regions = self._layout.regions[self._next : self._next + count]
        self._next += count
        most = max(1, BLOCK // self._packer.n_bytes(16, rows.shape[1])) * 16  # whole groups in half of the buffer
        weights = chain.from_iterable(in_runs(weight, most) for weight in rows.in_order())
        weight = next(weights)
        for region in regions:
            stream, scale = self._stream(region.offset), np.zeros(-(-region.n_out // 16) * 16, np.float32)
            done = 0
            while done < region.n_out:
                take = min(len(weight), region.n_out - done)
                of_scale = scale[done:].ctypes.data if region.scale_bytes else None
                self._packer.pack(weight[:take], stream.allocate(self._packer.n_bytes(take, region.n_in)), of_scale)
                done, weight = done + take, weight[take:]
                if not len(weight):
                    weight = next(weights, weight)
            if region.scale_bytes:
                stream.copy(scale.ctypes.data, region.scale_bytes)
            self._digests[region.offset] = stream.end()

    def embedding(self, embedding: Array) -> None:
        check_finite(EMBEDDING, embedding)
        stream, row_bytes = self._stream(self._layout.embedding), self._layout.row_bytes
        for rows in in_runs(embedding, max(1, BLOCK // 2 // row_bytes)):
            kept = np.ascontiguousarray(native(rows))
            stream.copy(kept.ctypes.data, len(kept) * row_bytes)
        self._digests[self._layout.embedding] = stream.end()

    def finish(self, path: Path) -> None:
        digests = [self._digests[offset] for _, offset, _ in self._layout.checked]
        header = json.dumps({"identity": self._layout.identity, "sha256": digests}).encode()
        header = header.ljust(self._layout.header_bytes, b"\0")
        assert len(header) == self._layout.header_bytes, "a digest of a region takes no 128 bytes"
        stream = self._stream(0)
        for done in range(0, len(header), BLOCK):
            part = header[done : done + BLOCK]
            ctypes.memmove(stream.allocate(len(part)), part, len(part))
        stream.end()
        try:
            os.fsync(self._file.fd)
            self._path.rename(path)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            raise DiskUnusable(f"{path}: {error}") from error

    def close(self) -> None:
        """Drop what is not finished."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _stream(self, offset: int) -> "_RegionStream":
        return _RegionStream(self._file, self._memory, offset)


class _RegionStream:
    """What a region holds, one part after the other, written in whole pages."""

    def __init__(self, file: DirectFile, memory: MappedMemory, offset: int) -> None:
        self._file, self._memory, self._offset = file, memory, offset
        self._filled, self._digest = 0, hashlib.sha256()

    def allocate(self, n_bytes: int) -> int:
        """Return the address where the next `n_bytes` are written now."""
        if self._filled + n_bytes > self._memory.n_bytes:
            self._flush(self._filled // PAGE * PAGE)
        assert self._filled + n_bytes <= self._memory.n_bytes, n_bytes
        self._filled += n_bytes
        return self._memory.address + self._filled - n_bytes

    def copy(self, source: int, n_bytes: int) -> None:
        for done in range(0, n_bytes, BLOCK):
            part = min(BLOCK, n_bytes - done)
            ctypes.memmove(self.allocate(part), source + done, part)

    def end(self) -> str:
        """Write zeros up to a whole page. Returns the digest of the region."""
        padded = round_up_to_page(self._filled)
        self._memory.clear(self._filled, padded - self._filled)
        self._filled = padded
        self._flush(padded)
        return self._digest.hexdigest()

    def _flush(self, n_bytes: int) -> None:
        if not n_bytes:
            return
        address = self._memory.address
        self._digest.update((ctypes.c_char * n_bytes).from_address(address))
        self._file.write(address, n_bytes, self._offset)
        self._offset += n_bytes
        self._filled -= n_bytes
        ctypes.memmove(address, address + n_bytes, self._filled)
