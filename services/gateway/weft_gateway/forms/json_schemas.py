"""JSON schemas of clients in the form of llguidance: OpenAPI's `nullable`, and keywords without enforcement."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from llguidance import LLMatcher

from weft.grammars import first_fault, one_line, parser_limits

Options = Mapping[str, Any]  # options of llguidance for a schema, as `x-guidance`
_ONE_OF = (
    "expected oneOf with schemas that exclude each other, for example by a required property of different const. "
    "Write anyOf, or set strict: false if the parameter has it: oneOf is then taken as anyOf"
)
_INSIDE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")  # a schema
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_SHARED = ("$defs", "definitions")
_NUMBERS = frozenset("enum minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
LONG_NUMBER = re.compile(r"[0-9]{16}")  # 2^53, the first integer rounded by 64-bit floats, has 16 digits
_MAX_INT64 = 2**63 - 1  # a float rounds it, llguidance does not
_ANNOTATIONS = frozenset(("title", "description", "examples", "default", "$comment"))


def with_nulls(text: str) -> str:
    """Rewrite OpenAPI's `nullable` as JSON schema; leave text that is not JSON unchanged."""
    if '"nullable"' not in text:
        return text
    try:
        return json.dumps(allow_null(json.loads(text)))
    except json.JSONDecodeError:
        return text
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error


def allow_null(schema: Any) -> Any:
    """Let a schema take null if it says `nullable: true`, in enum, too: a client that writes both means it."""
    if not isinstance(schema, dict):
        return schema
    typed: dict[str, Any] = {key: _inside(key, value, allow_null) for key, value in schema.items()}
    if not isinstance(takes_null := typed.pop("nullable", False), bool):
        raise ValueError("nullable is true or false")
    if not takes_null:
        return typed
    shared = {key: typed.pop(key) for key in (*_SHARED, "$schema", "$id") if key in typed}
    return {**shared, "anyOf": [typed, {"type": "null"}]}


def drop_annotations(schema: Any) -> Any:
    """Leave out annotations: grammars are bounded, and descriptions take most of a tool's schema."""
    if not isinstance(schema, dict):
        return schema
    return {key: _inside(key, value, drop_annotations) for key, value in schema.items() if key not in _ANNOTATIONS}


def rebase_references(schema: Any, place: str) -> Any:
    """Rewrite the references of a schema moved into a larger schema, at a JSON pointer like `/$defs/a`."""
    if not isinstance(schema, dict):
        return schema
    part: dict[str, Any] = {
        key: _inside(key, value, partial(rebase_references, place=place)) for key, value in schema.items()
    }
    part.pop("$id", None)  # it would change the base of its references
    if isinstance(reference := part.get("$ref"), str) and reference.startswith("#"):
        part["$ref"] = f"#{place}{reference[1:]}"
    return part


def keep_enforceable(schema: Any, options: Options, *, root_name: str = "") -> Any:
    """Return a schema within the keywords of llguidance.

    A lenient schema loses the keywords without enforcement. A strict schema raises ValueError with the first such
    keyword; `root_name`: the name of the schema.
    """
    fault = _find_fault(schema, options, schema)
    if not fault:
        return schema
    enforceable = _drop_faults(schema, options)
    if options["lenient"]:
        return enforceable
    path, part = _find_dropped(schema, enforceable)
    places = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in path)
    place = f"{root_name}{places}".removeprefix(".")
    raise ValueError(f"{place}: {_find_fault(part, options, schema) or fault}" if place else fault)


def _inside(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the schemas inside a keyword of a schema."""
    if key in _NAMED and isinstance(value, dict):
        return {name: change(inner) for name, inner in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [change(inner) for inner in value]
    return change(value) if key in _INSIDE and isinstance(value, dict) else value


def _drop_faults(schema: Any, options: Options) -> Any:
    """Leave out keywords, first in the definitions, because the rest refers to them."""
    root = schema
    for key in _SHARED:
        if isinstance(schema, dict) and isinstance(schema.get(key), dict):
            root = {**root, key: {name: _keep(inner, options, root) for name, inner in schema[key].items()}}
    return _keep(root, options, root)


def _keep(schema: Any, options: Options, root: Any) -> Any:
    if not _find_fault(schema, options, root):
        return schema
    members: dict[str, Any] = {}
    for key, value in schema.items() if isinstance(schema, dict) else ():
        inside = _inside(key, value, partial(_keep, options=options, root=root))
        if not _find_fault({**members, key: inside}, options, root):
            members[key] = inside
    return members


def _find_dropped(schema: Any, enforceable: Any) -> tuple[list[Any], Any]:
    """Return the path to the first part missing in `enforceable`, and the schema around it."""
    steps: Any = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for step, value in steps:
        if isinstance(enforceable, dict) and step not in enforceable:
            return [step], schema
        if value != enforceable[step]:
            path, part = _find_dropped(value, enforceable[step])
            return [step, *path], part
    return [], schema


def _find_fault(schema: Any, options: Options, root: Any) -> str:
    """Return the reason against enforcing a schema; "": none. `root`: the schema of its references."""
    if not isinstance(schema, dict):
        return "" if isinstance(schema, bool) else f"expected a schema, got {json.dumps(schema)[:64]}"
    if (number := next(_rounded(schema), None)) is not None:
        return f"the grammar would round the integer {str(number)[:64]}; leave it out, or use a string"
    if "$ref" in json.dumps(schema):
        schema = {**rebase_references(schema, "/$defs/root"), "$defs": {"root": rebase_references(root, "/$defs/root")}}
    defaults: Any = options
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)
    if error := LLMatcher.validate_grammar(grammar, limits=parser_limits()):
        return explain(error)
    return first_fault(grammar)


def _rounded(schema: Any) -> Iterator[int]:
    """Yield a schema's integers that llguidance rounds or fails on, because it computes with 64-bit floats."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key == "const" or (key in _NUMBERS and not isinstance(value, dict)):
            yield from _rounded_in(value)
        else:
            for inner in value if isinstance(value, list) else [value]:
                yield from _rounded(inner)


def _rounded_in(value: Any) -> Iterator[int]:
    match value:
        case bool():
            pass
        case int() if value != _MAX_INT64 and not (abs(value) <= _MAX_INT64 and int(float(value)) == value):
            yield value
        case list() | dict():
            for inner in value.values() if isinstance(value, dict) else value:
                yield from _rounded_in(inner)
        case _:
            pass


def explain(error: str) -> str:
    """Write llguidance's message about a schema for people."""
    return _ONE_OF if "coerce_one_of" in error else one_line(error.rpartition("\nerror: ")[2])
