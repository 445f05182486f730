"""The sentence of each value of the chart: `values.schema.json` has it once, with the bounds; the rest is written.

`python -m harness.chart_values` (`make values`) writes the comments of `values.yaml`, whose keys and defaults are its
own, and the table of the chart's README. A sentence that several values share stands at the first of them.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from harness.chart import CHART, COMPONENTS, PROFILES, Json, values_of
from harness.installation import merged

VALUES, SCHEMA, README = CHART / "values.yaml", CHART / "values.schema.json", CHART / "README.md"
MARKS = "<!-- make values: {} -->\n", "<!-- make values: end of {} -->\n"
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
    """Return every value that the schema names, in its order."""
    schema = json.loads(SCHEMA.read_text())
    return {value.path: value for value in _values(schema, schema["definitions"], ())}


def _values(node: Json, definitions: Json, above: tuple[str, ...]) -> Iterator[Value]:
    for name, given in node.get("properties", {}).items():
        path, shared = (*above, name), given.get("$ref", "").rpartition("/")[2]
        whole = {**definitions.get(shared, {}), **given}
        yield Value(path, whole.get("description", ""), bounds(whole), "" if "description" in given else shared)
        if "$comment" not in whole:  # fields of Kubernetes' own have their sentences there
            yield from _values(whole, definitions, path)


def bounds(node: Json) -> str:
    """Say in words what the schema asks of a value; shapes of names and the like are left to it."""
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
    """Return `values.yaml` with each sentence above its value, and no other comment."""
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
    """Return the README's rows: each value without parts, those of pods and volumes once for all components."""
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


def with_tables(text: str) -> str:
    """Return the README with its tables as they are now."""
    for name, rows in (("profiles", profiles()), ("table", table())):
        begin, end = (mark.format(name) for mark in MARKS)
        before, _, rest = text.partition(begin)
        text = before + begin + rows + end + rest.partition(end)[2]
    return text


def profiles() -> str:
    """Say what the default values and each profile give, by their values alone."""
    default = yaml.safe_load(VALUES.read_text())
    columns = {"default": default} | {
        name.removeprefix("profile-"): merged(default, yaml.safe_load(values_of(name).read_text())) for name in PROFILES
    }
    rows = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for title, said in PROFILE_ROWS.items():
        rows.append(f"| {title} | {' | '.join(said(values) for values in columns.values())} |")
    return "\n".join(rows) + "\n"


def _pods(values: Json, component: str) -> int:
    scaled = values[component].get("autoscaling", {})
    return scaled["minReplicas"] if scaled.get("enabled") else values[component].get("replicas", 1)


def _gateways(values: Json) -> str:
    scaled = values["gateway"]["autoscaling"]
    return f"{scaled['minReplicas']} to {scaled['maxReplicas']}" if scaled["enabled"] else str(_pods(values, "gateway"))


def _requests(values: Json) -> str:
    """Sum the requests of all pods, at their fewest."""
    asked = [(_pods(values, one), (values[one]["resources"] or {}).get("requests", {})) for one in COMPONENTS]
    cpu = sum(count * _cores(found.get("cpu", 0)) for count, found in asked)
    memory = sum(count * _gib(found.get("memory", "0Gi")) for count, found in asked)
    return f"{cpu:g} cores, {memory:.1f} GiB" if cpu else "none"


def _cores(quantity: str | int) -> float:
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _gib(quantity: str) -> float:
    return float(quantity[:-2]) / {"Mi": 1024, "Gi": 1}[quantity[-2:]]


def _volumes(values: Json) -> str:
    shared = values["database"]["mode"] == "postgresql"
    unused = {"supervisor"} if shared else set[str]()
    kept = [
        f"{one} {values[one]['persistence']['size']}" + (f" x {count}" if (count := _pods(values, one)) > 1 else "")
        for one in COMPONENTS
        if one not in unused and values[one].get("persistence", {}).get("enabled")
    ]
    return ", ".join(kept) or "none: what is kept goes with its pod"


def _several(values: Json) -> str:
    return ", ".join(one for one in COMPONENTS if _pods(values, one) > 1) or "nothing"


def _on(*path: str) -> Callable[[Json], str]:
    return lambda values: "yes" if _at(values, path) else "no"


PROFILE_ROWS: dict[str, Callable[[Json], str]] = {
    "between processes": lambda values: {"none": "plain text", "selfSigned": "TLS, a CA by Helm"}.get(
        values["tls"]["mode"], "TLS, cert-manager"
    ),
    "API keys": _on("gateway", "auth"),
    "database": lambda values: values["database"]["mode"],
    "gateways": _gateways,
    "runs on through a lost node": _several,
    "requests of the control plane": _requests,
    "volumes": _volumes,
    "network policies": _on("networkPolicy", "enabled"),
    "alerts, metrics, dashboards": _on("prometheusRule", "enabled"),
}


def main() -> int:
    VALUES.write_text(with_comments(VALUES.read_text()))
    README.write_text(with_tables(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
