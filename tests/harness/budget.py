"""Hold `make test` to its budget of CPU seconds: `python -m harness.budget check` after a run, `write` to raise it.

`tests/budget.toml` has the CPU seconds of each suite, and those of each file that takes a second or more. A machine
that is faster or slower uses others for the same tests: what the last run used is divided by its pace, the median of
what its files used by what the budget has for them. A suite fails where files that have grown add more than
`MAX_GROWTH` to it. Seconds are noisy: a file has grown where it uses `MIN_FILE_CPU_S` and `MAX_NOISE` more than its
budget, and still does in each of `MAX_REPEATS` runs of it alone. Another kind of processor has other tests to skip and
another ratio between them: there the check says what it found and fails nothing.

Exit codes: 0 within the budget, or another kind of machine; 1 beyond it; 2 no whole run to judge.
"""

import argparse
import json
import random
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from harness.guard import guarded
from harness.suite import ROOT, Run, Suite
from weft_bench.machine import machine
from weft_devcluster import tools

BUDGET = ROOT / "tests" / "budget.toml"
MAX_GROWTH = 0.05  # of a suite's budget
MAX_NOISE = 0.15  # of a file's budget: by how much two runs of the same tests differ
MAX_REPEATS = 3
MIN_FILE_CPU_S = 1.0
MIN_PACED_CPU_S = 2.0  # files below it say little of a machine's pace
MAX_FILES = 12  # that are named, and run again at a time
HEAD = """\
# CPU seconds of each suite of `make test`, and of its files that use a second or more. `harness.budget check`
# fails where files that have grown add more than 5 % to a suite; `make budget` raises it to what the last run used, and
# the commit says why.
machine = "{machine}"
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of a suite, and of its tests by file (a path below the suite's folder)."""

    cpu_s: float
    files: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Grown:
    """A suite to which files that have grown add too much: CPU seconds by file, at the budget's pace, most first."""

    suite: str
    budget_cpu_s: float
    files: Mapping[str, float]

    def __str__(self) -> str:
        most = "".join(f"\n    +{more:.1f} s  {file}" for file, more in list(self.files.items())[:MAX_FILES])
        return (
            f"{self.suite}: expected at most {self.budget_cpu_s * MAX_GROWTH:.0f} CPU seconds more "
            f"({MAX_GROWTH:.0%} of {self.budget_cpu_s:.0f}), got {sum(self.files.values()):.0f}{most}"
        )


Repeat = Callable[[Grown], Mapping[str, float]]


def measure_pace(budget: Mapping[str, Costs], used: Mapping[str, Costs]) -> float:
    """Find how many CPU seconds this machine uses where the budget's uses one: a median, weighted by the budget."""
    ratios = sorted(
        (used[suite].files[file] / cpu_s, cpu_s)
        for suite, costs in budget.items()
        for file, cpu_s in costs.files.items()
        if cpu_s >= MIN_PACED_CPU_S and used[suite].files.get(file)
    )
    left = sum(weight for _, weight in ratios) / 2
    for ratio, weight in ratios:
        left -= weight
        if left <= 0:
            return ratio
    return 1.0


def find_grown(budget: Mapping[str, Costs], used: Mapping[str, Costs], pace: float) -> list[Grown]:
    """Find the suites to which files that have grown add too much."""
    grown = list[Grown]()
    for suite, had in budget.items():
        more = {file: now / pace - had.files.get(file, 0.0) for file, now in used[suite].files.items()}
        most = {
            file: by
            for file, by in sorted(more.items(), key=lambda item: -item[1])
            if by >= max(MIN_FILE_CPU_S, MAX_NOISE * had.files.get(file, 0.0))
        }
        if sum(most.values()) > had.cpu_s * MAX_GROWTH:
            grown.append(Grown(suite, had.cpu_s, most))
    return grown


def read_budget(path: Path = BUDGET) -> dict[str, Costs]:
    """The budget of each suite."""
    with path.open("rb") as file:
        return {
            suite: Costs(table["suite"], {name: cpu_s for name, cpu_s in table.items() if name != "suite"})
            for suite, table in tomllib.load(file).items()
            if isinstance(table, dict)
        }


def read_machine(path: Path = BUDGET) -> str:
    """The machine whose CPU seconds the budget has."""
    with path.open("rb") as file:
        return str(tomllib.load(file)["machine"])


def describe_machine() -> str:
    """Processor, cores, memory, and whether it has the instructions that most tests of kernels run for."""
    cpuinfo = Path("/proc/cpuinfo")
    wide = cpuinfo.exists() and "avx512f" in cpuinfo.read_text()
    return f"{machine()}, {'with' if wide else 'without'} AVX-512"


def format_budget(costs: Mapping[str, Costs], machine: str) -> str:
    """Write the budget as TOML."""
    lines = [HEAD.format(machine=machine)]
    for suite, one in costs.items():
        lines.append(f"[{suite}]\nsuite = {one.cpu_s:.0f}")
        lines += [f'"{file}" = {s:.1f}' for file, s in sorted(one.files.items()) if s >= MIN_FILE_CPU_S]
        lines.append("")
    return "\n".join(lines)


def last_run(group: str) -> Path:
    """The file in which `tests/suites.py` keeps what the last whole run of a group has used."""
    return tools.cache() / "test-logs" / f"last-{group}.json"


def read_costs(path: Path) -> dict[str, Costs]:
    """What the suites of the last run have used."""
    suites = json.loads(path.read_text())
    return {name: Costs(one["cpu_s"], one["files"]) for name, one in suites.items()}


def files_of(cpu_of_tests: Mapping[str, float], suite: str) -> dict[str, float]:
    """CPU seconds of tests, by file below the suite's folder."""
    files = dict[str, float]()
    for test, cpu_s in cpu_of_tests.items():
        file = test.partition("::")[0].removeprefix(f"tests/{suite}/")
        files[file] = files.get(file, 0.0) + cpu_s
    return files


def check(budget: Mapping[str, Costs], used: Mapping[str, Costs], repeat: Repeat) -> list[Grown]:
    """Find suites that have grown and still have when `repeat` has run their grown files again, some times."""
    pace = max(1.0, measure_pace(budget, used))  # what became cheaper makes nothing else dearer
    print(f"budget: this run used {pace:.2f} times the CPU seconds of {read_machine()} for the same tests")
    least = dict(used)
    for _ in range(MAX_REPEATS):
        for one in (grown := find_grown(budget, least, pace)):
            print(f"{one}\nbudget: these files are run again", flush=True)
            again, files = repeat(one), least[one.suite].files
            fewer = {file: min(cpu_s, again.get(file, cpu_s)) for file, cpu_s in files.items()}
            least[one.suite] = replace(least[one.suite], files=fewer)
        if not grown:
            break
    return find_grown(budget, least, pace)


def run_again(folder: Path, grown: Grown) -> dict[str, float]:
    """Run the files of a suite that have grown again, alone. Returns CPU seconds by file."""
    files = list(grown.files)[:MAX_FILES]
    suite = Suite(f"{grown.suite} again", (*(f"tests/{grown.suite}/{file}" for file in files), "--numprocesses=1"))
    run = Run(random.SystemRandom().randrange(2**31), folder, tools.cache() / "test-logs", lambda _: None, print)
    return files_of(run.run(suite).cpu_of_tests, grown.suite)


def main(arguments: Sequence[str]) -> int:
    """Judge the last run, or make it the budget. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="harness.budget", description=__doc__)
    parser.add_argument("command", choices=("check", "write"))
    given = parser.parse_args(arguments)
    try:
        used = read_costs(last_run("test"))
        budget = {suite: costs for suite, costs in read_budget().items() if suite in used}
    except FileNotFoundError:
        print("budget: there is no whole run of `make test` to judge: run it first", file=sys.stderr)
        return 2
    if given.command == "write":
        pace = 1.0 if describe_machine() == read_machine() else measure_pace(budget, used)
        scaled = {
            suite: Costs(one.cpu_s / pace, {file: cpu_s / pace for file, cpu_s in one.files.items()})
            for suite, one in used.items()
        }
        BUDGET.write_text(format_budget(scaled, read_machine()))
        return 0
    return guarded("weft-budget-", lambda folder: _judge(budget, used, partial(run_again, folder)))


def _judge(budget: Mapping[str, Costs], used: Mapping[str, Costs], repeat: Repeat) -> int:
    if (ours := describe_machine()) != (theirs := read_machine()):
        print(f"budget: not judged: it is that of {theirs}, this is {ours}")
        for one in find_grown(budget, used, measure_pace(budget, used)):
            print(one)
        return 0
    grown = check(budget, used, repeat)
    for one in grown:
        print(one, file=sys.stderr)
    if grown:
        print("budget: make it cheaper, or run `make budget` and say in the commit why", file=sys.stderr)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
