"""`make test`: the suites of a group, a line while they run, and one table at the end.

    python tests/suites.py [test | slow | long | operator | operator-newer | cluster]

The folders of `make test` share one pytest: it collects once, and its workers begin costly files first, so that no core
is idle while a test waits for another process. Every run has the same cases: the seed is 0 unless `WEFT_TEST_SEED` is
set (`make explore` draws fresh seeds), and `PYTHONHASHSEED` is 0.

Times are printed and decide nothing; `harness.hangs` ends a test that hangs, and only that test. A suite that fails
does not stop the next suite. The whole output of a suite's pytest is kept (`logs()`), and shown from its first failure
on if there is one. However a run ends, no process and no folder of it stays (`harness.guard`).
"""

import contextlib
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.guard import guarded
from harness.order import cores
from harness.suite import HASH_SEED, ROOT, Result, Run, Suite, folder_of, read_records
from weft_devcluster import tools

COSTLY = ROOT / "tests" / "cpu_seconds.json"  # of the tests that use a tenth of the bound of one without a record
COSTS = tools.cache() / "test-logs" / "cpu_seconds.json"  # of all tests that ran on this machine
LOG_LINES = 150
LINE_S = 60.0  # how often a line is printed where none can be written over
MAX_REPEATED = 10  # tests that the command names which repeats a failure
MAX_WORKERS = 5

GIVEN = bool(os.environ.get("KUBECONFIG"))  # a cluster of somebody else's: one test at a time has it
# A worker that dies costs the test that it ran; each new one collects all tests again.
WORKERS = ("--max-worker-restart=50",)
ONE = ("--numprocesses=1", *WORKERS)  # so that a test that hangs costs itself alone here, too
ORDERED = ("--dist=loadfile", "--no-loadscope-reorder")  # in the order of `harness.order`, not by their tests
PAIRED = ("--numprocesses=2", *WORKERS, "--dist=worksteal")
FILES = ("--numprocesses=2", *WORKERS, *ORDERED)
WAITING = ("--numprocesses=3", *WORKERS, *ORDERED)  # where tests wait for other processes, for a sixth of the time
TOGETHER = (f"--numprocesses={min(cores() + 1, MAX_WORKERS)}", *WORKERS, *ORDERED)  # some tests wait, others compute

COMPUTING, STACKS = ("unit", "sim", "kernels", "oracle"), ("integration", "e2e")  # folders of `make test`
FOLDERS = (*COMPUTING, *STACKS)
SLOW = ("-m", "slow and not long")
LONG = ("-m", "long")


def paths(folders: Sequence[str]) -> tuple[str, ...]:
    """Name folders below tests/ as pytest does."""
    return tuple(f"tests/{folder}" for folder in folders)


OPERATOR = Suite("operator", ("tests/operator", *(ONE if GIVEN else FILES)))
INSTALLATION = ("tests/operator/test_chart_install.py", "tests/operator/test_crds.py", "tests/integration/chart")
NEWER = Suite("newer", (*INSTALLATION, *FILES), {"WEFT_CLUSTER": "newer"})  # versions: `weft_devcluster.tools`

GROUPS: Mapping[str, Sequence[Suite]] = {
    "test": (Suite("test", (*paths(FOLDERS), *TOGETHER)),),
    "slow": (Suite("slow", (*paths(COMPUTING), *SLOW, *PAIRED)), Suite("stacks", (*paths(STACKS), *SLOW, *WAITING))),
    "long": (
        Suite("operator", ("tests/operator", *LONG, *(ONE if GIVEN else FILES))),
        Suite("long", (*paths(FOLDERS), *LONG, *PAIRED)),
    ),
    "operator": (OPERATOR,),
    "operator-newer": (OPERATOR, NEWER),
    "cluster": (Suite("cluster", ("tests/cluster", *ONE)),),
}


def main(arguments: Sequence[str]) -> int:
    """Run a group of suites. Returns the exit code: 0 all passed, 1 a suite failed, 2 there is no such group."""
    group = arguments[0] if arguments else "test"
    if len(arguments) > 1 or group not in GROUPS:
        print(f"usage: suites.py {'|'.join(GROUPS)}", file=sys.stderr)
        return 2
    return guarded("weft-tests-", lambda folder: run(group, folder))


def run(group: str, folder: Path) -> int:
    """Run all suites of a group, with `folder` for temporary files."""
    suites = GROUPS[group]
    seed = int(os.environ.get("WEFT_TEST_SEED") or 0)
    last = read_last(group)
    expected_s = sum(costs["seconds"] for costs in last.values())
    takes = f"{expected_s / 60:.0f} minutes when it ran here last" if last else "it has not run here yet"
    print(f"{group}: {takes}; seed {seed}")
    print(f"output: {logs()}", flush=True)
    screen = Screen(expected_s)
    records = read_records(iter((COSTLY, COSTS)))
    one = Run(seed, folder, logs(), screen.show, screen.tell, records)
    results = list[Result]()
    for suite in suites:
        results.append(screen.close(one.run(suite), logs()))
        _keep_costs(results[-1])
    if not any(result.verdict.startswith("ended") for result in results):
        _keep_last(group, results)
    print("\n".join(summary(results, seed, last)), flush=True)
    return 0 if all(result.verdict == "passed" for result in results) else 1


def logs() -> Path:
    """Return the folder of the output of each suite's last run."""
    return tools.cache() / "test-logs"


class Screen:
    """What people see while suites run: on a terminal one line that is written over, elsewhere a line now and then."""

    def __init__(self, expected_s: float = 0.0) -> None:
        """`expected_s`: the seconds of the last run on this machine, 0 before the first."""
        self._expected_s, self._shown_at, self._began = expected_s, 0.0, time.monotonic()

    def show(self, result: Result) -> None:
        """Say how far a suite is, and about how long the rest of the run takes."""
        now = time.monotonic()
        if not sys.stdout.isatty() and now < self._shown_at + LINE_S:
            return
        self._shown_at = now
        left_s = self._expected_s - (now - self._began)
        line = result.line(now) + (f"; about {left_s / 60:.0f} minutes left" if left_s > 0 else "")
        print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)

    def tell(self, line: str) -> None:
        """Write a line that stays."""
        print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, flush=True)

    def close(self, result: Result, kept: Path) -> Result:
        """Say how a suite ended, with the end of its log where it failed."""
        passed = result.verdict == "passed"
        self.tell(result.line(result.began + result.seconds) + ("" if passed else f"  {result.verdict}"))
        if not passed:
            self.tell(_end_of(kept / f"{result.suite.name}.log"))
        return result


def _end_of(log: Path) -> str:
    """Return the end of a log from the first report of an error or failure on, the last LOG_LINES at most."""
    lines = log.read_text(errors="replace").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("=") and line.strip("= ") in ("FAILURES", "ERRORS")]
    return "\n".join(lines[min(starts, default=0) :][-LOG_LINES:])


def _keep_costs(result: Result) -> None:
    """Record the CPU seconds of a suite's tests: bounds of the next run. Records of other tests stay."""
    records = read_records(iter((COSTS,)))
    records |= {test: cpu_s for test, cpu_s in result.cpu_of_tests.items() if test not in result.failed}
    new = COSTS.with_suffix(".new")
    new.write_text(json.dumps(records, indent=0, sort_keys=True))
    new.replace(COSTS)


def _last(group: str) -> Path:
    return logs() / f"last-{group}.json"


def read_last(group: str) -> dict[str, dict[str, float]]:
    """Read the costs of a group's last whole run on this machine by suite: seconds, and CPU seconds of each folder."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(_last(group).read_text())
    return {}


def _keep_last(group: str, results: Sequence[Result]) -> None:
    """Keep the costs of a whole run: the next run shows them in its table."""
    costs = {result.suite.name: {"seconds": round(result.seconds, 1), **cpu_by_folder(result)} for result in results}
    _last(group).write_text(json.dumps(costs, indent=0))


def cpu_by_folder(result: Result) -> dict[str, float]:
    """Return the CPU seconds of a suite's tests by folder below tests/, and of everything else as "workers"."""
    cpu_s = Counter[str]()
    for test, used_s in result.cpu_of_tests.items():
        cpu_s[folder_of(test)] += used_s
    cpu_s["workers"] = max(0.0, result.cpu_s - cpu_s.total())
    return {folder: round(used_s, 1) for folder, used_s in cpu_s.items()}


def summary(results: Sequence[Result], seed: int, last: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table by folder, the reasons of skips, a command that repeats each failure, and a line for machines.

    `last`: the costs of the last run (`read_last`).
    """
    names = ("passed", "failed", "skipped")
    rows = [f"\n{'suite':<12} {'passed':>7} {'failed':>7} {'skipped':>7} {'CPU s':>7} {'last':>7}"]
    for result in results:
        before = last.get(result.suite.name, {})
        for folder, cpu_s in cpu_by_folder(result).items():
            counts = "".join(f" {result.by_folder[folder, name] or '':>7}" for name in names)
            cpu_before = f"{before[folder]:.0f}" if folder in before else ""
            rows.append(f"{folder:<12}{counts} {cpu_s:>7.0f} {cpu_before:>7}")
    total = sum((result.outcomes for result in results), Counter[str]())
    skips = sum((result.skips for result in results), Counter[str]())
    rows += [f"skipped {count}: {reason}" for reason, count in skips.most_common()]
    seconds, cpu_s = sum(result.seconds for result in results), sum(result.cpu_s for result in results)
    busy = cpu_s / (seconds * cores()) if seconds else 0.0
    rows.append(f"seed {seed}; {seconds / 60:.1f} minutes, {cpu_s:.0f} CPU seconds, {busy:.0%} of {cores()} cores")
    rows += [repeat(result, seed) for result in results if result.failed]
    bad = sum(result.verdict != "passed" for result in results)
    failed = total["failed"] or bad  # a suite may fail without a test that does
    rows.append(f"tests: {total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return rows


def repeat(result: Result, seed: int) -> str:
    """Return the command that runs a suite's failed tests again, with the same random choices."""
    environment = {**HASH_SEED, **result.suite.environment, "WEFT_TEST_SEED": str(seed)}
    words = [".venv/bin/python", "-m", "pytest", f"--hypothesis-seed={seed}", "-m", "", *result.failed[:MAX_REPEATED]]
    left = len(result.failed) - MAX_REPEATED
    more = f"  # and {left} more, in {logs() / result.suite.name}.log" if left > 0 else ""
    return f"repeat: {' '.join(f'{k}={v}' for k, v in environment.items())} {shlex.join(words)}{more}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
