"""Run the tests nearest to what has changed, for a minute: `make test-changed`, or `python -m harness.changed`.

What has changed is what git says: of the working tree, else of the last commit; `--since COMMIT` for more. Of the
tests that may see it those that failed last time run first, then those that have changed themselves, then by the
imports between a test and what has changed (`harness.mutants.nearest`), cheap ones before others. What tests reach
without importing it is in UNIMPORTED. When the time is over, the test at hand ends, and the files that are left are
named.

Exit codes: 0 what ran has passed; 1 a test failed; 2 git cannot tell.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from harness import deadline
from harness.mutants.nearest import ImportGraph, cost_of_files, import_graph
from harness.suite import ROOT, read_records
from weft_devcluster import tools

BATCH_FILES = 12  # of one pytest, which collects them before it runs the first
UNIMPORTED_DISTANCE = 3  # behind tests that import what has changed, or what imports it
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"

SERVICES = ("gateway", "scheduler", "supervisor", "predictor", "gpu-runner", "depot", "batch")
# What is read, built, or started by name -> the tests that do it.
UNIMPORTED: Sequence[tuple[str, Sequence[str]]] = (
    ("charts/*", ("tests/unit/chart", "tests/integration/chart")),
    ("crds/*", ("tests/unit/api", "tests/integration/chart")),
    ("weft/wire/v1/*", ("tests/unit/wire", "tests/integration/wire")),
    ("kernels/weft_kernels/cpu/src/*", ("tests/kernels/cpu",)),
    ("weft/store/migrations/*", ("tests/integration/store",)),
    *((f"services/{name}/*", (f"tests/integration/{name.removeprefix('gpu-')}",)) for name in SERVICES),
    ("operator/*", ("tests/integration/operator",)),
    ("cli/*", ("tests/integration/cli", "tests/e2e/test_demo.py")),
    ("examples/*", ("tests/unit/quickstart", "tests/e2e/test_tutorials.py")),
    ("docs/tutorials/*", ("tests/e2e/test_tutorials.py",)),
    ("images/*", ("tests/unit/images", "tests/integration/images")),
    *(
        (pattern, ("tests/unit/project",))
        for pattern in ("docs/*", "*.lock", "pyproject.toml", "Makefile", ".github/*")
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser("harness.changed", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--since", metavar="COMMIT", help="what has changed since then, the working tree included")
    parser.add_argument("--seconds", type=float, default=60.0, help="no test begins later (%(default)s)")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.seconds
    try:
        files = changed_files(options.since)
    except subprocess.CalledProcessError as error:
        print(f"error: {error.stderr.strip()}", file=sys.stderr)
        return 2
    failed = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.exists() else {}
    costs = cost_of_files(read_records(iter((tools.cache() / "test-logs" / "cpu_seconds.json",))))
    chosen = choose(files, import_graph(ROOT), costs, {test.partition("::")[0] for test in failed})
    print(f"{len(files)} files have changed; {len(chosen)} files of tests may see it, the nearest first", flush=True)
    return run(chosen, ends)


def changed_files(since: str | None) -> list[str]:
    """Paths that are in the checkout now. Raises CalledProcessError."""
    if since is None:
        working = _git("diff", "--name-only", "HEAD") + _git("ls-files", "--others", "--exclude-standard")
        names = working or _git("diff", "--name-only", "HEAD~1", "HEAD")
    else:
        names = _git("diff", "--name-only", since) + _git("ls-files", "--others", "--exclude-standard")
    return [name for name in dict.fromkeys(names) if (ROOT / name).exists()]


def choose(files: Sequence[str], graph: ImportGraph, costs: Mapping[str, float], failed: Iterable[str]) -> list[str]:
    """Files of tests, in the order in which they run. `costs`: CPU seconds by file; `failed`: files that failed."""
    distance: dict[str, float] = {}
    for file in files:
        for test, imports in graph.distances(file).items():
            distance[test] = min(distance.get(test, imports), imports)
        for folder in dict.fromkeys(name for pattern, names in UNIMPORTED if fnmatch(file, pattern) for name in names):
            place = ROOT / folder
            for path in [place] if place.is_file() else place.rglob("test_*.py"):
                distance.setdefault(str(path.relative_to(ROOT)), UNIMPORTED_DISTANCE)
    failed, changed = set(failed), set(files)

    def place_of(test: str) -> tuple[bool, bool, float, float, str]:
        return test not in failed, test not in changed, distance[test], costs.get(test, 1.0), test

    return sorted((test for test in distance if Path(test).name.startswith("test_")), key=place_of)


def run(tests: Sequence[str], ends: float) -> int:
    """Run files of tests in order until the time is over. Returns the exit code."""
    code, left = 0, list(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "--ff"]
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    while left and time.monotonic() < ends:
        batch, left = left[:BATCH_FILES], left[BATCH_FILES:]
        done = subprocess.run(
            [*command, *batch],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, deadline.VARIABLE: str(ends)},
            check=False,
        )
        code = code or int(done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))
    if left:
        more = " ..." if len(left) > BATCH_FILES else ""
        print(f"the time is over: {len(left)} files are left: {' '.join(left[:BATCH_FILES])}{more}")
    return code


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
