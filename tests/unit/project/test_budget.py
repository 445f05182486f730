"""What keeps `make test` short: suites are held to their CPU seconds, at the pace of whichever machine ran them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import budget
from harness.budget import MAX_GROWTH, Costs, Grown, check, find_grown, format_budget, measure_pace, read_budget
from suites import SUITES

FILES = {"test_a.py": 10.0, "b/test_b.py": 15.0, "test_c.py": 4.0, "test_small.py": 0.5}
HAD = {"unit": Costs(60.0, FILES), "sim": Costs(20.0, {"test_sim.py": 18.0})}


def at_pace(costs: Mapping[str, Costs], pace: float) -> dict[str, Costs]:
    return {
        suite: Costs(one.cpu_s * pace, {file: cpu_s * pace for file, cpu_s in one.files.items()})
        for suite, one in costs.items()
    }


def grown_by(more: Mapping[str, float]) -> dict[str, Costs]:
    """The unit suite with these CPU seconds more in these files."""
    files = {file: FILES.get(file, 0.0) + more.get(file, 0.0) for file in FILES | more}
    return HAD | {"unit": Costs(HAD["unit"].cpu_s + sum(more.values()), files)}


@given(st.floats(0.05, 20.0))
def test_a_machine_of_any_pace_is_within_the_budget(pace: float) -> None:
    used = at_pace(HAD, pace)
    assert measure_pace(HAD, used) == pytest.approx(pace)
    assert not find_grown(HAD, used, measure_pace(HAD, used))


@given(st.floats(0.05, 20.0), st.sampled_from([*FILES, "test_new.py"]))
def test_a_suite_that_grew_is_found_at_any_pace_and_its_file_named(pace: float, file: str) -> None:
    more = HAD["unit"].cpu_s * MAX_GROWTH
    within, beyond = (at_pace(grown_by({file: more * by}), pace) for by in (0.99, 1.01))
    assert not find_grown(HAD, within, pace)
    (grown,) = find_grown(HAD, beyond, measure_pace(HAD, beyond))
    assert (grown.suite, list(grown.files)) == ("unit", [file])
    assert file in str(grown)
    assert "expected at most 3 CPU seconds more (5% of 60), got 3" in str(grown)


def test_a_file_counts_with_the_least_that_it_has_used() -> None:
    asked = list[Grown]()

    def repeat(grown: Grown, *, now: list[float]) -> Mapping[str, float]:
        asked.append(grown)
        return {"test_a.py": now.pop(0)}

    noisy = grown_by({"test_a.py": 9.0})
    assert not check(HAD, noisy, lambda grown: repeat(grown, now=[10.2]))
    assert [one.suite for one in asked] == ["unit"], "only what has grown is run again"
    least = [19.5, 10.2, 19.5]
    assert not check(HAD, noisy, lambda grown: repeat(grown, now=least))
    assert least == [19.5], "and no more often than it says something new"
    assert check(HAD, noisy, lambda grown: repeat(grown, now=[19.5]))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "budget.toml"
    path.write_text(format_budget(HAD, "a machine"))
    large = {file: cpu_s for file, cpu_s in FILES.items() if cpu_s >= 1}
    assert read_budget(path) == HAD | {"unit": replace(HAD["unit"], files=large)}
    assert budget.read_machine(path) == "a machine"


def test_each_suite_of_make_test_has_a_budget() -> None:
    assert list(read_budget()) == [suite.name for suite in SUITES]
    for suite, costs in read_budget().items():
        assert sum(costs.files.values()) <= costs.cpu_s
        for file in costs.files:
            assert (Path(budget.ROOT) / "tests" / suite / file).is_file(), "make budget"
