"""What `weft bench offload` decides without an engine: groups, ratios, grids, schedules."""

import os
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft_bench import offload_plans
from weft_bench.cpu_machine import Machine
from weft_bench.cpu_shapes import BASE, DISTINCT
from weft_bench.errors import NoGroup
from weft_bench.lines import Line, Origin
from weft_bench.memory_group import forget, memory_group
from weft_bench.offload_cells import adapters_in_blocks
from weft_bench.offload_model import Context, OffloadModel, Options
from weft_bench.offload_peers import ACCELERATE, LLAMA, OURS, Run, best, compared
from weft_bench.offload_plans import COLUMNS_FIRST, ROWS_FIRST, SERIAL, ZIGZAG
from weft_bench.roofline import lora_bytes
from weft_runner.model.checkpoint import read_spec
from weft_runner.offload.costs import BlockWork
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.policy import Budgets, Formats, MemoryTier
from weft_runner.offload.rounding import Supports
from weft_runner.offload.search import PolicySearch

GIB = float(1 << 30)
RATES = MachineRates(
    disk_read=2 * GIB, disk_write=GIB, to_device=20 * GIB, to_host=20 * GIB, memory_read=30 * GIB,
    attention=30 * GIB, host_attention=30 * GIB, attention_flops_per_s=1e12,
    products={"bf16": ((1, 7e-11), (64, 1e-10), (256, 3e-10))}, overlap=0.95,
)  # fmt: skip


@contextmanager
def bar(label: str, length: int) -> Generator[Any]:
    yield int


DEVICE_ALONE = Supports((MemoryTier.DEVICE,), (MemoryTier.DEVICE,))
CONTEXT = Context(Origin("c", "m", "v"), bar, print)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OffloadModel:
    machine = Machine("native kernels (avx2)", 1e12, {1 << 20: 30e9})
    options = Options(tmp_path_factory.mktemp("models"), (0.25,), (16,), (BASE, DISTINCT))
    return OffloadModel(options, "tiny", machine)


@pytest.fixture
def search(model: OffloadModel) -> PolicySearch:
    """An executor with KV in memory alone, and a budget that has no room for that of 32 sequences."""
    spec = replace(
        read_spec(model.base / "config.json", None),
        layers=16,
        windows=(None,) * 16,
        hidden_size=1024,
        intermediate_size=2816,
    )
    work = BlockWork(512, 8, batch_tokens=256, page_tokens=16)
    return PolicySearch(spec, RATES, Budgets(120 << 20), Formats(), work, DEVICE_ALONE, 32)


def by_metric(lines: list[Line]) -> dict[tuple[str, str], Line]:
    return {(line.case, line.metric): line for line in lines}


def test_the_best_batch_of_each_engine_counts_and_what_did_not_fit_has_a_line(model: OffloadModel) -> None:
    runs = {
        OURS: [Run(1, 2.0, 1 << 20, ""), Run(8, 12.0, 9 << 20, ""), Run(16, None, 3 << 20, "")],
        ACCELERATE: [Run(1, 0.5, 1, ""), Run(4, 2.0, 2, "")],
        LLAMA: [Run(1, None, 1, "")],
    }
    lines = by_metric(list(compared(model, CONTEXT, "x", runs)))
    assert lines["x", "weft, 16 rows"].value is None
    assert lines["x", "weft, most memory"].value == 9
    ratio = lines["x, against accelerate", "times as fast"]
    assert (ratio.value, ratio.target, ratio.met) == (6.0, ">= 1", True)
    assert lines["x, against llama.cpp", "times as fast"].value is None
    assert best(runs[LLAMA]) is None


def test_a_group_has_its_limit_its_processes_and_its_peak(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    path = root / f"weft-bench-{os.getpid()}"

    mkdir, rmdir = Path.mkdir, Path.rmdir

    def made(folder: Path) -> None:
        mkdir(folder)
        for name, text in (("memory.max", "max"), ("memory.peak", "77"), ("cgroup.procs", "")):
            (folder / name).write_text(text)

    def removed(folder: Path) -> None:
        for each in folder.iterdir():
            each.unlink()
        rmdir(folder)

    root.mkdir()
    with pytest.MonkeyPatch.context() as kernel:  # fills in a group's files, and takes them away with it
        kernel.setattr(Path, "mkdir", made)
        kernel.setattr(Path, "rmdir", removed)
        with memory_group(1234, root) as group:
            assert (path / "memory.max").read_text() == "1234"
            assert group.peak_bytes == 77
            assert group.command(["a", "b"])[-3:] == [str(path / "cgroup.procs"), "a", "b"]
    assert not path.exists()


def test_no_group_can_be_made_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoGroup, match="administrator"), memory_group(1, tmp_path / "absent"):
        pass
    with pytest.raises(NoGroup, match="bounds no memory"), memory_group(1, tmp_path):
        pass
    forget([Path(__file__)])


def test_adapters_cost_what_their_bytes_do(model: OffloadModel) -> None:
    blocks = {(16, 0.5, BASE): 10.0, (16, 0.5, DISTINCT): 15.0, (4, 0.5, DISTINCT): 9.0}
    lines = by_metric(list(adapters_in_blocks(model, CONTEXT, blocks)))
    case = "tiny bf16, 50% of the weights, 16 rows, Distinct against base"
    over = 1 + 16 * lora_bytes(model.shape, 16) / (2 * model.shape.weights)
    assert lines[case, "bytes of a pass"].value == pytest.approx(over)
    told = lines[case, "time over bytes"]
    assert told.value == pytest.approx(1.5 / over)
    assert told.target == "<= 1.1"
    assert {found for found, _ in lines} == {case}


def test_a_grid_has_the_wanted_number_of_policies_none_twice(search: PolicySearch) -> None:
    found = offload_plans.grid(search, 30, random.Random(3))
    names = [offload_plans.name_of(plan) for plan in found]
    assert len(set(names)) == len(names) == 30
    assert names == [offload_plans.name_of(plan) for plan in offload_plans.grid(search, 30, random.Random(3))]
    assert len({plan.policy.block for plan in found}) > 3
    assert {plan.buffers for plan in found} == {1, 2}


def test_a_line_says_where_the_chosen_policy_lies_in_the_grid(model: OffloadModel, search: PolicySearch) -> None:
    plans = dict(zip("abc", offload_plans.grid(search, 3, random.Random(0)), strict=True))
    rate = {"a": [10.0, 9.0, 9.0, 9.0], "b": [11.0, 10.0, 10.0, 10.0], "c": [5.0]}
    lines = by_metric(list(offload_plans.grid_lines(model, CONTEXT, plans, rate, "a", ["b", "a"])))
    (case,) = {case for case, _ in lines}
    assert lines[case, "chosen, of the best"].value == 0.9
    assert lines[case, "chosen, its place"].value == 2
    assert lines[case, "1: b"].value == 10
    assert lines[case, "2: a (chosen)"].value == 9


def test_rank_correlation() -> None:
    assert offload_plans.rank_correlation([(1, 10), (2, 20), (3, 30)]) == 1
    assert offload_plans.rank_correlation([(1, 30), (2, 20), (3, 10)]) == -1


def test_schedules_have_the_same_memory_and_device_batch(search: PolicySearch) -> None:
    plans = offload_plans.schedules(search)
    zigzag, rows, serial = plans[ZIGZAG], plans[ROWS_FIRST], plans[SERIAL]
    assert zigzag is not None
    assert rows is not None
    assert serial is not None
    assert plans[COLUMNS_FIRST] is None  # no memory for the KV of all
    assert rows.policy.block == rows.policy.batch == offload_plans.SCHEDULE_BATCH
    assert rows.policy.block < zigzag.policy.block == serial.policy.block < offload_plans.SCHEDULE_SEQUENCES
    assert (zigzag.buffers, serial.buffers) == (2, 1)
    assert zigzag.predicted.tokens_per_s > max(rows.predicted.tokens_per_s, serial.predicted.tokens_per_s)
    assert {plan.budgets for plan in (zigzag, rows, serial)} == {search.budgets}
