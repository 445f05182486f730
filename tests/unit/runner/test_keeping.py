"""Adapters with a tier: fetched unasked, kept, and what happens where that is not possible."""

from weft_runner.core.events import Desired, DropHost, Fetch, Load, Tier
from weft_runner.core.keeping import FETCHES
from weft_runner.core.residency import Residency, check_slots


def host(*digests: str, n_bytes: int = 10) -> list[Desired]:
    return [Desired(digest, n_bytes=n_bytes, tier=Tier.HOST) for digest in digests]


def fetches(book: Residency) -> list[Fetch]:
    check_slots(book)
    return [action for action in book.take_actions() if isinstance(action, Fetch)]


def fetch_all(book: Residency, n_bytes: int = 10) -> list[str]:
    """Let every fetch succeed; what was fetched, in order."""
    order: list[str] = []
    while found := fetches(book):
        for fetch in found:
            order.append(fetch.digest)
            book.fetched(fetch.digest, host_bytes=n_bytes if fetch.to_host else None)
    return order


def test_they_come_a_few_at_a_time_in_the_lists_order_and_are_waited_for():
    book = Residency(2, host_bytes=1000)
    book.set_desired([*host("a", "b", "c"), Desired("disk", tier=Tier.DISK), Desired("asked for")])
    first = fetches(book)
    assert first == [Fetch("a", to_host=True), Fetch("b", to_host=True)]
    assert len(first) == FETCHES
    book.fetched("b", host_bytes=10)
    assert fetches(book) == [Fetch("c", to_host=True)]
    assert book.keeper.missing() == ["a", "c", "disk"]
    book.fetched("a", host_bytes=10)
    book.fetched("c", host_bytes=10)
    assert fetches(book) == [Fetch("disk", to_host=False)]
    book.fetched("disk", host_bytes=None)
    assert not book.keeper.missing()
    assert book.tier_of(book.adapters["disk"]) is Tier.DISK
    assert book.tier_of(book.adapters["asked for"]) is Tier.REMOTE


def test_what_has_a_tier_is_not_crowded_out_by_what_is_asked_for():
    book = Residency(1, host_bytes=30)
    book.set_desired(host("a", "b"))
    fetch_all(book)
    for turn in range(6):
        book.enter(f"other{turn}")
        book.loaded(f"other{turn}", rank=1, n_bytes=1, host_bytes=10, cost=1.0)
        book.leave(f"other{turn}", joined=True)
        check_slots(book)
    assert {"a", "b"} <= set(book.host)
    assert [book.tier_of(book.adapters[digest]) for digest in "ab"] == [Tier.HOST] * 2


def test_what_finds_no_room_in_host_memory_is_kept_on_disk_says_so_and_nobody_waits():
    book = Residency(1, host_bytes=25)
    book.set_desired(host("a", "b", "c"))
    for digest in fetches(book):
        book.fetched(digest.digest, host_bytes=10)
    assert fetches(book) == [Fetch("c", to_host=False)], "it is not even read"
    book.fetched("c", host_bytes=None)
    assert not book.keeper.missing()
    assert set(book.host) == {"a", "b"}
    assert book.tier_of(book.adapters["c"]) is Tier.DISK
    assert book.adapters["c"].shortfall == "kept on disk: 10 bytes find no room in the 25 bytes of host memory"
    assert book.adapters["c"] in book.listed(), "the report names it"
    assert not book.adapters["c"].error


def test_who_is_there_stays_when_others_come_and_room_that_is_given_back_is_used():
    book = Residency(1, host_bytes=25)
    book.set_desired(host("m", "n"))
    fetch_all(book)
    book.set_desired(host("a", "m", "n"))
    fetch_all(book)
    assert set(book.host) == {"m", "n"}, "the order of the list does not turn out what is there"
    book.set_desired(host("a", "n"))
    assert fetch_all(book) == ["a"]
    assert set(book.host) == {"a", "n"}
    assert not book.adapters["a"].shortfall


def test_a_size_that_was_not_known_before_is_found_out():
    book = Residency(1, host_bytes=25)
    book.set_desired(host("a", "b", n_bytes=0))
    fetch_all(book, n_bytes=20)
    assert not book.keeper.missing()
    assert set(book.host) == {"a"}
    assert "20 bytes find no room" in book.adapters["b"].shortfall


def test_a_failure_is_named_waited_for_and_tried_again():
    book = Residency(1)
    book.set_desired(host("a", "b"))
    fetches(book)
    book.fetched("b", host_bytes=10)
    book.fetch_failed("a", "the depot does not answer")
    assert not fetches(book), "not by itself"
    assert book.keeper.missing() == ["a"]
    assert book.adapters["a"].error == "the depot does not answer"
    book.retry()
    assert fetch_all(book) == ["a"]
    assert not book.keeper.missing()
    assert not book.adapters["a"].error


def test_an_artifact_that_is_wrong_is_named_and_not_waited_for():
    book = Residency(2)
    book.set_desired([*host("a"), Desired("p", pinned=True)])
    assert [type(action) for action in book.take_actions()[1:]] == [Load, Fetch]
    book.fetch_failed("a", "its header is torn", hopeless=True)
    book.failed("p", "its rank is too large", hopeless=True)
    assert not book.keeper.missing()
    assert not book.missing_pinned()
    assert {a.digest: a.error for a in book.listed()} == {"a": "its header is torn", "p": "its rank is too large"}
    book.retry()
    assert not fetches(book)
    assert not book.queue


def test_a_load_that_fails_while_it_is_fetched_lets_it_be_fetched_again():
    """Whoever drops the host copy cannot know whether the fetch had read it before or reads it after."""
    book = Residency(1)
    book.set_desired(host("a"))
    assert fetches(book)
    assert not book.enter("a")
    book.failed("a", "the disk was full")
    book.leave("a", joined=False)
    assert DropHost("a") in book.take_actions()
    book.fetched("a", host_bytes=10)
    assert "a" not in book.host
    actions = book.take_actions()
    assert actions == [DropHost("a"), Fetch("a", to_host=True)]
    book.fetched("a", host_bytes=10)
    assert "a" in book.host
    assert not book.keeper.missing()


def test_what_is_no_longer_wanted_leaves_host_memory_though_it_was_on_its_way():
    book = Residency(1)
    book.set_desired(host("a"))
    fetches(book)
    book.set_desired([])
    book.fetched("a", host_bytes=10)
    assert DropHost("a") in book.take_actions()
    assert not book.adapters
    assert not list(book.host)


def test_without_a_tier_any_more_it_may_be_crowded_out():
    book = Residency(1, host_bytes=10)
    book.set_desired(host("a"))
    fetch_all(book)
    book.set_desired([Desired("a"), *host("b")])
    fetch_all(book)
    assert set(book.host) == {"b"}


def test_what_is_found_on_disk_needs_no_fetch():
    book = Residency(1)
    wanted = [Desired(f"d{n}", tier=Tier.DISK) for n in range(FETCHES + 2)]
    book.set_desired(wanted)
    begun = fetches(book)
    book.on_disk(d.digest for d in wanted)
    assert not book.keeper.missing()
    for fetch in begun:
        book.fetched(fetch.digest, host_bytes=None)
    assert not fetches(book)
