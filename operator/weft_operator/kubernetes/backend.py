"""The planner's orders in a cluster, each one request to the API server.

Every write is fenced twice: by leadership, and by the version (or at least the uid) of the object in the plan. A child
depends on two objects, the child and its pool, and its fence covers only the child. So the pool is read again right
before the write. A broken fence raises `StaleWrite`: the object is planned again, from a fresh read.
"""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from weft_operator.core.actions import (
    AddFinalizer,
    ApplyChild,
    DeleteChild,
    EnsureRunner,
    RecordEvent,
    RemoveFinalizer,
    RemoveRunner,
    ScaleChild,
    SetPodDeletionCost,
    SetStatus,
)
from weft_operator.core.children import MANAGER
from weft_operator.core.resources import API_VERSION, Object, Ref, resource_version
from weft_operator.core.state import Child, ObjectKey
from weft_operator.errors import ApiFailed, ChildExists, ChildRefused, StaleWrite
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.client import APPLY_PATCH, BY_KIND, MERGE_PATCH, PODS, KubeApi
from weft_operator.kubernetes.event_mapping import DELETION_COST, owner_of
from weft_operator.kubernetes.events import EventRecorder
from weft_operator.kubernetes.resync import read_again

# The API server's verdict on a request (500: from an admission webhook). Any other status is about the server.
REFUSALS = frozenset((400, 403, 413, 422, 500))


class KubernetesBackend:
    """The backend of a cluster. It takes answers to writes into the cache, before their watch events come.

    It has no state besides the cache. `lead()` raises LeadershipLost; it is called right before each write. `write_s`
    bounds the time of a write. `observe(method, seconds)` is called after each write, successful or not.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: ObjectCache,
        events: EventRecorder,
        *,
        lead: Callable[[], None],
        write_s: float,
        observe: Callable[[str, float], None],
    ) -> None:
        self._api, self._cache, self._events, self._lead, self._write_s = api, cache, events, lead, write_s
        self._observe = observe

    async def set_status(self, action: SetStatus) -> None:
        """Replace the whole status of exactly this version."""
        resource = BY_KIND[action.ref.kind]
        fence = {"uid": action.uid, "resourceVersion": action.resource_version}
        body = {
            "apiVersion": API_VERSION,
            "kind": action.ref.kind,
            "metadata": {"namespace": action.ref.namespace, "name": action.ref.name, **fence},
            "status": action.status,
        }
        path = resource.path(action.ref.namespace, action.ref.name, "status")
        await self._fenced(_key(action.ref), action.resource_version, "PUT", path, body)

    async def add_finalizer(self, action: AddFinalizer) -> None:
        finalizers = self._finalizers(action)
        await self._patch_finalizers(action, [*finalizers, action.finalizer])

    async def remove_finalizer(self, action: RemoveFinalizer) -> None:
        finalizers = [name for name in self._finalizers(action) if name != action.finalizer]
        obj = await self._patch_finalizers(action, finalizers)
        if obj["metadata"].get("deletionTimestamp") and not obj["metadata"].get("finalizers"):
            self._cache.read(_key(action.ref), None)

    async def apply_child(self, action: ApplyChild) -> None:
        """Apply the whole intent (server-side). Fields missing from the intent are removed.

        An existing object is fenced by the version in the action. So a paused process, or a plan older than the object,
        cannot replace a newer intent by an old intent. Raises ChildExists for an object unknown to the plan, and
        ChildRefused.
        """
        child, path = action.child, BY_KIND[action.child.kind].path(action.child.namespace, action.child.name)
        await self._check(action.pool)
        cached = self._cache.find(child.key)
        owned = cached if cached and owner_of(cached) == action.pool else None  # else the plan does not see it
        there = owned or await self._unseen(action)
        if there is not owned and action.resource_version is None and there is not None:
            raise ChildExists(there)
        if resource_version(there) != action.resource_version:
            raise StaleWrite(_planned_from_another(child.key, action.resource_version, there))
        fence = {"resourceVersion": action.resource_version} if there else {}
        body = {**child.manifest, "metadata": {**child.manifest["metadata"], **fence}}
        query, version = _apply_query(child), action.resource_version
        with _refusals(child):
            await self._fenced(child.key, version, "PATCH", path, body, content_type=APPLY_PATCH, query=query)

    async def delete_child(self, action: DeleteChild) -> None:
        """Delete a child, unless the API server would refuse its successor. Raises ChildRefused then."""
        await self._check(action.pool)
        if (child := action.successor) is not None:
            path, query = BY_KIND[child.kind].path(child.namespace, child.name), _apply_query(child) | {"dryRun": "All"}
            with _refusals(child):
                await self._send("PATCH", path, child.manifest, content_type=APPLY_PATCH, query=query)
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": action.uid},
            "propagationPolicy": "Background",
        }
        path = BY_KIND[action.kind].path(action.namespace, action.name)
        try:
            await self._send("DELETE", path, body)
        except StaleWrite:
            there = await self._look(action.key)
            if there is not None and there["metadata"]["uid"] == action.uid:
                raise
        else:
            await self._look(action.key)  # its watch may be late; it is not deleted twice

    async def scale_child(self, action: ScaleChild) -> None:
        """Set the replicas of a Deployment, and leave the rest as it is."""
        await self._check(action.pool)
        fence = {"uid": action.uid, "resourceVersion": action.resource_version}
        body = {"metadata": fence, "spec": {"replicas": action.replicas}}
        path = BY_KIND[action.key.kind].path(action.key.namespace, action.key.name)
        query = {"fieldManager": MANAGER}
        version = action.resource_version
        await self._fenced(action.key, version, "PATCH", path, body, content_type=MERGE_PATCH, query=query)

    async def set_pod_deletion_cost(self, action: SetPodDeletionCost) -> None:
        """Set the cost by which a ReplicaSet chooses the first pod to stop."""
        await self._check(action.pool)
        metadata = {"uid": action.uid, "annotations": {DELETION_COST: str(action.cost)}}
        path = PODS.path(action.namespace, action.name)
        key = ObjectKey(PODS.kind, action.namespace, action.name)
        cached_version, body = resource_version(self._cache.find(key)), {"metadata": metadata}
        self._cache.wrote(
            await self._write(key, "PATCH", path, body, content_type=MERGE_PATCH), cached_version, fenced=False
        )

    async def record_event(self, action: RecordEvent) -> None:
        """Record an Event in parallel to reconciling: nothing waits for it."""
        self._events.record(action)

    async def ensure_runner(self, action: EnsureRunner) -> None:
        raise AssertionError(f"runners are pods here: {action}")

    async def remove_runner(self, action: RemoveRunner) -> None:
        raise AssertionError(f"runners are pods here: {action}")

    # ----------------------------------------------------------------------------------------------------- shared

    def _finalizers(self, action: AddFinalizer | RemoveFinalizer) -> list[str]:
        """Return the finalizers of exactly the action's version: a patch replaces the whole list.

        Raises StaleWrite.
        """
        cached = self._cache.find(_key(action.ref))
        if cached is None or cached["metadata"]["resourceVersion"] != action.resource_version:
            raise StaleWrite(f"{action.ref.kind} {action.ref} has changed since version {action.resource_version}")
        return list(cached["metadata"].get("finalizers") or ())

    async def _patch_finalizers(self, action: AddFinalizer | RemoveFinalizer, finalizers: list[str]) -> Object:
        fence = {"uid": action.uid, "resourceVersion": action.resource_version}
        body = {"metadata": {**fence, "finalizers": finalizers}}
        path = BY_KIND[action.ref.kind].path(action.ref.namespace, action.ref.name)
        version = action.resource_version
        return await self._fenced(_key(action.ref), version, "PATCH", path, body, content_type=MERGE_PATCH)

    async def _check(self, pool: Ref) -> None:
        """Check that a pool has not changed since the action was planned. Raises StaleWrite."""
        cached = self._cache.find(_key(pool))
        there = await self._look(_key(pool))
        if resource_version(there) != resource_version(cached):
            live_version, planned = resource_version(there), resource_version(cached)
            raise StaleWrite(f"{pool.kind} {pool} is at version {live_version}, not at {planned}")

    async def _fenced(
        self, key: ObjectKey, version: str | None, method: str, path: str, body: Mapping[str, Any], **options: Any
    ) -> Object:
        """Write on exactly this version of an object (None: it does not exist). Returns the written object."""
        obj = await self._write(key, method, path, body, **options)
        self._cache.wrote(obj, version)
        return obj

    async def _unseen(self, action: ApplyChild) -> Object | None:
        """Look for an object unseen by the plan: watches see only our label, and may be late.

        If the watch was late, the plan did not know how much of the object runs. Raises StaleWrite.
        """
        child = action.child
        there = await self._api.get(BY_KIND[child.kind], child.namespace, child.name)
        if there is not None and owner_of(there) == action.pool and self._cache.read(child.key, there):
            raise StaleWrite(f"{child.kind} {child.namespace}/{child.name} is there, and no watch has reported it")
        return there

    async def _look(self, key: ObjectKey) -> Object | None:
        """Read an object again, and take it into the cache."""
        return (await read_again(self._api, self._cache, key))[0]

    async def _write(self, key: ObjectKey, method: str, path: str, body: Mapping[str, Any], **options: Any) -> Object:
        """Write; returns the object as it is then. After a conflict it is read again: a watch may be late."""
        try:
            obj: Object = await self._send(method, path, body, **options)
        except StaleWrite:
            await self._look(key)
            raise
        return obj

    async def _send(self, method: str, path: str, body: Mapping[str, Any], **options: Any) -> Any:
        self._lead()
        began = time.perf_counter()
        try:
            return await self._api.request(method, path, body=body, timeout_s=self._write_s, **options)
        finally:
            self._observe(method, time.perf_counter() - began)


def _apply_query(child: Child) -> dict[str, str]:
    """Make the query of server-side apply: forced; strict if the pool contributes unparsed parts of the object."""
    strict = {"fieldValidation": "Strict"} if child.kind in ("Deployment", "StatefulSet") else {}
    return {"fieldManager": MANAGER, "force": "true", **strict}


@contextmanager
def _refusals(child: Child) -> Generator[None]:
    """Raise ChildRefused if the API server refuses the applied child."""
    try:
        yield
    except ApiFailed as error:
        if error.status not in REFUSALS:
            raise
        raise ChildRefused(f"{child.kind} {child.name}: {error.message}") from error


def _planned_from_another(key: ObjectKey, version: str | None, cached: Object | None) -> str:
    planned = f"from version {version}" if version else "while none was known"
    return f"{key.kind} {key.namespace}/{key.name} was planned {planned}, and is at version {resource_version(cached)}"


def _key(ref: Ref) -> ObjectKey:
    return ObjectKey(ref.kind, ref.namespace, ref.name)
