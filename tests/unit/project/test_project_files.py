"""What the project's own files name is there: make targets, files, versions. Workflows themselves run elsewhere."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
PATH = re.compile(r"(?<![\w./-])(?:\.?/)?((?:\.ci|\.github|images|charts|tests|docs)/[\w./-]*\w)")
MADE_MEANWHILE = {"charts"}  # `${{ github.repository }}/charts`: a place in a registry


def loaded(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), yaml.BaseLoader)  # texts alone: `on` stays a key


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_make_targets_and_files_of_a_workflow_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for step in steps_of(loaded(path)):
        for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for named in PATH.findall(path.read_text()):
        assert named in MADE_MEANWHILE or list(ROOT.glob(named.rstrip("/"))), named


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_and_an_end_and_names_versions_of_actions(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job or "uses" in job, name
    for step in steps_of(workflow):
        assert "uses" not in step or re.fullmatch(r"[\w./-]+@v\d+(\.\d+)*", step["uses"]), step["uses"]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The one place that says what is supported.
PYTHONS = [name for one in PROJECT["project"]["classifiers"] for name in re.findall(r"Python :: (3\.\d+)$", one)]
OLDEST, NEWEST = PYTHONS[0], PYTHONS[-1]


def test_pythons_from_the_oldest_to_the_newest_are_supported_without_a_gap() -> None:
    first, last = (int(name.partition(".")[2]) for name in (OLDEST, NEWEST))
    assert [f"3.{minor}" for minor in range(first, last + 1)] == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={OLDEST}"


@pytest.mark.parametrize(("workflow", "pythons"), [("ci", [OLDEST, NEWEST]), ("nightly", PYTHONS)])
def test_a_change_is_tested_on_the_oldest_and_the_newest_python_and_every_night_all_are(
    workflow: str, pythons: list[str]
) -> None:
    job = loaded(ROOT / ".github" / "workflows" / f"{workflow}.yaml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == pythons


def test_tools_read_the_code_as_of_the_oldest_python() -> None:
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{OLDEST.replace('.', '')}"
    assert PROJECT["tool"]["pyright"]["pythonVersion"] == OLDEST


def test_images_have_one_python_that_is_supported_and_none_of_the_older_half() -> None:
    named = {
        found[1]
        for path in (ROOT / "images").glob("*.Containerfile")
        for found in re.finditer(r"python:(3\.\d+)-", path.read_text())
    }
    assert len(named) == 1
    assert named <= set(PYTHONS[len(PYTHONS) // 2 :])


@pytest.mark.parametrize(
    "path", ["requirements.lock", "up.lock", *(f"images/{p.name}" for p in (ROOT / "images").glob("*.lock"))]
)
def test_a_lock_is_for_every_python_from_the_oldest_on(path: str) -> None:
    assert f"--python-version {OLDEST} --universal" in (ROOT / path).read_text().splitlines()[1]


@pytest.mark.parametrize("path", ["README.md", "docs/quickstart.md"])
def test_who_tries_it_reads_which_pythons_are_supported(path: str) -> None:
    assert f"Python {OLDEST} to {NEWEST}" in (ROOT / path).read_text()


def test_every_image_is_built_for_amd64_and_without_cuda_for_arm64() -> None:
    jobs = loaded(ROOT / ".github" / "workflows" / "images.yaml")["jobs"]
    built = jobs["build"]["strategy"]["matrix"]["include"]
    assert {one["file"] for one in built} == {
        f"images/{path.name}" for path in (ROOT / "images").glob("*.Containerfile")
    }
    for one in built:
        expected = "linux/amd64" if one["variant"] == "cuda" else "linux/amd64,linux/arm64"
        assert one["platforms"] == expected


def test_pre_commit_has_the_ruff_of_the_lock() -> None:
    repos = {repo["repo"]: repo["rev"] for repo in loaded(ROOT / ".pre-commit-config.yaml")["repos"]}
    locked = re.search(r"^ruff==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked is not None
    assert repos["https://github.com/astral-sh/ruff-pre-commit"] == f"v{locked[1]}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yaml")), ids=lambda path: path.name
)
def test_an_issue_form_has_a_name_and_fields_with_labels(path: Path) -> None:
    form = loaded(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["id"] and field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields) > 0


def test_tests_whose_cost_is_recorded_are_there() -> None:
    for name in json.loads((ROOT / "tests" / "cpu_seconds.json").read_text()):
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name
