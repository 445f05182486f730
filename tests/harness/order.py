"""Order the test files: costly files first, waiting files mixed with computing files.

A costly file that began last would leave one worker busy long after the others. A file of stacks waits for processes,
so it shares a core with a file that computes. The order changes no result, only the length of a run.

`python -m harness.order` writes the CPU seconds of the last run of `make test` to `tests/file_cpu_seconds.json`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILE_CPU_S = TESTS / "file_cpu_seconds.json"
MIN_FILE_CPU_S = 1.0  # cheaper files need no record
WAITING = ("tests/integration/", "tests/e2e/", "tests/operator/", "tests/cluster/")


def cores() -> int:
    """Count the cores that this process may use (`taskset`)."""
    return len(os.sched_getaffinity(0))


@cache
def usual_cpu_s() -> Mapping[str, float]:
    """Read the CPU seconds of costly test files, by path in the checkout."""
    return json.loads(FILE_CPU_S.read_text())


def sort_tests(items: list[pytest.Item]) -> None:
    """Sort tests by file; the tests of a file stay in their order."""
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    place = {file: number for number, file in enumerate(order_files(files, usual_cpu_s()))}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


def order_files(files: Sequence[str], cpu_s: Mapping[str, float]) -> list[str]:
    """Order files, costly ones first, so that both kinds of files come to their end at the same time."""
    shares: dict[str, tuple[float, int]] = {}
    for waiting in (False, True):
        kind = [file for file in files if file.startswith(WAITING) is waiting]
        kind.sort(key=lambda file: -cpu_s.get(file, 0.0))
        total_s = sum(cpu_s.get(file, 0.0) for file in kind) or 1.0
        done_s = 0.0
        for number, file in enumerate(kind):
            shares[file] = done_s / total_s, number
            done_s += cpu_s.get(file, 0.0)
    return sorted(files, key=shares.__getitem__)


def main() -> None:
    """Write the record anew from the CPU seconds of each test's last run on this machine."""
    from suites import COSTS, FOLDERS

    files: dict[str, float] = {}
    for test, used_s in json.loads(COSTS.read_text()).items():
        file = test.partition("::")[0]
        if file.startswith(tuple(f"tests/{folder}/" for folder in FOLDERS)) and (TESTS.parent / file).exists():
            files[file] = files.get(file, 0.0) + used_s
    costly = {file: round(used_s, 1) for file, used_s in sorted(files.items()) if used_s >= MIN_FILE_CPU_S}
    FILE_CPU_S.write_text(json.dumps(costly, indent=0) + "\n")


if __name__ == "__main__":
    main()
