"""What an iteration takes where nobody said it."""

from typing import Any

import pytest
import torch

from tests.unit.runner.test_kv_pages import GIB, SMALL, MemoryLimit, PlayedGpu, settings_of
from weft.domain.model.spec import ModelSpec
from weft_runner.executors import cuda, memory, settle_limits
from weft_runner.settings import RunnerSettings

UNSET: dict[str, Any] = {"max_sequences": 0, "max_batch_tokens": 0}


def found(settings: RunnerSettings, spec: ModelSpec = SMALL) -> tuple[int, int, int, int]:
    settled = settle_limits(settings, spec)
    return settled.max_sequences, settled.max_batch_tokens, settled.max_prefills, settled.host_mib


def played(monkeypatch: pytest.MonkeyPatch, *free: int, host: MemoryLimit | None = None) -> None:
    """Play GPUs that have `free` bytes left of 80 GiB."""
    gpus = [PlayedGpu(MemoryLimit(left, "a GPU", 80 * GIB)) for left in free]
    monkeypatch.setattr(cuda, "find_gpu", lambda rank=0: gpus[rank])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(cuda, "available_memory", lambda: host or MemoryLimit(1 << 40, "x", 1 << 40))


def test_without_a_gpu_a_step_is_small_and_one_number_bounds_the_other() -> None:
    assert found(settings_of(**UNSET, executor="cpu")) == (32, 512, 4, 1024)
    assert found(settings_of(**UNSET | {"max_sequences": 600}, executor="cpu")) == (600, 600, 4, 1024)
    assert found(settings_of(**UNSET | {"max_batch_tokens": 8}, executor="reference")) == (8, 8, 4, 1024)


def test_an_offloading_runner_leaves_host_memory_to_its_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, 79 * GIB)
    settings = settings_of(executor="cuda", offload=f"device={1 << 30}", max_rank=16)
    assert found(settings) == (settings.max_sequences, settings.max_batch_tokens, 4, 1024)


def test_a_gpu_has_room_for_many_and_the_least_of_several_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: dict[str, Any] = UNSET | {"executor": "cuda", "max_rank": 16}
    played(monkeypatch, 79 * GIB)
    assert found(settings_of(**flags)) == (1024, 8192, 1024, memory.MAX_HOST_MIB)
    assert found(settings_of(**flags | {"max_sequences": 7, "max_prefills": 2}))[:3] == (7, 8192, 2)
    assert found(settings_of(**flags | {"max_batch_tokens": 99}))[:2] == (99, 99)
    assert found(settings_of(**flags, host_mib=77))[3] == 77
    played(monkeypatch, 79 * GIB, 8 * GIB)  # less than nine tenths of it would leave
    assert found(settings_of(**flags, tensor_parallel=2))[:3] == (256, 2048, 256)


def test_the_largest_step_that_memory_has_room_for_is_chosen() -> None:
    for left in range(0, 4096, 64):
        limits = memory.gpu_step_limits(left << 9, 1, lambda tokens: tokens << 2)
        assert limits.sequences == max([256, *(most for most in (512, 1024) if most <= left)])
        assert limits.batch_tokens == max([2048, *(most for most in (4096, 8192) if most // 8 <= left)])


@pytest.mark.parametrize(
    ("left", "gpus", "mib"),
    [
        (MemoryLimit(60 * GIB, "container", 64 * GIB, is_group=True), 8, 16 << 10),
        (MemoryLimit(900 * GIB, "machine", 1024 * GIB), 8, 32 << 10),
        (MemoryLimit(900 * GIB, "machine", 1024 * GIB), 1, memory.MAX_HOST_MIB),
        (MemoryLimit(8 * GIB, "container", 64 * GIB, is_group=True), 1, 4 << 10),
        (MemoryLimit(1 * GIB, "container", 2 * GIB, is_group=True), 1, 1024),
    ],
)
def test_copies_have_a_quarter_of_what_a_runner_may_take_of_the_host(left: MemoryLimit, gpus: int, mib: int) -> None:
    assert memory.host_mib(left, gpus) == mib
