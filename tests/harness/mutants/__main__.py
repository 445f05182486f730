"""`make mutants COUNT=300 SEED=7`: small faults in the sources, one at a time, and which test sees each of them.

A mutant (`harness.mutants.hook`) runs against the tests of `make test` and the simulator's laws that call its function
(`harness.mutants.callers`: they are recorded once, which takes as long as `make test`), nearest file first in the graph
of imports, cheap ones before costly ones, and then against test files that have changed since. All that is in forks of
one session that has collected the tests (`harness.mutants.session`), for a line that runs at import in a pytest of its
own. Where the line is in no function that was called, the mutant runs on against the test files nearest to its module,
the others of its package, the laws, and the costly files that import the module. The first red test kills it; that test
is run once without the mutant: one that is red then, too, counts for nothing. The ledger has a line for each mutant and
is written at once, so that a run that was broken off goes on: a mutant of a source text that the ledger has is not run
again, except one that lived at another commit.

`DIFF=COMMIT` runs those again that the ledger has as killed, of packages whose sources or tests have changed since.
Mutants that nobody can see, with the reason, are in `tests/mutants/equivalent.toml`; they are not run.

Exit codes: 0; 1 where a mutant lives (DIFF: one that was killed before); 2 where a name or a file is wrong.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from harness.guard import guarded
from harness.mutants.callers import Callers, read_callers, record_callers
from harness.mutants.drawing import PACKAGES, Equivalent, all_mutants, draw, package_of, read_equivalents, stale
from harness.mutants.hook import ROOT, Mutant, UnknownMutant, mutants, parse
from harness.mutants.nearest import choose, cost_of_files, import_graph, make_nearness, order_callers
from harness.mutants.session import Collected, Session, can_be_planted
from harness.mutants.trials import ALL, ENVIRONMENT, OPTIONS, SITE, Job, Ledger, Line, digest, run_jobs
from harness.suite import Run, Suite, read_records
from suites import COSTLY, COSTS, LINE_S, ONE, TOGETHER, Screen, logs, paths

LEDGERS = "tools/ledgers"
LEDGER = ROOT / LEDGERS / "mutants.jsonl"
EQUIVALENT = ROOT / "tests" / "mutants" / "equivalent.toml"
LAWS, SIMULATED = "tests/harness/mutants/laws.py", "sim/weft_sim/scenario.py"
CALLING = ("unit", "sim", "integration")  # folders whose tests are recorded
BAR_CHARS = 30
OUTCOMES = ("killed", "equivalent", "alive", "unseen")


def main(arguments: Sequence[str]) -> int:
    """Run mutants. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many mutants (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="which ones, and the seed of the tests (default 0)")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="only of this one; may be given again")
    parser.add_argument("--mutant", action="append", help="only this one, FILE:LINE:OPERATOR[:INDEX], known or not")
    parser.add_argument("--diff", metavar="COMMIT", help="killed ones of what has changed since this commit, again")
    parser.add_argument("--list", action="store_true", help="name the mutants and run none")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--record", action="store_true", help="record again which tests call what")
    parser.add_argument("--ledger", type=Path, default=LEDGER, help="where lines are written (default: %(default)s)")
    given = parser.parse_args(arguments)
    return guarded("weft-mutants-", lambda folder: _work(given, folder))


def _work(given: argparse.Namespace, folder: Path) -> int:
    try:
        return Command(given, folder).run()
    except (UnknownMutant, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


class Command:
    """One call of the command."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        """Raises ValueError: the list of equivalents does not fit the sources."""
        self._given, self._folder = given, folder
        self._ledger, self._commit = Ledger(given.ledger), _commit()
        self._records = read_records(iter((COSTLY, COSTS)))
        self._equivalents = read_equivalents(EQUIVALENT)
        if left := stale(self._equivalents, ROOT):
            lines = "\n".join(f"  {one.file}, {one.function}: {one.operator} of `{one.text}`" for one in left)
            raise ValueError(f"expected mutants in {EQUIVALENT.relative_to(ROOT)}, got none for:\n{lines}\nremove them")
        self._lines: list[tuple[str, str]] = []  # package and outcome of each mutant of this call
        self._alive: list[Line] = []
        self._done = 0
        self._began = self._shown_at = time.monotonic()

    def run(self) -> int:
        """Run what was asked for. Returns the exit code. Raises UnknownMutant."""
        given = self._given
        chosen, by = self._chosen()
        if given.list:
            print("\n".join(f"{mutant.name}  {mutant.function}: {mutant.text}" for mutant in chosen))
            return 0
        left = list(chosen)
        if not given.mutant:
            left, equivalent, known = sort_out(chosen, self._ledger, self._equivalents, self._commit, bool(given.diff))
            self._lines += [(package_of(mutant.file), "equivalent") for mutant in equivalent]
            for line in known:
                self._count(line)
        print(f"{len(chosen)} mutants, {len(chosen) - len(left)} of them known; seed {given.seed}", flush=True)
        if left:
            self._run_all(list(self._jobs(left, by)))
        print("\n".join(summary(self._lines, self._alive)), flush=True)
        return 1 if self._alive else 0

    def _chosen(self) -> tuple[list[Mutant], dict[Mutant, str]]:
        """The mutants, and of those that were killed before the file of the test that did."""
        given = self._given
        if given.mutant:
            return [_find(name) for name in given.mutant], {}
        packages = given.package or list(PACKAGES)
        if not given.diff:
            return draw({name: all_mutants(ROOT, name) for name in packages}, given.count, given.seed), {}
        found, gone = killed_before(self._ledger, packages, _changed(given.diff))
        if gone:
            print(f"{gone} mutants were killed in lines that are not there any more")
        return list(found), found

    def _jobs(self, chosen: Sequence[Mutant], by: dict[Mutant, str]) -> Iterator[Job]:
        """Choose the tests of each mutant."""
        graph, costs, callers = import_graph(ROOT), cost_of_files(self._records), self._callers()
        for mutant in chosen:
            package, distances = package_of(mutant.file), graph.distances(mutant.file)
            suite = f"tests/unit/{package}"
            choice = choose(mutant.file, distances, suite, costs)
            stages: dict[str, Sequence[str]] = {"before": (by[mutant],) if by.get(mutant) else ()}
            there = [test for test in callers.find(mutant) if not callers.has_changed(test.partition("::")[0])]
            nearness = make_nearness(mutant.file, distances, suite, costs)
            stages["callers"], costly = order_callers(there, nearness, self._records)
            if callers.is_known(mutant):
                stages["changed"] = [test for test in (*choice.nearest, *choice.package) if callers.has_changed(test)]
                stages["costly"] = costly
            else:
                laws = (LAWS,) if SIMULATED in distances else ()
                stages |= {"nearest": choice.nearest, "package": choice.package, "laws": laws, "costly": choice.costly}
            in_session = callers.is_known(mutant) and can_be_planted(mutant)
            yield Job(mutant, package, digest(mutant.file), stages, in_session)

    def _callers(self) -> Callers:
        """Read which tests call what; record it where that was never done, or is asked for."""
        path = logs() / "callers.json"
        if self._given.record or not path.exists():
            print("recording which tests call what", flush=True)
            suites = (Suite("calling", (*paths(CALLING), *TOGETHER)), Suite("laws", (LAWS, *ONE)))
            screen = Screen()
            run = Run(self._given.seed, self._folder, self._folder / "logs", screen.show, screen.tell, self._records)
            for result in record_callers(path, suites, run, SITE):
                screen.close(result, run.logs)
        return read_callers(path)

    def _run_all(self, jobs: Sequence[Job]) -> None:
        """Run them in worker processes, those of a session first, and write each line as it comes."""
        given = self._given
        common = (given.jobs, given.seed, self._folder, self._records)
        of_session = [job for job in jobs if job.in_session]
        if of_session:
            work = partial(run_jobs, of_session, *common)
            run_in_session(of_session, given.seed, self._folder, lambda it: self._take(work(it), len(jobs)))
        self._take(run_jobs([job for job in jobs if not job.in_session], *common), len(jobs))

    def _take(self, lines: Iterator[tuple[int, Line]], total: int) -> None:
        for _, line in lines:
            line.commit = self._commit
            self._ledger.add(line)
            self._count(line)
            self._done += 1
            self._show(self._done, total)

    def _count(self, line: Line) -> None:
        self._lines.append((line.package, line.outcome))
        if line.outcome != "killed":
            self._alive.append(line)
            _tell(f"{line.outcome}: {told(line)}")

    def _show(self, done: int, total: int) -> None:
        """Say how far the run is: on a terminal in one line that is written over, elsewhere now and then."""
        now = time.monotonic()
        if not sys.stdout.isatty() and now < self._shown_at + LINE_S and done < total:
            return
        self._shown_at = now
        left_s = (now - self._began) * (total - done) / done
        line = f"{done:>5} of {total:<5} {now - self._began:>5.0f} s  {len(self._alive)} alive"
        line += f"; about {left_s / 60:.0f} minutes left" if left_s else ""
        print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def run_in_session(jobs: Sequence[Job], seed: int, folder: Path, work: Callable[[Collected], None]) -> None:
    """Collect the test files of jobs in this process, then work.

    `folder` keeps what hypothesis stores. Raises ValueError: they cannot be collected.
    """
    files = sorted({test.partition("::")[0] for job in jobs for tests in job.stages.values() for test in tests})
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    os.environ |= ENVIRONMENT | {
        "PYTHONPATH": path, "WEFT_TEST_SEED": str(seed), "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
    }  # fmt: skip
    words = ("-q", "-s", "-m", ALL, *OPTIONS, f"--hypothesis-seed={seed}", "--continue-on-collection-errors")
    code = pytest.main([*files, *words], [Session({job.mutant.file for job in jobs}, work)])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"expected tests that can be collected, got pytest's {code!s}: it says above why")


def sort_out(
    chosen: Sequence[Mutant], ledger: Ledger, equivalents: Sequence[Equivalent], commit: str, again: bool
) -> tuple[list[Mutant], list[Mutant], list[Line]]:
    """The mutants to run, those listed as equivalent, and what the ledger has of the others.

    What lived at another commit runs again, and `again` what was killed at another one.
    """
    left, equivalent, known = list[Mutant](), list[Mutant](), list[Line]()
    for mutant in chosen:
        line = ledger.find(mutant, digest(mutant.file))
        if any(one.is_meant(mutant) for one in equivalents):
            equivalent.append(mutant)
        elif line and ((line.outcome == "killed" and not again) or (line.commit == commit and commit[-1:] != "+")):
            known.append(line)
        else:
            left.append(mutant)
    return left, equivalent, known


def killed_before(ledger: Ledger, packages: Sequence[str], changed: set[str]) -> tuple[dict[Mutant, str], int]:
    """Mutants that the ledger has as killed, each with its test's file, and how many have no place any more.

    Those count whose package has changed, in sources or tests, or whose killing test has.
    """
    found, gone = dict[Mutant, str](), 0
    known: dict[str, list[Mutant]] = {}
    for line in ledger.killed():
        file, by = line.place[0], line.by.partition("::")[0]
        folders = (PACKAGES[line.package], *(f"tests/{suite}/{line.package}" for suite in ("unit", "integration")))
        if line.package not in packages or not (by in changed or any(path.startswith(folders) for path in changed)):
            continue
        if file not in known:
            known[file] = mutants(file, (ROOT / file).read_text()) if (ROOT / file).is_file() else []
        there = [
            each for each in known[file] if line.place[1:] == (each.function, each.text, each.operator, str(each.index))
        ]
        gone += not there
        found |= {there[0]: by if (ROOT / by).is_file() else ""} if there else {}
    return found, gone


def summary(lines: Sequence[tuple[str, str]], alive: Sequence[Line]) -> list[str]:
    """The table by package, with a bar of which the dark part is killed, and what lives."""
    counts = Counter(lines)
    rows = [f"\n{'package':<12} {'drawn':>6}" + "".join(f" {name:>10}" for name in OUTCOMES)]
    for package in (*(name for name in PACKAGES if any(name == one for one, _ in lines)), "all"):
        of = [sum(counts[name, kind] for name in PACKAGES if package in (name, "all")) for kind in OUTCOMES]
        bar = "█" * round(BAR_CHARS * of[0] / (sum(of) or 1))
        rows.append(f"{package:<12} {sum(of):>6}" + "".join(f" {n:>10}" for n in of) + f"  {bar:░<{BAR_CHARS}}")
    return [*rows, *(f"{line.outcome}: {told(line)}" for line in sorted(alive, key=lambda line: line.mutant))]


def told(line: Line) -> str:
    """A mutant for people, and the command that tries it again."""
    return f"{line.mutant}  {line.function}: {line.text}"


def _tell(line: str) -> None:
    print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, flush=True)


def _find(name: str) -> Mutant:
    """The mutant of this name. Raises UnknownMutant."""
    file, line, operator, index = parse(name)
    package_of(file)
    there = mutants(file, (ROOT / file).read_text()) if (ROOT / file).is_file() else []
    for mutant in there:
        if (mutant.line, mutant.operator, mutant.index) == (line, operator, index):
            return mutant
    known = ", ".join(mutant.name for mutant in there if mutant.line == line) or "none"
    raise UnknownMutant(f"expected a mutant of the source as it is now, got {name}; that line has: {known}")


def _changed(commit: str) -> set[str]:
    """Files that differ from a commit's. Raises ValueError: there is no such commit."""
    found = _git("diff", "--name-only", commit, "--")
    if found is None:
        raise ValueError(f"expected a commit of this repository in DIFF, got {commit}")
    return set(found.splitlines())


def _commit() -> str:
    """The last commit, with a plus where files differ from it: tests as they are now have no name then."""
    differs = _git("status", "--porcelain", "--", ".", f":!{LEDGERS}")
    return f"{(_git('rev-parse', '--short', 'HEAD') or '').strip()}{'+' if differs else ''}"


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
