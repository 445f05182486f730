"""`make test-changed`: which files of tests run, in which order, and where the time ends."""

import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

from harness import deadline
from harness.changed import UNIMPORTED, choose
from harness.mutants.nearest import ImportGraph
from harness.suite import ROOT

SOURCES = {
    "weft_toy/__init__.py": "",
    "weft_toy/core.py": "",
    "weft_toy/shell.py": "from weft_toy import core",
    "tests/test_core.py": "from weft_toy import core",
    "tests/test_costly.py": "from weft_toy.core import x",
    "tests/test_shell.py": "import weft_toy.shell",
    "tests/test_other.py": "",
}


@pytest.fixture
def graph(tmp_path: Path) -> ImportGraph:
    for name, source in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    return ImportGraph(tmp_path, ["weft_toy", "tests"])


def test_the_nearest_come_first_then_the_cheapest(graph: ImportGraph) -> None:
    found = choose(["weft_toy/core.py"], graph, {"tests/test_costly.py": 9.0}, [])
    assert found == ["tests/test_core.py", "tests/test_costly.py", "tests/test_shell.py"]


def test_what_is_not_imported_has_tests(graph: ImportGraph) -> None:
    assert "tests/unit/wire/test_codec.py" in choose(["weft/wire/v1/runner.proto"], graph, {}, [])


@pytest.mark.parametrize(("pattern", "tests"), UNIMPORTED)
def test_the_table_names_files_and_tests_that_are_there(pattern: str, tests: tuple[str, ...]) -> None:
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
    assert any(fnmatch(name, pattern) for name in tracked.splitlines())
    assert all((ROOT / name).exists() for name in tests)


def test_no_test_begins_too_late(tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text("def test_one(): ...\ndef test_two(): ...\n")
    (tmp_path / "conftest.py").write_text("from harness.deadline import register as pytest_configure\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", tmp_path, "--rootdir", tmp_path],
        env={"PYTHONPATH": str(ROOT / "tests"), deadline.VARIABLE: str(time.monotonic() - 1)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "the time is over: 2 tests of these files are left" in done.stdout
    assert "passed" not in done.stdout
