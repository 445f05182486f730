"""The objects of the cluster as this process knows them: from watches, and from answers to its own reads and writes.

resourceVersions are opaque: they are compared only for equality. As in every informer, a watch reports the changes of
an object in their order, and the last report counts. An answer runs ahead of the watch:

- The answer to a write fenced by the known version is the next version, unless a watch was faster. The cache expects it
  at the watch. An unexpected event is newer than all expected answers, because each fence held.
- A read skips the versions in between. If the watch then reports a version other than the read version, it may be older
  or newer. This is a doubt; the cache settles it by reading again.

An object missing from a read is gone for good, because uids do not come back. An object that a watch reports as deleted
may only be out of sight (its label was removed). Listeners are called once for each change. Plain memory, one owner,
one event loop.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from weft_operator.core.resources import Object, resource_version
from weft_operator.core.state import ObjectKey
from weft_operator.kubernetes.client import key_of

GONE_REMEMBERED = 4096
MAX_EXPECTED_VERSIONS = 16  # versions of an object; older versions become unknown, as after a read

Listener = Callable[[Object, bool], None]  # the object, and whether it is gone


class ObjectCache:
    """Objects by kind, namespace and name. `on_doubt` is called with keys to read: each answer goes to `read`."""

    def __init__(self, on_doubt: Callable[[ObjectKey], None] = lambda _: None) -> None:
        self.on_doubt = on_doubt
        self._objects: dict[str, dict[ObjectKey, Object]] = {}
        self._expected: dict[str, dict[str, bool]] = {}  # uid -> unreported answers; was it a read?
        self._doubted: dict[ObjectKey, tuple[str, str | None]] = {}  # uid and version of the watch's last report
        self._deleted_uids: OrderedDict[str, None] = OrderedDict()  # uids
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call the listener for every change, in the same turn of the loop. It must not raise."""
        self._listeners.append(listener)

    def find(self, key: ObjectKey) -> Object | None:
        return self._objects.get(key.kind, {}).get(key)

    def count(self, kind: str) -> int:
        return len(self._objects.get(kind, {}))

    def of_kind(self, kind: str) -> Iterator[Object]:
        yield from list(self._objects.get(kind, {}).values())

    # ------------------------------------------------------------------------------------------------- from a watch

    def put(self, obj: Object) -> bool:
        """Take an object reported by a watch. Return False if it is known or doubted."""
        key, uid, version = key_of(obj), _uid(obj), resource_version(obj)
        cached = self.find(key)
        if uid in self._deleted_uids:
            return False
        if cached is not None and _uid(cached) != uid:
            if _uid(cached) in self._expected:  # from an answer: this object may be its predecessor
                return self._doubt(key, uid, version)
            self._forget(key, cached)
        elif cached is not None:
            if self._is_expected(uid, version) or resource_version(cached) == version:
                return False
            if any(self._expected.get(uid, {}).values()):
                return self._doubt(key, uid, version)
        self._expected.pop(uid, None)
        self._store(key, obj)
        return True

    def drop(self, key: ObjectKey, uid: str) -> bool:
        """Take the report of a deleted or invisible object with this uid. Return False if it is known or doubted."""
        cached = self.find(key)
        if cached is None or _uid(cached) != uid:
            return False
        if any(self._expected.get(uid, {}).values()):
            return self._doubt(key, uid, None)
        self._remove(key, cached)
        return True

    # ----------------------------------------------------------------------------------------------- from an answer

    def wrote(self, obj: Object, fence: str | None, *, fenced: bool = True) -> bool:
        """Take in the answer to a write on the known version `fence` (None: a new object).

        `fenced`: the API server has compared the version. Returns False if a watch was faster.
        """
        key, uid, version = key_of(obj), _uid(obj), resource_version(obj)
        cached = self.find(key)
        if uid in self._deleted_uids or resource_version(cached) != fence or version == fence:
            return False
        if cached is not None and _uid(cached) != uid:
            self._forget(key, cached)
        self._expect(uid, version, read=fence is None or not fenced)
        self._store(key, obj)
        return True

    def read(self, key: ObjectKey, obj: Object | None, *, in_sight: bool = True) -> bool:
        """Take in the answer to a read. No watch reported the object meanwhile. Returns False if it is known.

        `in_sight`: a watch reports the object.
        """
        cached, doubted = self.find(key), self._doubted.pop(key, None)
        if obj is not None and not in_sight:
            if cached is not None:
                self._remove(key, cached)
            return cached is not None
        if cached is not None and (obj is None or _uid(cached) != _uid(obj)):
            self._forget(key, cached)
        if obj is None:
            return cached is not None
        uid, version = _uid(obj), resource_version(obj)
        caught_up = doubted == (uid, version)
        if caught_up:
            self._expected.pop(uid, None)
        if cached is not None and _uid(cached) == uid and resource_version(cached) == version:
            return False
        if not caught_up:
            self._expect(uid, version, read=True)
        self._store(key, obj)
        return True

    # ------------------------------------------------------------------------------------------------------- shared

    def _expect(self, uid: str, version: str | None, *, read: bool) -> None:
        expected = self._expected.setdefault(uid, {})
        expected[version or ""] = read
        if len(expected) > MAX_EXPECTED_VERSIONS:
            del expected[next(iter(expected))]
            expected[next(iter(expected))] = True

    def _is_expected(self, uid: str, version: str | None) -> bool:
        """Return whether a watch reports an expected answer. Earlier answers are no longer expected."""
        expected = self._expected.get(uid, {})
        if version not in expected:
            return False
        for pending in list(expected):
            del expected[pending]
            if pending == version:
                break
        if not expected:
            del self._expected[uid]
        return True

    def _doubt(self, key: ObjectKey, uid: str, version: str | None) -> bool:
        self._doubted[key] = (uid, version)
        self.on_doubt(key)
        return False

    def _store(self, key: ObjectKey, obj: Object) -> None:
        stored = strip_unused(obj)
        self._objects.setdefault(key.kind, {})[key] = stored
        self._call_listeners(stored, deleted=False)

    def _forget(self, key: ObjectKey, cached: Object) -> None:
        """Forget an object deleted for good."""
        self._deleted_uids[_uid(cached)] = None
        if len(self._deleted_uids) > GONE_REMEMBERED:
            self._deleted_uids.popitem(last=False)
        self._remove(key, cached)

    def _remove(self, key: ObjectKey, cached: Object) -> None:
        self._expected.pop(_uid(cached), None)
        self._doubted.pop(key, None)
        del self._objects[key.kind][key]
        self._call_listeners(cached, deleted=True)

    def _call_listeners(self, obj: Object, *, deleted: bool) -> None:
        for listener in self._listeners:
            listener(obj, deleted)


def strip_unused(obj: Object) -> Object:
    """Drop unread fields from an object: field managers, and most fields of pods and nodes."""
    metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    slimmed: dict[str, Any] = {**obj, "metadata": metadata}
    if obj["kind"] == "Pod":
        spec = obj.get("spec") or {}
        slimmed["spec"] = {name: spec[name] for name in ("nodeName", "tolerations") if name in spec}
    if obj["kind"] == "Node":
        identity = {name: metadata[name] for name in ("name", "uid", "resourceVersion")}
        slimmed = {"kind": "Node", "metadata": identity, "spec": obj.get("spec") or {}}
    return slimmed


def _uid(obj: Object) -> str:
    return str(obj["metadata"]["uid"])
