"""Edits of every field of a resource's spec, from its CustomResourceDefinition: right values, wrong ones, and none."""

import copy
from collections.abc import Iterator
from typing import Any

from weft.api.crd import crds

Json = dict[str, Any]
Path = tuple[str, ...]
Edit = tuple[Path, Any]  # None: without the field
WRONG = ("x y", -1, [], {"unknown": 1}, True, "99999999999")
KEPT = {("model", "uri"), ("source", "uri")}  # another source is another content


def edits(kind: str) -> list[Edit]:
    """Every field with each of its values, small enough that no pool becomes large."""
    schema = next(crd for crd in crds().values() if crd["spec"]["names"]["kind"] == kind)
    spec = schema["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return [
        (path, value)
        for path, of in _leaves(spec)
        for value in (*(v for v in _values(of) if _is_small(path) or v != 128), *WRONG, None)
    ]


def edited(obj: Json, path: Path, value: Any) -> Json:
    """The object with that field changed."""
    made = copy.deepcopy(obj)
    of = made["spec"]
    for name in path[:-1]:
        of = of.setdefault(name, {})
    if value is None:
        of.pop(path[-1], None)
    else:
        of[path[-1]] = value
    return made


def _leaves(schema: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    for name, of in schema.get("properties", {}).items():
        if of.get("type") == "object" and "properties" in of:
            yield from _leaves(of, (*path, name))
        elif (*path, name) not in KEPT:
            yield (*path, name), of


def _values(schema: Json) -> list[Any]:
    """Right ones."""
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return [True, False]
    if schema.get("type") == "integer":
        least = schema.get("minimum", 0)
        return [value for value in (least, least + 1, 3, 128) if least <= value <= min(schema.get("maximum", 128), 128)]
    return []


def _is_small(path: Path) -> bool:
    return path[-1] not in ("replicas", "minReplicas", "maxReplicas", "tensor", "pipeline", "podsPerRunner")
