"""`weft plan capacity` from a scenario to the ServingPool."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.api.manifests import parse_object
from weft_cli.main import main

LAPTOP = Path(__file__).parents[3] / "examples" / "plan" / "laptop.yaml"


@pytest.fixture
def scenario(tmp_path: Path) -> dict[str, Any]:
    """The example with fewer requests, for `run`."""
    (tmp_path / "laptop.toml").write_text(LAPTOP.with_suffix(".toml").read_text())
    asked = yaml.safe_load(LAPTOP.read_text())
    asked["load"] |= {"requests": 150, "output": "fixed:40"}
    return asked


def run(scenario: dict[str, Any], folder: Path, *more: str) -> int:
    (file := folder / "scenario.yaml").write_text(yaml.safe_dump(scenario, sort_keys=False))
    return main(["plan", "capacity", "-f", str(file), "--jobs", "1", *more])


def test_a_pool_with_roles_comes_back(
    scenario: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del scenario["model"]
    (tmp_path / "mine.yaml").write_text(
        "apiVersion: serving.weft.dev/v1alpha1\nkind: ServingPool\nmetadata: {name: mine, namespace: acme}\n"
        "spec: {model: {name: small, uri: 'file:model'}, replicas: 1, lora: {maxRank: 32}}\n"
    )
    pool, picture = tmp_path / "planned.yaml", tmp_path / "plan.svg"
    asked = scenario | {"pool": "mine.yaml", "phases": ["Split"]}
    assert run(asked, tmp_path, "-o", str(pool), "--picture", str(picture)) == 0
    printed = capsys.readouterr().out
    planned = yaml.safe_load(pool.read_text())
    spec = planned["spec"]
    assert spec["phases"] == {"mode": "Split"}
    assert [group["phase"] for group in spec["runnerGroups"]] == ["Prompt", "Token"]
    assert sum(group["minRunners"] for group in spec["runnerGroups"]) == spec["replicas"]
    assert (planned["metadata"]["name"], spec["lora"]["maxRank"]) == ("mine", 32)
    assert "Confirmed with other requests" in printed
    assert picture.read_text().startswith("<svg")
    parse_object(planned)


def test_designs_that_cannot_meet_the_objectives_say_why(
    scenario: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scenario | {"objectives": {"ttft": {"p90": "1ms"}}}, tmp_path) == 1
    assert "ttft p90 is missed by a request that is alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"objectives": {}}, "line 7, objectives: which? For example ttft: {p90: 1s}"),
        ({"objectives": {"ttft": "2s"}}, "line 8, objectives.ttft: write levels and times: {p90: 800ms}"),
        ({"objectives": {"ttft": {"p90": "1s", "p100": "2s"}}}, "`p100: 2s` is no level and time; write p90: 800ms"),
        ({"objectives": {"ttfs": {"p90": "1s"}}}, "unknown field 'ttfs'; did you mean 'ttft'?"),
        ({"model": None}, "line 1, model: which model?"),
        ({"model": "config.json"}, "config.json: [Errno 2] No such file"),
        ({"load": {"rate": 2.0}}, "load: give a trace, or distributions of prompt and output"),
        ({"load": {"trace": "no.csv"}}, "no.csv"),
        ({"load": {"prompt": "normal:3"}}, "line 3, load.prompt: 'normal:3': write fixed:N, uniform:LEAST,MOST or"),
        ({"minimize": "carbon"}, "minimize: Input should be 'cost', 'power' or 'count'; it is 'carbon'"),
        ({"hardware": {"kinds": "h100"}}, "hardware.kinds: write a list: [ONE, OTHER]; it is 'h100'"),
        ({"hardware": {"kinds": ["v100"]}}, "hardware: v100: the table has a100, h100, h200"),
        ({"pool": "no.yaml"}, "no.yaml: cannot be read"),
        ({"kind": "ServingPool"}, "a manifest; a scenario may name it, pool: PATH"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    changed: dict[str, Any], said: str, scenario: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scenario | changed, tmp_path) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "0 documents; a scenario is one"),
        (b"[1]", "not a mapping"),
        (b"load: {rate: 2", "no valid YAML: while parsing a flow mapping"),
        (b"model: a\nmodel: b", "the key 'model' is there twice (line 2)"),
        (b"\xff", "can't decode byte"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_scenario_is_named(
    text: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "scenario.yaml").write_bytes(text)
    assert main(["plan", "capacity", "-f", str(tmp_path / "scenario.yaml")]) == 2
    assert f"{tmp_path}/scenario.yaml: " in (err := capsys.readouterr().err)
    assert said in err
