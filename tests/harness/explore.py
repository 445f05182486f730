"""`make explore MINUTES=30`: draw fresh seeds for the property tests and the simulator until the time is over.

`make test` has the same cases every time; new inputs come from here. In each round the simulator runs fresh scenarios,
and a fresh seed draws the examples of all property tests but those marked `gpu`, in an order of files that the seed
shuffles too. A failure is printed with its seed and one command that repeats it, and the round goes on.

Exit codes: 0 nothing failed, 1 something failed.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.deadline import VARIABLE as DEADLINE
from harness.guard import guarded
from harness.suite import HASH_SEED, ROOT, Run, Suite, read_records
from suites import COSTLY, COSTS, FOLDERS, PAIRED, Screen, logs, repeat

EXAMPLES = 200  # of each property in a round: four times those of `make test`
SCENARIOS = 100  # of the simulator in a round, a minute
SEEDS = 2**31
FAILED_SCENARIO = re.compile(r"^seed (\d+): (.*)", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Explore for some minutes. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.explore", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="no test begins after these (default 30)")
    parser.add_argument("--seed", type=int, help="the seed of every round, to repeat one (default: drawn for each)")
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, help="of each property in a round (default %(default)s)"
    )
    given = parser.parse_args(arguments)
    return guarded("weft-explore-", lambda folder: explore(given, folder))


def explore(given: argparse.Namespace, folder: Path) -> int:
    """Run rounds until the time is over. Returns the exit code."""
    end, failures, rounds = time.monotonic() + 60 * given.minutes, list[str](), 0
    while time.monotonic() < end:
        rounds += 1
        seed = random.SystemRandom().randrange(SEEDS) if given.seed is None else given.seed
        print(f"round {rounds}: seed {seed}", flush=True)
        failures += run_scenarios(seed)  # first: a short call may end within the properties
        if time.monotonic() < end:
            failures += run_properties(seed, given.examples, end, folder)
    print(f"explore: {rounds} rounds in {given.minutes:g} minutes, {len(failures)} failures")
    print("\n".join(failures), flush=True)
    return 1 if failures else 0


def run_properties(seed: int, examples: int, end: float, folder: Path) -> list[str]:
    """Run all property tests with a seed; none begins after `end`. Returns a line for each failure."""
    files = property_files()
    random.Random(seed).shuffle(files)
    environment = {"WEFT_TEST_EXAMPLES": str(examples), DEADLINE: str(end)}
    suite = Suite("explore", (*files, "-m", "hypothesis and not gpu", *PAIRED), environment)
    screen, records = Screen(), read_records(iter((COSTLY, COSTS)))
    run = Run(seed, folder / str(time.monotonic_ns()), logs(), screen.show, screen.tell, records)
    run.folder.mkdir()
    result = screen.close(run.run(suite), logs())
    is_over = time.monotonic() >= end and "exit code 2)" in result.verdict  # pytest was interrupted by the deadline
    if not result.failed and result.verdict != "passed" and not is_over:
        return [f"seed {seed}: property tests: {result.verdict}"]
    result.suite = Suite(suite.name, suite.arguments, {"WEFT_TEST_EXAMPLES": str(examples)})
    failed, lines = result.failed, list[str]()
    for test in failed:
        result.failed = [test]
        lines.append(f"seed {seed}: {test}\n  {repeat(result, seed)}")
        screen.tell(lines[-1])
    return lines


def property_files() -> list[str]:
    """Name the test files that use Hypothesis."""
    files = (path for folder in FOLDERS for path in (ROOT / "tests" / folder).rglob("test_*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in files if "hypothesis" in path.read_text())


def run_scenarios(first: int) -> list[str]:
    """Run fresh scenarios of the simulator. Returns a line for each scenario that broke a law."""
    words = [sys.executable, "-m", "weft_sim", "check", "--seeds", str(SCENARIOS), "--first", str(first)]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **HASH_SEED}, capture_output=True, text=True, check=False)
    lines = [
        f"seed {seed}: {fault}\n  repeat: make sim-check SEEDS=1 FIRST={seed}"
        for seed, fault in FAILED_SCENARIO.findall(done.stdout)
    ]
    if done.returncode and not lines:
        lines = [f"seed {first}: the simulator ended with code {done.returncode}: {done.stderr[-2000:]}"]
    print("\n".join(lines) or done.stdout.strip(), flush=True)
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
