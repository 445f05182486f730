"""A run of tests that is stopped leaves nothing behind, however it is stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.waiting import PATIENCE_S, wait_until
from weft_devcluster.processes import has_ended

TESTS = Path(__file__).parents[2]
RUN = """
import os, subprocess, sys, time
from harness.guard import guarded

# The program's parent ends at once; it has a session of its own and ignores what can be ignored.
DETACHED = "setsid sh -c \'trap : TERM INT HUP; echo $$ > $0.part; mv $0.part $0; while :; do sleep 1000; done\' $0 &"

def work(folder):
    said = folder / "pid"
    subprocess.run(["sh", "-c", DETACHED, said], check=True)
    while not said.exists():
        time.sleep(0.01)
    print(os.getpid(), said.read_text().strip(), folder, flush=True)
    with subprocess.Popen(["sleep", "1000"]) as waited_for:
        code = int(sys.stdin.readline())
        waited_for.kill()
    return code

sys.exit(guarded("weft-guarded-", work))
"""


class Guarded:
    """`guarded` in a process of its own; `child` does the work, `detached` was started by it."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": str(folder)}
        self.parent = subprocess.Popen(
            [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.parent.stdout is not None
        child, detached, folder_name = self.parent.stdout.readline().split()
        self.child, self.detached, self.folder = int(child), int(detached), Path(folder_name)

    def nothing_is_left(self) -> bool:
        return all(has_ended(pid) for pid in (self.child, self.detached)) and not self.folder.exists()


@pytest.fixture
def run(tmp_path: Path):
    made = Guarded(tmp_path)
    yield made
    made.parent.kill()
    made.parent.wait(PATIENCE_S)


def test_the_work_ends_by_itself_with_its_own_exit_code(run: Guarded) -> None:
    run.parent.communicate("7\n", timeout=PATIENCE_S)
    assert run.parent.returncode == 7
    assert run.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_stop_ends_all_its_processes_first(run: Guarded, number: signal.Signals) -> None:
    run.parent.send_signal(number)
    assert run.parent.wait(PATIENCE_S) == 128 + number
    assert run.nothing_is_left()


def test_what_a_killed_parent_leaves_is_ended_by_the_child(run: Guarded) -> None:
    run.parent.kill()
    wait_until(run.nothing_is_left, "the child ends all processes and removes the folder")


def test_what_a_killed_child_leaves_is_ended_by_the_parent(run: Guarded) -> None:
    os.kill(run.child, signal.SIGKILL)
    assert run.parent.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert run.nothing_is_left()
