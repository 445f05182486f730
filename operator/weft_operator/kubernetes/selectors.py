"""Label selectors in the API's text form. Pure.

`a=b,c!=d,e in (f,g),h notin (i),j,!k`: requirements that all have to hold. A label that is not there is unequal to
everything, as the API server has it.
"""

import re
from collections.abc import Callable, Mapping

Labels = Mapping[str, str]
Requirement = Callable[[Labels], bool]

KEY = r"[A-Za-z0-9][A-Za-z0-9._/-]*"
VALUE = r"[A-Za-z0-9._-]*"
SETS = re.compile(rf"({KEY})\s+(in|notin)\s+\(([^()]*)\)")
EQUALS = re.compile(rf"({KEY})\s*(=|==|!=)\s*({VALUE})")
EXISTS = re.compile(rf"(!?)\s*({KEY})")
COMMA = re.compile(r",(?![^(]*\))")  # not one inside of parentheses


class BadSelector(ValueError):
    """The text is no label selector."""


def parse_selector(text: str) -> Requirement:
    """The requirement that labels have to meet. Raises BadSelector."""
    requirements = [_requirement(part.strip()) for part in COMMA.split(text)] if text.strip() else []
    return lambda labels: all(holds(labels) for holds in requirements)


def _requirement(text: str) -> Requirement:
    if match := SETS.fullmatch(text):
        key, operator, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        return lambda labels: (labels.get(key) in values) == (operator == "in")
    if match := EQUALS.fullmatch(text):
        key, operator, value = match.groups()
        return lambda labels: (labels.get(key) == value) == (operator != "!=")
    if match := EXISTS.fullmatch(text):
        absent, key = match.groups()
        return lambda labels: (key in labels) != bool(absent)
    raise BadSelector(f"{text[:100]!r} is no label requirement")
