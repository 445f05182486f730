"""`make flakes MINUTES=60`: find tests that fail now and then before people do.

The files of the integration, e2e and operator suites run one by one, least repeated first, each with a seed of its own,
on one core beside a busy loop, while processes below pytest are stopped for moments (SIGSTOP) that the seed draws. The
ledger (`tools/ledgers/flakes.jsonl`) has a line for each run of a file, so that the next call goes on from there.

Exit codes: 0 all passed, 1 not.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.guard import descendants, guarded
from harness.suite import ROOT, Result, Run, Suite, read_records
from suites import COSTLY, COSTS, logs, repeat
from weft_devcluster import tools
from weft_devcluster.errors import ToolMissing
from weft_devcluster.tied import tied

LEDGER = ROOT / "tools" / "ledgers" / "flakes.jsonl"
MAX_STOP_S = 0.5  # no lease, keepalive or probe of the product minds that
STOPS_A_SECOND = 0.5
TAIL_LINES = 60
# A file that stops processes itself is only kept busy: our SIGCONT would wake what its test has stopped.
STOPS_ITSELF = re.compile(r"SIGSTOP|\.pause\(\)|\.freeze\(|fault_st|through_faults")


def main(arguments: Sequence[str]) -> int:
    """Repeat files until the minutes are over. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.flakes", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="no file begins after these (default 60)")
    parser.add_argument("--file", action="append", default=[], help="only this file; may be given again")
    parser.add_argument("--seed", type=int, help="the seed of every run, to repeat one (default: drawn for each)")
    parser.add_argument("--ledger", type=Path, default=LEDGER, help="where the runs are written (default: %(default)s)")
    given = parser.parse_args(arguments)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    # The guard's work ends everything below it after each file; the loop is beside it.
    with subprocess.Popen(tied(sys.executable, "-c", "while True: pass")) as busy:
        try:
            return guarded("weft-flakes-", lambda folder: _repeat_files(given, folder))
        finally:
            busy.kill()


def _repeat_files(given: argparse.Namespace, folder: Path) -> int:
    """Run files, least repeated first, until the time is over. Returns the exit code."""
    files, end, failed = given.file or _files(), time.monotonic() + 60 * given.minutes, 0
    repeats = _repeats(given.ledger)
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    while True:
        seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
        file = min(files, key=lambda name: (repeats[name], random.Random(f"{seed} {name}").random()))
        result, stops = _run(file, seed, folder)
        line = {
            "file": file, "seed": seed, "outcome": "passed" if result.verdict == "passed" else "failed",
            "tests": dict(result.outcomes), "failed": result.failed, "seconds": round(result.seconds, 1),
            "cpu_s": round(result.cpu_s, 1), "stops": stops, "commit": head.stdout.strip(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }  # fmt: skip
        with given.ledger.open("a") as ledger:
            ledger.write(json.dumps(line) + "\n")
        repeats[file] += 1
        failed += _tell(result, line)
        if time.monotonic() >= end:
            break
    counts = [repeats[file] for file in files]
    print(f"files {len(files)}, repeats {min(counts)} to {max(counts)}, median {statistics.median(counts):.0f}")
    return 1 if failed else 0


def _run(file: str, seed: int, folder: Path) -> tuple[Result, int]:
    """One file under disturbance. Returns also how many processes were stopped for a moment."""
    rng, stops = random.Random(seed), 0
    quiet = STOPS_ITSELF.search((ROOT / file).read_text()) is not None

    def disturb(_: Result) -> None:
        nonlocal stops
        if not quiet and rng.random() < STOPS_A_SECOND:
            stops += _stop_one(rng)

    suite = Suite(file.replace("/", "."), (file, "-m", "not long"))
    records = read_records(iter((COSTLY, COSTS)))
    return Run(seed, folder, logs() / "flakes", disturb, print, records).run(suite), stops


def _stop_one(rng: random.Random) -> int:
    """Stop a process of the tests for a moment. Returns how many: none where it has ended or is stopped already."""
    pid = rng.choice(descendants() or [0])
    pause_s = rng.uniform(0.0, MAX_STOP_S)
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        if pid and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "SRD":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(pause_s)  # the moment itself
            os.kill(pid, signal.SIGCONT)
            return 1
    return 0


def _tell(result: Result, line: dict[str, Any]) -> int:
    """Print a line for a file, and why it failed. Returns 1 where it did."""
    passed = line["outcome"] == "passed"
    print(f"{line['file']:<60} {line['seconds']:>6.0f} s  {line['stops']:>3} stops  {result.verdict}", flush=True)
    if not passed:
        log = logs() / "flakes" / f"{result.suite.name}.log"
        print("\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]))
        print(repeat(result, line["seed"]))
        flags = f"--file {line['file']} --seed {line['seed']}"
        print(f"or, with the same stops: make flakes FLAKES_FLAGS='{flags}'", flush=True)
    return not passed


def _files() -> list[str]:
    """The files whose tests start processes. Those of the operator need what `make cluster-tools` builds."""
    suites = ["integration", "e2e"]
    try:
        tools.path("kube-apiserver")
        suites.append("operator")
    except ToolMissing as missing:
        print(f"not repeated: tests/operator: {missing}")
    paths = (path for suite in suites for path in (ROOT / "tests" / suite).rglob("test_*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def _repeats(ledger: Path) -> Counter[str]:
    """How often the ledger has each file."""
    if not ledger.exists():
        return Counter()
    return Counter(json.loads(line)["file"] for line in ledger.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
