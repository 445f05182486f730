"""`weft convert`: what it prints, what it says beside that, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.bad_manifests import pool
from weft_cli.main import main

NAMESPACE: dict[str, Any] = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "acme"}}
EARLIER = pool(scheduler={"queue": "s3", "maxPrefills": 1})
TODAY = pool(advanced={"queue": "s3"})


def test_documents_and_lists_are_printed_in_todays_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_kubectl = {"apiVersion": "v1", "kind": "List", "items": [EARLIER, NAMESPACE]}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump_all([EARLIER, NAMESPACE]))
    (tmp_path / "b.json").write_text(json.dumps(of_kubectl))
    assert main(["convert", "-f", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert list(yaml.safe_load_all(out)) == [TODAY, NAMESPACE, of_kubectl | {"items": [TODAY, NAMESPACE]}]
    assert err.count("document 1, ServingPool tiny: spec.scheduler.maxPrefills: 1 has no successor") == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (yaml.safe_dump(pool(drainSeconds=0)), "document 1, ServingPool tiny, spec.drainSeconds"),
        ("a: [", "no valid YAML"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert main(["convert", "-f", str(tmp_path / "a.yaml")]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert not out


def test_nothing_to_convert_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert"]) == 2
    assert "nothing to convert" in capsys.readouterr().err
