"""`make test`: every suite in order, a line for each while it runs, and one table at the end.

    python tests/suites.py [test | slow | long | operator | cluster]

A suite's time is printed and decides nothing; a test that hangs is ended from outside (`harness.hangs`), and costs
itself alone. A suite that fails does not stop the next ones. The whole output of a suite's pytest is kept (`logs()`),
and shown from its first failure on if there is one.

The seed of random choices is printed and can be given again: `WEFT_TEST_SEED=123 make test`. However a run ends, no
process and no folder of it stays (`harness.guard`).
"""

import contextlib
import json
import os
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.budget import files_of, last_run, read_budget, read_machine
from harness.guard import guarded
from harness.suite import ROOT, Result, Run, Suite, read_records
from weft_devcluster import tools

COSTLY = ROOT / "tests" / "cpu_seconds.json"  # of the tests that use a tenth of the bound of one without a record
LOG_LINES = 150
LINE_S = 60.0  # how often a line is printed where none can be written over
MAX_REPEATED = 10  # tests that the command names which repeats a failure

GIVEN = bool(os.environ.get("KUBECONFIG"))  # a cluster of somebody else's: one test at a time has it
# A worker that dies costs the test that it ran; each new one collects all tests again.
WORKERS = ("--max-worker-restart=50",)
ONE = ("--numprocesses=1", *WORKERS)  # so that a test that hangs costs itself alone here, too
ORDERED = ("--dist=loadfile", "--no-loadscope-reorder")  # in the order of `harness.order`, not by their tests
PAIRED = ("--numprocesses=2", *WORKERS, "--dist=worksteal")
FILES = ("--numprocesses=2", *WORKERS, *ORDERED)
WAITING = ("--numprocesses=3", *WORKERS, *ORDERED)  # where tests wait for other processes, for a sixth of the time

SUITES = (
    Suite("unit", ("tests/unit", *FILES)),
    Suite("sim", ("tests/sim", *PAIRED)),
    Suite("kernels", ("tests/kernels", *PAIRED)),
    Suite("oracle", ("tests/oracle", *FILES)),
    Suite("integration", ("tests/integration", *WAITING)),
    Suite("e2e", ("tests/e2e", *WAITING)),
)
SLOW = ("-m", "slow and not long")
LONG = ("-m", "long or hypothesis")
EXAMPLES = {"WEFT_TEST_EXAMPLES": "1000"}
GROUPS: Mapping[str, Sequence[Suite]] = {
    "test": SUITES,
    "slow": (
        Suite("slow", ("tests/unit", "tests/sim", "tests/kernels", "tests/oracle", *SLOW, *PAIRED)),
        Suite("stacks", ("tests/integration", "tests/e2e", *SLOW, *WAITING)),
    ),
    "long": (
        Suite("operator", ("tests/operator", *LONG, *(ONE if GIVEN else FILES))),
        Suite("long", (*(f"tests/{s.name}" for s in SUITES), *LONG, *PAIRED), environment=EXAMPLES),
    ),
    "operator": (Suite("operator", ("tests/operator", *(ONE if GIVEN else FILES))),),
    "cluster": (Suite("cluster", ("tests/cluster", *ONE)),),
}


def main(arguments: Sequence[str]) -> int:
    """Run a group of suites. Returns the exit code: 0 all passed, 1 not, 2 no such group."""
    group = arguments[0] if arguments else "test"
    if len(arguments) > 1 or group not in GROUPS:
        print(f"usage: suites.py {'|'.join(GROUPS)}", file=sys.stderr)
        return 2
    return guarded("weft-tests-", lambda folder: run(group, folder))


def run(group: str, folder: Path) -> int:
    """Run all suites of a group, with `folder` for whatever is temporary."""
    suites = GROUPS[group]
    seed = int(os.environ.get("WEFT_TEST_SEED") or random.SystemRandom().randrange(2**31))
    takes, shares = expect(group, [suite.name for suite in suites])
    print(f"{group}: {', '.join(suite.name for suite in suites)}: {takes}; seed {seed}")
    print(f"output: {logs()}", flush=True)
    screen = Screen(suites, shares)
    records = read_records(iter((COSTLY, _costs())))
    one = Run(seed, folder, logs(), screen.show, screen.tell, records)
    results = list[Result]()
    for suite in suites:
        results.append(screen.close(one.run(suite), logs()))
        _keep_costs(results[-1])
    if not any(result.verdict.startswith("ended") for result in results):
        _keep_run(group, results)
    print("\n".join(summary(results, seed)), flush=True)
    return 0 if all(result.verdict == "passed" for result in results) else 1


def expect(group: str, names: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Say what a group takes, and the share of each suite: by the last run here, else by the budget."""
    with contextlib.suppress(FileNotFoundError):
        seconds = {name: one["seconds"] for name, one in json.loads(last_run(group).read_text()).items()}
        return f"{sum(seconds.values()) / 60:.0f} minutes when it ran here last", seconds
    cpu_s = {name: costs.cpu_s for name, costs in read_budget().items() if name in names}
    if set(cpu_s) < set(names):
        return "it has not run here yet", {}
    return f"it has not run here yet; {sum(cpu_s.values()):.0f} CPU seconds on {read_machine()}", cpu_s


def logs() -> Path:
    """Return the folder of the output of each suite's last run."""
    return tools.cache() / "test-logs"


class Screen:
    """What people see while suites run: on a terminal one line that is written over, elsewhere a line now and then."""

    def __init__(self, suites: Sequence[Suite], shares: Mapping[str, float]) -> None:
        """`shares`: what each suite takes of the whole, in any unit; empty where nobody knows."""
        self._suites, self._shares, self._done, self._shown_at = suites, shares, list[Suite](), 0.0
        self._began = time.monotonic()

    def show(self, result: Result) -> None:
        """Say how far a suite is, and what is left of the run."""
        now = time.monotonic()
        if not sys.stdout.isatty() and now < self._shown_at + LINE_S:
            return
        self._shown_at = now
        line = f"{result.line(now)}{self._left(result, now)}"
        print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)

    def tell(self, line: str) -> None:
        """Write a line that stays."""
        print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, flush=True)

    def close(self, result: Result, kept: Path) -> Result:
        """Say how a suite ended, with the end of its log where it failed."""
        self._done.append(result.suite)
        passed = result.verdict == "passed"
        self.tell(result.line(result.began + result.seconds) + ("" if passed else f"  {result.verdict}"))
        if not passed:
            self.tell(_end_of(kept / f"{result.suite.name}.log"))
        return result

    def _left(self, result: Result, now: float) -> str:
        """Say which suites come after this one, and how long all of it takes at this run's pace."""
        after = self._suites[len(self._done) + 1 :]
        whole = sum(self._shares.values())
        done = sum(self._shares.get(suite.name, 0.0) for suite in self._done)
        done += result.share() * self._shares.get(result.suite.name, 0.0)
        left = f"; then {', '.join(suite.name for suite in after)}" if after else ""
        if whole and self._done:  # within the first suite the costly files come first: its share says little
            left += f"; about {(now - self._began) * (whole - done) / done / 60:.0f} minutes left"
        return left


def _end_of(log: Path) -> str:
    """Return the end of a log from the first report of an error or failure on, the last LOG_LINES at most."""
    lines = log.read_text(errors="replace").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("=") and line.strip("= ") in ("FAILURES", "ERRORS")]
    return "\n".join(lines[min(starts, default=0) :][-LOG_LINES:])


def _costs() -> Path:
    return logs() / "cpu_seconds.json"


def _keep_costs(result: Result) -> None:
    """Record what the tests of a suite have used, beside what others had: the bounds of the next run."""
    records = read_records(iter((_costs(),)))
    records |= {test: cpu_s for test, cpu_s in result.cpu_of_tests.items() if test not in result.failed}
    new = _costs().with_suffix(".new")
    new.write_text(json.dumps(records, indent=0, sort_keys=True))
    new.replace(_costs())


def _keep_run(group: str, results: Sequence[Result]) -> None:
    """Keep what a whole run took: what the next one is expected to take, and what the budget is held against."""
    suites = {
        result.suite.name: {
            "seconds": round(result.seconds, 1),
            "cpu_s": round(result.cpu_s, 1),
            "files": files_of(result.cpu_of_tests, result.suite.name),
        }
        for result in results
    }
    last_run(group).write_text(json.dumps(suites, indent=0))


def summary(results: Sequence[Result], seed: int) -> list[str]:
    """The table, why tests were skipped, how to repeat what failed, and one line that machines read."""
    names = ("passed", "failed", "skipped")
    rows = [f"\n{'suite':<12} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8} {'CPU s':>7}  verdict"]
    for result in results:
        counts = "".join(f" {result.outcomes[name]:>7}" for name in names)
        rows.append(f"{result.suite.name:<12}{counts} {result.seconds:>8.0f} {result.cpu_s:>7.0f}  {result.verdict}")
    total = sum((result.outcomes for result in results), Counter[str]())
    skips = sum((result.skips for result in results), Counter[str]())
    rows += [f"skipped {count}: {why}" for why, count in skips.most_common()]
    seconds, cpu_s = sum(result.seconds for result in results), sum(result.cpu_s for result in results)
    rows.append(f"seed {seed}; {seconds / 60:.1f} minutes, {cpu_s:.0f} CPU seconds")
    rows += [repeat(result, seed) for result in results if result.failed]
    bad = sum(result.verdict != "passed" for result in results)
    failed = total["failed"] or bad  # a suite may fail without a test that does
    rows.append(f"tests: {total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return rows


def repeat(result: Result, seed: int) -> str:
    """The command that runs a suite's failed tests again, alone and with the same random choices."""
    environment = {**result.suite.environment, "WEFT_TEST_SEED": str(seed)}
    words = [".venv/bin/python", "-m", "pytest", f"--hypothesis-seed={seed}", "-m", "", *result.failed[:MAX_REPEATED]]
    left = len(result.failed) - MAX_REPEATED
    more = f"  # and {left} more, in {logs() / result.suite.name}.log" if left > 0 else ""
    return f"repeat: {' '.join(f'{k}={v}' for k, v in environment.items())} {shlex.join(words)}{more}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
