"""`gpu-bench` and `gpu-check` under the interpreter: every case and every group, with tiny shapes.

So that they work at the first try where a GPU is lent for half an hour. On a GPU (TRITON_INTERPRET=0) the same tests
run there.
"""

import gc
import math
import random
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import played_flashinfer
from weft_bench import gpu_check, gpu_check_attention, gpu_worker
from weft_bench.errors import WrongAdapter
from weft_bench.gpu import GROUPS
from weft_bench.gpu_amounts import TINY, Batch
from weft_bench.gpu_attention import splits_of
from weft_bench.gpu_check import CheckContext, Differs, assert_close, assert_near, assert_same
from weft_bench.gpu_compile import chunk_counts
from weft_bench.gpu_device import Gpu, find
from weft_bench.gpu_machine import measured
from weft_bench.gpu_messages import BENCH, CHECK, COMPILE, OPERATORS, Ended, Job, Message, Outcome, Told
from weft_bench.gpu_operator import check as check_operator
from weft_bench.gpu_operator import made
from weft_bench.gpu_plan import CASES, Plan
from weft_bench.gpu_textgen import lengths
from weft_bench.gpu_worker import ran, side_of
from weft_kernels.triton.lora import chunk_bucket
from weft_runner.model.cuda import flashinfer

PLAN = Plan(TINY, "tiny", "tiny")


@pytest.fixture(scope="module")
def gpu() -> Generator[Gpu]:
    gc.freeze()  # every case collects garbage: not among the modules of this process
    yield find()
    gc.unfreeze()


class Bench:
    """A worker in this process."""

    def __init__(self, gpu: Gpu, kind: str, folder: Path) -> None:
        self.told: list[Message] = []
        self._gpu = gpu
        self._side = side_of(Job(kind, True, "tests", folder, PLAN), gpu, self.told.append)
        torch.set_num_threads(1)  # what is tiny gains nothing by a second one

    def run(self, name: str) -> Ended:
        return ran(self._side, self._gpu, name, seconds=math.inf)


@pytest.fixture(scope="module")
def figures(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Where launches take no time: what happens to take less than they do has no figure beyond them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_worker, "measured", lambda *given: replace(measured(*given), floor_s=0.0))
        return Bench(gpu, BENCH, tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("case", [case for case in CASES if case != "peft"])
def test_every_row_that_a_case_announced_is_measured(
    figures: Bench, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "flashinfer":
        play_flashinfer(monkeypatch)
    figures.told.clear()
    ended = figures.run(case)
    assert ended.error == ""
    lines = [message.line for message in figures.told if isinstance(message, Told)]
    planned = [(row.case, row.metric) for row in PLAN.rows(case)]
    assert sorted((line.case, line.metric) for line in lines) == sorted(planned)
    assert all(line.value is not None for line in lines)


def play_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and computes here."""
    monkeypatch.setitem(sys.modules, "flashinfer", played_flashinfer)
    monkeypatch.setattr(flashinfer, "unsupported_reason", lambda *_, **__: "")


def test_without_flashinfer_its_rows_are_not_measured_and_the_log_says_why(
    figures: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer, "unsupported_reason", lambda *_, **__: "it is not installed")
    figures.told.clear()
    assert figures.run("flashinfer").error == ""
    assert figures.told == []
    assert "not measured: it is not installed" in caplog.text


def test_flashinfer_is_checked_where_it_is_there(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks alone: where it is installed they are among those of the group."""
    play_flashinfer(monkeypatch)
    monkeypatch.setattr(CheckContext, "dtypes", (torch.float32, torch.bfloat16))
    checks = [check for name, check in gpu_check_attention.checks(CheckContext(gpu, tiny=True)) if "FlashInfer" in name]
    assert len(checks) == len(gpu_check_attention.TINY)
    for check in checks:
        check()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_the_same_work_runs_beside_peft(figures: Bench) -> None:
    figures.told.clear()
    assert figures.run("peft").error == ""
    lines = [message.line for message in figures.told if isinstance(message, Told)]
    assert [(line.case, line.metric) for line in lines] == [(row.case, row.metric) for row in PLAN.rows("peft")]
    assert all(line.value and line.baseline for line in lines)


@pytest.fixture(scope="module")
def checks(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(gpu, CHECK, tmp_path_factory.mktemp("checks"))


@pytest.mark.parametrize("group", GROUPS)
def test_every_check_passes(checks: Bench, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_bench.gpu_check_loading.LOAD_S", None)  # however busy this processor is
    checks.told.clear()
    ended = checks.run(group)
    outcomes = [message for message in checks.told if isinstance(message, Outcome)]
    assert ended.error == ""
    assert outcomes
    assert [outcome for outcome in outcomes if outcome.fault] == []


@pytest.mark.parametrize("name", [OPERATORS, "tiny"])
def test_kernels_are_compiled_ahead(gpu: Gpu, tmp_path: Path, name: str) -> None:
    assert Bench(gpu, COMPILE, tmp_path).run(f"{name} 1/8").error == ""


# ---- what is wrong is found


def test_a_check_that_fails_is_told_and_the_next_one_runs(
    checks: Bench, monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    def wrong() -> None:
        assert_same(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [0.0, 5.0, 0.0]]))

    def broken() -> None:
        raise ZeroDivisionError("not this one")

    def group(context: CheckContext) -> Iterator[gpu_check.Check]:
        yield from (("wrong", wrong), ("broken", broken), ("right", lambda: None))

    monkeypatch.setattr("weft_bench.gpu_check_sampling.checks", group)
    checks.told.clear()
    assert checks.run("sampling").error == ""
    faults = [message.fault for message in checks.told if isinstance(message, Outcome)]
    assert faults[0] == "1 of 6 are not the same; first at [1, 1]: 0 is not 5"
    assert "ZeroDivisionError: not this one" in faults[1]
    assert faults[2] == ""


@pytest.mark.parametrize("compare", [assert_close, assert_near])
def test_nan_is_far_from_everything(compare) -> None:
    right = torch.ones(3, 4)
    compare(right.clone(), right, 1e-6)
    broken = right.clone()
    broken[1, 2] = torch.nan
    with pytest.raises(Differs):
        compare(broken, right, 1e-6)


def test_an_operator_with_another_adapter_is_no_figure(gpu: Gpu) -> None:
    case = made(gpu, TINY.operators[0], Batch(2, "Distinct"))
    check_operator(case)
    first, second = case.dense.segments
    case.dense.segments[:] = [replace(first, a=second.a, b=second.b), replace(second, a=first.a, b=first.b)]
    with pytest.raises(WrongAdapter, match="off by"):
        check_operator(case)


def test_chunk_counts_make_all_launches_there_are() -> None:
    def launches(chunks: int) -> tuple[int, int]:
        return chunk_bucket(chunks), splits_of(chunks, 8, 132)[1].bit_length()

    counts = chunk_counts(8, 64, 132)
    assert {launches(n) for n in counts} == {launches(n) for n in range(1, 65)}
    assert len(counts) < 12


def test_lengths_are_those_of_the_recipe() -> None:
    found = lengths(random.Random(0), 4000, 2048)
    assert all(prompt >= 1 and answer >= 2 and prompt + answer <= 2048 for prompt, answer in found)
    assert 23 < sum(prompt for prompt, _ in found) / len(found) < 26
    assert 1000 < sum(map(sum, found)) / len(found) < 1050


def test_a_whole_command_with_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft_bench.gpu", "bench", "--tiny", "--no-compile", "--cases", "attention"]
    done = subprocess.run(
        [*command, "--budget-s", "3600", "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "attention" in done.stdout
    assert (tmp_path / "gpu.md").exists()
