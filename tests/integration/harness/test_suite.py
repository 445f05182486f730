"""A suite is watched from outside: a test that hangs or kills its process costs itself alone, and all of it is told."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.hangs import CPU_FACTOR, MAX_BEAT_S, MAX_IDLE_S, MIN_CPU_BOUND_S, HangWatch, Usage
from harness.suite import Result, Suite
from suites import repeat

WORKER = 7
RUN = """
import json, sys
from pathlib import Path
from harness.guard import guarded
from harness.suite import Run, Suite
from suites import summary

def work(folder):
    told = []
    run = Run(11, folder, folder / "logs", lambda _: None, told.append, max_idle_s=5.0)
    result = run.run(Suite("small", tuple(sys.argv[1:]), environment={"PYTHONPATH": sys.path[0]}))
    said = {"told": told, "outcomes": result.outcomes, "failed": result.failed, "verdict": result.verdict}
    print(json.dumps(said | {"cpu_s": result.cpu_s, "table": summary([result], run.seed, {})}))
    return 0

sys.path[0] = sys.argv.pop(1)
sys.exit(guarded("weft-small-", work))
"""
CONFTEST = """
from harness import progress

def pytest_addoption(parser):
    parser.addoption("--hypothesis-seed")

def pytest_configure(config):
    progress.register(config)
"""
STUCK = """
import ctypes

def test_before(): pass
def test_stuck_in_c():
    while True:
        ctypes.CDLL(None).pause()
def test_after(): pass
"""
DYING = """
import os, pytest

def test_survives(): assert "WEFT_PROGRESS" not in os.environ, "a pytest that it started would count as this run"
def test_dies(): os._exit(3)
def test_lacks_a_tool(): pytest.skip("needs helm: make cluster-tools")
def test_fails(): assert False
"""


class Watched:
    """A test that is looked at once a second."""

    def __init__(self, **records: float) -> None:
        self.watch, self.now, self.usage = HangWatch(records), 0.0, Usage(0.0, 0)
        self.watch.begin(WORKER, "test")
        assert self.look() == ""

    def look(self, seconds: float = 1.0, cpu_s: float = 0.0, moved_bytes: int = 0) -> str:
        self.now += seconds
        self.usage = Usage(self.usage.cpu_s + cpu_s, self.usage.moved_bytes + moved_bytes)
        return self.watch.observe(WORKER, self.usage, self.now)


@pytest.mark.parametrize("use", [{"cpu_s": 0.1}, {"moved_bytes": 1}])
def test_a_test_that_uses_anything_does_not_hang(use: dict[str, float]) -> None:
    watched = Watched()
    for _ in range(2000):
        assert watched.look() == watched.look(**use) == ""


def test_a_test_whose_processes_do_nothing_hangs_after_its_seconds() -> None:
    watched = Watched()
    waited = sum(not watched.look() for _ in range(1000))
    assert waited == MAX_IDLE_S


def test_the_bound_of_cpu_seconds_is_ten_times_what_is_recorded_and_never_small() -> None:
    assert Watched().look(cpu_s=MIN_CPU_BOUND_S - 1) == ""
    assert "CPU seconds" in Watched().look(cpu_s=MIN_CPU_BOUND_S + 1)
    recorded = MIN_CPU_BOUND_S
    assert Watched(test=recorded).look(cpu_s=CPU_FACTOR * recorded - 1) == ""
    assert "CPU seconds" in Watched(test=recorded).look(cpu_s=CPU_FACTOR * recorded + 1)


def test_a_watcher_that_was_stopped_has_seen_nothing_meanwhile() -> None:
    watched = Watched()
    assert watched.look(seconds=10 * MAX_IDLE_S) == ""
    assert watched.look(seconds=MAX_IDLE_S - 2 * MAX_BEAT_S) == ""


def test_what_waits_for_the_machine_is_given_its_time_again() -> None:
    watched = Watched()
    while not watched.look():
        pass
    watched.watch.forgive(WORKER)
    assert watched.look() == ""


@pytest.mark.parametrize("distribution", ["loadfile", pytest.param("worksteal", marks=pytest.mark.slow)])
def test_a_hang_and_a_death_cost_one_test_each(tmp_path: Path, distribution: str) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name, text in (("conftest", CONFTEST), ("test_stuck", STUCK), ("test_dying", DYING)):
        (project / f"{name}.py").write_text(textwrap.dedent(text))
    (project / "pytest.ini").write_text("[pytest]\n")
    words = [
        project,
        f"--rootdir={project}",
        "-c",
        project / "pytest.ini",
        "--numprocesses=2",
        f"--dist={distribution}",
    ]
    script = tmp_path / "run.py"
    script.write_text(RUN)
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script, tests, *words],
        env={
            **os.environ,
            "PYTHONPATH": str(tests),
            "TMPDIR": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # hypothesis takes a process a second
            "PYTEST_PLUGINS": "xdist.plugin",
        },
        stdout=subprocess.PIPE,
        check=True,
    )
    result = json.loads(done.stdout)
    said = "\n".join(result["told"])
    assert result["outcomes"] == {"passed": 3, "failed": 3, "skipped": 1}, said
    failed = sorted(test.partition("::")[2] for test in result["failed"])
    assert failed == ["test_dies", "test_fails", "test_stuck_in_c"]
    assert "test_stuck_in_c: its processes have used no CPU and moved no byte" in said
    assert "in test_stuck_in_c" in said, "the stack of the thread"
    assert result["verdict"] == "failed (pytest's exit code 1)"
    assert result["cpu_s"] > 0
    assert "skipped 1: needs helm: make cluster-tools" in result["table"]
    assert "tests: 3 passed, 3 failed, 1 skipped" in result["table"]


def test_a_failure_ends_with_the_command_that_repeats_it() -> None:
    result = Result(Suite("unit", (), environment={"WEFT_TEST_EXAMPLES": "9"}), 0.0, failed=["tests/a.py::test[x y]"])
    settings, _, words = repeat(result, 5).partition(" .venv/bin/python -m pytest ")
    assert settings == "repeat: PYTHONHASHSEED=0 WEFT_TEST_EXAMPLES=9 WEFT_TEST_SEED=5"
    assert words == "--hypothesis-seed=5 -m '' 'tests/a.py::test[x y]'"
