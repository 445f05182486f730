"""Record which tests call which function of the core packages: a mutant meets those alone that can see it.

One run of the quick tests, with this module as a plugin of pytest, keeps after each test what `harness.mutants.calls`
noted. What a test's set-up calls (a fixture may be a whole file's) counts for all tests of the file; what a child
process calls counts for the test that started it, if it ends by itself.
"""

import builtins
import json
import os
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.mutants.calls import NOTED, PACKAGES_VARIABLE, VARIABLE, write
from harness.mutants.drawing import PACKAGES
from harness.mutants.hook import ROOT, Mutant
from harness.mutants.trials import digest
from harness.suite import Result, Run, Suite


@dataclass(frozen=True, slots=True)
class Callers:
    """The tests (an id, or a file) that call each `FILE:FUNCTION`; `digests`: of the test files when they ran."""

    of: Mapping[str, frozenset[str]]
    digests: Mapping[str, str]

    def find(self, mutant: Mutant) -> frozenset[str]:
        """Find the tests that call the mutant's function, or for lines of a class or module any below them."""
        name = f"{mutant.file}:{mutant.function}"
        if tests := self.of.get(name):
            return tests
        below = [
            tests for function, tests in self.of.items() if function.startswith(f"{name}." if mutant.function else name)
        ]
        return frozenset[str]().union(*below)

    def is_known(self, mutant: Mutant) -> bool:
        """Say whether they are all: who only makes an object of a class, or reads a constant, notes nothing."""
        return f"{mutant.file}:{mutant.function}" in self.of

    def has_changed(self, file: str) -> bool:
        """Say whether a test file is new, gone, or another one than when it ran."""
        return not (ROOT / file).is_file() or self.digests.get(file) != digest(file)


def read_callers(path: Path) -> Callers:
    """Read what `record_callers` has written. Raises FileNotFoundError."""
    read = json.loads(path.read_text())
    tests = read["tests"]
    return Callers({name: frozenset(tests[i] for i in at) for name, at in read["of"].items()}, read["digests"])


def record_callers(path: Path, suites: Sequence[Suite], run: Run, site: Path) -> list[Result]:
    """Run suites and write which of their tests call what. Returns how they went.

    Raises ValueError: a suite was ended before its tests had run, and what it did not run would seem to call nothing.
    """
    calls = run.folder / "calls"
    calls.mkdir()
    environment = {
        VARIABLE: str(calls), PACKAGES_VARIABLE: ":".join(PACKAGES.values()),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    results = [
        run.run(
            Suite(suite.name, (*suite.arguments, "-p", "harness.mutants.callers"), {**suite.environment, **environment})
        )
        for suite in suites
    ]
    if ended := [result.suite.name for result in results if result.verdict.startswith("ended")]:
        raise ValueError(f"expected suites that run to their end, got {', '.join(ended)} ended before; run it again")
    of, numbers = defaultdict[str, set[int]](set), dict[str, int]()
    for file in calls.iterdir():
        for test, functions in json.loads(file.read_text()).items():
            number = numbers.setdefault(test, len(numbers))
            for function in functions:
                of[function].add(number)
    files = {test.partition("::")[0] for test in numbers}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "tests": list(numbers),
                "of": {name: sorted(at) for name, at in sorted(of.items())},
                "digests": {file: digest(file) for file in sorted(files) if (ROOT / file).is_file()},
            }
        )
    )
    return results


class Recorder:
    """Keeps what each test has called, and each file's set-up, and writes it at the end."""

    def __init__(self, noted: set[str]) -> None:
        self._noted, self._of_tests = noted, defaultdict[str, set[str]](set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._keep(item.nodeid.partition("::")[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._keep(item.nodeid))

    def _keep(self, name: str) -> Generator[None, object, object]:
        self._noted.clear()
        try:
            return (yield)
        finally:
            self._of_tests[name] |= self._noted
            self._noted.clear()

    def pytest_sessionfinish(self) -> None:
        write(Path(os.environ[VARIABLE], f"{os.getpid()}.json"), self._of_tests)


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that runs the tests."""
    noted: set[str] | None = getattr(builtins, NOTED, None)
    if noted is not None and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Recorder(noted))
