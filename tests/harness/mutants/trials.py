"""Run one mutant after the other against the tests that may see it, and keep in a ledger what came of each."""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness.guard import adopt_orphans
from harness.hangs import HangWatch
from harness.mutants.edits import Copy, Edit
from harness.mutants.hook import ROOT, SEEN_VARIABLE, VARIABLE, Mutant, UnknownMutant, parse
from harness.mutants.session import Collected
from harness.suite import Result, Run, Suite

SITE = Path(__file__).parent / "site"
MIN_CPU_BOUND_S, MAX_IDLE_S, PATIENCE_S = 60.0, 60.0, 30.0
NO_TESTS = "exit code 5"  # of pytest, where no test of the files is in the stage
ENVIRONMENT = {"WEFT_TEST_PATIENCE_S": str(PATIENCE_S), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
OPTIONS = ("-p", "no:cacheprovider", "--hypothesis-profile=verdict")
QUICK, ALL = "not long and not slow", "not long"
MARKED = {"before": ALL}  # by stage; the others run what `make test` does

trials: "Trials | None" = None  # of a worker process


@dataclass
class Line:
    """One mutant in the ledger. `source` is the digest of its file; `by` the test that killed it, one of `stage`.

    `outcome`: killed, alive, or unseen, where no test has imported the module.
    """

    mutant: str
    package: str
    function: str
    text: str
    source: str
    outcome: str
    by: str = ""
    stage: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0
    seed: int = 0
    commit: str = ""
    date: str = ""

    @property
    def place(self) -> tuple[str, ...]:
        """What stays the same where lines above it change."""
        file, _, operator, index = parse(self.mutant)
        return file, self.function, self.text, operator, str(index)


@dataclass(frozen=True, slots=True)
class Job:
    """A mutant or an edit, and the tests that may see it: ids or files by the name of their stage.

    `in_session`: in forks of a session that has collected them, and not in a pytest of its own.
    """

    mutant: Mutant | Edit
    package: str
    source: str
    stages: Mapping[str, Sequence[str]]
    in_session: bool = False


@dataclass
class Trials:
    """Runs mutants in one process, which has `folder` and what it starts for itself."""

    seed: int
    folder: Path
    records: Mapping[str, float]  # CPU seconds by test
    collected: Collected | None = None  # for jobs in a session
    _copy: Copy | None = None  # for edits
    _red: dict[type, set[str]] = field(default_factory=lambda: defaultdict(set))  # without any mutant, or any edit
    _green: dict[type, set[str]] = field(default_factory=lambda: defaultdict(set))
    _said: list[str] = field(default_factory=list[str])
    _runs: int = 0

    def run(self, job: Job) -> Line:
        """Run the stages until a test is red. Raises UnknownMutant: the file is another one than when it was drawn."""
        mutant, began = job.mutant, time.monotonic()
        line = Line(mutant.name, job.package, mutant.function, mutant.text, job.source, "alive", seed=self.seed)
        if digest(mutant.file) != job.source:
            raise UnknownMutant(f"{mutant.file} has changed while its mutants ran; run the command again")
        seen = self.folder / "seen"
        seen.unlink(missing_ok=True)
        for name, files in job.stages.items():
            if not files:
                continue
            if job.in_session and isinstance(mutant, Mutant):
                by = self._killer_in_session(mutant, files, MARKED.get(name, QUICK) == ALL, line)
            else:
                by = self._killer(mutant, files, MARKED.get(name, QUICK), seen, line)
            if by:
                line.outcome, line.by, line.stage = "killed", by, name
                break
        else:
            line.outcome = "alive" if job.in_session or seen.exists() else "unseen"
        line.seconds, line.cpu_s = round(time.monotonic() - began, 1), round(line.cpu_s, 1)
        line.date = time.strftime("%Y-%m-%d", time.gmtime())
        return line

    def _killer_in_session(self, mutant: Mutant, tests: Sequence[str], slow: bool, line: Line) -> str:
        """The test that is red, or hangs, with the mutant and green without it; "" where there is none."""
        red, green = self._red[Mutant], self._green[Mutant]
        while by := self._fork(mutant, tests, slow, line):
            if by in green or not self._fork(None, (by,), True, replace(line)):
                green.add(by)
                return by
            red.add(by)
        return ""

    def _fork(self, mutant: Mutant | None, tests: Sequence[str], slow: bool, line: Line) -> str:
        """Run tests in a fork of the session, and add to a line what they cost. Returns the first red one."""
        assert self.collected is not None, "this worker has a session"
        watch, but = HangWatch(self.records, MAX_IDLE_S, MIN_CPU_BOUND_S), self._red[Mutant] if mutant else set[str]()
        trial = self.collected.run(mutant, tests, but, self._folder(), watch, slow=slow)
        line.cpu_s += trial.cpu_s
        return trial.by

    def _folder(self) -> Path:
        self._runs += 1
        return self.folder / f"run{self._runs}"

    def _killer(self, mutant: Mutant | Edit, files: Sequence[str], marked: str, seen: Path, line: Line) -> str:
        """The test that is red with the mutant and green without it; "" where there is none."""
        while True:
            result = self._pytest(mutant, files, marked, seen)
            line.cpu_s += result.cpu_s
            hung = (said.partition(": HANGS ")[2].rpartition(": ")[0] for said in self._said if ": HANGS " in said)
            by = next(iter(result.failed), "") or next(hung, "")
            if not by:
                passed = result.verdict == "passed" or NO_TESTS in result.verdict
                return "" if passed else f"pytest itself: {result.verdict}"
            if "::" not in by or by in self._green[type(mutant)]:  # a file that cannot be imported, or one known
                return by
            path, _, test = by.partition("::")
            file = next((each for each in files if each.endswith(path)), path)  # pytest's root may be above ours
            if not self._pytest(mutant, (f"{file}::{test}",), ALL).failed:
                self._green[type(mutant)].add(by)
                return by
            self._red[type(mutant)].add(by)

    def _place(self, mutant: Mutant | Edit, seen: Path | None) -> tuple[Path, Mapping[str, str]]:
        """Prepare folder and environment of tests with a mutant, or without it where nothing is to be seen."""
        if isinstance(mutant, Edit):
            self._copy = self._copy or Copy(self.folder / "copy")
            self._copy.put(mutant if seen else None)
            if seen:
                seen.touch()
            return self._copy.folder, self._copy.environment()
        path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
        planted = {VARIABLE: mutant.name, SEEN_VARIABLE: str(seen)} if seen else {}
        return ROOT, {"PYTHONPATH": path, **planted}

    def _pytest(self, mutant: Mutant | Edit, tests: Sequence[str], marked: str, seen: Path | None = None) -> Result:
        """Run tests with a mutant, or without it where nothing is to be seen."""
        root, environment = self._place(mutant, seen)
        self._said.clear()
        folder = self._folder()
        folder.mkdir()
        common = ENVIRONMENT | {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")}
        options = ("-x", "-m", marked, *OPTIONS, *(f"--deselect={test}" for test in sorted(self._red[type(mutant)])))
        run = Run(
            self.seed, folder, self.folder / "logs", lambda _: None, self._said.append, self.records, MAX_IDLE_S,
            MIN_CPU_BOUND_S, bounds_collection=True, root=root,
        )  # fmt: skip
        result = run.run(Suite("mutant", (*tests, *options), environment={**common, **environment}))
        shutil.rmtree(folder, ignore_errors=True)
        return result


def run_jobs(
    jobs: Sequence[Job],
    at_a_time: int,
    seed: int,
    folder: Path,
    records: Mapping[str, float],
    collected: Collected | None = None,
) -> Iterator[tuple[int, Line]]:
    """Run jobs in worker processes, and yield the index of each with its line when it is done.

    `collected`: of the session in whose process this is called. Raises UnknownMutant: a file has changed since its
    mutant was drawn.
    """
    begun = (seed, folder, records, collected)
    with ProcessPoolExecutor(at_a_time, multiprocessing.get_context("fork"), _begin_worker, begun) as workers:
        indices = {workers.submit(_run_job, job): index for index, job in enumerate(jobs)}
        try:
            for future in as_completed(indices):
                yield indices[future], future.result()
        finally:
            workers.shutdown(wait=False, cancel_futures=True)


def _begin_worker(seed: int, folder: Path, records: Mapping[str, float], collected: Collected | None) -> None:
    global trials
    adopt_orphans()  # of a test's processes; the next mutant begins without them
    own = folder / f"worker-{os.getpid()}"
    own.mkdir()
    trials = Trials(seed, own, records, collected)


def _run_job(job: Job) -> Line:
    assert trials is not None, "a worker has begun"
    return trials.run(job)


class Ledger:
    """What is known of mutants that ran: JSON lines, of which the last one of a mutant counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        texts = path.read_text().splitlines() if path.exists() else []
        lines = [Line(**json.loads(text)) for text in texts]
        self._known = {(line.mutant, line.source): line for line in lines}
        self._last = {line.place: line for line in lines}

    def find(self, mutant: Mutant, source: str) -> Line | None:
        """What came of this mutant of this very source."""
        return self._known.get((mutant.name, source))

    def killed(self) -> list[Line]:
        """The last line of each place, where it says killed."""
        return [line for line in self._last.values() if line.outcome == "killed"]

    def add(self, line: Line) -> None:
        """Write a line at once."""
        self._known[line.mutant, line.source] = self._last[line.place] = line
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")


def digest(file: str) -> str:
    """Digest the text of a file of this checkout."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]
