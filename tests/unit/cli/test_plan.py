"""`weft plan capacity` from the command line to the ServingPool."""

from pathlib import Path

import pytest
import yaml

from weft.api.manifests import parse_object
from weft_cli.main import main

LAPTOP = Path(__file__).parents[3] / "examples" / "plan" / "laptop.toml"
LOAD = "--rate 20 --prompt fixed:300 --output fixed:40 --requests 150 --jobs 1"
SLO = "--slo ttft:p90=500ms --slo tbt:p99=40ms"


def run(arguments: str, *more: str) -> int:
    return main(["plan", "capacity", "--hardware", str(LAPTOP), "--kinds", "laptop", *arguments.split(), *more])


def test_a_pool_with_roles_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "pool.yaml"
    manifest.write_text(
        "apiVersion: serving.weft.dev/v1alpha1\nkind: ServingPool\nmetadata: {name: mine, namespace: acme}\n"
        "spec: {model: {name: small, uri: 'file:model'}, replicas: 1, lora: {maxRank: 32}}\n"
    )
    pool, picture = tmp_path / "planned.yaml", tmp_path / "plan.svg"
    files = ("-f", str(manifest), "--pool", str(pool), "--picture", str(picture))
    assert run(f"{LOAD} {SLO} --phases Split", *files) == 0
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


def test_designs_that_cannot_meet_the_objectives_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{LOAD} --slo ttft:p90=1ms --model m135") == 1
    assert "ttft p90 is missed by a request that is alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"{LOAD} --model m135", "which objectives?"),
        (f"{LOAD} --model m135 --slo ttft=2s", "METRIC:pLEVEL=TIME"),
        (f"{LOAD} {SLO}", "which model?"),
        (f"{SLO} --model m135", "give a trace"),
        (f"{LOAD} {SLO} --model m135 --minimize carbon", "cost, power, count"),
    ],
)
def test_what_is_missing_or_wrong(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert said in capsys.readouterr().err
