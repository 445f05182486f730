"""One adapter as the runner knows it: the state on its way to a device slot, its copies, and who uses it.

    ABSENT --> FETCHING --> ON_DISK --> LOADING --> RESIDENT <--> DRAINING
       ^----------+            ^-----------------------+-------------+

Two facts are apart from each other: the state, and whether host memory holds a copy (`HostCopy`). A resident adapter
may have a copy, one on disk may have none. A slot and pages belong to an adapter from LOADING on, never before its file
is on disk. Every transition is asserted.
"""

from dataclasses import dataclass
from enum import Enum

from weft.domain.adapter import AdapterState, Tier


class LoadState(Enum):
    """The state of an adapter on its way to a device slot."""

    ABSENT = "absent"  # in the depot, as far as is known
    FETCHING = "fetching"  # on its way to the disk, or on disk and compared with its digest and measured
    ON_DISK = "on disk"
    LOADING = "loading"  # read and converted for the slot and the pages that it holds
    RESIDENT = "resident"  # in its slot: a sequence joins at once
    DRAINING = "draining"  # in its slot until its last sequence ends: a new sequence queues


class HostCopy(Enum):
    """The state of an adapter's copy in host memory."""

    NONE = "none"
    COPYING = "copying"  # a fetch or a load makes it
    HELD = "held"


TRANSITIONS = {
    LoadState.ABSENT: {LoadState.FETCHING, LoadState.ON_DISK},  # ON_DISK: found there
    LoadState.FETCHING: {LoadState.ON_DISK, LoadState.ABSENT},
    LoadState.ON_DISK: {LoadState.FETCHING, LoadState.LOADING},  # FETCHING: its size on the device is not known yet
    LoadState.LOADING: {LoadState.RESIDENT, LoadState.ABSENT},  # ABSENT: it failed, so that the file is in doubt
    LoadState.RESIDENT: {LoadState.DRAINING, LoadState.ON_DISK},
    LoadState.DRAINING: {LoadState.RESIDENT, LoadState.ON_DISK},
}
COPY_TRANSITIONS = {
    HostCopy.NONE: {HostCopy.COPYING},
    HostCopy.COPYING: {HostCopy.HELD, HostCopy.NONE},
    HostCopy.HELD: {HostCopy.NONE},
}


@dataclass(slots=True, eq=False)
class Adapter:
    """The record of one digest. `slot` is set from LOADING to DRAINING."""

    digest: str
    rank: int = 0
    n_bytes: int = 0  # on the device; announced until `size_known`, 0: not even announced
    size_known: bool = False
    host_bytes: int = 0  # of the latest copy in host memory
    used: int = 0  # when that copy was, on the clock of the host cache
    tier: Tier | None = None  # the lowest tier that has to hold it; None: nobody desires it
    protected: bool = False  # pinned, and within what pinned adapters may hold
    state: LoadState = LoadState.ABSENT
    measuring: bool = False  # FETCHING, and its file was on disk before
    copy: HostCopy = HostCopy.NONE
    slot: int | None = None
    pages: tuple[int, ...] = ()  # beside that slot
    running: int = 0  # sequences that have joined
    waiting: int = 0  # sequences that have not
    swapped: int = 0  # sequences that had, whose KV is in host memory: they need it again
    overtaken: int = 0  # how often a sequence of another adapter joined while this one was ready for a slot
    load_cost: float = 0.0
    value: float = 0.0  # to keep it in its slot, see `slots.py`
    error: str = ""
    permanent_failure: bool = False  # the artifact is wrong: another attempt does not help
    degraded_reason: str = ""  # why a lower tier than desired holds it
    unpinned_reason: str = ""  # why it is desired pinned and not protected

    @property
    def desired(self) -> bool:
        return self.tier is not None

    @property
    def resident(self) -> bool:
        return self.state in (LoadState.RESIDENT, LoadState.DRAINING)

    @property
    def on_disk(self) -> bool:
        return self.measuring or self.state not in (LoadState.ABSENT, LoadState.FETCHING)

    @property
    def idle(self) -> bool:
        """Say whether no sequence names it, and nothing brings it nearer."""
        return not (self.running or self.waiting or self.swapped or self.in_transfer)

    @property
    def in_transfer(self) -> bool:
        """Say whether a fetch, a copy or a load is under way."""
        return self.state in (LoadState.FETCHING, LoadState.LOADING) or self.copy is HostCopy.COPYING

    @property
    def nearest_tier(self) -> Tier:
        """The tier of the adapter nearest to the device."""
        if self.resident:
            return Tier.DEVICE
        if self.copy is HostCopy.HELD:
            return Tier.HOST
        return Tier.DISK if self.on_disk else Tier.REMOTE

    @property
    def reported(self) -> bool:
        """Say whether a report lists it: otherwise it is idle, on disk or in the depot."""
        reasons = self.error or self.degraded_reason or self.unpinned_reason
        return bool(self.slot is not None or self.copy is not HostCopy.NONE or not self.idle or reasons)

    def report(self) -> AdapterState:
        return AdapterState(
            self.digest, self.nearest_tier, running=self.running + self.waiting + self.swapped, bytes=self.n_bytes,
            rank=self.rank, loading=self.in_transfer, error=self.error,
            shortfall=self.degraded_reason or self.unpinned_reason,
        )  # fmt: skip

    def announce(self, rank: int, n_bytes: int) -> None:
        """Take a rank and a size on the device as hints, where none is known."""
        self.rank, self.n_bytes = self.rank or rank, self.n_bytes or n_bytes

    def take_size(self, n_bytes: int, rank: int = 0, load_cost: float | None = None) -> None:
        """Take its true size on the device, and where they are known its true rank and what a load costs."""
        self.n_bytes, self.size_known, self.rank = max(n_bytes, 1), True, rank or self.rank
        self.load_cost = self.load_cost if load_cost is None else load_cost

    def want(self, tier: Tier | None) -> None:
        self.tier = tier

    def protect(self, *, protected: bool, why_not: str) -> None:
        """Note if it is not evicted, and why it is desired pinned and may be."""
        self.protected, self.unpinned_reason = protected, why_not

    def degrade(self, reason: str) -> None:
        """Note why a lower tier than desired holds it; "": none does."""
        self.degraded_reason = reason

    def measure_copy(self, host_bytes: int) -> None:
        self.host_bytes = host_bytes

    def use_copy(self, now: int) -> None:
        self.used = now

    def overtake(self, times: int) -> None:
        """Count sequences of different adapters that joined before the adapter's sequences."""
        self.overtaken += times

    def weigh(self, value: float) -> None:
        self.value = value

    def take_slot(self, slot: int, pages: tuple[int, ...]) -> None:
        """Load the adapter into this slot and these pages."""
        self.advance(LoadState.LOADING)
        self.slot, self.pages = slot, pages

    def leave_slot(self) -> None:
        """Leave slot and pages: the file of a resident adapter stays on disk, that of a failed load is in doubt."""
        self.advance(LoadState.ON_DISK if self.resident else LoadState.ABSENT)
        self.slot, self.pages = None, ()

    def count(self, *, running: int = 0, waiting: int = 0, swapped: int = 0) -> None:
        """Add to its counts of sequences."""
        self.running += running
        self.waiting += waiting
        self.swapped += swapped

    def fail(self, error: str, *, permanent: bool = False) -> None:
        """Keep why it could not be brought nearer; "": it could."""
        self.error, self.permanent_failure = error, permanent

    def advance(self, state: LoadState) -> None:
        assert state in TRANSITIONS[self.state], (self.digest, self.state, state)
        self.measuring = state is LoadState.FETCHING and self.state is LoadState.ON_DISK
        self.state = state

    def advance_copy(self, copy: HostCopy) -> None:
        assert copy in COPY_TRANSITIONS[self.copy], (self.digest, self.copy, copy)
        self.copy = copy


def check_adapter(adapter: Adapter) -> None:
    """Check the invariants of an adapter, valid after every event."""
    assert (adapter.slot is not None) == (adapter.resident or adapter.state is LoadState.LOADING), adapter
    assert adapter.running >= 0, adapter
    assert adapter.waiting >= 0, adapter
    assert adapter.swapped >= 0, adapter
    assert adapter.running == 0 or adapter.resident, adapter
    assert adapter.desired or not adapter.degraded_reason, adapter
