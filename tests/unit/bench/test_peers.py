"""Rounds of ours and a peer: who runs when, what is compared, what is found out."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from weft_bench.cpu_decode import Batch
from weft_bench.cpu_shapes import BASE, DISTINCT
from weft_bench.errors import PeerFailed, WrongAdapter
from weft_bench.lines import Origin
from weft_bench.peers.compare import Load, Round, best, checked, rounds, times_as_fast
from weft_bench.peers.targets import DECODE, LEAST, PEFT, PREFILL, VLLM, target
from weft_bench.peers.worker import Ran, Worker
from weft_bench.peers_bench import CASES, Options, environment, figures

ECHO = """
import json, sys
work = json.loads(sys.stdin.readline())
print(json.dumps({"ready": "echo 1"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    rows = len(asked["prompts"])
    print(json.dumps({"seconds": 0.5 * asked["tokens"], "tokens": [asked["tokens"]] * rows,
                      "adapters": work["adapters"]}), flush=True)
"""
LOAD = Load(("a", None), prompt_tokens=3, tokens=5, vocab=50)


def worker(tmp_path: Path, script: str, name: str = "echo", **environment: str) -> Worker:
    return Worker(name, [sys.executable, "-c", script], {"adapters": LOAD.adapters}, tmp_path / "log", environment)


def test_a_worker_answers_and_is_stopped_in_between(tmp_path: Path) -> None:
    with worker(tmp_path, ECHO) as echo:
        assert echo.versions == "echo 1"
        assert echo.run([[1], [2]], 4) == Ran(2.0, (4, 4), ("a", None))
        (child,) = (child for child in psutil.Process().children() if child.pid == echo.pid)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)  # returns once it is stopped
        assert child.status() == psutil.STATUS_STOPPED
    assert not psutil.pid_exists(child.pid)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('no such model')", "no such model"),
        ("print('hello'); import sys; sys.stdin.read()", "Expecting value"),
    ],
)
def test_a_worker_that_does_not_start_is_told_with_what_it_said(tmp_path: Path, script: str, said: str) -> None:
    with pytest.raises(PeerFailed, match=said), worker(tmp_path, script):
        pass


def test_a_worker_that_ends_is_told(tmp_path: Path) -> None:
    script = ECHO.replace("asked = json.loads(line)", "sys.exit('out of memory')")
    with worker(tmp_path, script) as ending, pytest.raises(PeerFailed, match="out of memory"):
        ending.run([[1], [2]], 4)


def test_an_environment_reaches_the_worker(tmp_path: Path) -> None:
    script = ECHO.replace('"echo 1"', "__import__('os').environ['SETTING']")
    with worker(tmp_path, script, SETTING="on") as told:
        assert told.versions == "on"


def test_each_round_asks_everybody_after_one_that_warms_up(tmp_path: Path) -> None:
    advances: list[int] = []
    with worker(tmp_path, ECHO, "one") as one, worker(tmp_path, ECHO, "two") as two:
        measured = rounds([one, two], LOAD, 2, random.Random(0), advances.append)
    assert measured == {"one": [Round(0.5, 2.5)] * 2, "two": [Round(0.5, 2.5)] * 2}
    assert len(advances) == 6
    assert measured["one"][0].step_s(LOAD) == 0.5


@pytest.mark.parametrize(
    "ran", [Ran(1.0, (5, 5), ("a", "a")), Ran(1.0, (5, 4), ("a", None)), Ran(1.0, (5,), ("a", None))]
)
def test_other_adapters_or_tokens_than_asked_for_are_found_out(ran: Ran) -> None:
    assert checked("x", LOAD, 5, Ran(1.0, (5, 5), ("a", None))) == 1.0
    with pytest.raises(WrongAdapter):
        checked("x", LOAD, 5, ran)


def test_the_best_settings_for_the_peer_count() -> None:
    assert best({"slow": [Round(1, 9), Round(1, 9)], "fast": [Round(2, 8), Round(1, 30), Round(1, 7)]}) == "fast"


def test_ratios_are_of_the_same_round() -> None:
    ours, theirs = [Round(1, 10), Round(1, 20), Round(1, 30)], [Round(1, 100), Round(1, 40), Round(1, 120)]
    assert times_as_fast(ours, theirs, lambda each: each.whole_s) == 4


def test_targets_are_those_of_cases_that_are_run() -> None:
    assert target(VLLM, DECODE, "tiny", 16, DISTINCT) == ">= 10"
    assert target(PEFT, PREFILL, "small", 16, DISTINCT) == ">= 1.6"
    assert target(VLLM, PREFILL, "m135", 16, BASE) == ">= 0.909"
    assert target(PEFT, DECODE, "tiny", 16, DISTINCT) is None
    for (_, _, rows, popularity), shapes in LEAST.items():
        assert all(Batch(rows, popularity) in CASES[shape] for shape in shapes)


def test_environments_are_words() -> None:
    assert environment("A=1 B='x y'") == {"A": "1", "B": "x y"}
    assert environment("") == {}
    with pytest.raises(ValueError, match="'B' is not"):
        environment("A=1 B")


@pytest.mark.integration
def test_ours_beside_transformers_and_peft(tmp_path: Path) -> None:
    """Both for real, on the smallest shape: rates and ratios of a batch with an adapter for each row."""
    origin = Origin("c", "m", "v")
    options = Options(
        tmp_path, None, Path(sys.executable), executor="reference", repetitions=1, prompt_tokens=4, tokens=3,
        cases={"tiny": (Batch(2, DISTINCT),)},
    )  # fmt: skip

    @contextmanager
    def bar(label: str, length: int) -> Iterator[Callable[[int], None]]:
        assert label == "tiny, batch 2, Distinct, 4 + 3 tokens: weft, PEFT"
        assert length == 4
        yield lambda _: None

    lines = {(line.case, line.metric): line for line in figures(options, ["tiny"], origin, bar)}
    assert {metric for case, metric in lines if case == "tiny, batch 2, Distinct, 4 + 3 tokens, against PEFT"} == {
        "decode, times as fast", "prefill, times as fast", "whole run, times as fast",
    }  # fmt: skip
    whole = {who: lines["tiny, batch 2, Distinct, 4 + 3 tokens", f"whole run, {who}"].value for who in ("weft", "PEFT")}
    assert all(value is not None and value > 0 for value in whole.values())
    told = lines["tiny, batch 2, Distinct, 4 + 3 tokens, against PEFT", "whole run, times as fast"]
    assert "reference/" in told.versions
    assert "peft " in told.versions
    assert told.value == pytest.approx((whole["weft"] or 0) / (whole["PEFT"] or 1))
