"""Rules that the type of one field cannot express: in CEL for the API server, in Python for all others."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """A constraint on an object. `field` (as users write it, inside the object) is the path of a breach.

    `cel` is evaluated by the API server with the object as `self` (None: its schema has it already), `holds` here with
    the typed object. Both mean the same; a test compares them on the table of bad manifests.
    """

    field: str
    message: str
    cel: str | None
    holds: Callable[[Any], bool]


def validations(rules: tuple[Rule, ...]) -> list[dict[str, str]]:
    """As `x-kubernetes-validations`."""
    return [{"rule": rule.cel, "message": rule.message, "fieldPath": f".{rule.field}"} for rule in rules if rule.cel]


def unique_names(field: str, entries: Callable[[Any], Iterable[Any] | None]) -> Rule:
    """A list whose entries have different names; in the schema it is `x-kubernetes-list-type: map`."""

    def holds(value: Any) -> bool:
        names = [entry.name for entry in entries(value) or ()]
        return len(names) == len(set(names))

    return Rule(field, "two entries have the same name", None, holds)
