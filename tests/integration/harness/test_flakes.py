"""Files are repeated under disturbance, least repeated first, and the ledger has what came of each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CONFTEST = """
from harness import progress

def pytest_configure(config):
    progress.register(config)
"""
FLAKY = """
import os

def test_holds_for_even_seeds():
    assert int(os.environ["WEFT_TEST_SEED"]) % 2 == 0
"""
STEADY = "def test_holds(): pass"


def flakes(folder: Path, seed: int) -> subprocess.CompletedProcess[str]:
    """`make flakes` for the time of one file."""
    files = [f"--file={folder / name}.py" for name in ("test_flaky", "test_steady")]
    words = [*files, "--minutes=0", f"--seed={seed}", f"--ledger={folder / 'ledger'}"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "harness.flakes", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_ledger_says_which_file_is_next_and_a_failure_how_it_is_repeated(tmp_path: Path) -> None:
    for name, text in (("conftest", CONFTEST), ("test_flaky", FLAKY), ("test_steady", STEADY)):
        (tmp_path / f"{name}.py").write_text(text)
    done = [flakes(tmp_path, 1), flakes(tmp_path, 1)]
    runs = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    flaky, steady = sorted(runs, key=lambda run: run["file"])
    assert flaky["file"].endswith("test_flaky.py"), "each file once: the least repeated comes first"
    assert (flaky["seed"], flaky["outcome"], flaky["tests"]) == (1, "failed", {"failed": 1})
    assert (steady["outcome"], steady["tests"]) == ("passed", {"passed": 1})
    assert sorted(each.returncode for each in done) == [0, 1]
    (failure,) = [each.stdout for each in done if each.returncode]
    assert "repeat: WEFT_TEST_SEED=1 .venv/bin/python -m pytest --hypothesis-seed=1" in failure
    assert "--seed 1'" in failure
