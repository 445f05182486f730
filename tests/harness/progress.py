"""What a run of pytest says of itself to `harness.suite`: JSON lines in a FIFO, whose path WEFT_PROGRESS has.

`{"total": N}` once the tests are collected, `{"done": TEST, "outcome": OUTCOME, "why": REASON}` for each of them;
OUTCOME is passed, failed or skipped, REASON that of a skip. Each process that runs tests says
`{"worker": PID, "begins": TEST}`, and `{"worker": PID, "ends": TEST, "cpu_s": SECONDS}` with what it and those that it
has waited for have used meanwhile.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

VARIABLE = "WEFT_PROGRESS"
MAX_WHY_CHARS = 1000  # a line that is longer than PIPE_BUF could be torn by another process's


def register(config: pytest.Config) -> None:
    """Report in the FIFO, where there is one; on SIGUSR1 write the stacks of all threads, in any case."""
    faulthandler.register(signal.SIGUSR1, file=os.dup(sys.stderr.fileno()), all_threads=True)
    path = os.environ.get(VARIABLE)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(Path(path), config))
    if path and not config.getoption("numprocesses", None):
        config.pluginmanager.register(Running(Path(path)))
        del os.environ[VARIABLE]  # a pytest that a test starts is another run's


class _Said:
    """Lines for the FIFO; each of them is one write."""

    def __init__(self, path: Path) -> None:
        self._pipe = path.open("w")

    def say(self, **event: Any) -> None:
        self._pipe.write(json.dumps(event) + "\n")
        self._pipe.flush()


class Progress(_Said):
    """Tests and their outcomes, in the process that people started. The last phase of a test to go wrong decides."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        super().__init__(path)
        self._config = config
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.say(total=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.say(total=len(ids))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> LoadFileScheduling | None:
        return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            # At once: a run may be stopped before pytest tells it.
            self._config.get_terminal_writer().line(f"\n{report.longreprtext}")
            self._outcomes[report.nodeid] = "failed", ""
        elif report.skipped and report.nodeid not in self._outcomes:
            self._outcomes[report.nodeid] = "skipped", _reason(report)
        if report.when not in ("setup", "call"):  # torn down, or xdist's word for a worker that died
            outcome, why = self._outcomes.pop(report.nodeid, ("passed", ""))
            self.say(done=report.nodeid, outcome=outcome, why=why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(done=report.nodeid, outcome="failed", why="")


class Running(_Said):
    """Tell which test this process runs."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = os.times()
        self.say(worker=os.getpid(), begins=item.nodeid)
        try:
            return (yield)
        finally:
            used = sum(os.times()[:4]) - sum(before[:4])
            self.say(worker=os.getpid(), ends=item.nodeid, cpu_s=round(used, 2))


class FileScheduling(LoadFileScheduling):
    """`--dist=loadfile` where a worker that dies costs the test that it ran: the others of its files run elsewhere.

    xdist's own would give that test to the next worker, and hand out files without a test left, whose worker then waits
    for ever.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        pending = {
            name: {test: False for test, done in unit.items() if not done}
            for name, unit in self.assigned_work[node].items()
        }
        crashed = next((test for unit in pending.values() for test in unit), None)
        if crashed is None:
            return super().remove_node(node)
        del self.assigned_work[node]
        for name, unit in pending.items():
            unit.pop(crashed, None)
            if unit:
                self.workqueue[name] = unit
        for other in self.nodes:
            self._reschedule(other)
        return crashed


def _reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")[:MAX_WHY_CHARS]
