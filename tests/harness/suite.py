"""Run one suite of tests in processes of its own and watch it from outside: how far it is, what hangs, its costs."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from harness.guard import command_of, descendants, end_descendants, reap_orphans
from harness.hangs import MAX_IDLE_S, MIN_CPU_BOUND_S, HangWatch, usage_of, waits_for_the_machine
from harness.progress import VARIABLE

ROOT = Path(__file__).parents[2]
BEAT_S = 1.0
PATIENCE_S = 600.0  # for each wait inside of a test (`weft_devcluster.waiting`)
STACKS_S = 2.0  # for a process to write the stacks of its threads
MAX_STACK_LINES = 60
HASH_SEED = {"PYTHONHASHSEED": "0"}  # sets of strings have one order: in a run, its workers, and the next run


class Suite(NamedTuple):
    """What pytest is called with."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}


@dataclass
class Result:
    """How far a suite has come, from what its pytest reports."""

    suite: Suite
    began: float
    total: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    by_folder: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])  # folder and outcome
    skips: Counter[str] = field(default_factory=Counter[str])
    failed: list[str] = field(default_factory=list[str])
    cpu_of_tests: dict[str, float] = field(default_factory=dict[str, float])
    seconds: float = 0.0
    cpu_s: float = 0.0
    verdict: str = ""

    def take(self, event: Mapping[str, str]) -> None:
        """Take an event of `harness.progress.Progress`."""
        if "total" in event:
            self.total = int(event["total"])
        elif "done" in event:
            self.outcomes[event["outcome"]] += 1
            self.by_folder[folder_of(event["done"]), event["outcome"]] += 1
            if event["outcome"] == "skipped":
                self.skips[event["why"]] += 1
            if event["outcome"] == "failed":
                self.failed.append(event["done"])

    def line(self, now: float) -> str:
        """One line that says how far it is."""
        count = f"{self.outcomes.total():>5} of {self.total:<5}" if self.total else f"{'collecting':<14}"
        failed = self.outcomes["failed"]
        return f"{self.suite.name:<12} {count} {now - self.began:>5.0f} s" + (f"  {failed} failed" if failed else "")


@dataclass
class Run:
    """What all suites of a run share. `say(result)` is called every second or so, `tell(line)` with what stays."""

    seed: int
    folder: Path
    logs: Path
    say: Callable[[Result], None]
    tell: Callable[[str], None]
    records: Mapping[str, float] = field(default_factory=dict[str, float])  # CPU seconds by test
    max_idle_s: float = MAX_IDLE_S
    min_cpu_bound_s: float = MIN_CPU_BOUND_S  # what a test without a record may use
    bounds_collection: bool = False  # by the same CPU seconds: what is imported may loop
    root: Path = ROOT  # where pytest runs

    def command(self, suite: Suite) -> list[str]:
        """The command line of a suite's pytest."""
        return [
            sys.executable, "-m", "pytest", *suite.arguments, "-v", "--durations=25",
            f"--hypothesis-seed={self.seed}", f"--basetemp={self.folder / suite.name}",
        ]  # fmt: skip

    def run(self, suite: Suite) -> Result:
        """Run a suite, from its start to the last of its processes."""
        result = Result(suite, began=time.monotonic())
        before = _cpu_of_children()
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{suite.name}.log"
        with log.open("wb") as output:
            result.verdict = self._follow(result, output)
        result.seconds = time.monotonic() - result.began
        left = [command_of(pid) for pid in descendants()]
        end_descendants()
        result.cpu_s = _cpu_of_children() - before
        for command in filter(None, left):
            self.tell(f"{suite.name}: a test left a process behind, which is ended now: {command[:200]}")
        return result

    def _follow(self, result: Result, output: IO[bytes]) -> str:
        """Run pytest and watch it. Returns the verdict."""
        suite, fifo = result.suite, self.folder / f"{result.suite.name}.progress"
        os.mkfifo(fifo)
        environment = {**os.environ, **HASH_SEED, **suite.environment}
        environment |= {"WEFT_TEST_SEED": str(self.seed), "TMPDIR": str(self.folder)}
        environment[VARIABLE] = str(fifo)
        environment.setdefault("WEFT_TEST_PATIENCE_S", str(PATIENCE_S))
        environment.pop(
            "PYTHONDONTWRITEBYTECODE", None
        )  # hundreds of processes would compile this checkout, one by one
        with (
            os.fdopen(os.open(fifo, os.O_RDWR)) as events,  # no end of file while no process of the suite has it open
            subprocess.Popen(
                self.command(suite),
                cwd=self.root,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):
            watch = _SuiteWatch(self, result, process.pid)
            listener = threading.Thread(target=watch.listen, args=(events,), daemon=True)
            listener.start()
            hung = ""
            while (code := _wait(process)) is None and not hung:
                reap_orphans(process.pid)
                self.say(result)
                hung = watch.look()
            if hung:
                end_descendants()
            with fifo.open("w") as ours:
                ours.write("{}\n")  # the last line
            listener.join()
        if hung:
            return f"ended: {hung}"
        return "passed" if code == 0 else f"failed (pytest's exit code {code})"


class _SuiteWatch:
    """The events of a suite's processes, and what they make of its tests. One thread listens, another one looks."""

    def __init__(self, run: Run, result: Result, pytest: int) -> None:
        self._run, self._result, self._pytest = run, result, pytest
        self._log = run.logs / f"{result.suite.name}.log"
        self._lock = threading.Lock()
        self._tests = HangWatch(run.records, run.max_idle_s, run.min_cpu_bound_s)
        self._between = HangWatch({}, run.max_idle_s, run.min_cpu_bound_s)

    def listen(self, events: IO[str]) -> None:
        """Take events until the last line has come."""
        for line in events:
            event = json.loads(line)
            if not event:
                return
            if "begins" in event:
                with self._lock:
                    self._tests.begin(event["worker"], event["begins"])
            elif "ends" in event:
                with self._lock:
                    seen = self._tests.end(event["worker"])
                self._result.cpu_of_tests[event["ends"]] = max(seen, event["cpu_s"])
            else:
                self._result.take(event)
                if event.get("outcome") == "failed":
                    self._run.tell(f"{self._result.suite.name}: FAILED {event['done']}")

    def look(self) -> str:
        """End workers whose tests hang. Returns why the suite hangs where no test runs, "" while it does not."""
        with self._lock:
            running = self._tests.tests()
        for worker, test in running.items():
            if why := self._why_it_hangs(worker, test):
                self._run.tell(f"{self._result.suite.name}: HANGS {test}: {why}")
                self._end(worker)
        if running:
            self._between.end(self._pytest)
            return ""
        if self._pytest not in self._between.tests():
            self._between.begin(self._pytest, "")
        why = self._between.observe(self._pytest, usage_of(self._pytest), time.monotonic())
        if why and "no CPU" not in why and self._run.bounds_collection:
            return f"no test ran, and {why}"
        if "no CPU" not in why or waits_for_the_machine(self._pytest):
            return ""
        return f"no test ran, and {why}"

    def _why_it_hangs(self, worker: int, test: str) -> str:
        usage, there = usage_of(worker), command_of(worker)
        with self._lock:
            if self._tests.tests().get(worker) != test:
                return ""
            if not there:  # died, as pytest-xdist reports
                self._tests.end(worker)
                return ""
            why = self._tests.observe(worker, usage, time.monotonic())
        if "no CPU" in why and waits_for_the_machine(worker):
            with self._lock:
                self._tests.forgive(worker)
            return ""
        return why

    def _end(self, worker: int) -> None:
        """Kill a worker and all below it, once it has written the stacks of its threads to the log."""
        begin, tree = self._log.stat().st_size, [worker, *descendants(worker)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGUSR1)
        time.sleep(STACKS_S)  # nothing says when all of them are written, and a hang is in no hurry
        for line in self._log.read_bytes()[begin:].decode(errors="replace").splitlines()[:MAX_STACK_LINES]:
            self._run.tell(f"    {line}")
        for pid in tree[1:]:
            self._run.tell(f"    below it: {command_of(pid)[:160]}")
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def folder_of(test: str) -> str:
    """Return the folder of a test below tests/."""
    return test.removeprefix("tests/").partition("/")[0].partition("::")[0]


def read_records(paths: Iterator[Path]) -> dict[str, float]:
    """The most CPU seconds that these JSON files have for each test. A file that is missing has none."""
    records: dict[str, float] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            for test, cpu_s in json.loads(path.read_text()).items():
                records[test] = max(records.get(test, 0.0), cpu_s)
    return records


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(BEAT_S)
    return None


def _cpu_of_children() -> float:
    """The CPU seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
