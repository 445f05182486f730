"""APIKeys: what follows from each state, and that no crash leaves a key in force that nobody should have."""

import asyncio
import base64
import contextlib
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from harness.field_edits import unread
from weft.api.manifests import ManifestError, parse_object
from weft.domain.limits import LimitRule
from weft_operator.controller import KeyController
from weft_operator.core import Object, RecordEvent, Ref, SetStatus
from weft_operator.core.actions import AddFinalizer, RemoveFinalizer
from weft_operator.core.api_keys import (
    BadSecret,
    Key,
    KeyDeclaration,
    KeyView,
    Secret,
    SecretKey,
    SupervisorKey,
    UnreadSecret,
    Withdraw,
    key_events_for,
    next_step,
    orphans,
    parse_key,
    secret_manifest,
    seen_secret,
)
from weft_operator.errors import AlreadyExists, ApiFailed, SupervisorUnavailable

FINALIZER = "serving.weft.dev/revoke-key"
REF = Ref("APIKey", "acme", "ci")
KEY: dict[str, Any] = {"kind": "APIKey", "metadata": {"name": "ci", "namespace": "acme"}}
NOW = 1_800_000_000.0


def manifest(
    uid: str = "u1", *, deleting: bool = False, finalizers: tuple[str, ...] = (), **spec: Any
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "namespace": "acme", "name": "ci", "uid": uid, "generation": 1, "resourceVersion": "1",
        "creationTimestamp": "2026-11-01T00:00:00Z", "finalizers": list(finalizers),
    }  # fmt: skip
    if deleting:
        meta["deletionTimestamp"] = "2026-11-01T00:00:01Z"
    return {"kind": "APIKey", "metadata": meta, "spec": {"scope": "Inference", **spec}}


def parsed(obj: Object) -> Key:
    key = parse_key(obj)
    assert isinstance(key, Key)
    return key


class Crashed(Exception):
    """The process ends here."""


class World:
    """A cluster with one namespace, and a supervisor: what outlives the operator. Every call may be the last one."""

    def __init__(self) -> None:
        self.objects: dict[Ref, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, Any]] = {}  # by hash: owner, key_id, in force, for good, declaration
        self.loop: KeyController | None = None
        self.crash_in = -1  # calls from now on; below 0: never
        self.after = False  # the call is carried out before the crash
        self.down = False
        self.ids, self.texts, self.versions = itertools.count(1), itertools.count(1), itertools.count(2)
        self.events: list[RecordEvent] = []
        self.refuse_secrets = False

    def operator(self, **how: Any) -> KeyController:
        draw = lambda: f"weft-key-{next(self.texts):043d}"  # noqa: E731
        self.loop = KeyController(
            self, self, self, namespaces=how.get("namespaces", ["acme"]), clock=lambda: NOW, draw=draw
        )
        for obj in self.objects.values():
            self.loop.on_object(obj, False)
        return self.loop

    async def settle(self, **how: Any) -> None:
        """A new leader, to the end."""
        loop = self.operator(**how)
        await loop.compare()
        for ref in list(self.objects):
            await loop.reconcile(ref)

    def in_force(self) -> dict[str, str]:
        """Hash -> owner."""
        return {key_hash: row["owner"] for key_hash, row in self.rows.items() if row["in force"]}

    # the cluster

    def put(self, obj: dict[str, Any]) -> None:
        obj["metadata"]["resourceVersion"] = str(next(self.versions))
        self.objects[REF] = obj
        self._report(obj, gone=False)

    def delete(self, *, force: bool = False) -> None:
        obj = self.objects[REF]
        if force or not obj["metadata"]["finalizers"]:
            del self.objects[REF]
            self._report(obj, gone=True)
            self._collect(obj["metadata"]["uid"])
        else:
            self.put({**obj, "metadata": {**obj["metadata"], "deletionTimestamp": "2026-11-01T00:00:01Z"}})

    def _collect(self, uid: str) -> None:
        mine = [
            name
            for name, one in self.secrets.items()
            if one["metadata"].get("ownerReferences", [{}])[0].get("uid") == uid
        ]
        for name in mine:
            del self.secrets[name]

    def _report(self, obj: Object, *, gone: bool) -> None:
        if self.loop:
            self.loop.on_object(obj, gone)

    def bring(self, name: str, text: str, **metadata: Any) -> None:
        data = {"key": base64.b64encode(text.encode()).decode()}
        meta = {"name": name, "creationTimestamp": "2026-11-01T00:00:00Z", **metadata}
        self.secrets[name] = {"metadata": meta, "data": data}

    def hash_of(self, name: str, key: Key) -> str:
        found = seen_secret(key, self.secrets.get(name))
        return found.key_hash if isinstance(found, SecretKey) else ""

    def _call(self) -> None:
        self.crash_in -= 1
        if self.crash_in == -1 and not self.after:
            raise Crashed

    def _called(self) -> None:
        if self.crash_in == -1 and self.after:
            raise Crashed

    # what the loop calls

    async def read(self, key: Key) -> Secret:
        return seen_secret(key, self.secrets.get(key.secret))

    async def create(self, key: Key, text: str) -> None:
        self._call()
        if self.refuse_secrets:
            raise ApiFailed("POST", 403, "Forbidden", "exceeded quota")
        if key.secret in self.secrets:
            raise AlreadyExists(key.secret)
        made = secret_manifest(key, text)
        made["metadata"]["creationTimestamp"] = "2026-11-01T00:00:00Z"
        self.secrets[key.secret] = made
        self._called()

    async def add_finalizer(self, action: AddFinalizer) -> None:
        self._call()
        obj = self.objects[action.ref]
        self.put({**obj, "metadata": {**obj["metadata"], "finalizers": [action.finalizer]}})
        self._called()

    async def remove_finalizer(self, action: RemoveFinalizer) -> None:
        self._call()
        obj = self.objects[action.ref]
        self.put({**obj, "metadata": {**obj["metadata"], "finalizers": []}})
        if obj["metadata"].get("deletionTimestamp"):
            self.delete(force=True)
        self._called()

    async def set_status(self, action: SetStatus) -> None:
        self._call()
        self.put({**self.objects[action.ref], "status": action.status})
        self._called()

    async def record_event(self, action: RecordEvent) -> None:
        self.events.append(action)

    async def declare(self, new: KeyDeclaration) -> SupervisorKey | None:
        self._call()
        if self.down:
            raise SupervisorUnavailable("UNAVAILABLE")
        for key_hash, row in self.rows.items():
            if row["owner"] == new.owner and key_hash != new.key_hash and row["in force"]:
                row["in force"] = False
        row = self.rows.setdefault(new.key_hash, {"owner": new.owner, "id": f"k{next(self.ids)}", "for good": False})
        row.setdefault("in force", False)
        taken = row["owner"] != new.owner
        if not taken and not row["for good"]:
            row |= {"in force": True, "declaration": new}
        self._called()
        return None if taken else SupervisorKey(row["id"], new, revoked=row["for good"])

    async def withdraw(self, owner: str) -> None:
        self._call()
        if self.down:
            raise SupervisorUnavailable("UNAVAILABLE")
        for row in self.rows.values():
            if row["owner"] == owner:
                row["in force"] = False
        self._called()

    async def declared(self) -> list[SupervisorKey]:
        if self.down:
            raise SupervisorUnavailable("UNAVAILABLE")
        kept = [row for row in self.rows.values() if row["in force"] or row["for good"]]
        return [
            SupervisorKey(row["id"], row["declaration"], revoked=row["for good"])
            for row in kept
            if "declaration" in row
        ]


def ready(world: World) -> tuple[str, str]:
    (condition,) = world.objects[REF]["status"]["conditions"]
    return condition["status"], condition["reason"]


def check(world: World) -> None:
    """What is in force is the key of a Secret that an APIKey of today names, and there is one at most."""
    if REF not in world.objects:
        return
    key = parsed(world.objects[REF])
    assert list(world.in_force()) in ([], [world.hash_of(key.secret, key)])


async def test_a_key_is_made_declared_and_reported_and_then_nothing_is_written() -> None:
    world = World()
    world.put(manifest(limits={"concurrent": 4}, models=["acme/*"]))
    await world.settle()
    key = parsed(world.objects[REF])
    (row,) = world.rows.values()
    key_hash, limits = world.hash_of("ci", key), LimitRule("", concurrent=4)
    new = KeyDeclaration("u1", "acme", "APIKey acme/ci", key_hash, "Inference", ("acme/*",), 0, limits)
    assert (world.in_force(), row["declaration"]) == ({key_hash: "u1"}, new)
    status = world.objects[REF]["status"]
    assert ready(world) == ("True", "Registered")
    assert (status["keyID"], status["secretName"], "expiresAt" in status) == ("k1", "ci", False)
    text = base64.b64decode(world.secrets["ci"]["data"]["key"]).decode()
    assert text not in str(world.objects) + str(world.rows) + str(world.events)
    version = world.objects[REF]["metadata"]["resourceVersion"]
    await world.settle()
    assert world.objects[REF]["metadata"]["resourceVersion"] == version
    assert [(event.type, event.reason) for event in world.events] == [("Normal", "Registered")]


@pytest.mark.parametrize("spec", [{"expiresAt": "2027-01-15T09:00:00Z"}, {"expiresAfter": "1809h"}])
async def test_a_key_ends_when_its_spec_says(spec: dict[str, str]) -> None:
    world = World()
    world.put(manifest(**spec))
    await world.settle()
    (row,) = world.rows.values()
    assert row["declaration"].expires_unix_ms == 1000 * (NOW + 3600)
    assert world.objects[REF]["status"]["expiresAt"] == "2027-01-15T09:00:00Z"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("crash_in", range(8))
@pytest.mark.parametrize("act", ["create", "delete the secret", "delete", "edit", "force", "bring another"])
async def test_a_crash_at_any_call_is_made_good_by_the_next_process(act: str, crash_in: int, after: bool) -> None:
    world = World()
    world.bring("mine", "x" * 32)
    brought = act == "bring another"
    world.put(manifest(**({"secretRef": {"name": "mine"}} if brought else {})))
    if act != "create":
        await world.settle()
    old = set(world.in_force())
    if act == "delete the secret":
        del world.secrets["ci"]
    elif act in ("delete", "force"):
        world.loop = None
        world.delete(force=act == "force")
    elif act == "edit":
        world.put({**world.objects[REF], "spec": {"scope": "Metrics", "expiresAt": "2126-01-01T00:00:00Z"}})
    elif brought:
        world.bring("mine", "y" * 32)
    world.crash_in, world.after = crash_in, after
    with contextlib.suppress(Crashed):
        await world.settle()
    world.crash_in = -1
    await world.settle()
    check(world)
    if act in ("delete", "force"):
        assert not world.in_force()
        assert not world.objects
        assert "ci" not in world.secrets
        return
    assert ready(world) == ("True", "Registered")
    assert len(world.in_force()) == 1
    assert (set(world.in_force()) == old) == (act == "edit")


async def test_drawn_lives_leave_no_key_that_nobody_should_have() -> None:
    for seed in range(60):
        draw, world = random.Random(seed), World()
        for turn in range(12):
            act = draw.choice(["make", "delete", "force", "lose", "revoke", "foreign", "edit", "down"])
            there = REF in world.objects
            if draw.random() < 0.3:
                world.loop = None  # nobody hears of it
            if act == "make" and not there:
                world.put(manifest(uid=f"u{turn}"))
            elif act in ("delete", "force") and there:
                world.delete(force=act == "force")
            elif act == "lose":
                world.secrets.clear()
            elif act == "revoke":
                for row in world.rows.values():
                    row |= {"for good": row["for good"] or row["in force"], "in force": False}
            elif act == "foreign":
                world.bring("ci", f"{turn:040d}")
            elif act == "edit" and there:
                world.put({**world.objects[REF], "spec": {"scope": draw.choice(["Metrics", "ReadOnly"])}})
            world.down, world.crash_in, world.after = act == "down", draw.randrange(-1, 6), draw.random() < 0.5
            with contextlib.suppress(Crashed, SupervisorUnavailable, AlreadyExists):
                await world.settle()
            world.crash_in, world.down = -1, False
            await world.settle()
            check(world)
            if REF not in world.objects:
                assert not world.in_force(), f"seed {seed}"


async def test_a_supervisor_that_is_away_decides_nothing_and_deletion_waits_for_it() -> None:
    world = World()
    world.put(manifest())
    await world.settle()
    world.down = True
    world.delete()
    loop = world.operator()
    with pytest.raises(SupervisorUnavailable):
        await loop.compare()
    await loop.reconcile(REF)
    assert REF in world.objects
    assert len(world.in_force()) == 1
    world.down = False
    await world.settle()
    assert REF not in world.objects
    assert not world.in_force()


async def test_a_call_without_an_answer_is_not_taken_for_one_that_did_nothing() -> None:
    world = World()
    world.put(manifest())
    loop = world.operator()
    await loop.compare()
    declare = world.declare

    async def lost(new: KeyDeclaration) -> SupervisorKey | None:
        await declare(new)
        raise SupervisorUnavailable("DEADLINE_EXCEEDED")

    world.declare = lost  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(SupervisorUnavailable):
        await loop.reconcile(REF)
    world.delete()
    await loop.reconcile(REF)
    assert REF in world.objects, "the finalizer stays until it is known what is declared"
    await loop.compare()
    await loop.reconcile(REF)
    assert REF not in world.objects
    assert not world.in_force()


async def test_a_list_that_was_on_its_way_does_not_hide_what_was_declared_meanwhile() -> None:
    world = World()
    world.put(manifest())
    loop = world.operator()
    await loop.compare()
    asked, answer = asyncio.Event(), asyncio.Event()
    listed = world.declared

    async def slow() -> list[SupervisorKey]:
        found = await listed()
        asked.set()
        await answer.wait()
        return found

    world.declared = slow  # pyright: ignore[reportAttributeAccessIssue]
    comparing = asyncio.create_task(loop.compare())
    await asked.wait()
    await loop.reconcile(REF)
    answer.set()
    await comparing
    world.delete()
    await loop.reconcile(REF)
    assert not world.in_force()
    assert REF not in world.objects


async def test_what_is_wrong_is_said_and_no_key_is_in_force() -> None:
    for spec, secret, reason in (
        ({"secretRef": {"name": "mine"}}, None, "SecretMissing"),
        ({"secretRef": {"name": "mine"}}, "x" * 31, "SecretInvalid"),
        ({"secretRef": {"name": "mine"}}, "x" * 513, "SecretInvalid"),
        ({"secretRef": {"name": "mine"}}, "x" * 31 + " y", "SecretInvalid"),
        ({"secretRef": {"name": "mine"}}, "x" * 31 + "é", "SecretInvalid"),
        ({"secretRef": {"name": "mine"}}, "a.b." + "x" * 32, "SecretInvalid"),
        ({"secretRef": {"name": "mine", "key": "other"}}, "x" * 32, "SecretInvalid"),
        ({"secretName": "mine"}, "x" * 32, "SecretConflict"),
        ({"expiresAt": "2027-01-15T08:00:00Z"}, None, "KeyExpired"),  # at this very moment
        ({"expiresAfter": "1808h"}, None, "KeyExpired"),
    ):
        world = World()
        if secret is not None:
            world.bring("mine", secret)
        world.put(manifest(**spec))
        await world.settle()
        assert ready(world) == ("False", reason), (spec, reason)
        assert not world.in_force()
        assert world.objects[REF]["status"].get("keyID") is None


async def test_a_key_that_is_somebody_elses_or_revoked_by_hand_is_refused() -> None:
    world = World()
    world.bring("mine", "x" * 32 + "\n")
    world.put(manifest(secretRef={"name": "mine"}))
    await world.settle()
    assert ready(world) == ("True", "Registered")
    (row,) = world.rows.values()
    row |= {"in force": False, "for good": True}
    await world.settle()
    assert ready(world) == ("False", "KeyRevoked")
    theirs = replace(row["declaration"], owner="u9")
    row |= {"owner": "u9", "for good": False, "in force": True, "declaration": theirs}
    await world.settle()
    assert ready(world) == ("False", "KeyTaken")


async def test_a_namespace_that_is_not_served_has_no_key_in_force_and_no_finalizer() -> None:
    world = World()
    world.put(manifest())
    await world.settle()
    await world.settle(namespaces=[])
    assert ready(world) == ("False", "NamespaceNotServed")
    assert not world.in_force()
    assert not world.objects[REF]["metadata"]["finalizers"]


async def test_a_secret_that_the_api_server_refuses_is_reported_and_tried_again() -> None:
    world = World()
    world.refuse_secrets = True
    world.put(manifest())
    await world.settle()
    assert ready(world) == ("False", "SecretRefused")
    world.refuse_secrets = False
    await world.settle()
    assert ready(world) == ("True", "Registered")


def test_a_secret_that_cannot_be_read_withdraws_nothing() -> None:
    key = parsed(manifest(finalizers=(FINALIZER,)))
    new = KeyDeclaration("u1", "acme", "", "a" * 64, "Inference", (), 0)
    view = KeyView(key, True, UnreadSecret("SecretForbidden", "no"), True, SupervisorKey("k1", new))
    step = next_step(view, NOW)
    assert isinstance(step, SetStatus)
    assert step.status["conditions"][0]["reason"] == "SecretForbidden"
    assert next_step(replace(view, secret=BadSecret("SecretInvalid", "")), NOW) == Withdraw("u1")


@pytest.mark.parametrize(
    ("generation", "reason", "stays"), [(1, "Registered", True), (0, "Registered", False), (1, "KeyTaken", False)]
)
def test_without_a_supervisor_only_a_registered_specs_status_stays(generation: int, reason: str, stays: bool) -> None:
    status = "True" if reason == "Registered" else "False"
    obj = manifest(finalizers=(FINALIZER,))
    condition = {"type": "Ready", "status": status, "reason": reason, "lastTransitionTime": "2026-11-01T00:00:00Z"}
    obj["status"] = {"observedGeneration": generation, "conditions": [condition]}
    step = next_step(KeyView(parsed(obj), True, SecretKey("a" * 64, NOW), is_known=False), NOW)
    if stays:
        assert step is None
    else:
        assert isinstance(step, SetStatus)
        (event,) = key_events_for(parsed(obj), step.status)
        assert (event.type, event.reason) == ("Normal", "Registering")


def test_orphans_are_owners_without_an_object() -> None:
    new = KeyDeclaration("u1", "acme", "", "a" * 64, "Inference", (), 0)
    there = [
        SupervisorKey("k1", new),
        SupervisorKey("k2", replace(new, owner="u2")),
        SupervisorKey("k3", new, revoked=True),
    ]
    assert orphans(there, {"u1"}) == ["u2"]


def outcome_of_key(spec: dict[str, Any]) -> str | None:
    """What the supervisor, the cluster and people were told; None: it is refused."""
    world = World()
    for name in ("aa", "bb"):
        world.bring(name, name * 32)
        world.secrets[name]["data"]["aa"] = base64.b64encode(b"c" * 32).decode()
    try:
        given = parse_object({"apiVersion": "serving.weft.dev/v1alpha1", **KEY, "spec": spec})
    except ManifestError:
        return None
    world.put(manifest(**given.to_dict()["spec"]))
    asyncio.run(world.settle())
    return repr((world.rows, world.secrets, world.objects[REF]["status"], world.events))


def test_the_value_of_each_field_of_a_key_reaches_something() -> None:
    assert unread("APIKey", {}, {("secretRef",): {"secretRef": {"name": "aa"}}}, outcome_of_key) == []
