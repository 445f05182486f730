"""The columns of the resources, as `kubectl get` and `weft get` print them. Standard library only.

The CustomResourceDefinitions have them as printer columns, so that the API server and `weft get` print the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """A printed value of an object: a field at a path, or a field of the condition `condition`."""

    name: str
    path: str
    description: str
    kind: str = "string"
    condition: str = ""
    wide: bool = False  # only with `-o wide`

    @property
    def json_path(self) -> str:
        """The path of the value, in the form of printer columns."""
        return f'.status.conditions[?(@.type=="{self.condition}")].{self.path}' if self.condition else f".{self.path}"

    def value(self, obj: Mapping[str, Any]) -> Any:
        """Return the value of the column for an object, or None if it has none."""
        field: Any = obj
        if self.condition:
            conditions = obj.get("status", {}).get("conditions", ())
            field = next((condition for condition in conditions if condition["type"] == self.condition), {})
        for name in self.path.split("."):
            if not isinstance(field, Mapping) or name not in field:
                return None
            field = field[name]  # pyright: ignore[reportUnknownVariableType]
        return field  # pyright: ignore[reportUnknownVariableType]


_AGE = Column("Age", "metadata.creationTimestamp", "The age since creation.", "date")
COLUMNS: Mapping[str, Sequence[Column]] = {
    "LoRAAdapter": (
        Column("Pool", "spec.poolRef.name", "The pool of the adapter."),
        Column("Model", "status.modelName", "The name that clients send as model."),
        Column("Ready", "status", "Whether clients can call it.", condition="Ready"),
        Column("Reason", "reason", "Why, or why not.", condition="Ready"),
        Column("Unavailable", "status.unavailableRunners", "Ready runners that do not serve the adapter.", "integer"),
        Column("Tier", "spec.tier", "The minimum tier on every ready runner.", wide=True),
        Column("Pinned", "spec.pinned", "Whether the adapter stays on the device.", "boolean", wide=True),
        Column("Rank", "status.rank", "The largest rank of any module.", "integer", wide=True),
        Column("Digest", "status.digest", "The digest of the content.", wide=True),
        Column("Canary", "status.canary.phase", "The phase of the canary.", wide=True),
        Column("Source", "reason", "Fetched, or the fault of the source.", condition="Fetched", wide=True),
        _AGE,
    ),
    "ServingPool": (
        Column("Model", "spec.model.uri", "The URI of the base model."),
        Column("Desired", "status.desiredReplicas", "Desired runners.", "integer"),
        Column("Ready", "status.readyReplicas", "Runners that take requests.", "integer"),
        Column("Adapters", "status.adapters.ready", "Adapters that clients can call.", "integer"),
        Column("Available", "status", "Whether it serves.", condition="Available"),
        Column("Reason", "reason", "Why, or why not.", condition="Available"),
        Column("SLO", "status.slo.attainedPercent", "Percent of requests within spec.slo.", "integer", wide=True),
        Column("Prompt", "status.phases.prompt", "Runners for prompts.", "integer", wide=True),
        Column("Token", "status.phases.token", "Runners for the tokens after prompts.", "integer", wide=True),
        Column("Mixed", "status.phases.mixed", "Runners for both, of a split pool.", "integer", wide=True),
        Column("Digest", "status.baseDigest", "The digest of the base model.", wide=True),
        _AGE,
    ),
    "APIKey": (
        Column("Scope", "spec.scope", "The rights of the key."),
        Column("Key", "status.keyID", "The id of the key in force."),
        Column("Secret", "status.secretName", "The Secret of the key."),
        Column("Ready", "status", "Whether gateways take it.", condition="Ready"),
        Column("Reason", "reason", "Why, or why not.", condition="Ready"),
        Column("Expires", "status.expiresAt", "The time from which the key is refused.", wide=True),
        Column("Rotated", "status.lastRotated", "The time of the last rotation.", "date", wide=True),
        _AGE,
    ),
}


def columns_of(kind: str, *, wide: bool) -> Sequence[Column]:
    """Return the columns of a kind after NAME, in order. Without `wide`, leave out wide columns."""
    return [column for column in COLUMNS[kind] if wide or not column.wide]
