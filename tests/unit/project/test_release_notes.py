"""The notes of a release are its section of the changelog, and nothing is released under two versions."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / ".ci" / "release_notes.py"
CHANGELOG = """# Changelog

## Unreleased
- next

## [0.2.0] - 2026-12-01
### Added
- two

## 0.1.0
- one
## 0.0.9
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_notes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "text"), [("Unreleased", "- next\n"), ("0.2.0", "### Added\n- two\n"), ("0.1.0", "- one\n")]
)
def test_notes_are_the_section_of_the_version(script: ModuleType, version: str, text: str) -> None:
    assert script.notes(CHANGELOG, version) == text


@pytest.mark.parametrize("version", ["0.3.0", "0.2", "0.0.9"])
def test_a_version_without_a_section_or_with_an_empty_one_is_not_released(script: ModuleType, version: str) -> None:
    with pytest.raises(script.NotReady, match=version):
        script.notes(CHANGELOG, version)


def test_package_and_chart_have_to_be_of_the_version(script: ModuleType) -> None:
    own, chart = '[project]\nversion = "0.2.0"\n', 'version: 0.2.0\nappVersion: "0.1.0"\n'
    others = {"pyproject.toml": own, "bench/pyproject.toml": own.replace("2", "3")}
    with pytest.raises(script.NotReady, match=r"to release 0\.2\.0: bench/py.*n is 0\.3\.0, .*appVersion is 0\.1\.0$"):
        script.check_versions("0.2.0", others, chart)
    script.check_versions("0.2.0", {"pyproject.toml": own}, chart.replace("0.1.0", "0.2.0"))


def test_the_files_of_this_repository_are_of_one_version(script: ModuleType) -> None:
    chart = (ROOT / "charts" / "weft" / "Chart.yaml").read_text()
    version = chart.split("\nversion: ")[1].split("\n")[0]
    assert len(script.projects()) == 5
    script.check_versions(version, script.projects(), chart)
    assert script.notes((ROOT / "CHANGELOG.md").read_text(), "Unreleased")


def test_the_script_fails_for_another_version() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "99.0.0"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "to release 99.0.0: pyproject.toml version is" in done.stderr
