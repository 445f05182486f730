"""What this process knows of the cluster, from watches and from answers that run ahead of them."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_operator.core import Object
from weft_operator.core.resources import resource_version
from weft_operator.core.state import ObjectKey
from weft_operator.kubernetes import ADAPTERS, PODS, ObjectCache, WatchHealth, WatchScope, missed

KEY = ObjectKey("LoRAAdapter", "default", "a")
Step = Callable[[ObjectCache], bool]


def thing(version: str, uid: str = "u1", kind: str = "LoRAAdapter", **rest: Any) -> dict[str, Any]:
    metadata = {"namespace": "default", "name": "a", "uid": uid, "resourceVersion": version, "managedFields": [{}]}
    return {"kind": kind, "metadata": metadata, **rest}


def versions_of(cache: ObjectCache) -> list[tuple[str, bool]]:
    """What a listener gets from now on."""
    found: list[tuple[str, bool]] = []
    cache.listen(lambda obj, gone: found.append((obj["metadata"]["resourceVersion"], gone)))
    return found


def version(cache: ObjectCache) -> str | None:
    return resource_version(cache.find(KEY))


def test_the_last_event_of_a_watch_wins_and_one_version_is_one_change() -> None:
    cache = ObjectCache()
    found = versions_of(cache)
    assert [cache.put(thing(v)) for v in ("5", "5", "x", "4")] == [True, False, True, True]
    assert found == [("5", False), ("x", False), ("4", False)]


def put(version: str) -> Step:
    return lambda cache: cache.put(thing(version))


def wrote(version: str, before: str, **how: bool) -> Step:
    return lambda cache: cache.wrote(thing(version), before, **how)


def read(version: str | None, **how: bool) -> Step:
    return lambda cache: cache.read(KEY, thing(version) if version else None, **how)


def drop(cache: ObjectCache) -> bool:
    return cache.drop(KEY, "u1")


# steps, each with what it changes; how often there is a doubt; the version that is known at the end
CASES: dict[str, tuple[list[tuple[Step, bool]], int, str | None]] = {
    "the event of an own write is known, and what follows it is news": (
        [(wrote("b", "a"), True), (wrote("c", "b"), True), (put("b"), False), (put("c"), False), (put("d"), True)],
        0,
        "d",
    ),
    # A list after an interruption has no event for each version.
    "beside own writes, each of them fenced": ([(wrote("b", "a"), True), (put("z"), True)], 0, "z"),
    "an answer undoes nothing that a watch reported since: the write itself, another one's": (
        [(put("b"), True), (put("c"), True), (wrote("b", "a"), False)],
        0,
        "c",
    ),
    "an answer does not bring back what is gone": ([(drop, True), (wrote("b", "a"), False)], 0, None),
    "between a read and its event there are doubts": (
        [(read("d"), True), (put("b"), False), (put("c"), False), (put("d"), False), (put("e"), True)],
        2,
        "e",
    ),
    "a doubt ends when a read finds what the watch reports": (
        [(read("d"), True), (put("f"), False), (read("f"), True), (put("g"), True), (put("h"), True)],
        1,
        "h",
    ),
    "a write that no version fenced is as good as a read": (
        [(wrote("c", "a", fenced=False), True), (put("b"), False)],
        1,
        "c",
    ),
    "found gone, and late events": ([(read(None), True), (put("b"), False), (drop, False)], 0, None),
    # A watch by label reports an object whose label was taken off as if it were deleted.
    "what was only out of sight comes back": ([(drop, True), (put("b"), True)], 0, "b"),
    "the end of one that was read meanwhile, its label is back": ([(read("c"), True), (drop, False)], 1, "c"),
    "what a read finds out of sight is no doubt any more, nor does it enter": (
        [(read("b"), True), (drop, False), (read("c", in_sight=False), True), (read("c", in_sight=False), False)],
        1,
        None,
    ),
    "and comes back in sight": (
        [(read("b"), True), (drop, False), (read("c", in_sight=False), True), (put("d"), True)],
        1,
        "d",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_of_watches_reads_and_own_writes_the_newest_is_known(case: str) -> None:
    """After a watch has reported version a."""
    (steps, doubts, newest), cache, doubted = CASES[case], ObjectCache(), list[ObjectKey]()
    cache.put(thing("a"))
    cache.on_doubt = doubted.append
    assert [step(cache) for step, _ in steps] == [changes for _, changes in steps]
    assert (doubted, version(cache) if newest else cache.find(KEY)) == ([KEY] * doubts, newest)


def test_a_new_object_of_the_same_name_is_reported_after_the_end_of_the_old_one() -> None:
    cache = ObjectCache()
    found = versions_of(cache)
    cache.put(thing("5", "u1"))
    cache.put(thing("9", "u2"))
    assert found == [("5", False), ("5", True), ("9", False)]
    assert not cache.drop(KEY, "u1"), "the end of the old one is no end of the new one"
    assert cache.count("LoRAAdapter") == 1


def test_late_events_of_an_object_before_the_one_that_was_read_change_nothing() -> None:
    cache = ObjectCache()
    cache.put(thing("a", "u1"))
    cache.read(KEY, thing("x", "u2"))
    assert not cache.put(thing("b", "u1"))
    assert not cache.drop(KEY, "u1")
    assert version(cache) == "x"


def test_of_a_pods_spec_only_the_node_is_kept_and_no_managed_fields() -> None:
    cache = ObjectCache()
    cache.put(thing("1", kind="Pod", spec={"containers": [], "nodeName": "n"}, status={"phase": "Running"}))
    kept = cache.find(ObjectKey("Pod", "default", "a"))
    assert kept is not None
    assert kept["spec"] == {"nodeName": "n"}
    assert "managedFields" not in kept["metadata"]
    assert kept["status"] == {"phase": "Running"}


STEPS = st.lists(st.sampled_from(["edit", "write", "read", "mark", "event", "doubt", "remake"]), max_size=40)


@given(STEPS, st.randoms(use_true_random=False))
def test_nothing_goes_back_behind_an_answer_and_the_end_is_the_truth(steps: list[str], random: Random) -> None:
    """Versions have no order that could be read from them; a watch reports all of them, in order, some time later."""
    cache, doubts = ObjectCache(), list[ObjectKey]()
    cache.on_doubt = doubts.append
    names = random.sample(range(10**6), 10**2)
    events: list[Object | tuple[str, str]] = []
    there = thing(str(names.pop()), "u0")
    cache.put(there)
    order, answered = {resource_version(there): 0}, 0  # of the versions; the newest that an answer has brought

    def change(uid: str) -> Object:
        nonlocal there
        there = thing(str(names.pop()), uid)
        order[resource_version(there)] = len(order)
        events.append(there)
        return there

    def deliver() -> None:
        event = events.pop(0)
        if isinstance(event, tuple):
            cache.drop(KEY, event[1])
        else:
            cache.put(event)

    for step in steps:
        uid = there["metadata"]["uid"]
        known = cache.find(KEY)
        match step:
            case "edit":
                change(uid)
            case "write" if known is not None and resource_version(known) == resource_version(there):
                cache.wrote(change(uid), resource_version(known))  # else the fence does not hold
            case "mark" if known is not None and known["metadata"]["uid"] == uid:
                cache.wrote(change(uid), resource_version(known), fenced=False)
            case "read":
                cache.read(KEY, there)
            case "event" if events:
                deliver()
            case "doubt" if doubts:
                cache.read(doubts.pop(), there)
            case "remake":
                events.append(("gone", uid))
                change(f"u{len(names)}")
            case _:
                pass
        at = -1 if (known := cache.find(KEY)) is None else order[resource_version(known)]
        answered = max(answered, at) if step in ("write", "mark", "read", "doubt") else answered
        assert at == -1 or at >= answered
    while events or doubts:
        if events:
            deliver()
        if doubts:
            cache.read(doubts.pop(), there)
    assert version(cache) == resource_version(there)


def identities(**versions: str) -> dict[ObjectKey, tuple[str, str | None]]:
    return {ObjectKey("Pod", "default", name): (f"uid-{name}", version) for name, version in versions.items()}


def test_a_list_finds_what_is_new_what_has_changed_and_what_is_gone() -> None:
    before = identities(a="5", b="4", d="3")
    assert sorted(key.name for key in missed(identities(a="5", b="6", c="7"), before, before)) == ["b", "c", "d"]


def test_what_a_watch_has_reported_since_the_list_is_not_missed() -> None:
    before, listed = identities(a="5", gone="1", late="1"), identities(a="6", new="8", late="2")
    assert [key.name for key in missed(listed, before, identities(a="7", new="8", late="1"))] == ["late"]


def test_a_watch_that_is_late_three_times_in_a_row_is_dead() -> None:
    watch_health, pods = WatchHealth(60.0, 0.0), WatchScope(PODS, "default")
    for late in (1, 0, 2, 3):
        watch_health.report_late(pods, late)
    assert watch_health.trouble(0.0) is None
    watch_health.report_late(WatchScope(ADAPTERS), 1)
    watch_health.report_late(pods, 1)
    assert watch_health.trouble(0.0) == "the watch of pods was late 3 times in a row"


def test_an_api_server_that_cannot_be_listed_for_long_is_trouble() -> None:
    watch_health = WatchHealth(60.0, 1000.0)
    assert watch_health.trouble(1300.0) is None
    assert "could not be listed" in (watch_health.trouble(1301.0) or "")


def test_a_listener_sees_the_cache_as_it_is_after_the_change() -> None:
    cache = ObjectCache()
    seen: list[Object | None] = []

    def look(obj: Object, gone: bool) -> None:
        seen.append(cache.find(KEY))

    cache.listen(look)
    cache.put(thing("5"))
    cache.drop(KEY, "u1")
    assert [found is None for found in seen] == [False, True]
