"""Sequences that leave the device for host memory and come back: `KvSwap`'s copies meet pages, adapters and phases."""

from collections.abc import Callable
from math import inf

from weft.domain.request import Priority
from weft_runner.core.adapters.manager import AdapterManager
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.events import SwapDone, SwapFailed
from weft_runner.core.page_table import PageTable
from weft_runner.core.prefix.host import HostPrefixes
from weft_runner.core.prefix.reuse import PrefixReuse
from weft_runner.core.reserve.reservations import Reservations
from weft_runner.core.sequence import Sequence, SequencePhase
from weft_runner.core.swap.swaps import MAX_SWAPS, KvSwap, SwappedKv


class Swapping:
    """One owner: the request pool. `go_on` runs a sequence from the next batch on."""

    def __init__(
        self, go_on: Callable[[Sequence], None], swap: KvSwap, host_prefixes: HostPrefixes, pages: PageTable,
        adapters: AdapterManager, reservations: Reservations, reuse: PrefixReuse, scheduler: BatchScheduler,
    ) -> None:  # fmt: skip
        self._go_on, self.swap, self._host_prefixes, self._pages = go_on, swap, host_prefixes, pages
        self._adapters, self._reservations, self._reuse, self._scheduler = adapters, reservations, reuse, scheduler

    # ---- moments of the pool

    def admit(self, sequence: Sequence, pages: list[int], decoding: int, *, adapter_there: bool) -> bool:
        """Wait until the next pages of its text are copied in. False: they are not there, or computed sooner.

        `decoding`: sequences that do; who waits for a copy misses one of their steps.
        """
        at = sequence.in_kv // self._pages.page_tokens
        names = [*self._reuse.names(sequence.chain, sequence.tokens, at)]
        if names and (waiting_copy := self.swap.arriving.get(names[0])):
            self.swap.wait_for_copy(sequence, waiting_copy)
        elif not (cached := self._host_prefixes.find(names)):
            return False
        else:
            times, n_tokens = self._scheduler.step_time, len(cached) * self._pages.page_tokens
            step_ms = times.step_ms(decoding, self._scheduler.keys, 0) if decoding else 0.0
            if self.swap.copy_ms(len(cached)) + step_ms >= times.prefill_ms(n_tokens):
                return False
            sequence.reuse(n_tokens)
            self._pages.fill(sequence.key, sequence.in_kv)
            copied = pages[at : at + len(cached)]
            self._reservations.drop_granted(copied)
            self.swap.read(sequence, cached, copied)
        if adapter_there:
            self.swap.by_key[sequence.key].bring_adapter()
        return True

    def owed_pages(self, priority: Priority = Priority.INTERACTIVE) -> int:
        """Pages owed to sequences in host memory and their adapters, before a new sequence of this priority.

        Batch ones wait until no interactive newcomer takes their pages.
        They come back as soon as they fit, so no newcomer is admitted while one is out, though it would fit (as in
        vLLM). The pages that lie free meanwhile, 2 % at the most, are those that running sequences grow into; newcomers
        would take them, and swap out others for it.
        """
        out = [swap for swap in self.swap.returning() if swap.sequence.start.priority <= priority]
        adapters = {swap.sequence.start.adapter for swap in out}
        return sum(swap.wanted_pages for swap in out) + self._adapters.pages_to_load(adapters)

    def swap_out(self, victim: Sequence, *, parked: bool = False) -> bool:
        """Begin to copy its KV out. False: nothing of it was computed, computing it again is cheaper, or no room.

        One that is `parked` is copied whatever computing it again would cost; it may have a row in a step in flight.
        """
        if victim.phase is SequencePhase.WAITING:
            return False
        pages = self._pages.pages_of(victim.key)
        needed_pages = len(pages) + self._reservations.paused.get(victim.key, 0)
        if victim.swaps + 1 >= MAX_SWAPS:
            needed_pages = max(needed_pages, self._pages.pages_for(victim.max_len))
        kv_pages = pages[: self._pages.pages_for(victim.in_kv)]
        recompute_ms = inf if parked else self._scheduler.step_time.prefill_ms(victim.in_kv)
        departure = self._scheduler.departures + 1
        if not self.swap.swap_out(victim, kv_pages, needed_pages, recompute_ms, departure, parked=parked):
            return False
        self._reservations.remove(victim.key)
        self._scheduler.count_departure()
        return True

    def bring_back_parked(self, key: str) -> bool:
        """Bring a parked sequence back, if its pages are free and not owed to others. Return True if it returns."""
        swap = self.swap.by_key[key]
        if self._reservations.paused or self.swap.returning() or not self._bring_back(swap, pinned_too=False):
            return False
        swap.unpark()
        return True

    def bring_back(self, *, pinned_too: bool = False) -> bool:
        """Bring swapped sequences back, the earliest arrival first, as far as pages are free. Return True if a copy
        runs.
        """
        begun = False
        for swap in self.swap.returning():
            if self._reservations.paused or not self._bring_back(swap, pinned_too=pinned_too):
                break
            begun = True
        return begun

    def remove(self, sequence: Sequence) -> None:
        """Let sequences waiting for the copy read its pages, or compute them."""
        for waiting_copy in self.swap.forget(sequence.key):
            self._resume(waiting_copy)

    # ---- events

    def on_copied(self, done: SwapDone) -> None:
        """Go on where a copy to host memory or back has ended."""
        self._host_prefixes.on_copied(done.number)
        swap = self.swap.on_copied(done.number, done.pages, done.seconds)
        if swap is not None and swap.sequence.phase is SequencePhase.SWAP_OUT:
            swap.sequence.release_pages()
            self._reservations.release(swap.sequence.key)
            if swap.sequence.start.adapter:
                self._adapters.swap_out(swap.sequence.start.adapter)
        elif swap is not None:
            self._resume(swap)

    def on_failed(self, failed: SwapFailed) -> Sequence | None:
        """Return the sequence whose copy has failed: it has to be computed once more."""
        self._host_prefixes.on_failed(failed.number)
        swap = self.swap.of_number(failed.number)
        return None if swap is None else swap.sequence

    def adapter_there(self, sequence: Sequence) -> None:
        """Record that the adapter of a returning sequence is on the device."""
        swap = self.swap.by_key[sequence.key]
        swap.bring_adapter()
        self._resume(swap)

    # ---- how

    def _bring_back(self, swap: SwappedKv, *, pinned_too: bool) -> bool:
        sequence, pages, adapters = swap.sequence, self._pages, self._adapters
        start = sequence.start
        shared = self._reuse.find(sequence.chain, sequence.tokens)[: sequence.in_kv // pages.page_tokens]
        n_pages = pages.free_pages - pages.free_beside(shared) + swap.wanted_pages - len(shared)
        to_load = adapters.pages_to_load([start.adapter])
        if n_pages + to_load > adapters.free_pages(start.adapter, alone=pinned_too):
            return False
        evicted = adapters.slots.evict_for(n_pages + to_load, start.adapter, pinned_too=pinned_too)
        granted = pages.reserve(sequence.key, swap.wanted_pages, shared)
        assert evicted, "free pages were checked"
        assert granted is not None, "pages were freed"
        pages.fill(sequence.key, sequence.in_kv)
        copied = granted[len(shared) : len(swap.hosts)]
        self._reservations.drop_granted(copied)
        self._reservations.add_granted(granted[len(swap.hosts) :])
        sequence.share_pages(len(shared))
        self.swap.swap_in(swap, copied)
        if start.adapter:
            adapters.release_swapped(start.adapter)
        if not start.adapter or adapters.acquire(start.adapter):
            swap.bring_adapter()
        return True

    def _resume(self, swap: SwappedKv) -> None:
        """Run it, once both its KV and its adapter are there."""
        if swap.copied and swap.adapter_there:
            self._reuse.count_host_hits(len(swap.cached) * self._pages.page_tokens)
            self._go_on(swap.sequence)
            self.remove(swap.sequence)
