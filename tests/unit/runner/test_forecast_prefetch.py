"""Adapters that a forecast names: one at a time, after all others, and nobody's trouble."""

from harness.desired import desired, whole
from weft.domain.adapter import DesiredChange, Tier
from weft_runner.core import AdapterManager, Fetch, Load, LoadState, PageTable, Retain, check_adapters
from weft_runner.core.adapter_manager import MOST_ON_DEMAND
from weft_runner.core.forecast_prefetch import MOST_FORECAST


def manager(slots: int = 2) -> AdapterManager:
    book = AdapterManager(slots)
    book.apply(whole())
    book.take_actions()
    return book


def named(book: AdapterManager, *digests: str) -> list[Fetch]:
    book.prefetch(digests)
    book.reconcile()
    return fetches(book)


def fetches(book: AdapterManager) -> list[Fetch]:
    check_adapters(book)
    return [action for action in book.take_actions() if isinstance(action, Fetch)]


def fetched(book: AdapterManager, digest: str) -> list[Fetch]:
    book.on_fetched(digest, n_bytes=10, host_bytes=None)
    return fetches(book)


def forecast(digest: str) -> Fetch:
    return Fetch(digest, measure=True, spare=True)


def counted(book: AdapterManager) -> dict[str, int]:
    return {**book.forecast.adapters}


def test_they_come_one_at_a_time_and_are_counted_once_they_are_used() -> None:
    book = manager()
    assert named(book, "a", "b") == [forecast("a")]
    assert book.forecast.left == 2
    assert fetched(book, "a") == [forecast("b")]
    assert fetched(book, "b") == []
    assert book.adapters["a"].nearest_tier is Tier.DISK
    book.acquire("a")
    book.acquire("a")
    assert counted(book) == {"fetched": 2, "used": 1}
    assert book.forecast.n_bytes["used"] == 10


def test_none_is_begun_while_a_sequence_waits_for_an_adapter() -> None:
    book = manager()
    book.acquire("needed")
    assert fetches(book) == [Fetch("needed", urgent=True)]
    assert named(book, "a") == []
    book.on_fetched("needed", n_bytes=None, host_bytes=None)
    assert fetches(book) == [], "it is being loaded"
    book.on_loaded("needed", rank=1, n_bytes=1, host_bytes=None, load_cost=1.0)
    assert fetches(book) == [forecast("a")]


def test_none_is_begun_before_what_is_desired_is_there() -> None:
    book = AdapterManager(2)
    assert named(book, "a") == [], "it is not even known"
    book.apply(whole(desired("disk", tier=Tier.DISK)))
    assert fetches(book) == [Fetch("disk")]
    assert fetched(book, "disk") == [forecast("a")]


def test_what_is_named_changes_neither_readiness_nor_what_is_missing() -> None:
    book = manager()
    named(book, "a")
    assert book.not_ready_reason() == ""
    book.on_fetch_failed("a", "the depot does not answer", permanent=True)
    assert book.not_ready_reason() == ""
    assert "a" not in book.adapters, "no report names an error"
    assert counted(book) == {"failed": 1}
    check_adapters(book)


def test_a_sequence_that_came_for_one_that_fails_has_it_fetched_again() -> None:
    book = manager()
    named(book, "a")
    assert not book.acquire("a")
    assert fetches(book) == [], "it waits for what is under way"
    assert not book.on_fetch_failed("a", "the disk has no room to spare"), "its sequence does not end"
    assert fetches(book) == [Fetch("a", urgent=True)]
    assert book.on_fetch_failed("a", "the depot does not answer"), "now it does"


def test_one_that_fits_no_device_is_forgotten_and_nobody_hears_of_it() -> None:
    book = AdapterManager(2, pages=PageTable(4, 16), page_bytes=10)
    book.apply(whole())
    named(book, "large")
    assert book.on_fetched("large", n_bytes=1000, host_bytes=None) == ""
    assert "large" not in book.adapters
    assert Retain(frozenset()) in book.take_actions()
    assert book.infeasible_reason("large"), "its size is remembered"


def test_what_is_here_is_not_named_again_and_names_are_bounded() -> None:
    book = manager()
    book.on_fetched(named(book, "a")[0].digest, n_bytes=10, host_bytes=None)
    assert named(book, "a") == []
    named(book, *(f"d{n}" for n in range(2 * MOST_FORECAST)))
    assert book.forecast.left <= MOST_FORECAST + 1


def test_the_unused_leave_first_and_none_takes_the_place_of_another() -> None:
    book = AdapterManager(2)
    book.on_found_on_disk(f"d{n}" for n in range(MOST_ON_DEMAND - 1))
    book.apply(whole())
    book.take_actions()
    assert named(book, "a", "b") == [forecast("a")]
    assert fetched(book, "a") == [], "the disk is full"
    assert book.forecast.left == 0
    book.acquire("needed")
    assert "a" not in book.adapters
    assert "needed" in book.adapters
    assert counted(book) == {"fetched": 1, "dropped": 1}
    assert book.forecast.n_bytes["dropped"] == 10


def test_one_that_is_removed_meanwhile_leaves_and_one_that_is_desired_meanwhile_stays() -> None:
    book = manager()
    named(book, "gone", "kept")
    book.apply(DesiredChange(2, full=False, removed=("gone",)))
    assert fetched(book, "gone") == [forecast("kept")]
    assert "gone" not in book.adapters
    book.apply(DesiredChange(3, full=False, adapters=(desired("kept", tier=Tier.DISK),)))
    assert book.not_ready_reason(), "now it is waited for"
    assert book.on_fetch_failed("kept", "the depot does not answer"), "as of any desired adapter"
    assert book.adapters["kept"].error
    book.retry()
    assert [fetch.digest for fetch in fetches(book)] == ["kept"]


def test_a_prefetched_adapter_is_loaded_at_once() -> None:
    book = manager()
    named(book, "a")
    fetched(book, "a")
    book.acquire("a")
    assert [action.digest for action in book.take_actions() if isinstance(action, Load)] == ["a"]
    assert book.adapters["a"].state is LoadState.LOADING
