"""The figures of `weft bench operator` from known measurements."""

from collections import Counter

import pytest

from weft_bench.audit_log import Writes
from weft_bench.lines import Line, Origin, missed
from weft_bench.operator import (
    Converged,
    Restarted,
    Singles,
    Size,
    Steady,
    converged,
    restarted,
    singles,
    steady,
    surroundings,
)
from weft_bench.scrape import Sample

ORIGIN, SIZE = Origin("command", "machine", "versions"), Size(adapters=4, runners=2)
NOTHING = Writes(Counter(), 0)
SAMPLES = (
    Sample("weft_operator_reconcile_seconds_bucket", {"kind": "LoRAAdapter", "le": "0.1"}, 50.0),
    Sample("weft_operator_reconcile_seconds_bucket", {"kind": "LoRAAdapter", "le": "0.5"}, 100.0),
    Sample("weft_operator_reconcile_seconds_bucket", {"kind": "LoRAAdapter", "le": "+Inf"}, 100.0),
    Sample("weft_operator_reconciles_total", {"kind": "LoRAAdapter", "result": "done"}, 97.0),
    Sample("weft_operator_reconciles_total", {"kind": "LoRAAdapter", "result": "failed"}, 3.0),
    Sample("process_resident_memory_bytes", {}, 64.0 * 2**20),
)


def values(lines: list[Line]) -> dict[str, float | None]:
    return {line.metric: line.value for line in lines}


def after_convergence(wrote: Writes) -> list[Line]:
    seen = Converged(
        applied_s=0.5,
        creates_s=[0.1, 0.2, 0.3],
        ready_s=2.0,
        counted_s=1.0,
        final_s=4.0,
        cpu_s={"the operator": 1.0},
        samples=SAMPLES,
        wrote=wrote,
    )
    return list(converged(ORIGIN, SIZE, seen))


def test_convergence_tells_times_reconciles_and_memory() -> None:
    told = values(after_convergence(NOTHING))
    assert told["all objects accepted"] == 0.5
    assert told["every adapter Ready"] == 2.0
    assert told["reconcile p50"] == pytest.approx(100.0)
    assert told["reconcile p99"] == pytest.approx(492.0)
    assert told["reconciles"] == 100
    assert told["failed reconciles"] == 3
    assert told["memory of the operator"] == 64.0


def test_cpu_times_stand_beside_their_share_of_a_core() -> None:
    line = next(line for line in after_convergence(NOTHING) if line.metric == "CPU of the operator")
    assert (line.value, line.bound_fraction) == (1.0, 0.25)


def test_writes_are_told_in_total_by_kind_and_for_each_adapter() -> None:
    wrote = Writes(Counter({"update loraadapters/status": 8, "patch loraadapters": 4}), refused=1)
    lines = after_convergence(wrote)
    told = values(lines)
    assert told["API writes"] == 12
    assert told["API writes: refused"] == 1
    assert told["API writes: update loraadapters/status"] == 8
    assert told["API writes for each adapter"] == 3.0
    assert next(line.ratio for line in lines if line.metric == "API writes for each adapter") == 1.5


def test_refusals_that_nobody_counted_are_not_measured() -> None:
    assert values(after_convergence(Writes(Counter({"SetStatus": 3}), None)))["API writes: refused"] is None


@pytest.mark.parametrize(("count", "met"), [(0, True), (1, False)])
def test_a_single_write_at_rest_or_after_a_restart_misses_the_target(count: int, met: bool) -> None:
    wrote = Writes(Counter({"update servingpools/status": count}), 0)
    rest = list(steady(ORIGIN, SIZE, Steady(30.0, {"the operator": 3.0}, SAMPLES, wrote)))
    again = list(restarted(ORIGIN, SIZE, Restarted(1.0, 2.0, 3.0, wrote)))
    assert [not missed(rest), not missed(again)] == [met, met]
    assert values(rest)["CPU of the operator"] == pytest.approx(0.1)


def test_single_changes_tell_the_median_and_hold_the_longest_to_the_target() -> None:
    quick = list(singles(ORIGIN, SIZE, "one edit", Singles([0.1, 0.3, 0.2], Writes(Counter({"patch pods": 6}), 0))))
    assert values(quick) == {"median": 0.2, "longest of 3": 0.3, "API writes": 2.0, "API writes: patch pods": 2.0}
    assert missed(quick) == []
    slow = list(singles(ORIGIN, SIZE, "one edit", Singles([0.1, 0.3, 11.0], NOTHING)))
    assert [line.metric for line in missed(slow)] == ["longest of 3"]


def test_sizes_do_not_mix_on_the_page() -> None:
    one, other = (surroundings(ORIGIN, Size(adapters, 2), 0.5) for adapters in (4, 5))
    assert one.key != other.key
