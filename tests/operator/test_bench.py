"""`weft bench operator`, small: every figure is measured, and neither rest nor a restart writes anything."""

from pathlib import Path

import pytest

from harness.cluster.cluster import Cluster
from harness.waiting import PATIENCE_S
from weft_bench.cases import Operator
from weft_bench.figures import operator
from weft_bench.run import Run
from weft_stage import process
from weft_stage.lines import missed


def test_a_small_benchmark_measures_everything_and_leaves_nothing_behind(
    control_plane: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CONVERGE_S", "CHANGE_S", "SETTLE_S"):
        monkeypatch.setattr(operator, limit, PATIENCE_S)
    for limit in ("START_S", "STOP_S"):
        monkeypatch.setattr(process, limit, PATIENCE_S)
    control_plane.require_no_nodes()
    options = Operator(control_plane.kubeconfig, control_plane.audit_log, adapters=1, runners=2, steady_seconds=1.0)
    lines = list(operator.figures(options, Run("operator", tmp_path)))
    values = {(line.case.partition(": ")[2], line.metric): line.value for line in lines}
    unknown = {line.metric for line in lines if line.value is None}
    assert unknown == (set() if control_plane.audit_log else {"API writes: refused"})
    assert [line for line in missed(lines) if line.unit != "s"] == [], "times on a busy machine prove nothing"
    assert values["steady 1 s", "API writes"] == values["restart", "API writes"] == 0
    if control_plane.audit_log:  # else the operator counts, in words of its own
        assert values["converge", "API writes: patch loraadapters"] == 1  # its finalizer
    for namespace in control_plane.get("namespaces")["items"]:
        if namespace["metadata"]["name"].startswith("weft-bench-"):
            control_plane.wait_until_gone("namespace", namespace["metadata"]["name"], "")
