"""docs/benchmarks/cluster.md: what the last `make test-cluster` showed, on which commit, when, on what machine.

PYTHONPATH=tests python -m harness.cluster.summary
"""

import datetime
import os
import platform
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from weft_devcluster import tools
from weft_devcluster.errors import ClusterError

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "benchmarks" / "cluster.md"
INSTALL_TO_ANSWER = "install-to-answer-s"


@dataclass(frozen=True, slots=True)
class Result:
    """One test of a JUnit report."""

    module: str
    name: str
    seconds: float
    verdict: str


def write_summary(page: Path = PAGE, report: Path | None = None) -> Path:
    """Raises ClusterError where no run has left its report."""
    report = report or tools.cache() / "test-cluster.xml"
    if not report.exists():
        raise ClusterError(f"no report at {report}: run `make test-cluster` first")
    page.write_text(render(report.read_text()))
    return page


def circumstances() -> dict[str, str]:
    """What a run notes in its report: the commit, the day, the machine."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    today = datetime.datetime.now(datetime.UTC)
    machine = f"{os.cpu_count()} cores, Linux {platform.release().partition('-')[0]}, {platform.machine()}"
    return {"commit": commit, "date": f"{today:%Y-%m-%d}", "machine": machine}


def render(report: str) -> str:
    """The page of a JUnit report. Raises ClusterError for a run that began no node."""
    root = ElementTree.fromstring(report)
    noted = {item.get("name"): item.get("value") for item in root.iter("property")}
    if "commit" not in noted:
        raise ClusterError("the last `make test-cluster` did not start a node: nothing to tell")
    results = [_result(case) for case in root.iter("testcase")]
    seconds = noted.get(INSTALL_TO_ANSWER)
    answer = [] if seconds is None else ["", f"From `helm install` to the last right answer: {seconds} s."]
    counts = ", ".join(f"{_count(results, verdict)} {verdict}" for verdict in ("passed", "failed", "skipped"))
    lines = [
        "# Tests on a whole node",
        "",
        "Written by `python -m harness.cluster.summary` after `make test-cluster`: a real Kubernetes "
        f"{tools.kubernetes()} with one node, pods that run this checkout, no mocks.",
        "",
        f"{counts}; {sum(result.seconds for result in results):.0f} s in all. "
        f"Commit {noted['commit']}, {noted['date']}, {noted['machine']}.",
        *answer,
        "",
        "| test | seconds | verdict |",
        "|---|---:|---|",
    ]
    lines += [f"| {_title(result)} | {result.seconds:.1f} | {result.verdict} |" for result in results]
    return "\n".join(lines) + "\n"


def _result(case: ElementTree.Element) -> Result:
    failed = case.find("failure") is not None or case.find("error") is not None
    verdict = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
    module = case.get("classname", "").rpartition(".")[2]
    return Result(module, case.get("name", ""), float(case.get("time", "0")), verdict)


def _title(result: Result) -> str:
    words = result.name.removeprefix("test_").replace("_", " ").replace("|", "\\|")
    return f"{result.module.removeprefix('test_').replace('_', ' ')}: {words}"


def _count(results: list[Result], verdict: str) -> int:
    return sum(result.verdict == verdict for result in results)


if __name__ == "__main__":
    print(write_summary())
