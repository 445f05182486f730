"""The objects of the cluster as this process knows them, from watches, lists and the answers to its own writes.

All three may come in any order. Of two versions of one object the newer one counts, and what is gone does not come back
by a late event of how it was. Listeners are called once for each change. Plain memory, one owner, one event loop.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from weft_operator.core.resources import Object
from weft_operator.core.state import ObjectKey
from weft_operator.kubernetes.client import key_of, version_of

GONE_REMEMBERED = 4096

Listener = Callable[[Object, bool], None]  # the object, and whether it is gone


class ObjectCache:
    """By kind, namespace and name."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[ObjectKey, Object]] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()  # uid -> the version at which it went
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call the listener for every change, in the turn in which it comes. It must not raise."""
        self._listeners.append(listener)

    def find(self, key: ObjectKey) -> Object | None:
        return self._objects.get(key.kind, {}).get(key)

    def count(self, kind: str) -> int:
        return len(self._objects.get(kind, {}))

    def of_kind(self, kind: str) -> Iterator[Object]:
        yield from list(self._objects.get(kind, {}).values())

    def put(self, obj: Object) -> bool:
        """Take in an object as it is, or was. False: that was known, or is older than what is known."""
        key, uid = key_of(obj), str(obj["metadata"]["uid"])
        known = self.find(key)
        if self._was_before(uid, obj) or (known is not None and not _newer(obj, known)):
            return False
        if known is not None and known["metadata"]["uid"] != uid:
            self.drop(key, str(known["metadata"]["uid"]))
        stored = strip_unused(obj)
        self._objects.setdefault(key.kind, {})[key] = stored
        self._tell(stored, gone=False)
        return True

    def drop(self, key: ObjectKey, uid: str, version: int | None = None) -> bool:
        """The object of that uid is gone, as of that version (None: of the one known). False: that was known.

        Gone means out of sight: with its label back it returns, under a higher version.
        """
        known = self.find(key)
        known = known if known is not None and known["metadata"]["uid"] == uid else None
        if known is not None and version is not None and version < (version_of(known) or 0):
            return False  # an old word: it was seen again since
        self._gone[uid] = max(version or 0, (version_of(known) or 0) if known else 0, self._gone.get(uid, 0))
        if len(self._gone) > GONE_REMEMBERED:
            self._gone.popitem(last=False)
        if known is None:
            return False
        del self._objects[key.kind][key]
        self._tell(known, gone=True)
        return True

    def _was_before(self, uid: str, obj: Object) -> bool:
        """A late word of something that went since."""
        return uid in self._gone and (version_of(obj) or 0) <= self._gone[uid]

    def _tell(self, obj: Object, *, gone: bool) -> None:
        for listener in self._listeners:
            listener(obj, gone)


def strip_unused(obj: Object) -> Object:
    """An object without what nobody here reads: who manages which field; of a pod everything but its state."""
    metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    slimmed: dict[str, Any] = {**obj, "metadata": metadata}
    if obj["kind"] == "Pod":
        slimmed.pop("spec", None)
    return slimmed


def _newer(obj: Object, known: Object) -> bool:
    """Of one uid the higher version; of two uids too, for a later object of that name is created later."""
    version, known_version = version_of(obj), version_of(known)
    if version is None or known_version is None:  # an API server whose versions are no numbers: what comes last counts
        return obj["metadata"].get("resourceVersion") != known["metadata"].get("resourceVersion")
    return version > known_version
