"""Adapters with a tier: fetched unasked, kept, and what happens where that is not possible."""

from harness.desired import desired, take_effects, whole
from weft.domain.adapter import DesiredAdapter, DesiredChange, Tier
from weft.domain.request import EndReason
from weft_runner.core import Fetch, Fetched
from weft_runner.core.adapters.adapter import HostCopy
from weft_runner.core.adapters.manager import AdapterManager, check_adapters
from weft_runner.core.events import DropHost, FetchFailed, Load, Loaded, LoadFailed
from weft_runner.core.host_cache import PREFETCHES
from weft_runner.core.page_table import PageTable


def host(*digests: str, n_bytes: int = 10) -> list[DesiredAdapter]:
    return [desired(digest, n_bytes=n_bytes, tier=Tier.HOST) for digest in digests]


def fetches(book: AdapterManager) -> list[Fetch]:
    check_adapters(book)
    return [action for action in take_effects(book) if isinstance(action, Fetch)]


def fetch_all(book: AdapterManager, n_bytes: int = 10) -> list[str]:
    """Let every fetch succeed; what was fetched, in order."""
    order: list[str] = []
    while found := fetches(book):
        for fetch in found:
            order.append(fetch.digest)
            book.on_event(Fetched(fetch.digest, None, n_bytes if fetch.to_host else None))
    return order


def test_they_come_a_few_at_a_time_in_the_lists_order_and_are_waited_for():
    book = AdapterManager(2, host_bytes=1000)
    book.apply(whole(*host("a", "b", "c"), desired("disk", tier=Tier.DISK), desired("asked for")))
    first = fetches(book)
    assert first == [Fetch("a", to_host=True), Fetch("b", to_host=True)]
    assert len(first) == PREFETCHES
    assert not book.prefetcher.idle
    book.on_event(Fetched("b", None, 10))
    assert fetches(book) == [Fetch("c", to_host=True)]
    assert book.prefetcher.missing() == ["a", "c", "disk"]
    book.on_event(Fetched("a", None, 10))
    book.on_event(Fetched("c", None, 10))
    assert fetches(book) == [Fetch("disk", to_host=False)]
    book.on_event(Fetched("disk", None, None))
    assert not book.prefetcher.missing()
    assert book.prefetcher.idle
    assert book.adapters["disk"].nearest_tier is Tier.DISK
    assert book.adapters["asked for"].nearest_tier is Tier.REMOTE


def test_what_has_a_tier_is_not_crowded_out_by_what_is_asked_for():
    book = AdapterManager(1, host_bytes=30)
    book.apply(whole(*host("a", "b")))
    fetch_all(book)
    for turn in range(6):
        book.acquire(f"other{turn}")
        book.on_event(Fetched(f"other{turn}", None, None))
        book.on_event(Loaded(f"other{turn}", 1, 1, 10, 1.0))
        book.release(f"other{turn}", joined=True)
        check_adapters(book)
    assert {"a", "b"} <= set(book.host.adapters)
    assert [book.adapters[digest].nearest_tier for digest in "ab"] == [Tier.HOST] * 2


def test_a_copy_that_was_loaded_from_is_not_the_next_to_go():
    book = AdapterManager(1, host_bytes=25)
    for digest in ("a", "b", "a", "c"):
        book.acquire(digest)
        for action in take_effects(book):
            if isinstance(action, Fetch):
                book.on_event(Fetched(digest, None, None))
        book.on_event(Loaded(digest, 1, 1, 10, 1.0))
        book.release(digest, joined=True)
    assert [*book.host.adapters] == ["a", "c"]


def test_what_finds_no_room_in_host_memory_is_kept_on_disk_says_so_and_nobody_waits():
    book = AdapterManager(1, host_bytes=25)
    book.apply(whole(*host("a", "b", "c")))
    for digest in fetches(book):
        book.on_event(Fetched(digest.digest, None, 10))
    assert fetches(book) == [Fetch("c", to_host=False)], "it is not even read"
    book.on_event(Fetched("c", None, None))
    assert not book.prefetcher.missing()
    assert set(book.host.adapters) == {"a", "b"}
    assert book.adapters["c"].nearest_tier is Tier.DISK
    assert book.adapters["c"].degraded_reason == "kept on disk: 10 bytes do not fit into the 25 bytes of host memory"
    assert book.adapters["c"].report().shortfall, "the report names it"
    assert not book.adapters["c"].error


def test_who_is_there_stays_when_others_come_and_room_that_is_given_back_is_used():
    book = AdapterManager(1, host_bytes=25)
    book.apply(whole(*host("m", "n")))
    fetch_all(book)
    book.apply(whole(*host("a", "m", "n")))
    fetch_all(book)
    assert set(book.host.adapters) == {"m", "n"}, "the order of the list does not turn out what is there"
    book.apply(whole(*host("a", "n")))
    assert fetch_all(book) == ["a"]
    assert set(book.host.adapters) == {"a", "n"}
    assert not book.adapters["a"].degraded_reason


def test_a_size_that_was_not_known_before_is_found_out():
    book = AdapterManager(1, host_bytes=25)
    book.apply(whole(*host("a", "b", n_bytes=0)))
    fetch_all(book, n_bytes=20)
    assert not book.prefetcher.missing()
    assert set(book.host.adapters) == {"a"}
    assert "20 bytes do not fit" in book.adapters["b"].degraded_reason


def test_a_failure_is_named_waited_for_and_tried_again():
    book = AdapterManager(1)
    book.apply(whole(*host("a", "b")))
    fetches(book)
    book.on_event(Fetched("b", None, 10))
    book.on_event(FetchFailed("a", EndReason.LOAD_FAILED, "the depot does not answer", permanent=False))
    assert not fetches(book), "not by itself"
    assert book.prefetcher.missing() == ["a"]
    assert book.not_ready_reason() == "1 adapters are not held at their tier yet"
    assert book.adapters["a"].error == "the depot does not answer"
    book.retry()
    assert fetch_all(book) == ["a"]
    assert not book.prefetcher.missing()
    assert not book.adapters["a"].error


def test_an_artifact_that_is_wrong_is_named_and_not_waited_for():
    book = AdapterManager(2)
    book.apply(whole(*host("a"), desired("p", pinned=True)))
    assert fetches(book) == [Fetch("p", urgent=True), Fetch("a", to_host=True)]
    book.on_event(FetchFailed("a", EndReason.LOAD_FAILED, "its header is torn", permanent=True))
    book.on_event(Fetched("p", None, None))
    assert Load("p", 0) in take_effects(book)
    book.on_event(LoadFailed("p", EndReason.LOAD_FAILED, "its rank is too large", permanent=True))
    assert not book.prefetcher.missing()
    assert not book.catalog.missing_pinned()
    assert {d: a.error for d, a in book.adapters.items()} == {"a": "its header is torn", "p": "its rank is too large"}
    book.retry()
    assert not fetches(book)
    assert not book.queue.adapters


def test_a_sequence_waits_for_the_prefetch_that_is_under_way_and_no_second_one_is_made():
    book = AdapterManager(1)
    book.apply(whole(*host("a")))
    assert fetches(book) == [Fetch("a", to_host=True)]
    assert not book.acquire("a")
    assert not fetches(book)
    assert book.on_event(FetchFailed("a", EndReason.LOAD_FAILED, "the disk was full", permanent=False)), (
        "the sequence ends"
    )
    book.release("a", joined=False)
    assert not book.acquire("a")
    assert fetches(book) == [Fetch("a", to_host=True, urgent=True)]
    book.on_event(Fetched("a", None, 10))
    assert Load("a", 0) in take_effects(book)
    book.on_event(LoadFailed("a", EndReason.LOAD_FAILED, "the disk is full again", permanent=False))
    assert DropHost("a") in take_effects(book), "what it had read is in doubt"
    assert book.adapters["a"].copy is HostCopy.NONE
    book.release("a", joined=False)
    book.retry()
    assert fetch_all(book) == ["a"]
    assert book.adapters["a"].copy is HostCopy.HELD


def test_what_is_removed_leaves_host_memory_though_it_was_on_its_way():
    book = AdapterManager(1)
    book.apply(whole(*host("a")))
    fetches(book)
    book.apply(DesiredChange(2, full=False, removed=("a",)))
    book.on_event(Fetched("a", None, 10))
    assert DropHost("a") in take_effects(book)
    assert not book.adapters
    assert not book.host.adapters


def test_without_a_tier_any_more_it_may_be_crowded_out():
    book = AdapterManager(1, host_bytes=10)
    book.apply(whole(*host("a")))
    fetch_all(book)
    book.apply(whole(desired("a"), *host("b")))
    fetch_all(book)
    assert set(book.host.adapters) == {"b"}


def test_what_an_earlier_process_left_on_disk_needs_no_fetch():
    book = AdapterManager(1)
    wanted = [desired(f"d{n}", tier=Tier.DISK) for n in range(PREFETCHES + 2)]
    book.catalog.find_on_disk(d.digest for d in wanted[1:])
    book.apply(whole(*wanted))
    assert book.prefetcher.missing() == ["d0"]
    assert [fetch.digest for fetch in fetches(book)] == ["d0"]


def test_a_file_that_is_measured_for_a_sequence_stays_on_disk_and_is_not_missing():
    book = AdapterManager(1, pages=PageTable(8, 4), page_bytes=10)
    book.catalog.find_on_disk(["a"])
    book.apply(whole(desired("a", tier=Tier.DISK)))
    assert not book.prefetcher.missing()
    book.acquire("a")
    (fetch,) = fetches(book)
    assert fetch.measure
    assert book.adapters["a"].nearest_tier is Tier.DISK
    assert not book.not_ready_reason()


def test_kv_takes_no_room_of_adapters_with_a_tier_and_they_come_back_when_it_has_gone():
    book = AdapterManager(1, host_bytes=40)
    book.apply(whole(*host("a", "b")))
    fetch_all(book)
    assert not book.host.reserve_kv(21, "")
    assert book.host.reserve_kv(20, "")
    book.apply(whole(*host("a", "b", "c")))
    fetch_all(book)
    assert book.adapters["c"].degraded_reason
    book.host.release_kv(20)
    book.reconcile()
    assert fetch_all(book) == ["c"]
    assert not book.adapters["c"].degraded_reason
    assert set(book.host.adapters) == {"a", "b", "c"}
