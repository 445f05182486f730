"""KV pages of a device as copies to host memory and back see them, and streams to other runners: bytes.

What they mean is the executor's own business: `layout` names it, and equal names are equal meanings.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.threads import ThreadPool
from weft_runner.model.arrays import Bytes
from weft_runner.model.kv_window import DirectKvWindow, KvWindow


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


class NativeKvMemory:
    """Pages of the native executor, [pages, page bytes]; all threads of its pool copy."""

    between_steps = True

    def __init__(
        self, library: Library, pool: ThreadPool, memory: MappedMemory, page_bytes: int, layers: int = 1,
        layout: str = "",
    ) -> None:  # fmt: skip
        self._library, self._pool, self._memory, self.page_bytes = library, pool, memory, page_bytes
        self._layers, self.layout = layers, layout

    def window(self) -> DirectKvWindow:
        return DirectKvWindow(self._memory.array().reshape(-1, self.page_bytes), self._layers)

    def host_page(self) -> Bytes:
        return np.empty(self.page_bytes, np.uint8)

    def fence(self) -> None:
        return None

    def copy_out(self, pages: Sequence[int], hosts: Sequence[Bytes], fence: None) -> None:
        del fence
        self._library.copy(self._pool, _addresses(hosts), self._addresses(pages), self.page_bytes)

    def copy_in(self, pages: Sequence[int], hosts: Sequence[Bytes], fence: None) -> None:
        del fence
        self._library.copy(self._pool, self._addresses(pages), _addresses(hosts), self.page_bytes)

    def _addresses(self, pages: Sequence[int]) -> list[int]:
        return [self._memory.address + page * self.page_bytes for page in pages]


def _addresses(hosts: Sequence[Bytes]) -> list[int]:
    return [host.ctypes.data for host in hosts]
