"""What a plan says of memory is what the cpu executor takes: it starts with the plan's settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.native_library import native_library
from harness.native_models import offload_executor, write_model
from weft_cli.offload_report import pool_settings
from weft_runner.model import Partition, read_spec
from weft_runner.offload import (
    BlockWork,
    Budgets,
    Formats,
    MemoryTier,
    OffloadPlan,
    PolicySearch,
    Supports,
    check_placement,
    find_plan,
    solver,
)

from .test_search import MACHINE, MIB, ON_DEVICE

native_library()  # skips where nothing can be built
RANK, BATCH_TOKENS, DISK_BYTES = 16, 64, 1 << 30


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    shape = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 256}
    return write_model(tmp_path / "model", 7, **shape)


def executor_of(files: dict[str, Path], search: PolicySearch, plan: OffloadPlan, *, told: bool) -> tuple[Any, Budgets]:
    """With the pool's settings that the plan asks for. `told`: it gets the plan, too."""
    wanted, budgets, layers = (
        pool_settings({0: search}, {0: plan}),
        search.tiers,
        search.layers or range(search.spec.layers),
    )
    sizes = {"dtype": "bf16", "threads": 1, "pages": wanted["kvPages"], "page_tokens": 16, "slots": 2}
    executor = offload_executor(
        files, files["config.json"].parent, sizes, part=Partition(search.spec, first=layers.start, last=layers.stop),
        device_bytes=budgets.device_bytes, disk_bytes=budgets.disk_bytes, micro_batch=BATCH_TOKENS,
        max_tokens=wanted["maxBatchTokens"], max_sequences=wanted["maxSequences"], max_rank=RANK,
        plan=plan if told else None, in_flight=search.work.in_flight,
    )  # fmt: skip
    return executor, budgets


@pytest.mark.parametrize("device_mib", [8, 10, 14])
def test_the_executor_starts_with_the_plans_settings_and_takes_what_is_planned_beside_weights(
    device_mib: int, files: dict[str, Path]
) -> None:
    work = BlockWork(32, 16, 2, RANK, batch_tokens=BATCH_TOKENS)
    spec, budgets = read_spec(files["config.json"]), Budgets(device_mib * MIB, 0, DISK_BYTES)
    search = PolicySearch(spec, MACHINE, budgets, Formats(), work, ON_DEVICE, most_block=4)
    plan = find_plan(search, solver.relax)
    executor, _ = executor_of(files, search, plan, told=False)
    try:
        used, layer = plan.usage[MemoryTier.DEVICE], search.sizes.layer
        assert executor.beside_bytes == pytest.approx(used.total - used.weights - used.ring, abs=layer / 2)
        assert executor.residency.resident_bytes + executor.residency.ring_bytes <= used.weights + used.ring + layer / 2
    finally:
        executor.close()


@pytest.mark.parametrize("layers", [range(2), range(2, 4), range(4, 6)])
def test_a_stage_starts_with_what_is_planned_for_its_layers(layers: range, files: dict[str, Path]) -> None:
    """Rows that come and leave included, of two passes in flight."""
    work = BlockWork(32, 16, 2, RANK, batch_tokens=BATCH_TOKENS, in_flight=2)
    spec, budgets = read_spec(files["config.json"]), Budgets(14 * MIB, 0, DISK_BYTES)
    search = PolicySearch(spec, MACHINE, budgets, Formats(), work, ON_DEVICE, most_block=4, layers=layers)
    executor, _ = executor_of(files, search, find_plan(search, solver.relax), told=True)
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize(("device_mib", "host_mib"), [(12, 0), (9, 3), (16, 0), (30, 0)])
def test_what_a_plan_puts_on_each_tier_is_there_and_no_tier_has_more_than_its_budget(
    device_mib: int, host_mib: int, files: dict[str, Path]
) -> None:
    """Long texts: KV of a block is larger than memory, and a disk that is fast beside the products has it."""
    machine, work = (
        replace(MACHINE, disk_read=2e10, disk_write=2e10),
        BlockWork(224, 32, 0, RANK, batch_tokens=BATCH_TOKENS),
    )
    spec, budgets = read_spec(files["config.json"]), Budgets(device_mib * MIB, host_mib * MIB, DISK_BYTES)
    search = PolicySearch(spec, machine, budgets, Formats(), work, Supports(), most_block=128)
    plan = find_plan(search, solver.relax)
    executor, tiers = executor_of(files, search, plan, told=True)
    try:
        placed = executor.placement
        check_placement(placed, tiers)
        assert placed.weights.resident_bytes == plan.usage[MemoryTier.DEVICE].weights
        assert placed.kv.outside_pages * placed.kv.page_bytes == plan.usage[MemoryTier.DISK].kv
        assert placed.kv.outside_pages
    finally:
        executor.close()
