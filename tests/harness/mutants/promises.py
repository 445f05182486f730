"""`make promises`: one break planted for each promise of the pages, and whether the test that the promise has sees it.

`tests/mutants/promises.toml` names for a row of a page's table (by its first cell) the test and the break: a mutant
(`harness.mutants.hook`) found by its line's text, so that edits above it change nothing, or an edit
(`harness.mutants.edits`) of what is no Python. A break is seen where that test alone is red with it and green without.

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
from harness.mutants.edits import Edit
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
    """A row of a page, the test that holds it, and the break: a mutant, whose line's text is its anchor, or an edit."""

    page: str
    row: str
    test: str
    file: str
    text: str
    function: str = ""
    operator: str = ""
    index: int = 0
    instead: str | None = None

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
        promise, seen = promises[index], "::" in line.by  # else nothing could be imported
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
        place = {"instead"} if "instead" in entry else {"function", "operator"}
        if entry.keys() - {"index"} != (needed := {"page", "row", "test", "file", "text", *place}):
            raise ValueError(f"{file.name}: expected {', '.join(sorted(needed))}, got {entry}")
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
        if break_of(one) is None and one.instead is not None:
            yield f"{where}: expected a text that stands once in {one.file} and another one instead, got `{one.text}`"
        elif break_of(one) is None:
            got = f"{one.operator} {one.index} of `{one.text}` in {one.function}"
            yield f"{where}: expected a mutant of {one.file}, got {got}"


def break_of(promise: Promise) -> Mutant | Edit | None:
    """The mutant of the source as it is now, or the edit; None: there is no such place any more."""
    path = ROOT / promise.file
    if promise.instead is not None:
        once = path.is_file() and path.read_text().count(promise.text) == 1
        return Edit(promise.file, promise.text, promise.instead) if once and promise.text != promise.instead else None
    there = mutants(promise.file, path.read_text()) if path.is_file() else []
    return next(filter(promise.is_broken_by, there), None)


def promised(page: Path) -> dict[str, str]:
    """The rows of a page that name a test, by their first cell as plain text."""
    rows = (line for line in page.read_text().splitlines() if line.startswith("| ") and SHOWN.search(line))
    return {CODE.sub("", row.split(" | ")[0].removeprefix("| ")).strip(): row for row in rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
