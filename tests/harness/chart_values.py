"""The sentence of each value of the chart: `values.schema.json` has it once, with the bounds; the rest is written.

`python -m harness.chart_values` (`make values`) writes the comments of `values.yaml`, whose keys and defaults are its
own, and the table of the chart's README. A sentence that several values share stands at the first of them.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from harness.chart import CHART, COMPONENTS, Json

VALUES, SCHEMA, README = CHART / "values.yaml", CHART / "values.schema.json", CHART / "README.md"
BEGIN, END = "<!-- make values: begin -->\n", "<!-- make values: end -->\n"
ANY = "COMPONENT"  # in the table: each component that has the value
WIDTH = 120
_KEY = re.compile(r"( *)(\w+):( .*)?$")
_BARE = re.compile(r"""((?:"[^"]*"|'[^']*'|[^"'])*?)(?:(?:^|\s+)#.*)?$""")  # a line, and its comment


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart. `shared`: the definition that its sentence comes from, if it has none of its own."""

    path: tuple[str, ...]
    sentence: str
    bounds: str
    shared: str

    @property
    def text(self) -> str:
        return f"{self.sentence} {self.bounds}".strip()


def described() -> dict[tuple[str, ...], Value]:
    """Every value that the schema names, in its order."""
    schema = json.loads(SCHEMA.read_text())
    return {value.path: value for value in _values(schema, schema["definitions"], ())}


def _values(node: Json, definitions: Json, above: tuple[str, ...]) -> Iterator[Value]:
    for name, given in node.get("properties", {}).items():
        path, shared = (*above, name), given.get("$ref", "").rpartition("/")[2]
        whole = {**definitions.get(shared, {}), **given}
        yield Value(path, whole.get("description", ""), bounds(whole), "" if "description" in given else shared)
        yield from _values(whole, definitions, path)


def bounds(node: Json) -> str:
    """What the schema asks of a value, in words; shapes of names and the like are left to it."""
    if "enum" in node:
        unsaid = any(one not in node.get("description", "") for one in node["enum"])
        return f"One of {', '.join(node['enum'])}." if unsaid else ""
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f"{low} to {high}."
    if low is not None:
        return f"At least {low}."
    return f"Above {node['exclusiveMinimum']}, below {node['exclusiveMaximum']}." if "exclusiveMinimum" in node else ""


def with_comments(text: str) -> str:
    """`values.yaml` with each sentence above its value, and no other comment."""
    known, said = described(), set[str]()
    title = json.loads(SCHEMA.read_text())["description"]
    lines, above = [*_wrapped(title, ""), ""], list[str]()
    for line in text.splitlines():
        without = _BARE.match(line)
        bare = without[1] if without else line
        if line.strip() and not bare.strip():
            continue
        found = _KEY.match(bare)
        if found:
            depth = len(found[1]) // 2
            above[depth:] = [found[2]]
            value = known.get(tuple(above))
            if value and value.text not in said:
                said.add(value.text)
                lines += _wrapped(value.text, found[1])
        if bare or lines[-1]:
            lines.append(bare)
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str) -> list[str]:
    width = WIDTH - len(indent) - 2
    return [f"{indent}# {line}" for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)]


def table() -> str:
    """The README's rows: each value without parts, those of pods and volumes once for all components."""
    known, defaults = described(), yaml.safe_load(VALUES.read_text())
    rows, told = ["| value | default | meaning |", "|---|---|---|"], set[tuple[str, ...]]()
    for path, value in known.items():
        if any(other[: len(path)] == path and other != path for other in known):
            continue
        named = tuple(_general(known, path))
        if named in told:
            continue
        told.add(named)
        default = "differs" if _differs(defaults, known, path) else _short(_at(defaults, path))
        rows.append(f"| `{'.'.join(named)}` | {default} | {_cell(value.text)} |")
    return "\n".join(rows) + "\n"


def _general(known: dict[tuple[str, ...], Value], path: tuple[str, ...]) -> Iterator[str]:
    """The path, where a component shares the value with others by the word for all of them."""
    shared = any(known[path[:length]].shared for length in range(2, len(path) + 1))
    yield ANY if path[0] in (*COMPONENTS, "common", "runner") and shared else path[0]
    yield from path[1:]


def _differs(defaults: Json, known: dict[tuple[str, ...], Value], path: tuple[str, ...]) -> bool:
    if next(_general(known, path)) != ANY:
        return False
    others = [defaults[one] for one in COMPONENTS if (one, *path[1:]) in known]
    return len({json.dumps(_at(other, path[1:])) for other in others}) > 1


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
    return node  # pyright: ignore[reportUnknownVariableType]


def _short(default: Any) -> str:
    text = json.dumps(default)
    return f"`{text}`" if len(text) <= 40 else "see values.yaml"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*.DOMAIN", "`*.DOMAIN`").replace('"*"', '`"*"`')


def with_table(text: str) -> str:
    """The README with its table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def main() -> int:
    VALUES.write_text(with_comments(VALUES.read_text()))
    README.write_text(with_table(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
