"""Objects with the semantics of the Kubernetes API, in memory; `persistence.py` keeps them in `objects.json`.

Every change raises the store's version by exactly one and is exactly one event. So a watch is a position in the history
and needs no queue. Stored objects are never changed in place: a change makes a new object. `generation` grows with the
spec and with the mark of deletion, never with status or metadata. A status write is fenced by the version in the
action.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from weft_operator.core.resources import Kind, Object, Ref, ref_of
from weft_operator.errors import Expired, LocalConflict, LocalNotFound, StaleWrite

EventType = Literal["ADDED", "MODIFIED", "DELETED"]
Result = Literal["created", "configured", "unchanged"]

HISTORY = 4096
# metadata allowed in a manifest, in addition to name and namespace
OWN_METADATA = ("labels", "annotations", "finalizers")


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change of an object. `version` is the new version of the store and the object's `resourceVersion`."""

    version: int
    type: EventType
    object: Object


class ObjectStore:
    """The objects of a data directory, with a single owner on one event loop. `clock` gives unix seconds."""

    def __init__(self, clock: Callable[[], float], objects: Iterable[Object] = (), version: int = 1) -> None:
        self._clock = clock
        self._objects: dict[Ref, Object] = {ref_of(obj): obj for obj in objects}
        self.version = version
        self._history: deque[WatchEvent] = deque(maxlen=HISTORY)
        self._listeners: list[Callable[[WatchEvent], None]] = []
        self._watchers: set[asyncio.Event] = set()

    def get(self, ref: Ref) -> Object:
        """Read an object of the store. Raises LocalNotFound."""
        stored = self._objects.get(ref)
        if stored is None:
            raise LocalNotFound(f"there is no {ref.kind} {ref}")
        return stored

    def find(self, ref: Ref) -> Object | None:
        return self._objects.get(ref)

    def objects(self, kind: Kind | None = None, namespace: str | None = None) -> list[Object]:
        """List objects by namespace and name; `self.version` is the version of the list."""
        chosen = (
            obj
            for ref, obj in self._objects.items()
            if (kind is None or ref.kind == kind) and (namespace is None or ref.namespace == namespace)
        )
        return sorted(chosen, key=lambda obj: (obj["metadata"]["namespace"], obj["metadata"]["name"]))

    def apply(self, manifest: Object) -> tuple[Result, Object]:
        """Make the object as an admitted manifest says. Labels, annotations and spec are replaced, status is kept.

        Raises LocalConflict if the manifest names a different uid or version, or the object is being deleted.
        """
        previous = self.find(ref_of(manifest))
        if previous is None:
            return "created", self._created(manifest)
        _check_precondition(previous, manifest["metadata"])
        system_fields = {name: manifest["metadata"].get(name) or None for name in OWN_METADATA}
        if "finalizers" not in manifest["metadata"]:
            system_fields["finalizers"] = previous["metadata"].get("finalizers")
        same_spec = previous["spec"] == manifest["spec"]
        if same_spec and all(
            (previous["metadata"].get(name) or None) == value for name, value in system_fields.items()
        ):
            return "unchanged", previous
        generation = previous["metadata"]["generation"] + (0 if same_spec else 1)
        user_fields = {name: value for name, value in previous["metadata"].items() if name not in OWN_METADATA}
        metadata = (
            user_fields | {name: value for name, value in system_fields.items() if value} | {"generation": generation}
        )
        return "configured", self._put("MODIFIED", {**previous, "metadata": metadata, "spec": manifest["spec"]})

    def set_status(self, ref: Ref, uid: str, resource_version: str, status: Object) -> Object:
        """Replace the status of exactly this version. Raises StaleWrite if the object is newer or absent."""
        previous = self._fenced(ref, uid, resource_version)
        return self._put("MODIFIED", {**previous, "metadata": dict(previous["metadata"]), "status": status})

    def delete(self, ref: Ref) -> Object:
        """Remove an object, or, while it has finalizers, mark it. Raises LocalNotFound."""
        previous = self.get(ref)
        metadata = dict(previous["metadata"])
        if not metadata.get("finalizers"):
            return self._put("DELETED", {**previous, "metadata": metadata})
        if "deletionTimestamp" in metadata:
            return previous
        metadata |= {"deletionTimestamp": self._now(), "generation": metadata["generation"] + 1}
        return self._put("MODIFIED", {**previous, "metadata": metadata})

    def remove_finalizer(self, ref: Ref, uid: str, resource_version: str, finalizer: str) -> Object:
        """Remove a finalizer. Removing the last finalizer of a marked object deletes the object. Raises StaleWrite."""
        previous = self._fenced(ref, uid, resource_version)
        metadata = dict(previous["metadata"])
        metadata["finalizers"] = [name for name in metadata.get("finalizers", ()) if name != finalizer]
        is_deleted = not metadata["finalizers"] and "deletionTimestamp" in metadata
        return self._put("DELETED" if is_deleted else "MODIFIED", {**previous, "metadata": metadata})

    def listen(self, listener: Callable[[WatchEvent], None]) -> None:
        """Call the listener for every change, in the same turn of the loop. It must not raise."""
        self._listeners.append(listener)

    async def watch(self, version: int) -> AsyncIterator[WatchEvent]:
        """Yield every change after this version, without end. Raises Expired when the history does not reach
        back."""
        wake = asyncio.Event()
        self._watchers.add(wake)
        try:
            while True:
                wake.clear()
                for event in self._events_after(version):
                    version = event.version
                    yield event
                if version == self.version:
                    await wake.wait()
        finally:
            self._watchers.discard(wake)

    def require_remembered(self, version: int) -> None:
        """Check that a watch from this version can be complete. Raises Expired."""
        if not 0 <= self.version - version <= len(self._history):
            raise Expired(f"version {version} is not remembered any more (now {self.version}): list again")

    def _events_after(self, version: int) -> list[WatchEvent]:
        self.require_remembered(version)
        missed = self.version - version
        return [self._history[i] for i in range(len(self._history) - missed, len(self._history))]

    def _created(self, manifest: Object) -> Object:
        fields = manifest["metadata"]
        if "uid" in fields or "resourceVersion" in fields:
            raise LocalConflict(
                f"{manifest['kind']} {ref_of(manifest)} does not exist, but the manifest names a version of it"
            )
        metadata = {
            "name": fields["name"],
            "namespace": fields["namespace"],
            **{name: fields[name] for name in OWN_METADATA if fields.get(name)},
            "uid": str(uuid.uuid4()),
            "creationTimestamp": self._now(),
            "generation": 1,
        }
        made = {
            "apiVersion": manifest["apiVersion"],
            "kind": manifest["kind"],
            "metadata": metadata,
            "spec": manifest["spec"],
        }
        return self._put("ADDED", made)

    def _put(self, kind: EventType, obj: dict[str, Any]) -> Object:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            del self._objects[ref_of(obj)]
        else:
            self._objects[ref_of(obj)] = obj
        event = WatchEvent(self.version, kind, obj)
        self._history.append(event)
        for wake in self._watchers:
            wake.set()
        for listener in self._listeners:
            listener(event)
        return obj

    def _fenced(self, ref: Ref, uid: str, resource_version: str) -> Object:
        previous = self.find(ref)
        if previous is None or previous["metadata"]["uid"] != uid:
            raise StaleWrite(f"{ref.kind} {ref} is gone")
        if previous["metadata"]["resourceVersion"] != resource_version:
            raise StaleWrite(f"{ref.kind} {ref} has changed since version {resource_version}")
        return previous

    def _now(self) -> str:
        # Microseconds: the older of two objects wins a name, also within a second.
        return datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _check_precondition(previous: Object, preconditions: Mapping[str, Any]) -> None:
    metadata, name = previous["metadata"], f"{previous['kind']} {ref_of(previous)}"
    for field in ("uid", "resourceVersion"):
        if field in preconditions and preconditions[field] != metadata[field]:
            raise LocalConflict(
                f"{name} has {field} {metadata[field]}, the manifest says {preconditions[field]}: read it again"
            )
    if "deletionTimestamp" in metadata:
        raise LocalConflict(f"{name} is being deleted: apply again when it is gone")
