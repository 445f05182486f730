"""`weft bench operator`, small: every figure is measured, and neither rest nor a restart writes anything."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from cluster.control_plane import ControlPlane
from weft_bench.lines import missed
from weft_bench.operator import Size
from weft_bench.through_operator import measure


@contextmanager
def no_bar(label: str, length: int) -> Generator[Callable[[int], None]]:
    yield lambda _: None


def test_a_small_benchmark_measures_everything_and_leaves_nothing_behind(control_plane: ControlPlane) -> None:
    lines = asyncio.run(measure(control_plane.kubeconfig, control_plane.audit_log, Size(2, 2), 3.0, no_bar))
    values = {(line.case.partition(": ")[2], line.metric): line.value for line in lines}
    assert [line for line in lines if line.value is None] == []
    assert [line for line in missed(lines) if line.unit != "s"] == [], "times on a busy machine prove nothing"
    assert values["steady 3 s", "API writes"] == values["restart", "API writes"] == 0
    assert values["converge", "API writes: patch loraadapters"] == 2  # their finalizers
    for name in control_plane.kubectl("get", "namespaces", "-o", "name").split():
        if name.startswith("namespace/weft-bench-"):
            control_plane.kubectl("wait", "--for=delete", name, "--timeout=60s")
