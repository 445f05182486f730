"""Copies of KV to host memory and back: what they cost, the sequences that wait for them, and who wants pages back.

A new sequence that would read pages which are on their way for another one waits for that copy, and copies nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weft_runner.core.events import DropSwap, Effect, SwapIn, SwapOut
from weft_runner.core.host_cache import CachedPage, HostCache
from weft_runner.core.sequence import Sequence, SequencePhase

MAX_SWAPS = 8  # of a sequence: after the last one it comes back with pages for all that it can still ask for
GUESSED_BYTES_PER_S = 1_073_741_824.0  # a GiB, until a copy was measured
RATE = 0.25  # of a measured copy in what the next is expected to take


@dataclass(slots=True, eq=False)
class SwappedKv:
    """A sequence on its way out, out, or on its way back, or one that waits for its text's beginning.

    `number`: of its copies. `hosts`: its pages in host memory, in token order: its own, or those of earlier prompts.
    """

    sequence: Sequence
    number: int
    hosts: tuple[int, ...]
    wanted_pages: int  # on the device, on its return; 0: it is new, and has them
    cached: tuple[CachedPage, ...] = ()  # those of earlier prompts
    waits_for: int = 0  # the copy of another sequence that it waits for
    copied: bool = False  # on its way back: its KV is on the device
    adapter_there: bool = False  # on its way back: so is its adapter, or it has none
    parked: bool = False  # it is owed no pages

    @property
    def is_new(self) -> bool:
        """Say whether it waits for its text's beginning, and had not left."""
        return not self.wanted_pages

    def bring_adapter(self) -> None:
        """Record that the sequence's adapter is on the device, or that it has no adapter."""
        self.adapter_there = True

    def unpark(self) -> None:
        """Let the sequence return like preempted sequences."""
        self.parked = False


class KvSwap:
    """One owner: the request pool. `page_bytes`: of a page's KV; 0: this runner swaps nothing.

    `effects` takes the copies, and what ends them: before anything else is done with their pages.
    """

    def __init__(self, host: HostCache, page_bytes: int, effects: list[Effect]) -> None:
        self._host, self.page_bytes, self._effects = host, page_bytes, effects
        self.by_key: dict[str, SwappedKv] = {}
        self.arriving: dict[bytes, int] = {}  # names of pages on their way to the device, and the number of the copy
        self.bytes_per_s = GUESSED_BYTES_PER_S
        self.out_bytes = self.in_bytes = self.prefix_in_bytes = 0
        self.copy_s = 0.0  # that copies took, out and in, of sequences that had left
        self._numbers = self._hosts = 0

    @property
    def moving(self) -> bool:
        """A copy is under way, so that an event follows."""
        return any(_copies(swap) for swap in self.by_key.values())

    @property
    def num_swapped_out(self) -> int:
        """Count the sequences that had to leave and do not run yet. Any thread."""
        return sum(not swap.is_new for swap in tuple(self.by_key.values()))

    @property
    def host_pages(self) -> int:
        """Count the pages of sequences in host memory. Any thread."""
        return sum(len(swap.hosts) for swap in tuple(self.by_key.values()))

    def returning(self) -> list[SwappedKv]:
        """Return the swapped, unparked sequences: interactive sequences first, then by arrival."""
        phase = SequencePhase.SWAPPED
        out = [swap for swap in self.by_key.values() if swap.sequence.phase is phase and not swap.parked]
        return sorted(
            out, key=lambda swap: (swap.sequence.start.priority, swap.sequence.arrived, swap.sequence.admitted)
        )

    def swap_out(
        self, sequence: Sequence, pages: list[int], wanted_pages: int, recompute_ms: float, departure: int, *,
        parked: bool = False,
    ) -> bool:  # fmt: skip
        """Begin to copy a sequence's pages. Return False if recomputing is cheaper, or host memory is full.

        `departure`: the number of its departure.
        """
        n_bytes = len(pages) * self.page_bytes
        if not n_bytes or 2 * self.copy_ms(len(pages)) >= recompute_ms:
            return False
        if not self._host.reserve_kv(n_bytes, sequence.start.adapter):
            return False
        sequence.swap_out(departure)
        number, hosts = self.next_number(), self.next_hosts(pages)
        swap = self.by_key[sequence.key] = SwappedKv(sequence, number, hosts, wanted_pages, parked=parked)
        self._effects.append(SwapOut(swap.number, tuple(pages), swap.hosts))
        return True

    def swap_in(self, swap: SwappedKv, pages: list[int]) -> None:
        """Begin to copy the last of its pages back to these; the first ones are on the device already."""
        swap.sequence.swap_in()
        self._effects.append(SwapIn(swap.number, swap.hosts[len(swap.hosts) - len(pages) :], tuple(pages)))

    def read(self, sequence: Sequence, cached: list[CachedPage], pages: list[int]) -> None:
        """Begin to copy pages of earlier prompts to these, for a new sequence; the first of its pages are there."""
        self._host.take(cached)
        hosts = tuple(page.host for page in cached)
        swap = self._wait(SwappedKv(sequence, self.next_number(), hosts, 0, (*cached,)))
        self.arriving.update((page.name, swap.number) for page in cached)
        self._effects.append(SwapIn(swap.number, swap.hosts, tuple(pages)))

    def wait_for_copy(self, sequence: Sequence, number: int) -> None:
        """Let a new sequence wait for pages in copy for another sequence."""
        self._wait(SwappedKv(sequence, self.next_number(), (), 0, waits_for=number))

    def copy_ms(self, n_pages: int) -> float:
        """Return the expected time of copying n pages in one direction."""
        return 1e3 * n_pages * self.page_bytes / self.bytes_per_s

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def next_hosts(self, pages: list[int]) -> tuple[int, ...]:
        """Return the numbers of host pages, one for each page."""
        self._hosts += len(pages)
        return tuple(range(self._hosts - len(pages) + 1, self._hosts + 1))

    def on_copied(self, number: int, pages: int, seconds: float) -> SwappedKv | None:
        """Note that a copy of n pages is complete. None: its sequence has ended."""
        n_bytes = pages * self.page_bytes
        if n_bytes and seconds > 0.0:
            self.bytes_per_s += RATE * (n_bytes / seconds - self.bytes_per_s)
        swap = self.of_number(number)
        if swap is not None and swap.sequence.phase is SequencePhase.SWAP_OUT:
            self.out_bytes, self.copy_s = self.out_bytes + n_bytes, self.copy_s + seconds
        elif swap is not None:
            if swap.is_new:
                self.prefix_in_bytes += n_bytes
            else:
                self.in_bytes, self.copy_s = self.in_bytes + n_bytes, self.copy_s + seconds
            swap.copied = True
        return swap

    def of_number(self, number: int) -> SwappedKv | None:
        return next((swap for swap in self.by_key.values() if swap.number == number), None)

    def forget(self, key: str) -> list[SwappedKv]:
        """Forget a sequence that runs, or is over: nothing of its own stays in host memory, and no copy goes on.

        Returns those that waited for its copy, and wait no more.
        """
        if (swap := self.by_key.pop(key, None)) is None:
            return []
        if swap.cached:
            for page in swap.cached:
                del self.arriving[page.name]
            self.drop(swap.number, ())  # before any page it reads is free: the cache may drop some at once
            self._host.put_back(swap.cached)
        elif swap.hosts:
            self._host.release_kv(len(swap.hosts) * self.page_bytes)
            self.drop(swap.number, swap.hosts)
        waiting = [other_swap for other_swap in self.by_key.values() if other_swap.waits_for == swap.number]
        for other_swap in waiting:
            other_swap.waits_for, other_swap.copied = 0, True
        return waiting

    def drop(self, number: int, hosts: Iterable[int]) -> None:
        """End a copy and free its host pages."""
        begun = [effect for effect in self._effects if isinstance(effect, SwapOut | SwapIn) and effect.number == number]
        for copy in begun:  # by the same event
            self._effects.remove(copy)
        self._effects.append(DropSwap((number,), tuple(hosts)))

    def _wait(self, swap: SwappedKv) -> SwappedKv:
        swap.sequence.swap_in()
        self.by_key[swap.sequence.key] = swap
        return swap


def _copies(swap: SwappedKv) -> bool:
    phase = swap.sequence.phase
    return phase is SequencePhase.SWAP_OUT or (phase is SequencePhase.SWAP_IN and not (swap.copied or swap.waits_for))


def check_swap(swap: KvSwap) -> None:
    """Check that KV in host memory belongs to live sequences and is accounted for, and that waited-for copies exist."""
    assert swap._host.kv_bytes == swap.host_pages * swap.page_bytes, swap.by_key  # pyright: ignore[reportPrivateUsage]
    arriving = {page.name: waiting.number for waiting in swap.by_key.values() for page in waiting.cached}
    assert swap.arriving == arriving, "a page is on its way for nobody"
    numbers = {waiting.number for waiting in swap.by_key.values() if waiting.cached}
    for key, swapped in swap.by_key.items():
        assert swapped.sequence.key == key, key
        assert swapped.sequence.phase in (SequencePhase.SWAP_OUT, SequencePhase.SWAPPED, SequencePhase.SWAP_IN), key
        assert not swapped.waits_for or swapped.waits_for in numbers, key
        if swapped.sequence.phase is not SequencePhase.SWAP_IN:
            assert 0 < len(swapped.hosts) <= swapped.wanted_pages, key
            assert not swapped.cached, key
