"""Edits of fields that a person could make: the fields and their values come from the CustomResourceDefinitions."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from weft.api.crd import crds

Json = dict[str, Any]
Path = tuple[str, ...]
Edit = tuple[Path, Any]  # a field of the spec and its value; None: without the field
WRONG = ("x y", -1, [], {"unknown": 1}, True, "99999999999")
KEPT = {("model", "uri"), ("source", "uri")}  # another source is another content
WHOLE = ("runnerGroups", 0, "template")  # its fields are those of the pool's template, in whose place it stands
TEXTS = (
    "aa", "bb", "file:beside", "file:next", "hf:aa/bb", "s3://aaa/bb", "https://aa.io/bb", "1h", "2h", "/aa", "/bb",
    "http://aa", f"sha256:{'a' * 64}", f"sha256:{'c' * 64}", "2126-01-01T00:00:00Z", "2127-01-01T00:00:00Z",
)  # fmt: skip
AMOUNTS = ("1Gi", "2Gi")
SIZES = ("replicas", "minReplicas", "maxReplicas", "tensor", "pipeline", "podsPerRunner")


def right_edits(kind: str, *, most: int) -> list[Edit]:
    """List for each field of a kind values that it may have, and its removal. No pool becomes larger than `most`."""
    return [
        (path, value)
        for path, of in _fields(kind)
        for value in (*(v for v in _values(of) if path[-1] not in SIZES or v <= most), None)
    ]


def wrong_edits(kind: str) -> list[Edit]:
    """List for each field values that few fields may have."""
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


# ---------------------------------------------------------------- fields that nobody reads

Place = tuple[str | int, ...]  # a path with the first entry of lists


def unread(kind: str, base: Json, needs: Mapping[Place, Json], outcome: Callable[[Json], str | None]) -> list[str]:
    """Find the fields of which no two values (or one and none) have different outcomes, everything else equal.

    `base` is a spec, `needs` what fields below a place need beside it. `outcome`: None where a spec is refused.
    """
    spec = _schemas()[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    found = list[str]()
    for place, of in _places(spec):
        start = copy.deepcopy(base)
        for prefix in sorted(needs, key=len):
            if place[: len(prefix)] == prefix:
                _merge(start, needs[prefix])
        made = (outcome(_put(start, place, value, spec)) for value in (None, *_samples(of)))
        taken = (one for one in made if one is not None)
        first = next(taken, None)
        if all(one == first for one in taken):
            found.append(".".join(map(str, place)))
    return found


def _places(schema: Json, place: Place = ()) -> Iterator[tuple[Place, Json]]:
    if place != WHOLE and schema.get("type") == "object" and "properties" in schema:
        for name, of in schema["properties"].items():
            yield from _places(of, (*place, name))
    elif schema.get("type") == "array" and "properties" in schema["items"]:
        yield from _places(schema["items"], (*place, 0))
    else:
        yield place, schema


def _samples(of: Json) -> Sequence[Any]:
    if "properties" in of:
        return [{"image": "aa"}]
    if "additionalProperties" in of:
        return [{"aa": value} for value in _samples(of["additionalProperties"])]
    if of.get("x-kubernetes-preserve-unknown-fields"):
        return [{"aa": 1}, {"aa": 2}]
    if of.get("type") == "array":
        return [[value] for value in _samples(of["items"])]
    if "x-kubernetes-int-or-string" in of:
        return [*AMOUNTS, 2, 3]
    if of.get("type") == "number":
        return [0.5, 0.7]
    if of.get("type") == "integer":
        return [value for value in (*_values(of), of.get("maximum", 0)) if value <= 128]
    return _values(of) or TEXTS


def _put(spec: Json, place: Place, value: Any, schema: Json) -> Json:
    """Return the spec with that value, or without the field; what is required on the way is there."""
    made: Any = copy.deepcopy(spec)
    at = made
    for index, step in enumerate(place[:-1]):
        if isinstance(step, str):
            schema = schema["properties"][step]
            at = at.setdefault(step, [] if isinstance(place[index + 1], int) else {})
        else:
            schema = schema["items"]
            at[:] = at or [{}]
            at = at[0]
        if isinstance(at, dict):
            for name in schema.get("required", ()):
                at.setdefault(name, _least(schema["properties"][name]))
    if value is None:
        at.pop(place[-1], None)
    else:
        at[place[-1]] = value
    return made


def _least(schema: Json) -> Any:
    """Return a value with what is required in it."""
    if "properties" in schema:
        return {name: _least(schema["properties"][name]) for name in schema.get("required", ())}
    if schema.get("type") == "array":
        return [_least(schema["items"])]
    return _samples(schema)[0]


def _merge(into: Json, of: Json) -> None:
    for name, value in of.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = copy.deepcopy(value)
