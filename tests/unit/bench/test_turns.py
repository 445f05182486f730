"""Two checkouts in turn: the arithmetic of intervals, the order of the sides, and what is refused."""

import math
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from weft_bench import turns
from weft_bench.cases import Turns
from weft_bench.main import app
from weft_bench.turns import Case, Interval, Result, Worker
from weft_stage.errors import PeerFailed


def test_an_interval_is_students_of_the_logarithms_of_ratios() -> None:
    found = Interval.of([0.98, 1.0, 1.02, 1.04])
    assert found.mean == pytest.approx(1.009752, abs=1e-6)
    half = 3.182446 * 0.0255721 / 2  # the t quantile of three degrees, the deviation of the logs, the root of four
    assert (math.log(found.high / found.mean), math.log(found.mean / found.low)) == pytest.approx(
        (half, half), rel=1e-4
    )
    assert found.percent == pytest.approx(100 * (math.exp(half) - 1), rel=1e-4)


def test_equal_ratios_have_no_width_and_one_ratio_has_no_interval() -> None:
    assert Interval.of([0.5] * 3) == Interval(0.5, 0.5, 0.5)
    assert Interval.of([2.0]).percent == math.inf


class Played:
    """A worker whose unit takes `cpu_s`, in turn."""

    def __init__(self, side: str, log: list[str], *cpu_s: float) -> None:
        self._side, self._log, self._cpu_s = side, log, cpu_s
        self._asked = 0

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        self._log.append(f"{self._side} {what['seed']} {what['repeats']}")
        self._asked += 1
        cpu_s = self._cpu_s[self._asked % len(self._cpu_s)]
        return {"cpu_s": cpu_s * what["repeats"], "wall_s": 0.01 * what["repeats"], "units": what["repeats"]}


def played(log: list[str], options: Turns, *new_s: float) -> Result:
    sides = {"old": Played("old", log, 0.1), "new": Played("new", log, *new_s)}

    def start(number: int) -> Any:
        log.append(f"start {number}")
        return nullcontext(cast("dict[str, Worker]", sides))

    (result,) = turns.rounds(start, [Case("c", {})], options, lambda _: None)
    return result


def test_the_sides_take_turns_with_equal_work_and_the_order_alternates() -> None:
    log = list[str]()
    result = played(log, Turns(Path(), rounds=3), 0.05)
    rounds = ["old 0, c, 0 2", "new 0, c, 0 2", "new 0, c, 1 2", "old 0, c, 1 2"]
    assert [line for line in log if ", -" not in line] == ["start 0", *rounds, "start 2", *(
        line.replace("c, 1", "c, 3").replace("c, 0", "c, 2") for line in rounds
    )]  # fmt: skip
    assert [line for line in log if ", -3 " in line] == ["old 0, c, -3 2", "new 0, c, -3 2"] * 2, "each start warms up"
    assert result.taken["new"] == [(0.05, 0.01)] * 4
    assert str(result.intervals[0]) == "0.5000 [0.5000, 0.5000]"
    assert result.verdict(Turns(Path())) == "c: new takes 50.0% less CPU; the interval is +-0.00 % after 4 rounds"


def test_rounds_of_one_start_are_one_sample() -> None:
    result = Result(Case("c", {}), {"old": [(1.0, 1.0)] * 4, "new": [(1.1, 1.0), (1.1, 1.0), (0.9, 1.0), (0.9, 1.0)]})
    assert result.intervals[0] == Interval.of([1.1, 0.9])


def test_rounds_are_added_until_the_interval_is_narrow_or_their_number_is_reached() -> None:
    noise = (0.1, 0.102, 0.104)
    narrow = Turns(Path(), rounds=2, target_percent=3.0, max_rounds=50)
    result = played([], narrow, *noise)
    assert 2 < result.rounds < 50
    assert result.intervals[0].percent <= 3.0
    bounded = Turns(Path(), rounds=2, target_percent=0.1, max_rounds=6)
    result = played([], bounded, *noise)
    assert result.rounds == 6
    assert result.verdict(bounded).endswith("after 6 rounds, wider than the target of 0.1 %")


def test_a_worker_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    ready = 'print(\'{"ready": ""}\', flush=True)'
    program = f"import sys; sys.stdin.readline(); {ready}; sys.stdin.readline(); raise KeyError('why')"
    with (
        Worker("the old worker", [sys.executable, "-c", program], {}, tmp_path / "log") as worker,
        pytest.raises(PeerFailed, match=r"the old worker did not answer: it ended\n(.|\n)*KeyError: 'why'"),
    ):
        worker.ask({})


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--cases", "decode,encode"], 2, "decode, prefill, reports, decisions, path, request, refused"),
        (["--cases", "path"], 1, "expected a checkout of Weft"),
        (["--rows", "0", "--cases", "path"], 2, "--rows: expected at least 1, got '0'"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    ended = CliRunner().invoke(app, ["turns", "--old", str(tmp_path), *arguments])
    assert ended.exit_code == status
    assert said in " ".join(ended.stderr.replace("│", " ").split())
