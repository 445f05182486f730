"""The scheduler's core is a function of its events: the order of a set or a hash decides nothing."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest

from harness.processes import started
from harness.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_same_events_give_the_same_effects_whatever_the_hash_seed() -> None:
    command = (sys.executable, "-m", "tests.integration.scheduler.trace")
    with ExitStack() as processes:
        playing = [
            processes.enter_context(
                started(*command, cwd=ROOT, stdout=PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)})
            )
            for seed in range(4)
        ]
        first, *others = [process.communicate(timeout=PATIENCE_S)[0].splitlines() for process in playing]
    assert [process.returncode for process in playing] == [0] * 4
    assert sum("message=Assign(" in line for line in first) > 100
    for other in others:
        different = next(((a, b) for a, b in zip(first, other, strict=False) if a != b), None)
        assert different is None
        assert len(other) == len(first)
