"""KV pages of a device as copies to host memory and back see them: bytes. The layout is the executor's own business."""

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.model.kv_cache import KvCache

Bytes = npt.NDArray[np.uint8]


class KvMemory(Protocol):
    """One page is `page_bytes`, here and in host memory. Copies return when they are complete, with the GIL free."""

    page_bytes: int

    def host_page(self) -> Any:
        """Memory for one page. Raises MemoryError or RuntimeError."""
        ...

    def fence(self) -> Any:
        """All that has been launched so far: a copy comes after it. The engine's thread."""
        ...

    def copy_out(self, page: int, part: slice, host: Any, fence: Any) -> None:
        """Bytes `part` of a page to those of a host page."""
        ...

    def copy_in(self, page: int, part: slice, host: Any, fence: Any) -> None:
        """And back."""
        ...


class LocalKvMemory:
    """Pages in this machine's memory, [pages, page bytes]. Steps are complete when the engine orders a copy."""

    def __init__(self, pages: Bytes) -> None:
        self._pages = pages
        self.page_bytes = pages.shape[1]

    @classmethod
    def mapped(cls, memory: MappedMemory, page_bytes: int) -> "LocalKvMemory":
        """`memory` has to live as long."""
        n_pages = memory.n_bytes // page_bytes
        array = np.ctypeslib.as_array((ctypes.c_uint8 * (n_pages * page_bytes)).from_address(memory.address))
        return cls(array.reshape(n_pages, page_bytes))

    @classmethod
    def of(cls, kv: KvCache) -> "LocalKvMemory":
        return cls(_bytes_of(kv).numpy())

    def host_page(self) -> Bytes:
        return np.empty(self.page_bytes, np.uint8)

    def fence(self) -> None:
        return None

    def copy_out(self, page: int, part: slice, host: Bytes, fence: None) -> None:
        del fence
        np.copyto(host[part], self._pages[page, part])

    def copy_in(self, page: int, part: slice, host: Bytes, fence: None) -> None:
        del fence
        np.copyto(self._pages[page, part], host[part])


class CudaKvMemory:
    """Pages on a GPU; pinned memory on the host, a stream of its own between them."""

    def __init__(self, kv: KvCache) -> None:
        self._pages = _bytes_of(kv)
        self.page_bytes = self._pages.shape[1]
        self._copies = torch.cuda.Stream(self._pages.device)

    def host_page(self) -> torch.Tensor:
        return torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=True)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._pages.device))
        return event

    def copy_out(self, page: int, part: slice, host: torch.Tensor, fence: torch.cuda.Event) -> None:
        self._copy(host[part], self._pages[page, part], fence)

    def copy_in(self, page: int, part: slice, host: torch.Tensor, fence: torch.cuda.Event) -> None:
        self._copy(self._pages[page, part], host[part], fence)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, fence: torch.cuda.Event) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            self._copies.wait_event(fence)
            to.copy_(source, non_blocking=True)
        self._copies.synchronize()


def kv_memory(kv: KvCache) -> LocalKvMemory | CudaKvMemory:
    """Of a torch executor."""
    return CudaKvMemory(kv) if kv.tensor.is_cuda else LocalKvMemory.of(kv)


def _bytes_of(kv: KvCache) -> torch.Tensor:
    return kv.tensor.view(len(kv.tensor), -1).view(torch.uint8)
