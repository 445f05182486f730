"""KV pages of the torch executors as copies and streams see them: in this machine's memory, or on a GPU."""

from collections.abc import Sequence
from typing import Any

import torch

from weft_runner.model.kv_cache import KvCache
from weft_runner.model.kv_memory import PIECE_BYTES, LocalKvMemory


class StagedKvWindow:
    """Pages of a device, [pages, layers, bytes]: they pass through pinned memory, on a stream of their own."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.layers, self.layer_bytes = pages.shape[1], pages.shape[2]
        self.piece_bytes = max(PIECE_BYTES, self.layer_bytes)
        self._pages, on_gpu = pages, pages.is_cuda
        self._staging = torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes: memoryview = self._staging.numpy().data
        self._copies = torch.cuda.Stream(pages.device) if on_gpu else None

    def outgoing(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> list[memoryview]:
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            self._after(fence)
            for staged, page in zip(self._staged(len(pages), layers), pages, strict=True):
                staged.copy_(self._pages[page, first_layer : first_layer + layers], non_blocking=True)
        self._complete()
        return self.incoming(pages, first_layer, layers)

    def incoming(self, pages: Sequence[int], first_layer: int, layers: int) -> list[memoryview]:
        del first_layer
        return [self._bytes[: len(pages) * layers * self.layer_bytes]]

    def publish(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            self._after(fence)
            for staged, page in zip(self._staged(len(pages), layers), pages, strict=True):
                self._pages[page, first_layer : first_layer + layers].copy_(staged, non_blocking=True)
        self._complete()

    def _staged(self, pages: int, layers: int) -> torch.Tensor:
        """[pages, layers, bytes] of the staging memory."""
        return self._staging[: pages * layers * self.layer_bytes].view(pages, layers, self.layer_bytes)

    def _after(self, fence: Any) -> None:
        if self._copies is not None:
            self._copies.wait_event(fence)

    def _complete(self) -> None:
        if self._copies is not None:
            self._copies.synchronize()


class CudaKvMemory:
    """Pages on a GPU; pinned memory on the host, a stream of its own between them."""

    between_steps = False

    def __init__(self, kv: KvCache) -> None:
        self._pages, self._layers, self.layout = _bytes_of(kv), kv.tensor.shape[1], _layout(kv)
        self.page_bytes = self._pages.shape[1]
        self._copies = torch.cuda.Stream(self._pages.device)

    def window(self) -> StagedKvWindow:
        return StagedKvWindow(self._pages.view(len(self._pages), self._layers, -1))

    def host_page(self) -> torch.Tensor:
        return torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=True)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._pages.device))
        return event

    def copy_out(self, pages: Sequence[int], hosts: Sequence[torch.Tensor], fence: torch.cuda.Event) -> None:
        self._copy(hosts, [self._pages[page] for page in pages], fence)

    def copy_in(self, pages: Sequence[int], hosts: Sequence[torch.Tensor], fence: torch.cuda.Event) -> None:
        self._copy([self._pages[page] for page in pages], hosts, fence)

    def _copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor], fence: torch.cuda.Event) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            self._copies.wait_event(fence)
            for target, page in zip(to, source, strict=True):
                target.copy_(page, non_blocking=True)
        self._copies.synchronize()


def kv_memory(kv: KvCache) -> LocalKvMemory | CudaKvMemory:
    """Return the memory of a torch executor's KV."""
    if kv.tensor.is_cuda:
        return CudaKvMemory(kv)
    return LocalKvMemory(_bytes_of(kv).numpy(), kv.tensor.shape[1], _layout(kv))


def _bytes_of(kv: KvCache) -> torch.Tensor:
    return kv.tensor.view(len(kv.tensor), -1).view(torch.uint8)


def _layout(kv: KvCache) -> str:
    """Return the layout of torch executors' KV: Punica's."""
    dtype = str(kv.tensor.dtype).removeprefix("torch.")
    return "/".join(["paged", dtype, *map(str, kv.tensor.shape[1:])])
