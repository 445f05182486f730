"""Edits of fields that a person could make: the fields and their values come from the CustomResourceDefinitions."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from weft.api.crd import crds

Json = dict[str, Any]
Path = tuple[str, ...]
Edit = tuple[Path, Any]  # a field of the spec and its value; None: without the field
WRONG = ("x y", -1, [], {"unknown": 1}, True, "99999999999")
KEPT = {("model", "uri"), ("source", "uri")}  # another source is another content
SIZES = ("replicas", "minReplicas", "maxReplicas", "tensor", "pipeline", "podsPerRunner")


def right_edits(kind: str, *, most: int) -> list[Edit]:
    """Of each field of a kind: values that it may have, and its removal. No pool becomes larger than `most`."""
    return [
        (path, value)
        for path, of in _fields(kind)
        for value in (*(v for v in _values(of) if path[-1] not in SIZES or v <= most), None)
    ]


def wrong_edits(kind: str) -> list[Edit]:
    """Of each field: values that few fields may have."""
    return [(path, value) for path, _ in _fields(kind) for value in WRONG]


@cache  # pydantic makes the schemas of all kinds anew in each call of `crds`
def _schemas() -> dict[str, Json]:
    return {crd["spec"]["names"]["kind"]: crd for crd in crds().values()}


def _fields(kind: str) -> list[tuple[Path, Json]]:
    schema = _schemas()[kind]
    return list(_leaves(schema["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]))


def _leaves(schema: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    for name, of in schema.get("properties", {}).items():
        if of.get("type") == "object" and "properties" in of:
            yield from _leaves(of, (*path, name))
        elif (*path, name) not in KEPT:
            yield (*path, name), of


def _values(schema: Json) -> list[Any]:
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return [True, False]
    if schema.get("type") == "integer":
        least = schema.get("minimum", 0)
        return [value for value in (least, least + 1, 3, 128) if least <= value <= min(schema.get("maximum", 128), 128)]
    return []
