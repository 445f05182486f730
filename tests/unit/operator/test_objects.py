"""The object store against the rules of the Kubernetes API."""

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.operator.planning import adapter_object, adapter_ref, check_store, pool_object
from weft_operator.errors import Expired, LocalConflict, LocalNotFound, StaleWrite
from weft_operator.local import HISTORY, ObjectStore, WatchEvent


def new_store() -> ObjectStore:
    return ObjectStore(lambda: 1_700_000_000.25)


store = pytest.fixture(new_store)


def test_a_new_object_gets_what_a_server_gives() -> None:
    result, obj = new_store().apply(adapter_object("upper"))
    meta = obj["metadata"]
    assert result == "created"
    assert (meta["generation"], meta["resourceVersion"]) == (1, "2")
    assert (meta["creationTimestamp"], len(meta["uid"])) == ("2023-11-14T22:13:20.250000Z", 36)


def test_the_same_manifest_again_changes_nothing(store: ObjectStore) -> None:
    _, before = store.apply(adapter_object("upper"))
    assert store.apply(adapter_object("upper")) == ("unchanged", before)


def test_only_a_changed_spec_raises_the_generation(store: ObjectStore) -> None:
    store.apply(adapter_object("upper"))
    wish = adapter_object("upper")
    wish["metadata"]["labels"] = {"team": "a"}
    result, obj = store.apply(wish)
    assert (result, obj["metadata"]["generation"]) == ("configured", 1)
    result, obj = store.apply(wish | {"spec": wish["spec"] | {"pinned": True}})
    assert (result, obj["metadata"]["generation"]) == ("configured", 2)
    assert obj["metadata"]["labels"] == {"team": "a"}


def test_labels_that_a_manifest_leaves_out_go_away(store: ObjectStore) -> None:
    wish = adapter_object("upper")
    store.apply(wish | {"metadata": wish["metadata"] | {"labels": {"team": "a"}}})
    _, obj = store.apply(adapter_object("upper"))
    assert "labels" not in obj["metadata"]


def test_a_status_is_kept_by_apply_and_never_raises_the_generation(store: ObjectStore) -> None:
    _, obj = store.apply(adapter_object("upper"))
    meta = obj["metadata"]
    written = store.set_status(adapter_ref("upper"), meta["uid"], meta["resourceVersion"], {"digest": "d"})
    assert written["metadata"]["generation"] == 1
    _, obj = store.apply(adapter_object("upper", pinned=True))
    assert obj["status"] == {"digest": "d"}


def test_a_status_made_from_an_older_version_has_no_effect(store: ObjectStore) -> None:
    _, first = store.apply(adapter_object("upper"))
    store.apply(adapter_object("upper", pinned=True))
    meta = first["metadata"]
    with pytest.raises(StaleWrite, match="has changed"):
        store.set_status(adapter_ref("upper"), meta["uid"], meta["resourceVersion"], {})
    store.delete(adapter_ref("upper"))
    store.apply(adapter_object("upper"))
    with pytest.raises(StaleWrite, match="gone"):
        store.set_status(adapter_ref("upper"), meta["uid"], meta["resourceVersion"], {})


def test_a_manifest_may_insist_on_a_version(store: ObjectStore) -> None:
    _, obj = store.apply(adapter_object("upper"))
    wish = adapter_object("upper", pinned=True)
    wish["metadata"]["resourceVersion"] = "1"
    with pytest.raises(LocalConflict, match="read it again"):
        store.apply(wish)
    wish["metadata"]["resourceVersion"] = obj["metadata"]["resourceVersion"]
    assert store.apply(wish)[0] == "configured"
    gone = adapter_object("lower")
    gone["metadata"]["uid"] = "1"
    with pytest.raises(LocalConflict, match="does not exist"):
        store.apply(gone)


def test_a_finalizer_holds_a_deleted_object_until_it_is_taken_off(store: ObjectStore) -> None:
    wish = adapter_object("upper")
    wish["metadata"]["finalizers"] = ["f"]
    store.apply(wish)
    marked = store.delete(adapter_ref("upper"))
    assert marked["metadata"]["generation"] == 2
    assert "deletionTimestamp" in marked["metadata"]
    assert store.delete(adapter_ref("upper")) == marked
    with pytest.raises(LocalConflict, match="being deleted"):
        store.apply(wish)
    meta = marked["metadata"]
    store.remove_finalizer(adapter_ref("upper"), meta["uid"], meta["resourceVersion"], "f")
    with pytest.raises(LocalNotFound):
        store.get(adapter_ref("upper"))


def test_a_stored_object_is_never_changed_in_place(store: ObjectStore) -> None:
    _, first = store.apply(adapter_object("upper"))
    version = first["metadata"]["resourceVersion"]
    store.apply(adapter_object("upper", pinned=True))
    store.delete(adapter_ref("upper"))
    assert first["metadata"]["resourceVersion"] == version
    assert first["spec"]["pinned"] is False


async def test_a_watch_reports_every_change_once_and_in_order(store: ObjectStore) -> None:
    store.apply(adapter_object("a"))
    watch = store.watch(1)
    store.apply(adapter_object("b"))
    seen = [await anext(watch), await anext(watch)]
    waiting = asyncio.create_task(_next(watch))
    await asyncio.sleep(0)
    store.delete(adapter_ref("a"))
    seen.append(await waiting)
    assert [(event.version, event.type) for event in seen] == [(2, "ADDED"), (3, "ADDED"), (4, "DELETED")]


@pytest.mark.parametrize("since", [0, 99_999])
async def test_a_watch_from_a_version_that_is_not_remembered_has_to_list_again(store: ObjectStore, since: int) -> None:
    store.apply(adapter_object("a"))
    with pytest.raises(Expired, match="list again"):
        await anext(store.watch(since))


async def test_a_watcher_that_falls_too_far_behind_is_reported(store: ObjectStore) -> None:
    for number in range(HISTORY + 2):
        store.apply(adapter_object("a", pinned=bool(number % 2)))
    with pytest.raises(Expired):
        await anext(store.watch(1))
    assert (await anext(store.watch(store.version - 1))).version == store.version


def test_lists_are_by_kind_and_namespace(store: ObjectStore) -> None:
    for obj in (adapter_object("b", "z"), adapter_object("a", "z"), adapter_object("c", "y"), pool_object()):
        store.apply(obj)
    assert [o["metadata"]["name"] for o in store.objects("LoRAAdapter")] == ["c", "a", "b"]
    assert [o["metadata"]["name"] for o in store.objects("LoRAAdapter", "z")] == ["a", "b"]
    assert len(store.objects()) == 4


class Model(RuleBasedStateMachine):
    """Any sequence of calls: versions only grow, events tell everything, a follower of events has the same objects."""

    @initialize()
    def start(self) -> None:
        self.store = new_store()
        self.events: list[WatchEvent] = []
        self.cache: dict[str, Any] = {}
        self.store.listen(self.heard)

    def heard(self, event: WatchEvent) -> None:
        self.events.append(event)
        name = event.object["metadata"]["name"]
        if event.type == "DELETED":
            del self.cache[name]
        else:
            assert (event.type == "ADDED") is (name not in self.cache)
            self.cache[name] = event.object

    @rule(name=st.sampled_from("abc"), pinned=st.booleans(), finalizer=st.booleans())
    def apply(self, name: str, pinned: bool, finalizer: bool) -> None:
        wish = adapter_object(name, pinned=pinned)
        if finalizer:
            wish["metadata"]["finalizers"] = ["f"]
        try:
            self.store.apply(wish)
        except LocalConflict:
            assert "deletionTimestamp" in self.cache[name]["metadata"]

    @precondition(lambda self: self.cache)
    @rule(data=st.data(), value=st.integers(0, 3), stale=st.booleans())
    def status(self, data: st.DataObject, value: int, stale: bool) -> None:
        meta = self.cache[data.draw(st.sampled_from(sorted(self.cache)))]["metadata"]
        version = str(int(meta["resourceVersion"]) - stale)
        try:
            self.store.set_status(adapter_ref(meta["name"]), meta["uid"], version, {"value": value})
            assert not stale
        except StaleWrite:
            assert stale

    @precondition(lambda self: self.cache)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.store.delete(adapter_ref(data.draw(st.sampled_from(sorted(self.cache)))))

    @precondition(lambda self: self.cache)
    @rule(data=st.data())
    def finalize(self, data: st.DataObject) -> None:
        meta = self.cache[data.draw(st.sampled_from(sorted(self.cache)))]["metadata"]
        self.store.remove_finalizer(adapter_ref(meta["name"]), meta["uid"], meta["resourceVersion"], "f")

    @invariant()
    def holds(self) -> None:
        check_store(self.store)
        assert [event.version for event in self.events] == list(range(2, self.store.version + 1))
        assert self.store.objects() == [self.cache[name] for name in sorted(self.cache)]


TestModel = Model.TestCase
TestModel.settings = settings(stateful_step_count=25)


async def _next(watch: Any) -> WatchEvent:
    return await anext(watch)
