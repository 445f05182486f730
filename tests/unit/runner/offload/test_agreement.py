"""What a plan says of memory is what the cpu executor takes: it starts with the plan's settings."""

from pathlib import Path

import pytest

from harness.native_library import native_library
from harness.native_models import write_model
from weft_cli.plan_offload import pool_settings
from weft_runner.model.checkpoint import open_checkpoint, read_spec
from weft_runner.model.cpu.offload import OffloadBudget, OffloadExecutor
from weft_runner.offload.costs import BlockWork
from weft_runner.offload.policy import Budgets, Formats, MemoryTier
from weft_runner.offload.rounding import Supports
from weft_runner.offload.search import PolicySearch, find_plan
from weft_runner.offload.solver import relax

from .test_search import MACHINE, MIB

RANK, BATCH_TOKENS = 16, 64


@pytest.mark.parametrize("device_mib", [8, 10, 14])
def test_the_executor_starts_with_the_plans_settings_and_takes_what_is_planned_beside_weights(
    device_mib: int, tmp_path: Path
) -> None:
    shape = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 1024}
    files = write_model(tmp_path / "model", 7, **shape)
    spec = read_spec(files["config.json"])
    work = BlockWork(32, 16, 2, RANK, batch_tokens=BATCH_TOKENS)
    search = PolicySearch(spec, MACHINE, Budgets(device_mib * MIB), Formats(), work, Supports(), most_block=4)
    plan = find_plan(search, relax)
    wanted = pool_settings(search, plan)
    budget = OffloadBudget(
        device_bytes=device_mib * MIB, disk_bytes=1 << 30, path=tmp_path, base="sha256:" + "5" * 64,
        micro_batch=BATCH_TOKENS, max_tokens=wanted["scheduler"]["maxBatchTokens"],
        max_sequences=wanted["scheduler"]["maxSequences"], max_rank=RANK,
    )  # fmt: skip
    executor = OffloadExecutor(
        native_library(), open_checkpoint(files, spec), budget, dtype="bf16", threads=1,
        pages=wanted["kvCache"]["pages"], page_tokens=16, slots=2,
    )  # fmt: skip
    try:
        used, layer = plan.usage[MemoryTier.DEVICE], search.sizes.layer
        assert executor.beside_bytes == pytest.approx(used.total - used.weights - used.ring, abs=layer / 2)
        assert executor.residency.resident_bytes + executor.residency.ring_bytes <= used.weights + used.ring + layer / 2
    finally:
        executor.close()
