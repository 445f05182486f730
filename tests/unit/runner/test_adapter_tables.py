"""Tables of one decision each: who is evicted first, who is protected of those that are pinned, who may go next."""

import pytest

from harness.desired import desired, whole
from weft_runner.core.adapters.adapter import Adapter, LoadState
from weft_runner.core.adapters.known import KnownAdapters
from weft_runner.core.adapters.slots import AdapterSlots
from weft_runner.core.page_table import PageTable


def slots_of(pages: int = 16, slots: int = 8) -> AdapterSlots:
    return AdapterSlots(slots, PageTable(pages, 1), 10, [], {})


EVICTED = {  # name: (pages, cost of a load), (draining, protected, running)
    "the cheapest": ({"a": (1, 3.0), "b": (1, 1.0), "c": (1, 2.0)}, {}, "bca"),
    "cost counts by page": ({"a": (4, 3.0), "b": (1, 1.0)}, {}, "ab"),
    "one that drains before all": ({"a": (1, 1.0), "b": (1, 9.0)}, {"b": "draining"}, "ba"),
    "none that runs": ({"a": (1, 1.0), "b": (1, 9.0)}, {"a": "running"}, "b"),
    "a pinned one last": ({"a": (1, 1.0), "b": (1, 9.0)}, {"a": "protected"}, "ba"),
}


@pytest.mark.parametrize(("sizes", "marks", "order"), EVICTED.values(), ids=EVICTED)
def test_who_leaves_first_when_pages_are_short(sizes, marks, order):
    slots, adapters = slots_of(), {d: Adapter(d, n_bytes=10 * n, size_known=True) for d, (n, _) in sizes.items()}
    for digest, adapter in adapters.items():
        adapter.load_cost, mark = sizes[digest][1], marks.get(digest)
        adapter.state = LoadState.ON_DISK
        assert slots.assign(adapter)
        adapter.advance(LoadState.RESIDENT)
        slots.on_use(adapter)
        if mark == "draining":
            adapter.advance(LoadState.DRAINING)
        adapter.running, adapter.protected = mark == "running", mark == "protected"
        slots.mark_changed(adapter)
    left = []
    while slots.evict_for(slots.pages.free_pages + 1, pinned_too=True):
        slots.check()
        left += [d for d, adapter in adapters.items() if adapter.slot is None and d not in left]
    assert "".join(left) == order
    assert slots.evict_for(slots.pages.free_pages), "nobody has to leave for what is free"


def test_the_adapter_that_needs_the_pages_is_not_evicted_for_them():
    slots = slots_of(pages=2)
    for digest, cost in (("cheap", 1.0), ("dear", 9.0)):
        adapter = Adapter(digest, n_bytes=10, size_known=True, load_cost=cost, state=LoadState.ON_DISK)
        assert slots.assign(adapter)
        adapter.advance(LoadState.RESIDENT)
        slots.on_use(adapter)
        slots.mark_changed(adapter)
    assert not slots.evict_for(2, "cheap")
    assert slots.evict_for(1, "cheap")
    assert [adapter.digest for adapter in slots.by_slot.values()] == ["cheap"]


PINNED = {  # sizes in pages, slots -> protected; of 16 pages one adapter may hold 12
    "all slots but one": ([1, 1, 1], 3, "ab"),
    "one slot is nobody's": ([1], 1, ""),
    "pages of one adapter": ([8, 8, 4], 8, "ac"),
    "what is announced larger than that": ([15, 2], 8, "a"),  # a hint, until it is measured
}


@pytest.mark.parametrize(("sizes", "n_slots", "protected"), PINNED.values(), ids=PINNED)
def test_who_is_protected_of_those_that_are_pinned(sizes, n_slots, protected):
    known = KnownAdapters(slots := slots_of(slots=n_slots))
    known.apply(whole(*(desired("abc"[i], n_bytes=10 * n, pinned=True) for i, n in enumerate(sizes))))
    known.protect()
    assert "".join(adapter.digest for adapter in known.protected) == protected
    assert sum(map(slots.pages_needed, known.protected)) <= slots.max_pages


TRANSITIONS = {
    LoadState.ABSENT: {LoadState.FETCHING, LoadState.ON_DISK},
    LoadState.FETCHING: {LoadState.ON_DISK, LoadState.ABSENT},
    LoadState.ON_DISK: {LoadState.FETCHING, LoadState.LOADING},
    LoadState.LOADING: {LoadState.RESIDENT, LoadState.ABSENT},
    LoadState.RESIDENT: {LoadState.DRAINING, LoadState.ON_DISK},
    LoadState.DRAINING: {LoadState.RESIDENT, LoadState.ON_DISK},
}


@pytest.mark.parametrize("state", LoadState)
@pytest.mark.parametrize("following", LoadState)
def test_an_adapter_advances_by_the_table_alone(state, following):
    adapter = Adapter("a", state=state)
    if following in TRANSITIONS[state]:
        adapter.advance(following)
        assert adapter.measuring == (state is LoadState.ON_DISK and following is LoadState.FETCHING)
    else:
        with pytest.raises(AssertionError):
            adapter.advance(following)
