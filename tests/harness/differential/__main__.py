"""`make differential BASE=COMMIT`: the same events, objects, messages and bodies through the code of two trees.

The old tree is COMMIT, unpacked into a folder; the new one is this checkout as it is. The old tree records what its
simulator and tests ask of the code (`record`), both replay that with their own code and their own `drive`, and answers
are compared after `renames.toml`: decisions of the scheduler (request, runner, epoch, time) and its other effects, the
supervisor's effects, the planner's actions and objects, values read and bytes written, refusals by name, traces of
simulations, renders and CRDs. What the old tree says is kept in ~/.cache/weft/differential for the next call.

Exit codes: 0: equal, or explained in the table; 1: not; 2: a tree that could not be asked.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.differential.comparison import Names, compare
from harness.differential.values import read, write
from harness.guard import guarded

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PLACE = HERE.relative_to(ROOT)
KEPT = Path.home() / ".cache" / "weft" / "differential"
PARTS = ("simulations", "tests")
AT_A_TIME = 2  # processes
LOG_CHARS = 3_000  # of a process that failed


class Broken(Exception):
    """A tree that could not be asked; the text says why."""


def main(arguments: Sequence[str]) -> int:
    """Compare. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.differential", description=__doc__)
    parser.add_argument("base", metavar="COMMIT", help="the old tree")
    parser.add_argument("--all", action="store_true", help="more seeds and examples")
    parser.add_argument("--names", type=Path, default=HERE / "renames.toml", help="the table of what is meant")
    options = parser.parse_args(arguments)
    return guarded("weft-differential-", partial(_compare, options))


def _compare(options: argparse.Namespace, folder: Path) -> int:
    began = time.monotonic()
    try:
        kept = _old_tree(options, folder)
        names = Names(tomllib.loads(options.names.read_text()))
        recordings = [kept / f"{part}.gz" for part in PARTS]
        if names:
            recordings = [_renamed(path, folder / path.name, names) for path in recordings]
        jobs = [_job(ROOT, "drive", folder / f"new-{path.name}", str(path)) for path in recordings]
        old = [kept / f"answers-{path.name}" for path in recordings]
        if not (complete := kept / "complete").exists():
            jobs += [
                _job(folder / "old", "drive", answers, str(kept / path.name))
                for path, answers in zip(recordings, old, strict=True)
            ]
        _run(jobs)
        complete.touch()
    except Broken as error:
        print(f"differential: {error}", file=sys.stderr)
        return 2
    report = compare(read(old), read([folder / f"new-{path.name}" for path in recordings]), names)
    print(report.text())
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if report.unexplained else 0


def _old_tree(options: argparse.Namespace, folder: Path) -> Path:
    """The folder with recordings of the old tree; where they are not there yet, its files are in `folder`/old."""
    git = ["git", "-C", str(ROOT)]
    asked = subprocess.run(
        [*git, "rev-parse", "--verify", f"{options.base}^{{commit}}"], capture_output=True, text=True
    )
    if asked.returncode:
        raise Broken(f"{options.base}: {asked.stderr.strip()}")
    commit, tree = asked.stdout.strip(), folder / "old"
    tree.mkdir()
    archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    driver = b"".join((tree / PLACE / name).read_bytes() for name in ("record.py", "drive.py", "values.py"))
    kept = KEPT / f"{commit[:12]}-{hashlib.sha256(driver).hexdigest()[:8]}{'-all' * options.all}"
    if not (kept / "complete").exists():
        kept.mkdir(parents=True, exist_ok=True)
        more = ["--all"] if options.all else []
        _run([_job(tree, "record", kept / f"{part}.gz", "--part", part, *more) for part in PARTS])
    return kept


def _renamed(path: Path, to: Path, names: Names) -> Path:
    write(to, map(names.record, read([path])))
    return to


def _job(tree: Path, module: str, out: Path, *more: str) -> tuple[Path, list[str]]:
    return tree, [sys.executable, "-m", f"harness.differential.{module}", "--out", str(out), *more]


def _run(jobs: Sequence[tuple[Path, list[str]]]) -> None:
    """Run processes in their trees, a few at a time. Raises Broken."""
    for first in range(0, len(jobs), AT_A_TIME):
        running = [(command, _start(tree, command)) for tree, command in jobs[first : first + AT_A_TIME]]
        for command, process in running:
            log, _ = process.communicate()
            if process.returncode:
                raise Broken(f"{' '.join(command[1:])} ended with {process.returncode}:\n{log[-LOG_CHARS:]}")


def _start(tree: Path, command: list[str]) -> subprocess.Popen[str]:
    """A tree's own packages come before those that are installed."""
    folders = [path for path in sorted(tree.iterdir()) if path.is_dir() and not (path / "__init__.py").exists()]
    roots = [tree, *folders, *sorted((tree / "services").iterdir())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots)), "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        command, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
