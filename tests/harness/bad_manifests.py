"""Manifests that have to be refused: by the API server through the CRDs, and by the local API, for the same reason.

The cases of `bad_manifests.jsonl` say where (`field`) and what (`says`), and both judges are held to both. Plain
violations of a schema are told by the API server in words of its own that no CRD can change; those cases name a
wording, and `WORDINGS` has both texts. The cases of `good_manifests.jsonl` are on the right side of each bound.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.json_lines import cases

Manifest = dict[str, Any]

# What a plain schema violation is called here, and what the API server calls it.
WORDINGS: dict[str, tuple[str, str]] = {
    "missing": ("Field required", "Required value"),
    "too small": ("greater than or equal to", "greater than or equal to"),
    "too large": ("less than or equal to", "less than or equal to"),
    "one of": ("Input should be", "Unsupported value"),
    "no integer": ("valid integer", "must be of type integer"),
    "no boolean": ("valid boolean", "must be of type boolean"),
    "no string": ("valid string", "must be of type string"),
    "no object": ("valid dictionary", "must be of type object"),
    "too long": ("String should have at most", "Too long"),
    "too short": ("String should have at least", "should be at least"),
    "too many": ("at most", "must have at most"),
    "too few": ("at least", "should have at least"),
    "pattern": ("should match", "should match"),
    "no quantity": ("expected a quantity", "should match"),
    "no amount": ("expected a quantity", "must be of type"),
    "negative": ("expected a quantity", "greater than or equal to 0"),
    "twice": ("two entries have the same name", "Duplicate value"),
    "unknown field": ("unknown field", "unknown field"),
    # The API server checks metadata.name itself before any rule of the CRD.
    "name": ("RFC 1123 label", "RFC 1123"),
}


@dataclass(frozen=True)
class Bad:
    """One refusal. With `before`, `wish` is an update of it."""

    name: str
    field: str
    says: str
    wish: Manifest
    before: Manifest | None = None

    @property
    def here(self) -> str:
        """What the local API's message contains."""
        return WORDINGS.get(self.says, (self.says, self.says))[0]

    @property
    def there(self) -> str:
        """What the API server's message contains."""
        return WORDINGS.get(self.says, (self.says, self.says))[1]


def manifest(kind: str, name: str, spec: Manifest, namespace: str = "default") -> Manifest:
    """A whole object."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "serving.weft.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def pool(name: str = "tiny", namespace: str = "default", **spec: Any) -> Manifest:
    """A ServingPool that is in order but for `spec`."""
    return manifest("ServingPool", name, {"model": {"uri": "file:models/tiny"}} | spec, namespace)


def adapter(name: str = "upper", namespace: str = "default", **spec: Any) -> Manifest:
    """A LoRAAdapter that is in order but for `spec`."""
    whole = {"poolRef": {"name": "tiny"}, "source": {"uri": "file:adapters/upper"}} | spec
    return manifest("LoRAAdapter", name, whole, namespace)


def _wish(row: dict[str, Any]) -> Manifest:
    """A case's object: a pool or an adapter that is in order but for these fields of its spec, or a whole manifest."""
    if "pool" in row:
        return pool(**row["pool"])
    return adapter(**row["adapter"]) if "adapter" in row else row["manifest"]


def _bad(row: dict[str, Any]) -> Bad:
    before = _wish(row["before"]) if "before" in row else None
    return Bad(row["name"], row["field"], row["says"], _wish(row), before)


BAD = tuple(map(_bad, cases(Path(__file__).with_name("bad_manifests.jsonl"))))
GOOD = {row["name"]: _wish(row) for row in cases(Path(__file__).with_name("good_manifests.jsonl"))}
