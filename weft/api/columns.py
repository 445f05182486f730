"""The columns of the resources, as `kubectl get` and `weft get` print them. Standard library only.

The CustomResourceDefinitions have them as printer columns, so that the API server prints what `weft get` prints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """One value of an object: a field by its path, or a field of the condition `condition`."""

    name: str
    path: str
    description: str
    kind: str = "string"
    condition: str = ""
    wide: bool = False  # only with `-o wide`

    @property
    def json_path(self) -> str:
        """The path of the value, in the form that printer columns use."""
        return f'.status.conditions[?(@.type=="{self.condition}")].{self.path}' if self.condition else f".{self.path}"

    def value(self, obj: Mapping[str, Any]) -> Any:
        """The value in this object; None if it has none."""
        field: Any = obj
        if self.condition:
            conditions = obj.get("status", {}).get("conditions", ())
            field = next((condition for condition in conditions if condition["type"] == self.condition), {})
        for name in self.path.split("."):
            if not isinstance(field, Mapping) or name not in field:
                return None
            field = field[name]  # pyright: ignore[reportUnknownVariableType]
        return field  # pyright: ignore[reportUnknownVariableType]


_AGE = Column("Age", "metadata.creationTimestamp", "Since it was created.", "date")
COLUMNS: Mapping[str, Sequence[Column]] = {
    "LoRAAdapter": (
        Column("Pool", "spec.poolRef.name", "The pool that serves it."),
        Column("Model", "status.modelName", "What clients send as model."),
        Column("Ready", "status", "Whether clients can call it.", condition="Ready"),
        Column("Reason", "reason", "Why, or why not.", condition="Ready"),
        Column("Unavailable", "status.unavailableRunners", "Ready runners that do not serve it.", "integer"),
        Column("Tier", "spec.tier", "The least that every ready runner holds it in.", wide=True),
        Column("Pinned", "spec.pinned", "Whether it stays on the device.", "boolean", wide=True),
        Column("Rank", "status.rank", "The largest rank of any module.", "integer", wide=True),
        Column("Digest", "status.digest", "The identity of its content.", wide=True),
        Column("Canary", "status.canary.phase", "What has become of its canary.", wide=True),
        Column("Source", "reason", "Fetched, or what is wrong with it.", condition="Fetched", wide=True),
        _AGE,
    ),
    "ServingPool": (
        Column("Model", "spec.model.uri", "Where the base model is."),
        Column("Desired", "status.desiredReplicas", "Runners wanted.", "integer"),
        Column("Ready", "status.readyReplicas", "Runners that take requests.", "integer"),
        Column("Adapters", "status.adapters.ready", "Adapters that clients can call.", "integer"),
        Column("Available", "status", "Whether it serves.", condition="Available"),
        Column("Reason", "reason", "Why, or why not.", condition="Available"),
        Column("SLO", "status.slo.attainedPercent", "Percent that met spec.slo.", "integer", wide=True),
        Column("Prompt", "status.phases.prompt", "Runners for prompts.", "integer", wide=True),
        Column("Token", "status.phases.token", "Runners for the tokens after them.", "integer", wide=True),
        Column("Mixed", "status.phases.mixed", "Runners for both, of a split pool.", "integer", wide=True),
        Column("Digest", "status.baseDigest", "The identity of the base model.", wide=True),
        _AGE,
    ),
    "APIKey": (
        Column("Scope", "spec.scope", "What it may do."),
        Column("Key", "status.keyID", "The id of the key in force."),
        Column("Secret", "status.secretName", "Where the key is."),
        Column("Ready", "status", "Whether gateways take it.", condition="Ready"),
        Column("Reason", "reason", "Why, or why not.", condition="Ready"),
        Column("Expires", "status.expiresAt", "When it is refused.", wide=True),
        Column("Rotated", "status.lastRotated", "Since when it is this key.", "date", wide=True),
        _AGE,
    ),
}


def columns_of(kind: str, *, wide: bool) -> Sequence[Column]:
    """The columns of a kind after NAME, in their order."""
    return [column for column in COLUMNS[kind] if wide or not column.wide]
