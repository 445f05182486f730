"""Values of a tree as JSON, and back into values of a tree: what a recording and a replay are made of.

A value of a class is an object that names its class under "=", so that another tree builds it from its own class of
that name, whatever module that is in. What JSON has not (bytes, enums, sets, infinities, protobuf messages) is an
object with one entry whose name begins with "=". Manifests, being JSON, stay as they are.
"""

import base64
import dataclasses
import gzip
import importlib
import json
import math
import pkgutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from pydantic import BaseModel

PACKAGES = (
    "weft.domain",
    "weft_scheduler.core",
    "weft_supervisor.core",
    "weft_operator.core",
    "weft.wire.codec",
    "weft.artifacts",
)
HEX_BYTES = 4096  # longer ones are written compressed
Json = Any


def write(path: Path, lines: Iterable[Json]) -> None:
    """Write lines of JSON, compressed."""
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def read(paths: Iterable[Path]) -> Iterator[Json]:
    """Read the lines of several files."""
    for path in paths:
        with gzip.open(path, "rt") as file:
            yield from map(json.loads, file)


def own_tree() -> None:
    """Raises AssertionError where the code that is imported is another tree's."""
    import weft

    root = Path(__file__).parents[3]
    assert Path(str(weft.__file__)).is_relative_to(root), f"{weft.__file__} is not of {root}"


def plain(value: Any) -> Json:
    """The value as JSON. What has no JSON (a function) is its class's name."""
    match value:
        case Enum():
            return {"=enum": f"{type(value).__name__}.{value.name}"}
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return value if math.isfinite(value) else {"=float": repr(value)}
        case bytes() | bytearray() | memoryview():
            return _of_bytes(bytes(value))
        case Message():
            data = _of_bytes(value.SerializeToString(deterministic=True))
            return {"=message": [value.DESCRIPTOR.full_name, data]}
        case Mapping():
            if all(isinstance(name, str) and not name.startswith("=") for name in value):
                return {name: plain(item) for name, item in value.items()}
            return {"=map": [[plain(name), plain(item)] for name, item in value.items()]}
        case Set():
            return {"=set": sorted(map(plain, value), key=repr)}
        case _ if (names := fields_of(type(value))) is not None:
            return {"=": type(value).__name__} | {name: plain(getattr(value, name)) for name in names}
        case Sequence():
            return [plain(item) for item in value]
        case BaseModel():
            return {"=other": [type(value).__name__, plain(value.model_dump())]}
        case _:
            return {"=other": type(value).__name__}


def _of_bytes(data: bytes) -> Json:
    if len(data) <= HEX_BYTES:
        return {"=bytes": data.hex()}
    return {"=zlib": base64.b64encode(zlib.compress(data, 1)).decode()}


@cache
def fields_of(of: type) -> Sequence[str] | None:
    """The names of what makes a value of a class; None: it is no class of values."""
    if dataclasses.is_dataclass(of):
        return [field.name for field in dataclasses.fields(of) if field.init]
    return getattr(of, "_fields", None)


@cache
def classes() -> Mapping[str, type]:
    """The classes of values and enums of this tree by their names; of two the one in the earlier package."""
    found: dict[str, type] = {}
    for package in PACKAGES:
        root = importlib.import_module(package)
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            importlib.import_module(info.name)
        for name, module in sorted(sys.modules.items()):
            if name == package or name.startswith(f"{package}."):
                for of in vars(module).values():
                    if isinstance(of, type) and of.__module__ == name:
                        found.setdefault(of.__name__, of)
    return found


def built(data: Json) -> Any:
    """The value of this tree. Raises LookupError for a class that it has not, TypeError for another's fields."""
    match data:
        case {"=": name, **fields}:
            return classes()[name](**{field: built(item) for field, item in fields.items()})
        case {"=enum": name}:
            of, _, member = name.partition(".")
            return getattr(classes()[of], member)
        case {"=float": text}:
            return float(text)
        case {"=bytes": text}:
            return bytes.fromhex(text)
        case {"=zlib": text}:
            return zlib.decompress(base64.b64decode(text))
        case {"=message": [name, content]}:
            return message_class(name).FromString(built(content))
        case {"=map": pairs}:
            return {built(name): built(item) for name, item in pairs}
        case {"=set": items}:
            return frozenset(map(built, items))
        case dict():
            return {name: manifest(item) for name, item in data.items()}
        case list():
            return tuple(map(built, data))
        case _:
            return data


def manifest(data: Json) -> Any:
    """What stands in a mapping: lists stay lists, as in a manifest that was read."""
    return [manifest(item) for item in data] if isinstance(data, list) else built(data)


@cache
def message_class(name: str) -> Any:
    """The class of a protobuf message. Raises KeyError."""
    from google.protobuf import symbol_database

    import weft.wire.v1 as contracts

    for info in pkgutil.iter_modules(contracts.__path__, f"{contracts.__name__}."):
        importlib.import_module(info.name)
    return symbol_database.Default().GetSymbol(name)
