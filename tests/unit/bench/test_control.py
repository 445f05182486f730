"""Every case of `weft bench control` at sizes of a second: it drives the cores and codecs that ship."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from weft_bench.control import CASES, Amounts, figures
from weft_bench.control_cases import BUSY, PlayedRunner
from weft_stage.lines import Origin

TINY = Amounts(
    runners=2, rounds=2, host_copies=20, adapters=200, fleet=3, decisions=30, messages=20
)  # of requests 100 for each runner: more than run


@contextmanager
def bar(_label: str, length: int) -> Iterator[Callable[[int], None]]:
    advanced = 0

    def advance(by: int) -> None:
        nonlocal advanced
        advanced += by

    yield advance
    assert advanced in (0, length)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_figure_of_a_case_is_measured(case: str) -> None:
    lines = list(figures(Origin("c", "m", "v"), [case], TINY, bar))
    assert lines
    assert all(line.value is not None for line in lines)
    assert any(line.target for line in lines)


def test_a_played_runner_reports_what_changed() -> None:
    runner = PlayedRunner(0, 2_000)
    first, second = len(runner.report()), len(runner.report())
    assert first > BUSY * 100
    assert second < 1_000
