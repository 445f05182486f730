"""Rules between objects: the table, at the pure function and at the local API; the webhook has it in tests/operator."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bad_manifests import Manifest
from harness.conflicting_manifests import PASSING, REFUSED, Wish, base, lora, slots
from tests.unit.operator.planning import pool_object
from weft_operator.core import DesiredState, Object, OperatorPolicy, parse
from weft_operator.core.acceptance import reject_adapter, reject_pool
from weft_operator.core.state import SharedFolders
from weft_operator.core.validation import Review, pinned_max, validate
from weft_operator.errors import Invalid
from weft_operator.local import ObjectAdmission, ObjectStore, admit, ref_of


def clock() -> Iterator[float]:
    """Every object is younger than the one before."""
    now = 1_000_000.0
    while True:
        now += 1
        yield now


def world(*manifests: Manifest) -> ObjectStore:
    """A store with these objects, put there past the rules between them."""
    ticks = clock()
    store = ObjectStore(lambda: next(ticks))
    for manifest in manifests:
        put(store, manifest)
    return store


def put(store: ObjectStore, manifest: Manifest) -> None:
    wish = {name: value for name, value in manifest.items() if name not in ("status", "deleted")}
    _, stored = store.apply(admit(wish, store.find))
    if "status" in manifest:
        meta = stored["metadata"]
        store.set_status(ref_of(stored), meta["uid"], meta["resourceVersion"], manifest["status"])
    if manifest.get("deleted"):
        store.delete(ref_of(stored))


def desired_of(store: ObjectStore) -> DesiredState:
    desired = DesiredState()
    for obj in store.objects():
        desired.put(parse(obj))
    return desired


def reviewed(row: Wish) -> Any:
    store = world(*row.there)
    wish = admit(row.wish, store.find)
    return validate(wish, store.find(ref_of(wish)), desired_of(store))


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_the_local_api_refuses_the_same(row: Wish) -> None:
    store = world(*row.there)
    version = store.version
    with pytest.raises(Invalid) as caught:
        ObjectAdmission(store)(row.wish, store.find)
    (cause,) = caught.value.causes
    assert cause.field == row.field
    assert f"{row.reason}: " in cause.message
    assert row.says in caught.value.message
    assert store.version == version


@pytest.mark.parametrize("row", PASSING, ids=lambda row: row.name)
def test_what_breaks_nobody_passes(row: Wish) -> None:
    found = reviewed(row)
    assert found.objections == ()
    assert row.warns in "; ".join(found.warnings)
    assert bool(row.warns) == bool(found.warnings)


def test_the_local_admission_follows_the_store() -> None:
    store = world(base(**slots(2)))
    admission = ObjectAdmission(store)
    store.apply(admission(lora("a", pinned=True), store.find))
    with pytest.raises(Invalid, match="NoSlots"):
        admission(lora("b", pinned=True), store.find)
    store.delete(ref_of(lora("a")))
    store.apply(admission(lora("b", pinned=True), store.find))


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_an_object_that_goes_or_whose_spec_stays_always_passes(row: Wish) -> None:
    store = world(*row.there)
    desired = desired_of(store)
    wish = admit(row.wish, store.find)
    going = {**wish, "metadata": {**wish["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert validate(going, store.find(ref_of(wish)), desired).objections == ()
    relabelled = {**wish, "metadata": {**wish["metadata"], "labels": {"a": "b"}, "finalizers": []}}
    assert validate(relabelled, wish, desired).objections == ()


def test_memory_that_is_ahead_of_the_question_makes_no_rival_of_the_object_itself() -> None:
    """The API server asks with the version it read, the watch may have told of the next one already."""
    store = world(base(**slots(2)), lora("a", modelName="upper", pinned=True))
    wish = admit(lora("a", modelName="upper", pinned=True), store.find)
    assert validate(wish, admit(lora("a"), lambda _: None), desired_of(store)).objections == ()


def test_who_edits_labels_is_not_warned_again() -> None:
    wish = admit(lora("a"), lambda _: None)
    assert validate(wish, None, DesiredState()).warnings
    assert validate({**wish, "metadata": {**wish["metadata"], "labels": {"a": "b"}}}, wish, DesiredState()) == Review()


@pytest.mark.parametrize(("replicas", "warns"), [(1, True), (2, False)])
def test_a_split_pool_of_fewer_runners_than_its_phases_want_is_warned_of(replicas: int, warns: bool) -> None:
    review = reviewed(Wish("", (), pool_object("chat", replicas=replicas, phases={"mode": "Split"})))
    assert any(warning.startswith("phases: ") for warning in review.warnings) == warns


def test_a_pool_of_a_namespace_that_is_not_served_is_reported_and_takes_no_name() -> None:
    store = world(base())
    desired = DesiredState(OperatorPolicy(pool_namespaces=frozenset({"elsewhere"})))
    for obj in store.objects():
        desired.put(parse(obj))
    wish = admit(base() | {"metadata": {"name": "second", "namespace": "tenant"}}, store.find)
    found = validate(wish, None, desired)
    assert found.objections == ()
    assert "NamespaceNotServed" in found.warnings[0]
    served = admit(base() | {"metadata": {"name": "second", "namespace": "elsewhere"}}, store.find)
    assert validate(served, None, desired).objections == (), "the pool that is not served holds no name"


FOLDERS = SharedFolders(frozenset({"/srv/weft"}), frozenset({"default/cache"}))


@pytest.mark.parametrize(
    ("cache", "before", "refused"),
    [
        ({"hostPath": {"path": "/srv/weft"}}, None, ""),
        ({"hostPath": {"path": "/srv"}}, None, "modelCache.hostPaths, got /srv;"),
        ({"hostPath": {"path": "/srv/weft/below"}}, None, "modelCache.hostPaths, got /srv/weft/below;"),
        ({"persistentVolumeClaim": {"claimName": "cache"}}, None, ""),
        ({"persistentVolumeClaim": {"claimName": "other"}}, None, "modelCache.claims, got default/other;"),
        ({"emptyDir": {}}, None, ""),
        ({"hostPath": {"path": "/srv"}}, {"hostPath": {"path": "/srv"}}, ""),
        ({"hostPath": {"path": "/srv"}}, {"hostPath": {"path": "/etc"}}, "modelCache.hostPaths, got /srv;"),
    ],
)
def test_a_folder_that_the_site_does_not_list_is_refused_unless_the_pool_has_it_already(
    cache: Any, before: Any, refused: str
) -> None:
    desired, store = DesiredState(OperatorPolicy(shared_folders=FOLDERS)), world()
    old = admit(pool_object(modelCache=before), store.find) if before else None
    review = validate(admit(pool_object(replicas=2, modelCache=cache), store.find), old, desired)
    assert [(found.reason, found.field) for found in review.objections] == [
        *([("VolumeNotAllowed", "spec.modelCache")] if refused else [])
    ]
    assert refused in "; ".join(found.message for found in review.objections)


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (1, "LoRAAdapter tenant/a0"),
        (3, "LoRAAdapters tenant/a0, tenant/a1, tenant/a2"),
        (8, "LoRAAdapters tenant/a0, tenant/a1, tenant/a2 and 5 more"),
    ],
)
def test_the_adapters_that_an_objection_names_come_by_name(count: int, named: str) -> None:
    there = base(), *(lora(f"a{i}", baseModel=f"model-{i}") for i in range(count))
    (objection,) = reviewed(Wish("renamed", there, base(model={"name": "other", "uri": "file:m"}))).objections
    assert f"{named} says 'model-0'" in objection.message


NAMES = st.sampled_from(["a", "b", "c"])
WISHES = st.one_of(
    st.builds(
        lambda name, model, pinned, rank: lora(name, modelName=model, pinned=pinned, maxRank=rank),
        NAMES,
        st.sampled_from(["x", "y", "base"]),
        st.booleans(),
        st.sampled_from([8, 32]),
    ),
    st.builds(
        lambda size, rank, name: base(
            lora={"maxRank": rank}, advanced={"maxAdapters": size}, model={"name": name, "uri": "file:m"}
        ),
        st.integers(1, 4),
        st.sampled_from([16, 64]),
        st.sampled_from(["base", "x"]),
    ),
)


@given(st.lists(WISHES | NAMES, max_size=25))
def test_who_is_admitted_one_after_the_other_keeps_the_laws(steps: list[Manifest | str]) -> None:
    """Whatever is applied and deleted: names are unique among the accepted, and no pool is pinned full."""
    store = world(base())
    admission = ObjectAdmission(store)
    for step in steps:
        if isinstance(step, str):
            if store.find(ref_of(lora(step))):
                store.delete(ref_of(lora(step)))
            continue
        try:
            store.apply(admission(step, store.find))
        except Invalid:
            continue
    check_laws(store.objects())


def check_laws(objects: list[Object]) -> None:
    desired = DesiredState()
    for obj in objects:
        desired.put(parse(obj))
    accepted = [a for a in desired.adapters.values() if reject_adapter(a, desired) is None]
    assert accepted == list(desired.adapters.values()), "who was admitted is accepted"
    assert all(reject_pool(pool, desired) is None for pool in desired.pools.values())
    names = [resource.model_name for resource in (*accepted, *desired.pools.values())]
    assert len(names) == len(set(names))
    for pool in desired.pools.values():
        most = pinned_max(pool)
        assert most is None or sum(a.spec.pinned for a in desired.adapters_of(pool.meta.ref)) <= most


def test_a_tenant_is_not_shown_what_the_adapters_of_others_are_called() -> None:
    secrets = (lora("merger", modelName="wanted", pinned=True), lora("layoffs", pinned=True))
    wish = lora("mine", "curious", modelName="wanted", pinned=True)
    said = " ".join(str(objection) for objection in reviewed(Wish("", (base(**slots(3)), *secrets), wish)).objections)
    assert "NameConflict" in said
    assert "NoSlots" in said
    assert not any(word in said for word in ("merger", "layoffs", "tenant"))
