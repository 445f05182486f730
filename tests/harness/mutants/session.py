"""Run tests of one collected session again and again, each time in a fork whose code has one mutant.

A pytest that starts for each mutant spends seconds on imports before its first test. Here pytest collects once; a trial
is a fork of it in which the mutated function has other code, and processes that its tests start have the mutant by
`harness.mutants.hook`. A mutant of a line that runs at import (a constant, a default) needs a pytest of its own:
`can_be_planted` says which of the two it is.
"""

import ast
import gc
import inspect
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple, NoReturn

import pytest

from harness.guard import end_descendants
from harness.hangs import HangWatch, usage_of, waits_for_the_machine
from harness.mutants.hook import ROOT, VARIABLE, Mutant, install, mutated

BEAT_S = 1.0
MAX_READ_BYTES = 1 << 16
Place = tuple[str, str, int]  # file, qualified name and first line of a function's code


class Trial(NamedTuple):
    """The first test that was red, ended its process or hung; "" where none did. `cpu_s`: with children."""

    by: str
    cpu_s: float


class Collected:
    """The tests of a session, and the functions that live in its process."""

    def __init__(self, items: Sequence[pytest.Item], files: Set[str], red: list[str]) -> None:
        """`files`: whose functions can get mutants; `red`: where the session adds the id of each test that fails."""
        self._red, self._tests = red, defaultdict[str, list[pytest.Item]](list)  # by id, and by file
        for item in items:
            self._tests[item.nodeid].append(item)
            self._tests[item.nodeid.partition("::")[0]].append(item)
        self._functions = defaultdict[Place, list[FunctionType]](list)
        gc.unfreeze()  # what collection has frozen is not among the objects otherwise
        paths = {str(ROOT / file) for file in files}
        for function in gc.get_objects():
            if type(function) is FunctionType and function.__code__.co_filename in paths:
                self._functions[_place(function.__code__)].append(function)
        gc.freeze()

    def run(
        self, mutant: Mutant | None, tests: Sequence[str], but: Set[str], folder: Path, watch: HangWatch, *, slow: bool
    ) -> Trial:
        """Run tests (ids, or files) `but` some in their order until one is red, `slow` ones too or without them.

        `folder` is theirs, and gone afterwards. Raises RuntimeError: the fork ended before a test began.
        """
        found = dict.fromkeys(item for test in tests for item in self._tests[test])
        items = [item for item in found if item.nodeid not in but and (slow or not item.get_closest_marker("slow"))]
        if not items:  # all of them are slow, or gone
            return Trial("", 0.0)
        folder.mkdir()
        read, write = os.pipe()
        if not (pid := os.fork()):
            self._run_and_exit(mutant, items, folder, write)
        os.close(write)
        try:
            by = _follow(pid, read, watch)
            if by is None:
                raise RuntimeError(f"expected tests in a fork, got none:\n{(folder / 'output').read_text()}")
        finally:
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so that it is nobody else's number
            usage = os.wait4(pid, 0)[2]
            end_descendants(0.0)
            os.close(read)
            shutil.rmtree(folder, ignore_errors=True)
        return Trial(by, usage.ru_utime + usage.ru_stime)

    def _run_and_exit(self, mutant: Mutant | None, items: Sequence[pytest.Item], folder: Path, events: int) -> NoReturn:
        """Run tests in a process that was forked for them."""
        try:
            with (folder / "output").open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.environ |= {"TMPDIR": str(folder), "PYTEST_DEBUG_TEMPROOT": str(folder)}
            tempfile.tempdir = None
            if mutant:
                os.environ[VARIABLE] = mutant.name
                install()  # for a module that a test imports first
                self._plant(mutant)
            for item, following in zip(items, [*items[1:], None], strict=True):
                _say(events, "begins", item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self._red:
                    _say(events, "red", self._red[0])
                    break
            _say(events, "end", "")
        except Exception:  # noqa: BLE001 - told in the fork's output: os._exit below would hide it
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)  # without an "end", where a test has ended its process

    def _plant(self, mutant: Mutant) -> None:
        """Give functions that live the mutated code."""
        for before, after in changed_codes(mutant):
            for function in self._functions[_place(before)]:
                function.__code__ = after


class Session:
    """A plugin: collects, then calls `work` with the session instead of running its tests."""

    def __init__(self, files: Set[str], work: Callable[[Collected], None]) -> None:
        """`files`: of the mutants."""
        self._files, self._work, self._red = files, work, list[str]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Do the work instead of running tests."""
        self._work(Collected(session.items, self._files, self._red))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what is red."""
        if report.failed:
            self._red.append(report.nodeid)


def can_be_planted(mutant: Mutant) -> bool:
    """Say whether it changes what a function does when it is called: not what a module, a class or a default is."""
    pairs = list(changed_codes(mutant))
    same_cells = all(len(before.co_freevars) == len(after.co_freevars) for before, after in pairs)
    return same_cells and bool(pairs[-1][0].co_flags & inspect.CO_OPTIMIZED)


def changed_codes(mutant: Mutant) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield each code object that a mutant changes with the changed one, from the module to the innermost function."""
    path = ROOT / mutant.file
    source = path.read_text()
    trees = ast.parse(source), mutated(mutant.name, source)
    before, after = (compile(tree, path, "exec", dont_inherit=True) for tree in trees)
    while before is not None:
        yield before, after
        pairs = list(zip(_codes_in(before), _codes_in(after), strict=False))
        same = len(pairs) == len(_codes_in(before)) == len(_codes_in(after))
        before, after = next((pair for pair in pairs if same and pair[0] != pair[1]), (None, after))


def _codes_in(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _say(events: int, what: str, test: str) -> None:
    os.write(events, f"{json.dumps([what, test])}\n".encode())


def _follow(pid: int, events: int, watch: HangWatch) -> str | None:
    """Follow a fork to its end. Returns the test that was red, that hung, or in which the process ended; else "".

    None: it ended before a test began.
    """
    left, running = b"", None
    while True:
        ready, _, _ = select.select([events], [], [], BEAT_S)
        if not ready:
            if pid in watch.tests() and (why := watch.observe(pid, usage_of(pid), time.monotonic())):
                if "no CPU" not in why or not waits_for_the_machine(pid):
                    return running
                watch.forgive(pid)
            continue
        if not (read := os.read(events, MAX_READ_BYTES)):
            return running
        *lines, left = (left + read).split(b"\n")
        for what, test in map(json.loads, lines):
            if what != "begins":
                return test
            running = test
            watch.begin(pid, test)
