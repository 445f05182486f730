"""The comparison of a live object with its intent. Equal objects are not written, even by a new process.

The comparison reads only the live object: does every intended field have its intended value? So it finds foreign
changes. An annotation holds the hash of the whole intent. So the comparison also finds fields dropped from the intent,
and server-side apply then removes them. An API server adds defaults, reformats quantities and drops empty values: the
comparison ignores all three.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.api.template import amount

INTENT = "serving.weft.dev/intent"
SCALARS = frozenset((str, int, float, bool, type(None)))

# Lists that the API server merges by a key, so other writers may add to them. Every other list has a single owner.
LIST_KEYS: Mapping[str, tuple[str, ...]] = {
    "ownerReferences": ("uid",),
    "containers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ports": ("containerPort", "port", "protocol"),
}
QUANTITIES = ("limits", "requests", "sizeLimit")
# Fields with a meaningful zero: the API server keeps it. In other fields, zero and absence are the same.
KEPT_ZEROS = frozenset(
    (
        "replicas",
        "maxSurge",
        "maxUnavailable",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "allowPrivilegeEscalation",
        "readOnlyRootFilesystem",
        "privileged",
        "runAsUser",
        "runAsGroup",
        "runAsNonRoot",
        "fsGroup",
        "terminationGracePeriodSeconds",
    )
)


def with_spec_hash(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the manifest with its hash as an annotation."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), INTENT: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def spec_hash(obj: Mapping[str, Any]) -> str:
    """Return the hash in an object's annotations; "" if absent."""
    return str((obj["metadata"].get("annotations") or {}).get(INTENT, ""))


def matches(live: Mapping[str, Any], intent: Mapping[str, Any]) -> bool:
    """Whether the live object has every value of an intent with its hash."""
    return _mapping_matches(live, intent, False)


def _matches(live: Any, intent: Any, field: str, quantity: bool) -> bool:
    quantity = quantity or field in QUANTITIES
    if type(intent) not in SCALARS:  # most values are scalars: `isinstance` of an ABC costs more than the rest
        if isinstance(intent, Mapping):
            return isinstance(live, Mapping) and _mapping_matches(live, intent, quantity)
        if isinstance(intent, Sequence) and not isinstance(intent, str):
            return isinstance(live, Sequence) and not isinstance(live, str) and _list_matches(live, intent, field)
    if quantity and isinstance(live, str | int):
        return amount(live) == amount(intent)
    return bool(live == intent) and isinstance(live, bool) == isinstance(intent, bool)


def _mapping_matches(live: Mapping[str, Any], intent: Mapping[str, Any], quantity: bool) -> bool:
    return all(
        _matches(live[name], value, name, quantity) if name in live else _is_dropped(name, value)
        for name, value in intent.items()
    )


def _is_dropped(field: str, value: Any) -> bool:
    """Whether the API server leaves out a field with this value."""
    return value is None or (field not in KEPT_ZEROS and not isinstance(value, Mapping) and not value)


def _list_matches(live: Sequence[Any], intent: Sequence[Any], field: str) -> bool:
    keys = LIST_KEYS.get(field)
    if keys is None:
        return len(live) == len(intent) and all(_matches(a, b, "", False) for a, b in zip(live, intent, strict=True))
    by_key = {_key(item, keys): item for item in live}
    return all(_key(item, keys) in by_key and _matches(by_key[_key(item, keys)], item, "", False) for item in intent)


def _key(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key) or ("TCP" if key == "protocol" else None) for key in keys)
