"""KV pages of a device as copies to host memory and back see them, and streams to other runners: bytes.

What they mean is the executor's own business: `layout` names it, and equal names are equal meanings.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.threads import ThreadPool
from weft_runner.model.arrays import Bytes

PIECE_BYTES = 4 << 20  # pass in some milliseconds: what is dropped meanwhile is noticed behind one piece


class Guard:
    """What protects pages: after `drop` nothing reads them for a stream or a copy, or writes what that brings."""

    def __init__(self) -> None:
        self._lock, self.dropped = threading.Lock(), False

    def __enter__(self) -> bool:
        """Take the lock until the end of the block. True: the pages may be touched there."""
        self._lock.acquire()
        return not self.dropped

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def drop(self) -> None:
        """Wait for the bytes that are being copied, not for a socket. Any thread."""
        self.dropped = True
        with self._lock:
            pass


class KvWindow(Protocol):
    """One direction of one stream: a thread of its own uses it, for one piece at a time, of `piece_bytes` at most.

    A piece is layers [first_layer, first_layer + layers) of some pages, page by page. `fence`: of `KvMemory.fence`.
    """

    layers: int
    layer_bytes: int  # of one layer of one page
    piece_bytes: int

    def outgoing(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> list[memoryview]:
        """The bytes of a piece, in order, in as few parts as they lie in."""
        ...

    def incoming(self, pages: Sequence[int], first_layer: int, layers: int) -> list[memoryview]:
        """Return the memory that the bytes of a piece are to be written to."""
        ...

    def publish(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> None:
        """Let steps read a piece that is written, from when this returns."""
        ...


class DirectKvWindow:
    """Pages in this process's memory, [pages, page bytes]: they are sent from and received to where they lie."""

    def __init__(self, pages: Bytes, layers: int) -> None:
        self.layers, self._page_bytes = layers, pages.shape[1]
        self.layer_bytes = self._page_bytes // layers
        self.piece_bytes = max(PIECE_BYTES, self.layer_bytes)
        self._bytes = pages.reshape(-1).data

    def outgoing(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> list[memoryview]:
        del fence
        return self.incoming(pages, first_layer, layers)

    def incoming(self, pages: Sequence[int], first_layer: int, layers: int) -> list[memoryview]:
        if layers == self.layers:
            runs = _runs(pages, self._page_bytes)
            return [self._bytes[first : first + count * self._page_bytes] for first, count in runs]
        begins = [page * self._page_bytes + first_layer * self.layer_bytes for page in pages]
        return [self._bytes[begin : begin + layers * self.layer_bytes] for begin in begins]

    def publish(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> None:
        pass


def _runs(pages: Sequence[int], page_bytes: int) -> list[tuple[int, int]]:
    """Neighbours in memory that are neighbours in the sequence, as (first byte, pages)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] * page_bytes == page * page_bytes:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page * page_bytes, 1))
    return runs


class KvMemory(Protocol):
    """One page is `page_bytes`, here and in host memory. Copies return when they are complete, with the GIL free.

    `between_steps`: copies belong there, since steps compute on the same cores.
    """

    page_bytes: int
    between_steps: bool
    layout: str

    def window(self) -> KvWindow:
        """For one direction of a stream. Raises MemoryError or RuntimeError."""
        ...

    def host_page(self) -> Any:
        """Memory for one page. Raises MemoryError or RuntimeError."""
        ...

    def fence(self) -> Any:
        """Return a mark of all that has been launched so far: a copy comes after it. The engine's thread."""
        ...

    def copy_out(self, pages: Sequence[int], hosts: Sequence[Any], fence: Any) -> None:
        """Copy pages to as many host pages."""
        ...

    def copy_in(self, pages: Sequence[int], hosts: Sequence[Any], fence: Any) -> None:
        """Copy as many host pages to pages."""
        ...


class LocalKvMemory:
    """Pages in this machine's memory, [pages, page bytes]. Steps are complete when the engine orders a copy."""

    between_steps = True

    def __init__(self, pages: Bytes, layers: int = 1, layout: str = "") -> None:
        self._pages, self._layers, self.layout = pages, layers, layout
        self.page_bytes = pages.shape[1]

    def window(self) -> DirectKvWindow:
        return DirectKvWindow(self._pages, self._layers)

    def host_page(self) -> Bytes:
        return np.empty(self.page_bytes, np.uint8)

    def fence(self) -> None:
        return None

    def copy_out(self, pages: Sequence[int], hosts: Sequence[Bytes], fence: None) -> None:
        del fence
        for page, host in zip(pages, hosts, strict=True):
            np.copyto(host, self._pages[page])

    def copy_in(self, pages: Sequence[int], hosts: Sequence[Bytes], fence: None) -> None:
        del fence
        for page, host in zip(pages, hosts, strict=True):
            np.copyto(self._pages[page], host)


class NativeKvMemory(LocalKvMemory):
    """Pages of the native executor; all threads of its pool copy."""

    def __init__(
        self, library: Library, pool: ThreadPool, memory: MappedMemory, page_bytes: int, layers: int = 1,
        layout: str = "",
    ) -> None:  # fmt: skip
        whole = memory.n_bytes // page_bytes * page_bytes
        super().__init__(memory.array()[:whole].reshape(-1, page_bytes), layers, layout)
        self._library, self._pool, self._address = library, pool, memory.address

    def copy_out(self, pages: Sequence[int], hosts: Sequence[Bytes], fence: None) -> None:
        del fence
        self._library.copy(self._pool, _addresses(hosts), self._addresses(pages), self.page_bytes)

    def copy_in(self, pages: Sequence[int], hosts: Sequence[Bytes], fence: None) -> None:
        del fence
        self._library.copy(self._pool, self._addresses(pages), _addresses(hosts), self.page_bytes)

    def _addresses(self, pages: Sequence[int]) -> list[int]:
        return [self._address + page * self.page_bytes for page in pages]


def _addresses(hosts: Sequence[Bytes]) -> list[int]:
    return [host.ctypes.data for host in hosts]
