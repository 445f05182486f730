"""`make test`: every suite in order, a line for each while it runs, and one table at the end.

    python tests/suites.py [test | long | operator | cluster]

A suite's time is printed and decides nothing. A hang is ended by the bound of its test (pytest-timeout, `timeout` in
pyproject.toml) or, where that cannot be, by the bound of the whole run (BOUND_S). A suite that fails does not stop the
next ones. The whole output of a suite's pytest is kept (`logs()`), and shown from its first failure on if there is one.

The seed of random choices is printed and can be given again: `WEFT_TEST_SEED=123 make test`. However a run ends, no
process and no folder of it stays (`harness.guard`).
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from harness.guard import command_of, descendants, end_descendants, guarded, reap_orphans
from harness.progress import VARIABLE
from weft_devcluster import tools

ROOT = Path(__file__).parents[1]
BOUND_S = 3600  # of a whole run: no working machine comes near it
ELSEWHERE = "two cores of an AMD EPYC (Zen 4)"
LOG_LINES = 150
BEAT_S = 1.0
LINE_S = 60.0  # how often a line is printed where none can be written over


class Suite(NamedTuple):
    """What pytest is called with, and the seconds that it took ELSEWHERE (0: not measured)."""

    name: str
    arguments: tuple[str, ...]
    elsewhere_s: int
    environment: Mapping[str, str] = {}


REPORT = tools.cache() / "test-cluster.xml"

GIVEN = bool(os.environ.get("KUBECONFIG"))  # a cluster of somebody else's: one test at a time has it
ONCE = "--max-worker-restart=0"  # xdist waits for ever for the files of a worker that crashed
ORDERED = ("--dist=loadfile", "--no-loadscope-reorder")  # in the order of `harness.order`, not by their tests
PAIRED = ("--numprocesses=2", ONCE, "--dist=worksteal")
FILES = ("--numprocesses=2", ONCE, *ORDERED)
WAITING = ("--numprocesses=3", ONCE, *ORDERED)  # where tests wait for other processes, for a sixth of the time

SUITES = (
    Suite("unit", ("tests/unit", *FILES), 100),
    Suite("sim", ("tests/sim", *PAIRED), 25),
    Suite("kernels", ("tests/kernels", *PAIRED), 65),
    Suite("oracle", ("tests/oracle", *FILES), 74),
    Suite("integration", ("tests/integration", *WAITING), 166),
    Suite("e2e", ("tests/e2e", *WAITING), 179),
)
LONG = ("-m", "long or hypothesis")
EXAMPLES = {"WEFT_TEST_EXAMPLES": "1000"}
GROUPS: Mapping[str, Sequence[Suite]] = {
    "test": SUITES,
    "long": (
        Suite("operator", ("tests/operator", *LONG, *(() if GIVEN else FILES)), 0),
        Suite("long", (*(f"tests/{s.name}" for s in SUITES), *LONG, *PAIRED), 0, EXAMPLES),
    ),
    "operator": (Suite("operator", ("tests/operator", *(() if GIVEN else FILES)), 306),),
    "cluster": (Suite("cluster", ("tests/cluster", f"--junitxml={REPORT}"), 244),),
}


@dataclass
class Result:
    """How far a suite has come, from what its pytest reports."""

    suite: Suite
    began: float
    total: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    skips: Counter[str] = field(default_factory=Counter[str])
    running: dict[str, None] = field(default_factory=dict[str, None])  # in the order of their start
    seconds: float = 0.0
    verdict: str = ""

    def take(self, event: Mapping[str, str]) -> None:
        """An event of `harness.progress`."""
        if "total" in event:
            self.total = int(event["total"])
        elif "start" in event:
            self.running[event["start"]] = None
        else:
            self.running.pop(event["done"], None)
            self.outcomes[event["outcome"]] += 1
            if event["outcome"] == "skipped":
                self.skips[event["why"]] += 1

    def line(self, now: float) -> str:
        done, failed = self.outcomes.total(), self.outcomes["failed"]
        count = f"{done:>5} of {self.total:<5}" if self.total else f"{'collecting':<14}"
        return f"{self.suite.name:<12} {count} {now - self.began:>5.0f} s" + (f"  {failed} failed" if failed else "")


def main(arguments: Sequence[str]) -> int:
    """Run a group of suites. Returns the exit code: 0 all passed, 1 not, 2 no such group."""
    group = arguments[0] if arguments else "test"
    if len(arguments) > 1 or group not in GROUPS:
        print(f"usage: suites.py {'|'.join(GROUPS)}", file=sys.stderr)
        return 2
    return guarded("weft-tests-", lambda folder: run(group, folder))


def run(group: str, folder: Path) -> int:
    """All suites of a group, with `folder` for whatever is temporary."""
    suites = GROUPS[group]
    seed = int(os.environ.get("WEFT_TEST_SEED") or random.SystemRandom().randrange(2**31))
    minutes = sum(suite.elsewhere_s for suite in suites) / 60
    takes = f"about {minutes:.0f} minutes on {ELSEWHERE}" if minutes else "an hour or more"
    print(f"{group}: {', '.join(suite.name for suite in suites)}: {takes}; seed {seed}")
    print(f"output: {logs()}", flush=True)
    end = time.monotonic() + BOUND_S
    results = [_run(suite, seed, folder, end) for suite in suites]
    print(_summary(results, seed), flush=True)
    return 0 if all(result.verdict == "passed" for result in results) else 1


def logs() -> Path:
    """Where the output of each suite's last run is kept."""
    return tools.cache() / "test-logs"


def _run(suite: Suite, seed: int, folder: Path, end: float) -> Result:
    """One suite, from start to the last of its processes."""
    result = Result(suite, began=time.monotonic())
    if result.began >= end:
        result.verdict = "not run"
        return result
    logs().mkdir(parents=True, exist_ok=True)
    log = logs() / f"{suite.name}.log"
    with log.open("wb") as output:
        code = _follow(result, seed, folder, output, end)
    result.seconds = time.monotonic() - result.began
    result.verdict = _verdict(code, result)
    left = [command_of(pid) for pid in descendants()]
    end_descendants()
    _show(result.line(time.monotonic()) + ("" if result.verdict == "passed" else f"  {result.verdict}"), last=True)
    if result.verdict != "passed":
        print(_end_of(log), flush=True)
    for command in filter(None, left):
        print(f"{suite.name}: a test left a process behind, which is ended now: {command[:200]}", flush=True)
    return result


def _follow(result: Result, seed: int, folder: Path, output: IO[bytes], end: float) -> int | None:
    """Run pytest and keep the screen; None when the bound of the run ended it."""
    suite = result.suite
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "pytest", *suite.arguments, "-v", "--durations=25", f"--hypothesis-seed={seed}"]
    command += [f"--basetemp={folder / suite.name}"]
    environment = {**os.environ, **suite.environment, "WEFT_TEST_SEED": str(seed), "TMPDIR": str(folder)}
    environment[VARIABLE] = str(writing)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile this checkout, one by one
    with (
        os.fdopen(reading) as events,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, pass_fds=[writing], start_new_session=True
        ) as process,
    ):
        os.close(writing)
        listener = threading.Thread(target=_listen, args=(events, result), daemon=True)
        listener.start()
        while time.monotonic() < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(BEAT_S)
                listener.join(BEAT_S)
                return code
            reap_orphans(process.pid)
            _show(result.line(time.monotonic()))
        end_descendants()
    return None


def _listen(events: IO[str], result: Result) -> None:
    """Take the events of a suite until its pytest has ended."""
    for line in events:
        event = json.loads(line)
        result.take(event)
        if event.get("outcome") == "failed":
            _show(f"{result.suite.name}: FAILED {event['done']}", last=True)


def _verdict(code: int | None, result: Result) -> str:
    if code is None:
        return f"ended by the run's bound of {BOUND_S // 60} minutes during {', '.join(result.running) or 'collection'}"
    return "passed" if code == 0 else f"failed (pytest's exit code {code})"


_shown_at = 0.0


def _show(line: str, *, last: bool = False) -> None:
    """On a terminal the line that is written over; elsewhere a line now and then. `last`: a line that stays."""
    global _shown_at
    if sys.stdout.isatty():
        print(f"\r\x1b[K{line}", end="\n" if last else "", flush=True)
    elif last or time.monotonic() > _shown_at + LINE_S:
        print(line, flush=True)
        _shown_at = time.monotonic()


def _end_of(log: Path) -> str:
    """From the first report of an error or failure on; else the end. The last LOG_LINES of it."""
    lines = log.read_text(errors="replace").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("=") and line.strip("= ") in ("FAILURES", "ERRORS")]
    return "\n".join(lines[min(starts, default=0) :][-LOG_LINES:])


def _summary(results: Sequence[Result], seed: int) -> str:
    """The table, why tests were skipped, and one line that machines read."""
    rows = [f"\n{'suite':<12} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8} {'elsewhere':>10}  verdict"]
    for result in results:
        counts = "".join(f" {result.outcomes[name]:>7}" for name in ("passed", "failed", "skipped"))
        row = f"{result.suite.name:<12}{counts} {result.seconds:>8.0f} {result.suite.elsewhere_s:>10}  {result.verdict}"
        rows.append(row)
    total = sum((result.outcomes for result in results), Counter[str]())
    skips = sum((result.skips for result in results), Counter[str]())
    rows += [f"skipped {count}: {why}" for why, count in skips.most_common()]
    bad = sum(result.verdict != "passed" for result in results)
    failed = total["failed"] or bad  # a suite may fail without a test that does
    rows.append(f"seed {seed}; {sum(result.seconds for result in results) / 60:.1f} minutes")
    rows.append(f"tests: {total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
