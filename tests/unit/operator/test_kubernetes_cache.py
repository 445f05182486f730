"""What this process knows of the cluster, whoever tells it and in whatever order."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft_operator.core.resources import Object
from weft_operator.core.state import ObjectKey
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.client import ADAPTERS, PODS
from weft_operator.kubernetes.resync import Difference, Identity, WatchHealth, WatchScope, compare

KEY = ObjectKey("LoRAAdapter", "default", "a")


def thing(version: int, uid: str = "u1", kind: str = "LoRAAdapter", **rest: Any) -> dict[str, Any]:
    metadata = {"namespace": "default", "name": "a", "uid": uid, "resourceVersion": str(version), "managedFields": [{}]}
    return {"kind": kind, "metadata": metadata, **rest}


def heard(cache: ObjectCache) -> list[tuple[str, bool]]:
    told: list[tuple[str, bool]] = []
    cache.listen(lambda obj, gone: told.append((obj["metadata"]["resourceVersion"], gone)))
    return told


def test_each_version_is_told_once_and_an_older_one_never() -> None:
    cache = ObjectCache()
    told = heard(cache)
    assert [cache.put(thing(version)) for version in (5, 5, 4, 7)] == [True, False, False, True]
    assert told == [("5", False), ("7", False)]


def test_what_is_gone_does_not_come_back_by_a_late_word_of_it() -> None:
    cache = ObjectCache()
    cache.put(thing(5))
    assert cache.drop(KEY, "u1", 8)
    assert not cache.put(thing(7))
    assert not cache.drop(KEY, "u1", 8)
    assert cache.find(KEY) is None


def test_what_was_only_out_of_sight_comes_back_under_a_higher_version() -> None:
    """A watch by label tells of an object whose label was taken off as if it were deleted."""
    cache = ObjectCache()
    cache.put(thing(5))
    cache.drop(KEY, "u1", 8)
    assert cache.put(thing(9))
    assert not cache.drop(KEY, "u1", 8), "an old word: it was seen again since"


def test_a_new_object_of_the_same_name_is_told_after_the_end_of_the_old_one() -> None:
    cache = ObjectCache()
    told = heard(cache)
    cache.put(thing(5, "u1"))
    cache.put(thing(9, "u2"))
    assert told == [("5", False), ("5", True), ("9", False)]
    assert not cache.drop(KEY, "u1"), "the end of the old one is no end of the new one"
    assert cache.count("LoRAAdapter") == 1


def test_managed_fields_and_a_pods_spec_are_not_kept() -> None:
    cache = ObjectCache()
    cache.put(thing(1, kind="Pod", spec={"containers": []}, status={"phase": "Running"}))
    kept = cache.find(ObjectKey("Pod", "default", "a"))
    assert kept is not None
    assert "spec" not in kept
    assert "managedFields" not in kept["metadata"]
    assert kept["status"] == {"phase": "Running"}


@given(st.permutations(range(1, 8)), st.integers(1, 8))
def test_the_end_is_the_same_in_whatever_order_it_is_told(versions: list[int], last: int) -> None:
    """Watches, lists and answers to writes overtake one another; each may also come twice."""
    cache = ObjectCache()
    for version in [*versions, *versions]:
        if version < last:
            cache.put(thing(version))
        elif version == last:
            cache.drop(KEY, "u1", version)
    known = cache.find(KEY)
    assert known is None if last < 8 else known is not None and known["metadata"]["resourceVersion"] == "7"


def identities(**versions: int) -> dict[ObjectKey, Identity]:
    return {ObjectKey("Pod", "default", name): Identity(f"uid-{name}", version) for name, version in versions.items()}


def test_an_audit_finds_what_is_new_what_has_changed_and_what_is_gone() -> None:
    found = compare(identities(a=5, b=6, c=7), identities(a=5, b=4, d=3), 7)
    assert found.late == (ObjectKey("Pod", "default", "b"), ObjectKey("Pod", "default", "c"))
    assert found.gone == ((ObjectKey("Pod", "default", "d"), "uid-d"),)


def test_what_was_made_after_the_list_is_not_gone_and_what_is_newer_is_not_late() -> None:
    assert compare(identities(a=5), identities(a=9, new=8), 7) == Difference((), ())


def test_a_watch_that_is_late_three_times_in_a_row_is_dead() -> None:
    watch_health, pods = WatchHealth(60.0, 0.0), WatchScope(PODS, "default")
    for late in (1, 0, 2, 3):
        watch_health.found(pods, late)
    assert watch_health.trouble(0.0) is None
    watch_health.found(WatchScope(ADAPTERS), 1)
    watch_health.found(pods, 1)
    assert watch_health.trouble(0.0) == "the watch of pods was late 3 times in a row"


def test_an_api_server_that_cannot_be_listed_for_long_is_trouble() -> None:
    watch_health = WatchHealth(60.0, 1000.0)
    assert watch_health.trouble(1300.0) is None
    assert "could not be listed" in (watch_health.trouble(1301.0) or "")


def test_a_listener_sees_the_mirror_as_it_is_after_the_change() -> None:
    cache = ObjectCache()
    seen: list[Object | None] = []

    def look(obj: Object, gone: bool) -> None:
        seen.append(cache.find(KEY))

    cache.listen(look)
    cache.put(thing(5))
    cache.drop(KEY, "u1")
    assert [found is None for found in seen] == [False, True]
