"""The base of every typed object: strict, frozen, camelCase outside, and helpful about misspelt names.

An unknown field is refused with the nearest known name: a typo must not silently become a default.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

MAX_ERRORS = 50  # of an object in a report: finding a better name for each of 20,000 fields would take half a minute
LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
OBJECT_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
MODEL_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$"
VERSION_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
NAMESPACES_PATTERN = r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$"  # a namespace, or all of them
_HOST = r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?"
_REST = r"[^\x00-\x1f\x7f]"
URI_PATTERN = (
    rf"^(file:{_REST}+"
    rf"|pvc:[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/{_REST}*)?"
    rf"|hf:[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(/{_REST}*)?"
    rf"|s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/{_REST}*)?"
    rf"|oci://{_HOST}/[a-z0-9._/-]*[a-z0-9](:[A-Za-z0-9_][A-Za-z0-9._-]*)?(@sha256:[0-9a-f]{{64}})?"
    rf"|https://{_HOST}(/[^?#\x00-\x20\x7f]*)?"
    r"|depot:sha256:[0-9a-f]{64})$"
)
ENDPOINT_PATTERN = r"^https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
DURATION_PATTERN = r"^([0-9]{1,6}(h|m|s))+$"
# For the commonest mistakes. The API server has the same texts (a CEL rule stands for the pattern).
PATTERN_HELP = {
    LABEL_PATTERN: "only lower-case letters, digits and '-' inside are allowed (RFC 1123 label)",
    NAMESPACES_PATTERN: "write the name of a namespace, or '*' for all of them",
    OBJECT_NAME_PATTERN: "only lower-case letters, digits and, inside, '-' and '.' are allowed (RFC 1123 subdomain)",
    MODEL_NAME_PATTERN: "only letters, digits and . _ : / - inside are allowed",
    VERSION_NAME_PATTERN: "only letters, digits and, inside, '.', '_' and '-' are allowed",
    URI_PATTERN: "write file:PATH, pvc:CLAIM/PATH, hf:ORG/NAME, s3://BUCKET/PREFIX, "
    "oci://HOST/REPOSITORY:TAG, https://HOST/FOLDER or depot:sha256:...",
    ENDPOINT_PATTERN: "write http://HOST[:PORT] or https://HOST[:PORT], without a path",
    DURATION_PATTERN: "write hours, minutes and seconds as in 1h30m, 5m or 90s",
    DIGEST_PATTERN: "expected a digest: 'sha256:' and 64 lower-case hex digits",
}

# Fields of earlier versions, and the remedy.
_CONVERT = "`weft convert -f FILE` rewrites manifests of an earlier form"
_NAMES = ("scheduler", "kvCache", "offload", "kvAcrossClasses", "maxAdapters", "wakeSeconds")
EARLIER: dict[str, str] = dict.fromkeys(_NAMES, _CONVERT)

# RFC 1123 label: names become parts of other names (processes, services), so the short form holds for all of them.
Label = Annotated[str, Field(pattern=LABEL_PATTERN, max_length=63)]
NamespaceOrAll = Annotated[str, Field(pattern=NAMESPACES_PATTERN, max_length=63)]
# Names of foreign objects: a Secret, a PriorityClass.
ObjectName = Annotated[str, Field(pattern=OBJECT_NAME_PATTERN, max_length=253)]
# The `model` of requests.
ModelName = Annotated[str, Field(pattern=MODEL_NAME_PATTERN, max_length=253)]
# The name of an adapter's content, after `@` in a request's model. A digest is not a name.
VersionName = Annotated[str, Field(pattern=VERSION_NAME_PATTERN, max_length=63)]
Uri = Annotated[str, Field(pattern=URI_PATTERN, max_length=2048)]
Endpoint = Annotated[str, Field(pattern=ENDPOINT_PATTERN, max_length=262)]
DigestText = Annotated[str, Field(pattern=DIGEST_PATTERN, max_length=71)]
TokenIds = Annotated[tuple[Annotated[int, Field(strict=True, ge=0)], ...], Field(max_length=128)]
# As Kubernetes writes a metav1.Duration, in whole seconds.
DurationText = Annotated[str, Field(pattern=DURATION_PATTERN, max_length=21)]


def duration_s(text: str) -> int:
    """Return the seconds of a DurationText."""
    seconds = {"h": 3600, "m": 60, "s": 1}
    return sum(int(count) * seconds[unit] for count, unit in re.findall(r"([0-9]+)([hms])", text))


def _aware(value: object) -> object:
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)  # YAML drops the zone of times written in UTC
    return value


def _rfc3339(value: datetime) -> str:
    precision = "microseconds" if value.microsecond else "seconds"
    return value.isoformat(timespec=precision).replace("+00:00", "Z")


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("a time outside of the calendar") from error


Timestamp = Annotated[
    datetime, BeforeValidator(_aware), AfterValidator(_in_utc), PlainSerializer(_rfc3339, return_type=str)
]


@dataclass(frozen=True, slots=True)
class Rule:
    """A constraint across fields, or beyond the type of a field.

    `field` (as users write it, inside the object) is the path to report. `cel` is evaluated by the API server with the
    object as `self` (None: its schema has it already). `holds` checks the typed object here. Both mean the same. A test
    compares them on the table of bad manifests.
    """

    field: str
    message: str
    cel: str | None
    holds: Callable[[Any], bool]


def unique_names(field: str, entries: Callable[[Any], Iterable[Any] | None]) -> Rule:
    """Return the rule that entries of a list have different names. In the schema it is `x-kubernetes-list-type:
    map`."""

    def holds(value: Any) -> bool:
        names = [entry.name for entry in entries(value) or ()]
        return len(names) == len(set(names))

    return Rule(field, "two entries have the same name", None, holds)


class ApiModel(BaseModel):
    """The base of API objects. Unknown fields are refused with the nearest name. The text below a field documents
    it."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_nearest(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            made = handler(data)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            details = [_detail(cls, item) for item in errors[:MAX_ERRORS]]
            if len(errors) > MAX_ERRORS:
                details.append(_error("more", f"{len(errors) - MAX_ERRORS} more problems", (), {}))
            raise ValidationError.from_exception_data(cls.__name__, details) from error
        if broken := [rule for rule in cls.rules if not rule.holds(made)]:
            details = [_error("rule", rule.message, tuple(rule.field.split(".")), {}) for rule in broken]
            raise ValidationError.from_exception_data(cls.__name__, details)
        return made

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the rules to the schema as CEL, for the CRDs."""
        schema = handler(core_schema)
        validations = [
            {"rule": rule.cel, "message": rule.message, "fieldPath": f".{rule.field}"} for rule in cls.rules if rule.cel
        ]
        if validations:
            resolved = handler.resolve_ref_schema(schema)
            resolved["x-kubernetes-validations"] = [*resolved.get("x-kubernetes-validations", []), *validations]
        return schema

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate as pydantic does, but accept only the names that users write: `maxRank`, not `max_rank`."""
        names: dict[str, Any] = {"by_alias": True, "by_name": False}
        return super().model_validate(obj, **{**names, **options})

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types with camelCase names, without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def names_of(model: type[BaseModel]) -> list[str]:
    """Return the names of the fields as users write them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def did_you_mean(name: str, names: list[str]) -> str:
    """Return `did you mean 'x'?`, or the list of known names if none is close."""
    lower = {candidate.lower(): candidate for candidate in names}
    if close := difflib.get_close_matches(name[:100].lower(), list(lower)):
        return f"did you mean {lower[close[0]]!r}?"
    return f"there are: {', '.join(names)}"


def _error(kind: Any, text: Any, loc: tuple[str | int, ...], rejected: Any) -> InitErrorDetails:
    """Return an error with a literal `text`, not a template."""
    return InitErrorDetails(type=PydanticCustomError(kind, text), loc=loc, input=rejected)


def _detail(model: type[BaseModel], item: Any) -> InitErrorDetails:
    """Convert an error of pydantic. Replace its text if it does not name the correction."""
    kind, loc, text = str(item["type"]), item["loc"], str(item["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden" and len(loc) == 1:
        name = str(loc[0])
        help_ = EARLIER.get(name) or did_you_mean(name, names_of(model))
        kind, text = "unknown_field", f"unknown field {name[:100]!r}; {help_}"
    elif kind == "tuple_type":
        earlier = f"; {_CONVERT}" if loc[-1:] == ("allowedNamespaces",) else ""
        text = f"expected a list{earlier}"
    elif (pattern := item.get("ctx", {}).get("pattern")) in PATTERN_HELP:
        text = PATTERN_HELP[pattern]
    return _error(kind, text, loc, item["input"])
