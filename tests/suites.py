"""`make test`: every suite in order, each with a written budget of seconds on 2 cores, and one table at the end.

`python tests/suites.py operator` and `... cluster` run the suites that need a test cluster (`make cluster-tools`): what
they find missing is an error in the first, and told as skipped in the second, which needs root and containerd.

Suites of tests that need a process or a few run two at a time, whole files in order where files have servers to share;
those that start whole stacks run alone. A suite that fails does not stop the next ones; one that overruns its budget
is killed and counts as failed. The seed of random choices is printed and can be given again:
`WEFT_TEST_SEED=123 make test`.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Suite(NamedTuple):
    name: str
    arguments: tuple[str, ...]
    budget_s: int


REPORT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "test-cluster.xml"

PAIRED = ("--numprocesses=2", "--dist=worksteal")
FILES = ("--numprocesses=2", "--dist=loadfile")

SUITES = (
    Suite("unit", ("tests/unit", "-m", "not oracle", *FILES), 420),
    Suite("kernels", ("tests/kernels", *PAIRED), 150),
    Suite("oracle", ("tests/unit", "-m", "oracle", *PAIRED), 160),
    Suite("integration", ("tests/integration",), 360),
    Suite("e2e", ("tests/e2e",), 410),
)
GROUPS = {
    "test": SUITES,
    "operator": (Suite("operator", ("tests/operator",), 960),),
    "cluster": (Suite("cluster", ("tests/cluster", f"--junitxml={REPORT}"), 1080),),
}


def run(suite: Suite, seed: int) -> tuple[str, float]:
    """Run one suite in a process group of its own; returns its verdict and the seconds it took."""
    command = [sys.executable, "-m", "pytest", *suite.arguments, "-q", "--durations=5", f"--hypothesis-seed={seed}"]
    environment = {**os.environ, "WEFT_TEST_SEED": str(seed)}
    started = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(suite.budget_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"over its budget of {suite.budget_s} s", time.monotonic() - started
    return "passed" if code == 0 else f"failed (exit {code})", time.monotonic() - started


def main(arguments: Sequence[str] = ("test",)) -> int:
    """Run a group of suites. Returns the exit code: 0 all passed, 1 not, 2 no such group."""
    if len(arguments) != 1 or arguments[0] not in GROUPS:
        print(f"usage: suites.py {'|'.join(GROUPS)}", file=sys.stderr)
        return 2
    seed = int(os.environ.get("WEFT_TEST_SEED") or random.SystemRandom().randrange(2**31))
    verdicts: list[tuple[Suite, str, float]] = []
    for suite in GROUPS[arguments[0]]:
        print(f"\n=== {suite.name} (budget {suite.budget_s} s, seed {seed})", flush=True)
        verdicts.append((suite, *run(suite, seed)))
    print(f"\n{'suite':<12} {'seconds':>8} {'budget':>7}  verdict")
    for suite, verdict, seconds in verdicts:
        print(f"{suite.name:<12} {seconds:>8.1f} {suite.budget_s:>7}  {verdict}")
    failed = sum(verdict != "passed" for _, verdict, _ in verdicts)
    print(f"seed {seed}\nsuites: {len(verdicts) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["test"]))
