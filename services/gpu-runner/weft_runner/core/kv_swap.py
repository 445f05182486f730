"""Sequences whose KV is in host memory: what a swap costs, and who wants pages back.

A preempted sequence leaves the device by the cheaper of two ways (vLLM: swapping and recomputation; S3, section 3.4):
its KV is copied to host memory and back, or it is scheduled again and computed once more. KV in host memory and copies
of adapters there share one budget (`host_cache.py`). While a sequence is swapped out its adapter may leave the device
too, and comes back with it: KV without its adapter is of no use (FastLibra, arXiv 2505.03756), so an adapter whose
sequences are swapped out keeps its copy in host memory longer than others, and its file.
"""

from dataclasses import dataclass

from weft_runner.core.events import DropSwap, SwapIn, SwapOut
from weft_runner.core.host_cache import HostCache
from weft_runner.core.sequence import Sequence, SequencePhase

MOST_SWAPS = 8  # of a sequence: after the last one it comes back with pages for all that it can still ask for
GUESSED_BYTES_PER_S = float(1 << 30)  # until a copy was measured
RATE = 0.25  # of a measured copy in what the next is expected to take


@dataclass(slots=True, eq=False)
class SwappedKv:
    """A sequence on its way out, out, or on its way back. `number`: of its copy in host memory."""

    sequence: Sequence
    number: int
    kv_pages: int  # that hold tokens
    wanted_pages: int  # on the device, on its return
    copied: bool = False  # on its way back: its KV is on the device
    adapter_there: bool = False  # on its way back: so is its adapter, or it has none


class KvSwap:
    """One owner: the request pool. `page_bytes`: of a page's KV; 0: this runner swaps nothing."""

    def __init__(self, host: HostCache, page_bytes: int) -> None:
        self._host, self._page_bytes = host, page_bytes
        self.by_key: dict[str, SwappedKv] = {}
        self.drops: list[DropSwap] = []
        self.copies: list[SwapOut | SwapIn] = []
        self.bytes_per_s = GUESSED_BYTES_PER_S
        self.out_bytes = self.in_bytes = 0
        self.copy_s = 0.0  # that copies took, out and in
        self._numbers = 0

    @property
    def leaving(self) -> bool:
        """Pages are about to come free."""
        return any(swap.sequence.phase is SequencePhase.SWAP_OUT for swap in self.by_key.values())

    @property
    def moving(self) -> bool:
        """A copy is under way, so that an event follows."""
        return any(_copies(swap) for swap in self.by_key.values())

    @property
    def host_pages(self) -> int:
        return sum(swap.kv_pages for swap in self.by_key.values())

    def returning(self) -> list[SwappedKv]:
        """Those that are out, the earliest arrival first."""
        out = [swap for swap in self.by_key.values() if swap.sequence.phase is SequencePhase.SWAPPED]
        return sorted(out, key=lambda swap: (swap.sequence.arrived, swap.sequence.admitted))

    def swap_out(self, sequence: Sequence, pages: list[int], wanted_pages: int, recompute_ms: float) -> bool:
        """Begin to copy these pages, which hold its tokens. False: recomputing is cheaper, or host memory is full."""
        n_bytes = len(pages) * self._page_bytes
        if not n_bytes or 2e3 * n_bytes / self.bytes_per_s >= recompute_ms:
            return False
        if not self._host.reserve_kv(n_bytes, sequence.start.adapter):
            return False
        self._numbers += 1
        sequence.swap_out()
        self.by_key[sequence.key] = SwappedKv(sequence, self._numbers, len(pages), wanted_pages)
        self.copies.append(SwapOut(self._numbers, tuple(pages)))
        return True

    def swap_in(self, swap: SwappedKv, pages: list[int]) -> None:
        """Begin to copy the last of its pages back to these; the first ones are on the device already."""
        swap.sequence.swap_in()
        self.copies.append(SwapIn(swap.number, swap.kv_pages - len(pages), tuple(pages)))

    def on_copied(self, number: int, pages: int, seconds: float) -> SwappedKv | None:
        """A copy of so many pages is complete. None: its sequence has ended."""
        n_bytes = pages * self._page_bytes
        self.copy_s += seconds
        if n_bytes and seconds > 0.0:
            self.bytes_per_s += RATE * (n_bytes / seconds - self.bytes_per_s)
        swap = self.of_number(number)
        if swap is not None and swap.sequence.phase is SequencePhase.SWAP_OUT:
            self.out_bytes += n_bytes
        elif swap is not None:
            self.in_bytes += n_bytes
            swap.copied = True
        return swap

    def of_number(self, number: int) -> SwappedKv | None:
        return next((swap for swap in self.by_key.values() if swap.number == number), None)

    def forget(self, key: str) -> None:
        """Its sequence runs again, or is over: nothing of it stays in host memory, and no copy goes on."""
        swap = self.by_key.pop(key, None)
        if swap is not None:
            self._host.release_kv(swap.kv_pages * self._page_bytes)
            self.copies = [copy for copy in self.copies if copy.number != swap.number]
            self.drops.append(DropSwap(swap.number))

    def take_drops(self) -> list[DropSwap]:
        """Before anything else is done with pages: those of a dropped copy may have new owners."""
        drops, self.drops = self.drops, []
        return drops

    def take_copies(self) -> list[SwapOut | SwapIn]:
        """After everything else: adapters whose pages are copied to have left them."""
        copies, self.copies = self.copies, []
        return copies


def _copies(swap: SwappedKv) -> bool:
    phase = swap.sequence.phase
    return phase is SequencePhase.SWAP_OUT or (phase is SequencePhase.SWAP_IN and not swap.copied)


def check_swap(swap: KvSwap) -> None:
    """What is in host memory is a living sequence's, and accounted for."""
    assert swap._host.kv_bytes == swap.host_pages * swap._page_bytes, swap.by_key  # pyright: ignore[reportPrivateUsage]
    for key, swapped in swap.by_key.items():
        assert swapped.sequence.key == key, key
        assert swapped.sequence.phase in (SequencePhase.SWAP_OUT, SequencePhase.SWAPPED, SequencePhase.SWAP_IN), key
        assert 0 < swapped.kv_pages <= swapped.wanted_pages, key
