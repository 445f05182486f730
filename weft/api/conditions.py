"""Conditions: what is true of an object, since when, and why not. Pure; `now` comes from the caller."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from weft.api.fields import ApiModel, Timestamp
from weft.domain.text import sanitize

ConditionStatus = Literal["True", "False", "Unknown"]
MAX_MESSAGE_CHARS = 4096


class Condition(ApiModel):
    """One observation. Reasons are CamelCase and API (`weft.api.reasons`)."""

    type: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]*$", max_length=316)]
    """What is observed, for example Ready."""
    status: ConditionStatus
    """True, False or Unknown."""
    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """metadata.generation of the spec that was observed."""
    last_transition_time: Timestamp
    """When status last changed."""
    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]*$", max_length=1024)]
    """Why, as one CamelCase word for programs."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Why, for people, and what to do."""


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=16,
        exclude_if=lambda value: not value,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


def find_condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of this type."""
    return next((condition for condition in conditions if condition.type == kind), None)


def is_true(conditions: Iterable[Condition], kind: str) -> bool:
    """Whether the condition is there and True."""
    condition = find_condition(conditions, kind)
    return condition is not None and condition.status == "True"


def set_condition(
    conditions: Iterable[Condition],
    kind: str,
    status: ConditionStatus,
    reason: str,
    message: str,
    *,
    generation: int | None,
    now: datetime,
) -> tuple[Condition, ...]:
    """The conditions with this one set; the others and the order stay. lastTransitionTime changes only with `status`.

    Setting what is there already returns equal conditions, so that nothing is written to the API server.
    """
    before = tuple(conditions)
    old = find_condition(before, kind)
    since = old.last_transition_time if old and old.status == status else now.replace(microsecond=0)
    new = Condition(
        type=kind,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=reason,
        message=sanitize_message(message),
    )
    if old is None:
        return (*before, new)
    return tuple(new if condition.type == kind else condition for condition in before)


def sanitize_message(message: str) -> str:
    """A message as it is stored: printable, and at most MAX_MESSAGE_CHARS."""
    text = sanitize(message[: MAX_MESSAGE_CHARS + 1])
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."
