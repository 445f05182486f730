"""What a run of pytest says of itself to `tests/suites.py`: JSON lines on a pipe, whose number WEFT_PROGRESS_FD has.

`{"total": N}` once the tests are collected, `{"start": TEST}` and `{"done": TEST, "outcome": OUTCOME, "why": REASON}`
for each of them; OUTCOME is passed, failed or skipped, REASON that of a skip.
"""

import json
import os
from typing import Any

import pytest

VARIABLE = "WEFT_PROGRESS_FD"


def register(config: pytest.Config) -> None:
    """Report on the pipe, where there is one. Worker processes of pytest-xdist do not: their controller does."""
    number = os.environ.get(VARIABLE)
    if number and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(int(number)))


class Progress:
    """The hooks. The last phase of a test to go wrong decides; a test is done when it is torn down."""

    def __init__(self, number: int) -> None:
        self._pipe = os.fdopen(number, "w")
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._say(total=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._say(total=len(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed", ""
        elif report.skipped and report.nodeid not in self._outcomes:
            self._outcomes[report.nodeid] = "skipped", _reason(report)
        if report.when == "teardown":
            outcome, why = self._outcomes.pop(report.nodeid, ("passed", ""))
            self._say(done=report.nodeid, outcome=outcome, why=why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say(done=report.nodeid, outcome="failed", why="")

    def _say(self, **event: Any) -> None:
        self._pipe.write(json.dumps(event) + "\n")
        self._pipe.flush()


def _reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")
