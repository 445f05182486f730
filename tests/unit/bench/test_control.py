"""Every case of `weft bench control` at sizes of a second: it drives the cores and codecs that ship."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft_bench.control_cases import BUSY, Amounts, PlayedRunner
from weft_bench.figures import control
from weft_bench.run import Run
from weft_stage.lines import Origin

# 100 requests for each runner are more than run.
TINY = Amounts(runners=2, rounds=2, host_copies=20, adapters=200, fleet=3, decisions=30)


class CheckedRun(Run):
    """Checks that progress reaches its length."""

    @contextmanager
    def progress(self, label: str, length: int) -> Generator[Callable[[int], None]]:
        advanced = list[int]()
        yield advanced.append
        assert sum(advanced) == length


@pytest.mark.slow
@pytest.mark.parametrize("case", control.CASES)
def test_every_figure_of_a_case_is_measured(case: str, tmp_path: Path) -> None:
    lines = list(control.case_figures(case, Origin("c", "m", "v"), TINY, CheckedRun("control", tmp_path)))
    assert lines
    assert all(line.value is not None for line in lines)
    assert any(line.target for line in lines)


def test_a_played_runner_reports_what_changed() -> None:
    runner = PlayedRunner(0, 2_000)
    first, second = len(runner.report()), len(runner.report())
    assert first > BUSY * 100
    assert second < 1_000
