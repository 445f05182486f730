"""Every value of the chart has one sentence, and the schema, `values.yaml` and the README agree."""

import json
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import yaml

from harness import chart_values
from harness.chart import Json
from harness.chart_values import README, SCHEMA, VALUES, bounds, described, profiles, with_comments, with_tables


def test_every_value_has_a_sentence() -> None:
    without = [value.path for value in described().values() if not re.fullmatch(r"[A-Z`].+ .+\.", value.sentence)]
    named = [value.path for value in described().values() if re.match(r"[a-z]\w*:.+\.$", value.sentence)]
    assert [path for path in without if path not in named] == []


def test_every_value_that_values_yaml_has_is_one_of_the_schema() -> None:
    known = set(described())
    assert [path for path in paths(yaml.safe_load(VALUES.read_text())) if path not in known] == []


def paths(node: Json, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the chart's own values: what stands in a free mapping is Kubernetes'."""
    for name, value in node.items():
        yield (*above, name)
        inside = isinstance(value, dict) and (*above, name) not in leaves()
        if inside:
            yield from paths(cast("Json", value), (*above, name))


def leaves() -> set[tuple[str, ...]]:
    known = described()
    return {path for path in known if not any(other[:-1] == path for other in known)}


def test_a_mapping_that_names_its_keys_takes_no_other() -> None:
    def open_ones(node: Any) -> Iterator[Any]:
        if isinstance(node, dict):
            if "properties" in node and node.get("additionalProperties") is not False and "type" in node:
                yield list(cast("Json", node["properties"]))
            for value in cast("Json", node).values():
                yield from open_ones(value)

    assert list(open_ones(json.loads(SCHEMA.read_text()))) == []


def test_the_comments_and_the_table_are_those_of_the_schema() -> None:
    assert VALUES.read_text() == with_comments(VALUES.read_text()), "run `make values`"
    assert README.read_text() == with_tables(README.read_text()), "run `make values`"


def test_a_changed_sentence_changes_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    sentence = described()["gateway", "auth"].sentence
    changed = tmp_path / "values.schema.json"
    changed.write_text(SCHEMA.read_text().replace(sentence, "Ask everybody for a key."))
    monkeypatch.setattr(chart_values, "SCHEMA", changed)
    assert "  # Ask everybody for a key.\n  auth: true\n" in with_comments(VALUES.read_text())
    assert "| `gateway.auth` | `true` | Ask everybody for a key. |" in with_tables(README.read_text())


def test_the_profiles_table_adds_up_what_a_profile_asks_for() -> None:
    rows = {cells[1]: cells[2:-1] for row in profiles().splitlines() if (cells := [c.strip() for c in row.split("|")])}
    names = rows[""]
    assert names == ["default", "dev", "small", "production"]
    production = {title: cells[3] for title, cells in rows.items()}
    assert production["gateways"] == "3 to 20"
    assert production["requests of the control plane"] == "8.75 cores, 8.2 GiB"
    assert production["runs on through a lost node"] == "gateway, operator, scheduler, supervisor, predictor"
    assert production["volumes"] == "predictor 1Gi x 2, depot 500Gi, batch 50Gi"
    assert rows["requests of the control plane"][1] == "none"


def test_comments_change_no_value() -> None:
    text = 'nameOverride: "a # b"  # a hint\n# of another\ncrds:\n  install: true\n'
    assert yaml.safe_load(with_comments(text)) == {"nameOverride": "a # b", "crds": {"install": True}}


def test_bounds_are_said_in_words() -> None:
    assert bounds({"enum": ["a", "b"]}) == "One of a, b."
    assert bounds({"enum": ["sqlite"], "description": "sqlite: a file."}) == ""
    assert bounds({"minimum": 1, "maximum": 9}) == "1 to 9."
    assert bounds({"minimum": 1}) == "At least 1."
    assert bounds({"exclusiveMinimum": 0, "exclusiveMaximum": 1}) == "Above 0, below 1."
