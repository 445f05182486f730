"""Manifests that only other objects forbid, and such as may pass: for the webhook, the local API and the pure rules.

Each case of `conflicting_manifests.jsonl` is a small world of its own (`there`, stored in this order), a wish, and what
has to be said to it. The namespaces are PLATFORM, whose pools others use, and TENANT; a test with namespaces of its own
puts those instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.bad_manifests import Manifest, adapter, pool
from harness.json_lines import cases

PLATFORM, TENANT = "platform", "tenant"


@dataclass(frozen=True)
class Wish:
    """An object that is wanted in a world; an update where the world has it already."""

    name: str
    there: tuple[Manifest, ...]
    wish: Manifest
    reason: str = ""  # empty: it passes
    field: str = ""
    says: str = ""
    warns: str = ""


def base(**spec: Any) -> Manifest:
    """The platform's pool, whose model is `base`, open to everybody."""
    return pool("base", PLATFORM, **{"model": {"name": "base", "uri": "file:m"}, "allowedNamespaces": ["*"]} | spec)


def lora(name: str, namespace: str = TENANT, **spec: Any) -> Manifest:
    """A tenant's adapter in that pool."""
    return adapter(name, namespace, **{"poolRef": {"name": "base", "namespace": PLATFORM}} | spec)


def slots(number: int) -> Manifest:
    return {"advanced": {"maxAdapters": number}}


def _manifest(row: dict[str, Any]) -> Manifest:
    """Make a case's object: `base`, or a `lora`, `pool` or `adapter` of this name, with these fields of its spec."""
    if "base" in row:
        made = base(**row["base"])
    else:
        ((kind, make),) = (pair for pair in (("lora", lora), ("pool", pool), ("adapter", adapter)) if pair[0] in row)
        made = make(row["name"], row.get("namespace", TENANT), **row[kind])
    if "rank" in row:  # as after its content was read
        made["status"] = {"rank": row["rank"]}
    return _going(made) if row.get("going") else made


def _going(manifest: Manifest) -> Manifest:
    """Deleted, and kept by a finalizer."""
    return manifest | {"metadata": manifest["metadata"] | {"finalizers": ["serving.weft.dev/unload"]}, "deleted": True}


def _wishes() -> Iterator[Wish]:
    for row in cases(Path(__file__).with_name("conflicting_manifests.jsonl")):
        world: dict[str, Any] = {"there": tuple(map(_manifest, row["there"])), "wish": _manifest(row["wish"])}
        yield Wish(**row | world)


WISHES = tuple(_wishes())
REFUSED, PASSING = (tuple(wish for wish in WISHES if bool(wish.reason) is refused) for refused in (True, False))


def in_namespaces(value: Any, names: Mapping[str, str]) -> Any:
    """The same world, or text about it, in other namespaces."""
    if isinstance(value, str):
        return _replaced(value, names)
    if isinstance(value, dict):
        return {key: in_namespaces(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_namespaces(item, names) for item in value)
    return value


def _replaced(text: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        text = (
            other
            if text == name
            else text.replace(f"{name}/", f"{other}/").replace(f"namespace {name}", f"namespace {other}")
        )
    return text
