"""`make promises`: one break planted for each promise of the pages, and whether the test that the promise has sees it.

`tests/mutants/promises.toml` names for a row of a page's table (by its first cell) the test and the break: a mutant
(`harness.mutants.hook`) found by its line's text, so that edits above it change nothing. A break is seen where that
test alone is red with it and green without.

Exit codes: 0; 1 where a break is not seen; 2 where an entry fits no page, test or source.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.guard import guarded
from harness.mutants.hook import ROOT, Mutant, mutants
from harness.mutants.trials import Job, digest, run_jobs
from harness.suite import read_records
from suites import COSTLY, logs

PROMISES = ROOT / "tests" / "mutants" / "promises.toml"
PAGES = ("features.md", "threat-model.md", "reliability.md", "invariants.md")
EXACT = "invariants.md"  # each row names the file of its test
SHOWN = re.compile(r"`pytest tests/[^`]+`")
CODE = re.compile(r"`|\[|\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Promise:
    """A row of a page, the test that holds it, and the break: a mutant, whose line's text is its anchor."""

    page: str
    row: str
    test: str
    file: str
    function: str
    text: str
    operator: str
    index: int = 0

    def is_broken_by(self, mutant: Mutant) -> bool:
        """Say whether that is its break."""
        ours = self.file, self.function, self.text, self.operator, self.index
        return ours == (mutant.file, mutant.function, mutant.text, mutant.operator, mutant.index)


def main(arguments: Sequence[str]) -> int:
    """Run the breaks. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.mutants.promises", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="promises whose row, page or test has this text")
    parser.add_argument("--seed", type=int, default=0, help="of the tests (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    given = parser.parse_args(arguments)
    promises, _ = read_promises(PROMISES)
    if wrong := list(faults(promises)):
        print("\n".join(wrong), file=sys.stderr)
        return 2
    chosen = [one for one in promises if given.only in f"{one.page} {one.row} {one.test}"]
    return guarded("weft-promises-", lambda folder: _run(chosen, given.jobs, given.seed, folder))


def _run(promises: Sequence[Promise], at_a_time: int, seed: int, folder: Path) -> int:
    records, unseen = read_records(iter((COSTLY, logs() / "cpu_seconds.json"))), 0
    for done, (index, line) in enumerate(
        run_jobs([_job(one) for one in promises], at_a_time, seed, folder, records), 1
    ):
        promise, seen = promises[index], line.outcome == "killed"
        unseen += not seen
        word = "seen" if seen else f"NOT SEEN ({line.outcome})"
        print(
            f"{done:>4} of {len(promises)}  {word:<9} {line.cpu_s:>5.1f} CPU s  {promise.page}: {promise.row}",
            flush=True,
        )
        if not seen:
            print(f"      {promise.test}\n      does not see {line.mutant}: {line.text}", flush=True)
    print(f"{len(promises) - unseen} of {len(promises)} breaks are seen by the test that their promise names")
    return 1 if unseen else 0


def _job(promise: Promise) -> Job:
    mutant = break_of(promise)
    assert mutant is not None, "entries were checked"
    return Job(mutant, "", digest(mutant.file), {"before": (promise.test,)})


def read_promises(file: Path) -> tuple[list[Promise], dict[str, int]]:
    """Read the promises, and how many rows of each page have none. Raises ValueError for an incomplete entry."""
    read = tomllib.loads(file.read_text())
    for entry in read["promise"]:
        if missing := {"page", "row", "test", "file", "function", "text", "operator"} - entry.keys():
            raise ValueError(f"{file.name}: expected {', '.join(sorted(missing))}, got {entry}")
    return [Promise(**entry) for entry in read["promise"]], read["without"]


def faults(promises: Sequence[Promise]) -> Iterator[str]:
    """What is wrong with entries: each as `PAGE, ROW: what`."""
    rows = {page: promised(ROOT / "docs" / page) for page in {one.page for one in promises}}
    for one in promises:
        where, (path, _, name) = f"{one.page}, {one.row}", one.test.partition("::")
        if (shown := rows[one.page].get(one.row)) is None:
            yield f"{where}: expected the first cell of a row that names a test, got another text"
        elif one.page == EXACT and path not in shown:
            yield f"{where}: expected a row that names {path}, got {shown}"
        defined = rf"^\s*(?:async )?def {re.escape(name.partition('[')[0].rpartition('::')[2])}\("
        if not (ROOT / path).is_file() or not re.search(defined, (ROOT / path).read_text(), re.MULTILINE):
            yield f"{where}: expected FILE::TEST, got {one.test}"
        if break_of(one) is None:
            got = f"{one.operator} {one.index} of `{one.text}` in {one.function}"
            yield f"{where}: expected a mutant of {one.file}, got {got}"


def break_of(promise: Promise) -> Mutant | None:
    """The mutant of the source as it is now; None: there is no such place any more."""
    path = ROOT / promise.file
    there = mutants(promise.file, path.read_text()) if path.is_file() else []
    return next(filter(promise.is_broken_by, there), None)


def promised(page: Path) -> dict[str, str]:
    """The rows of a page that name a test, by their first cell as plain text."""
    rows = (line for line in page.read_text().splitlines() if line.startswith("| ") and SHOWN.search(line))
    return {CODE.sub("", row.split(" | ")[0].removeprefix("| ")).strip(): row for row in rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
