"""A model larger than its GPU, under Triton's interpreter: the bits of the executor that has it whole.

Copies are done at once there; the rings, the thread that copies and the order of a step are those of a device.
"""

import io
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from harness import interpreter
from harness.device_models import beside_weights
from harness.native_models import Scales, adapter_tensors, make_step, write_model
from harness.ranks import settings_of
from weft_kernels.triton import int4
from weft_runner.errors import DiskUnusable, ExecutorLost, NoPolicyFits, OutOfMemory, PolicyInvalid, RunnerError
from weft_runner.executors import ModelSource, make_executor
from weft_runner.model import Partition, open_checkpoint, read_spec, stage_of
from weft_runner.model.cuda import machine_rates, measuring
from weft_runner.model.cuda.device import DTYPES, find_gpu
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.cuda.offload import OffloadCudaExecutor
from weft_runner.model.tiers.budget import OffloadBudget, formats_of
from weft_runner.model.weights import load_weights
from weft_runner.offload import (
    ON_GPU,
    BlockWork,
    Budgets,
    DevicePlacement,
    MachineRates,
    MemoryTier,
    PolicySearch,
    check_device_placement,
    find_plan,
    machine_of,
    place_on_device,
    serving_limits,
    solver,
    spec_json,
    split_activations,
    split_kv,
)
from weft_runner.settings import OffloadByHand, RunnerSettings
from weft_runner.shell.metrics import OffloadSeries
from weft_runner.shell.offload_policy import settle_offload

PAGES, P, SLOTS = 64, 16, 2
BESIDE = 20_000  # bytes of tables of positions and adapters, which plans leave to the runner
LAYER = {"bf16": 69_632, "int4": 28_672}  # bytes in the file
SIZES = Sizes(PAGES, P, SLOTS, max_rank=16, rows=4, context=96, graphs=False, tokens=64)
MODEL = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "max_position_embeddings": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 7},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 7, "head_dim": 48,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    },
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh",
    },
}  # fmt: skip
RANKS = ({"q_proj": 8, "down_proj": 3}, dict.fromkeys(("k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), 5))
BASE = "sha256:" + "5" * 64
MACHINE = MachineRates(
    disk_read=1e9, disk_write=1e9, to_device=1e4, to_host=5e3, memory_read=1e10, attention=1e10, host_attention=1e10,
    attention_flops_per_s=1e12, products={"bf16": ((1, 1e-12), (64, 1e-11))}, one_memory=False,
)  # fmt: skip
Files = Callable[..., dict[str, Path]]
Kept = list[OffloadCudaExecutor]  # until a test ends


@pytest.fixture(scope="module")
def files_of(tmp_path_factory: pytest.TempPathFactory) -> Files:
    interpreter.hurry()

    @cache
    def make(tied: bool = False) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp("models") / str(tied)
        return write_model(folder, 7, torch.bfloat16, **MODEL, tie_word_embeddings=tied)

    return make


@pytest.fixture
def made() -> Iterator[Kept]:
    """The executors that a test has made, which end with it."""
    executors: Kept = []
    yield executors
    for executor in executors:
        executor.close()


def budget(folder: Path, part: Partition, dtype: str, left: int, host: int, **changed: Any) -> OffloadBudget:
    """`left`: bytes of the device for weights and their ring, `host`: of the host for weights."""
    values: dict[str, Any] = {
        "device_bytes": left, "host_bytes": host, "disk_bytes": 1 << 30, "path": folder, "base": BASE,
        "micro_batch": SIZES.tokens, "max_tokens": SIZES.tokens, "max_sequences": SIZES.rows,
        "max_rank": SIZES.max_rank, **changed,
    }  # fmt: skip
    limits = OffloadBudget(**values)
    beside = beside_weights(part, dtype, SIZES, limits)
    return replace(limits, device_bytes=left + beside.device_bytes, host_bytes=host + beside.host_bytes)


def offloaded(
    files: dict[str, Path], folder: Path, left: int, host: int, dtype: str = "bf16", stage: tuple[int, int] = (0, 1),
    **changed: Any,
) -> OffloadCudaExecutor:  # fmt: skip
    spec = read_spec(files["config.json"])
    part = stage_of(spec, *stage)
    limits = budget(folder, part, dtype, left, host, **changed)
    return OffloadCudaExecutor(find_gpu(), open_checkpoint(files, spec), limits, SIZES, dtype=dtype, part=part)


def whole(files: dict[str, Path], dtype: str = "bf16") -> CudaExecutor:
    spec, pack = read_spec(files["config.json"]), int4.pack if dtype == "int4" else None
    return CudaExecutor(spec, load_weights(files, spec, DTYPES[dtype], pack=pack), SIZES)


def with_adapters(executor: CudaExecutor, spec: Any) -> CudaExecutor:
    """On the last pages, which no row has."""
    free = list(range(PAGES - 1, -1, -1))
    for slot, ranks in enumerate(RANKS):
        tensors, store = adapter_tensors(spec, slot, ranks), executor.adapters
        pages = [free.pop(0) for _ in range(-(-store.device_bytes(tensors, Scales()) // store.page_bytes))]
        executor.allocate_adapter_pages(pages)
        store.put(slot, store.build(tensors, Scales(), pages))
    assert free[0] >= 24
    return executor


Rows = list[tuple[list[int], int, list[int], int | None]]


def script(seed: int, steps: int = 2) -> list[Rows]:
    """Prompts, chunks of them and single tokens of four sequences, with adapters and without.

    Batches of 16 tokens leave one token of a row of 17.
    """
    drawn, fed = random.Random(seed), [0] * SIZES.rows
    slots = [drawn.choice((None, 0, 1)) for _ in fed]
    turns: list[Rows] = []
    for _ in range(steps):
        rows: Rows = []
        for i in sorted(drawn.sample(range(len(fed)), drawn.randint(1, len(fed)))):
            count = min(drawn.choice((1, 2, 17, 21)), SIZES.tokens - sum(len(row[0]) for row in rows))
            tokens = [drawn.randrange(203) for _ in range(count)]
            rows.append((tokens, fed[i], list(range(6 * i, 6 * i + 6)), slots[i]))
            fed[i] += count
        turns.append(rows)
    return turns


def logits_of(executor: CudaExecutor) -> list[torch.Tensor]:
    """The bits of a script's steps."""
    return [executor.run(make_step(rows)).view(torch.int32).clone() for rows in script(240)]


# Layers' bytes (of the device for weights and ring, of the host): all there is, and less; the disk has what is left.
# With each of them as many KV pages on the host: few, so that adapters move more; most; all but those of adapters.
HOST_PAGES = (0, 45, 30, 54, 0, 58)
# And device batches: one; of a chunk or two each; with rows of all but the first ones, or of all, on the host.
ROWS = (
    {}, {"micro_batch": 1}, {"micro_batch": 1, "activation_host_tokens": 64},
    {"micro_batch": 1, "activation_host_tokens": 48}, {"micro_batch": 16, "activation_host_tokens": 64}, {},
)  # fmt: skip
ON_HOST = {"micro_batch": 16, "activation_host_tokens": SIZES.tokens}
SPLITS = ((9.0, 0.0), (2.3, 9.0), (1.1, 1.0), (2.2, 2.5), (2.5, 1.7), (1.5, 9.0))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tied", "splits"), [("bf16", False, range(6)), ("int4", True, (2, 4))])
def test_its_bits_are_those_of_the_executor_that_has_the_model_whole(
    files_of: Files, tmp_path: Path, made: Kept, dtype: str, tied: bool,
    splits: Sequence[int],
) -> None:  # fmt: skip
    """In bf16 with all splits; int4 has other bytes, and moves them in the same way."""
    files = files_of(tied)
    spec = read_spec(files["config.json"])
    expected, tiers = with_adapters(whole(files, dtype), spec), set[tuple[bool, ...]]()
    whole_logits = logits_of(expected)
    for (left, host), host_pages, rows in ((SPLITS[i], HOST_PAGES[i], ROWS[i]) for i in splits):
        limits = (int(layers * LAYER[dtype]) for layers in (left, host))
        made.append(offloaded(files, tmp_path, *limits, dtype, kv_host_pages=host_pages, **rows))
        placed = made[-1].placement
        tiers.add(tuple(any(map(any, placed.of(tier))) for tier in MemoryTier))
        assert made[-1].numerics_class == expected.numerics_class
        found = logits_of(with_adapters(made[-1], spec))
        assert all(torch.equal(*pair) for pair in zip(found, whole_logits, strict=True))
    assert [bool(one.figures.activations.written_bytes) for one in made] == [
        bool("activation_host_tokens" in ROWS[i]) for i in splits
    ]
    assert (True, True, True) in tiers
    assert dtype == "int4" or tiers >= {(True, False, False), (True, True, False)}, tiers


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_norms_biases_and_caps_of_other_families_are_where_their_layer_is(
    tmp_path: Path, made: Kept, family: str
) -> None:
    """Layers, pages and rows come from the host in parts."""
    interpreter.hurry()
    files = write_model(tmp_path / "model", 7, torch.bfloat16, **MODEL, **OTHERS[family])
    spec, rows = read_spec(files["config.json"]), {"micro_batch": 16, "activation_host_tokens": 64}
    whole_logits = logits_of(with_adapters(whole(files), spec))
    made.append(offloaded(files, tmp_path, 130_000, 200_000, kv_host_pages=54, **rows))
    found = logits_of(with_adapters(made[-1], spec))
    assert all(torch.equal(*pair) for pair in zip(found, whole_logits, strict=True))
    figures = made[-1].figures
    assert all((figures.stream.copied_bytes, figures.kv.written_bytes, figures.activations.written_bytes))


@pytest.mark.slow
def test_pages_on_the_host_are_copied_once_a_pass_and_layer_and_only_those_that_were_written_go_back(
    files_of: Files, tmp_path: Path, made: Kept
) -> None:
    """All pages but the first are there; a page whose first token is written now is not copied from there."""
    files = files_of()
    executor, expected = offloaded(files, tmp_path, 300_000, 0, kv_host_pages=63, machine=MACHINE), whole(files)
    made.append(executor)
    page, sampled = executor.page_bytes, 0.0  # all else is fast beside the copies
    prompt = make_step([([1] * 31, 0, [0, 1], None), ([2] * 31, 0, [2, 3], None)])
    token = make_step([([7], 31, [0, 1], None), ([7], 31, [2, 3], None)])
    alone = make_step([([9], 32, [2, 3, 4], None)])
    for step, read, written in ((prompt, 0, 3), (token, 3, 2), (alone, 2, 1)):
        before = replace(executor.figures.kv)
        assert torch.equal(executor.run(step), expected.run(step))
        after, accuracy = executor.figures.kv, executor.figures.accuracy
        assert after.read_bytes - before.read_bytes == read * page
        assert after.written_bytes - before.written_bytes == written * page
        assert accuracy is not None
        slowest = max(read / MACHINE.to_device, written / MACHINE.to_host) * page
        assert accuracy.predicted_s - sampled == pytest.approx(slowest, rel=1e-3)
        sampled = accuracy.predicted_s
    assert executor.kv_memory is None, "what copies pages reads them on the device"


@pytest.mark.slow
def test_a_page_moves_to_the_host_for_an_adapter_and_adapters_have_no_more_than_are_on_the_device(
    files_of: Files, tmp_path: Path, made: Kept
) -> None:
    """Pages pass from adapters to sequences and back, between steps of rows whose pages are moved by it."""
    files = files_of()
    executor, expected = offloaded(files, tmp_path, 300_000, 0, kv_host_pages=60), whole(files)
    made.append(executor)
    tensors = adapter_tensors(read_spec(files["config.json"]), 0, {"q_proj": 2})
    rows = [list(range(4 * i, 4 * i + 4)) for i in range(3)]
    for at, pages in enumerate(([63], [62], [63], [3])):
        lengths = (40 - at, 12, 12)
        text = make_step([([at] * n, 0, own, None) for own, n in zip(rows, lengths, strict=True)])
        after = zip(rows, lengths, (0, None, 0), strict=True)
        more = make_step([([5], n, own, slot) for own, n, slot in after])
        found = list[list[torch.Tensor]]()
        for one in (executor, expected):
            logits = one.run(text).clone()
            one.allocate_adapter_pages(pages)
            one.adapters.put(0, one.adapters.build(tensors, Scales(), pages))
            found.append([logits, one.run(more).clone()])
            one.adapters.clear(0)
            one.clear_pages(pages)
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert executor.stage_state.frames == 4
    with pytest.raises(OutOfMemory, match="adapters hold more KV pages than the 4 in memory"):
        executor.allocate_adapter_pages(list(range(59, 64)))


def test_weights_are_moved_once_a_pass_and_the_next_ones_ahead(files_of: Files, tmp_path: Path, made: Kept) -> None:
    executor = offloaded(files_of(), tmp_path, 170_000, 190_000, share=0.2)
    made.append(executor)
    placed = executor.placement
    for done in range(1, 4):
        executor.run(make_step([([1] * 9, 0, [0], None), ([2] * 5, 0, [1], None)]))
        assert executor.figures.stream.copied_bytes >= done * sum(placed.weights.streamed)
        assert executor.figures.stream.read_bytes >= done * sum(placed.disk_read) > 0
    assert executor.figures.stream.copied_bytes <= 3 * sum(placed.weights.streamed) + placed.weights.ring_bytes
    registry = CollectorRegistry()
    registry.register(OffloadSeries(lambda: [executor.figures]))
    host, copied = {"stage": "0", "place": "host"}, "weft_runner_offload_copied_bytes_total"
    assert registry.get_sample_value("weft_runner_offload_weight_bytes", host) == placed.host_bytes > 0
    assert registry.get_sample_value(copied, {"stage": "0"}) == executor.figures.stream.copied_bytes


@pytest.mark.slow
def test_rows_on_the_host_are_copied_there_and_back_once_between_two_layers(
    files_of: Files, tmp_path: Path, made: Kept
) -> None:
    """Not before the first layer nor behind the last one, and not where the buffers hold all rows of a pass."""
    executor = offloaded(files_of(), tmp_path, 300_000, 0, **ON_HOST, machine=MACHINE)
    made.append(executor)
    row, copied, sampled = executor.placement.activations.row_bytes, 0, 0.0
    for tokens, passing in ((40, 40), (32, 0), (50, 50)):
        executor.run(make_step([([1] * tokens, 0, [0, 1, 2, 3], None)]))
        copied += 2 * passing * row
        figures = executor.figures
        assert (figures.activations.read_bytes, figures.activations.written_bytes) == (copied, copied)
        assert figures.accuracy is not None
        if passing:  # all else is fast beside the copies
            expected_s = 2 * passing * row / min(MACHINE.to_device, MACHINE.to_host)
            assert figures.accuracy.predicted_s - sampled == pytest.approx(expected_s, rel=1e-3)
        sampled = figures.accuracy.predicted_s
    registry = CollectorRegistry()
    registry.register(OffloadSeries(lambda: [executor.figures]))
    for name in ("read", "written"):
        total = f"weft_runner_offload_activations_{name}_bytes_total"
        assert registry.get_sample_value(total, {"stage": "0"}) == copied > 0


@pytest.mark.slow
@pytest.mark.parametrize("rows", [{}, ON_HOST])
def test_layers_come_in_the_order_of_their_requests_and_a_pass_may_be_given_up(
    files_of: Files, tmp_path: Path, made: Kept, rows: dict[str, int]
) -> None:
    files = files_of()
    executor, expected = offloaded(files, tmp_path, 75_000, 90_000, **rows), whole(files)
    made.append(executor)
    step = make_step([([5, 6, 7] * 13, 0, [0, 2, 3], None), ([8], 0, [1], None)])

    def fails(layer: int) -> None:
        raise InterruptedError(layer)

    with pytest.raises(InterruptedError):
        executor.run(step, layer_done=fails)
    found = [[one.run(step, last=2).clone() for _ in range(2)] for one in (executor, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(*(one.run(step, first=2, hidden=found[0][0]).clone() for one in (executor, expected)))
    called: list[int] = []
    assert torch.equal(executor.run(step, layer_done=called.append), expected.run(step))
    assert called == [0, 1, 2]


@pytest.mark.slow
def test_two_stages_have_budgets_of_their_own(files_of: Files, tmp_path: Path, made: Kept) -> None:
    files = files_of()
    lefts = (75_000, 125_000)
    made += [offloaded(files, tmp_path, left, 75_000, stage=(i, 2), **ON_HOST) for i, left in enumerate(lefts)]
    step, expected = make_step([([5, 6, 7] * 13, 0, [0, 2, 3], None), ([8], 0, [1], None)]), whole(files)
    assert torch.equal(made[1].run(step, hidden=made[0].run(step)), expected.run(step))


def test_a_file_that_is_cut_short_under_it_is_an_executor_lost(files_of: Files, tmp_path: Path, made: Kept) -> None:
    made.append(offloaded(files_of(), tmp_path, 75_000, 75_000, share=0.0))
    (path,) = tmp_path.glob("*.packed")
    os.truncate(path, 4096)
    with pytest.raises(ExecutorLost, match="it was cut short"):
        made[-1].run(make_step([([1], 0, [0], None)]))


@pytest.mark.parametrize(
    ("left", "host", "disk", "error", "what"),
    [
        (1000, 1 << 20, 1 << 30, NoPolicyFits, r"deviceBytes \d+ is \d+ too small: \d+ for KV and adapters, \d+"),
        (75_000, 1000, 1 << 30, NoPolicyFits, r"hostBytes 1000 is \d+ too small: KV and activations take 0, and"),
        (75_000, 1 << 20, 1000, NoPolicyFits, r"diskBytes 1000 is \d+ too small: packed weights take \d+"),
    ],
)
def test_budgets_that_hold_nothing_are_named(
    files_of: Files, tmp_path: Path, left: int, host: int, disk: int,
    error: type[RunnerError], what: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=what):
        offloaded(files_of(), tmp_path, left, host, disk_bytes=disk)
    assert not list(tmp_path.glob("*.p*"))


def test_a_disk_without_direct_reads_is_named(files_of: Files) -> None:
    with pytest.raises(DiskUnusable, match="/proc/nowhere"):
        offloaded(files_of(), Path("/proc/nowhere"), 75_000, 75_000)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6), st.lists(st.integers(1, 50), min_size=4, max_size=4), st.integers(0, 4), st.integers(0, 1500),
    st.integers(0, 900), st.floats(0, 1), st.integers(0, 9), st.integers(0, 40), st.integers(1, 40),
)  # fmt: skip
def test_a_placement_keeps_to_every_budget_and_what_a_refusal_says_is_missing_suffices(
    layers: int, matrices: list[int], pieces: int, device: int, host: int, share: float, host_pages: int,
    host_rows: int, batch_rows: int,
) -> None:  # fmt: skip
    """The device may lack something, and then the host."""
    groups = [*([matrices] * layers), *([[max(matrices)]] * pieces)]
    total, budgets = sum(map(sum, groups)), Budgets(device + 10, host)
    kv = split_kv(9, host_pages, row_pages=2, layers=layers, page_bytes=7 * layers)
    rows = split_activations(40, host_rows, batch_rows=batch_rows, sequences=4, row_bytes=2048)

    def place() -> DevicePlacement:
        return place_on_device(groups, budgets, kv, rows, work_bytes=10, packed_bytes=total, share=share)

    for tier in (MemoryTier.DEVICE, MemoryTier.HOST):
        try:
            place()
        except NoPolicyFits as error:
            if error.tier == tier:
                budgets = replace(budgets, **{f"{tier}_bytes": budgets.of(tier) + error.short_bytes})
    placed = place()
    check_device_placement(placed, budgets)
    if rows.outside_rows:
        assert rows.memory_bytes < 40 * 2048
        assert budgets.host_bytes >= placed.host_bytes + kv.host_bytes + host_rows * 2048


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "host", "rows"),
    [
        (400_000, 300_000, MemoryTier.DEVICE), (800_000, 800_000, MemoryTier.DEVICE),
        (800_000, 800_000, MemoryTier.HOST),
    ],
)  # fmt: skip
def test_what_a_plan_puts_on_each_tier_is_there_and_no_tier_has_more_than_its_budget(
    files_of: Files, tmp_path: Path, made: Kept, device: int, host: int,
    rows: MemoryTier,
) -> None:  # fmt: skip
    """Products take as long for few rows as for many, and copies are fast: KV on the host makes room for rows."""
    files, budgets = files_of(), Budgets(device, host)
    spec = read_spec(files["config.json"])
    work = BlockWork(80, 16, batch_tokens=320, table_bytes=100)
    products = {"bf16": ((1, 1e-9), (512, 1.01e-9))}
    machine = replace(MACHINE, to_device=1e10, to_host=1e10, attention=1e12, products=products)
    search = PolicySearch(spec, machine, budgets, formats_of("bf16", executor="cuda"), work, most_tokens=320)
    search = replace(search, supports=replace(ON_GPU, activations=(rows,)))
    plan = find_plan(search, solver.relax)
    limits = serving_limits({0: (search, plan)})
    sizes = replace(SIZES, pages=limits.pages, rows=limits.sequences, tokens=limits.batch_tokens)
    budget = OffloadBudget(
        device + BESIDE, 1 << 30, tmp_path, BASE, plan.batch_tokens, sizes.tokens, sizes.rows, 16, host_bytes=host,
        plan=plan,
    )  # fmt: skip
    executor = OffloadCudaExecutor(find_gpu(), open_checkpoint(files, spec), budget, sizes, dtype="bf16")
    made.append(executor)
    placed, used = executor.placement, plan.usage
    assert plan.kv_host > 0
    assert placed.kv.host_bytes == used[MemoryTier.HOST].kv
    assert (placed.weights.resident_bytes, placed.host_bytes) == (
        used[MemoryTier.DEVICE].weights, used[MemoryTier.HOST].weights
    )  # fmt: skip
    on_host = placed.kv.host_bytes + placed.activations.host_bytes
    assert on_host + placed.host_bytes + placed.staging_bytes <= host
    assert bool(placed.activations.outside_rows) == (rows is MemoryTier.HOST)
    assert placed.activations.host_bytes <= used[MemoryTier.HOST].activations
    assert placed.device_bytes <= device + BESIDE
    step = make_step([([1, 2, 3], 0, [0], None), ([4], 0, [1], None)])
    assert torch.equal(executor.run(step), whole(files).run(step))


def asked_of(folder: Path, **flags: Any) -> RunnerSettings:
    own = {"base_digest": BASE, "data_dir": folder, "executor": "cuda", "max_rank": 16, "kv_pages": 64}
    return settings_of(**{**own, "max_sequences": 4, "max_batch_tokens": 64, **flags})


def test_the_flags_of_a_runner_make_one(files_of: Files, tmp_path: Path, made: Kept) -> None:
    files = files_of()
    spec = read_spec(files["config.json"])
    asked = asked_of(tmp_path, offload=f"device=2000000,host={1 << 20}", by_hand=OffloadByHand())
    executor = make_executor(asked, ModelSource(spec, files, 1))
    assert isinstance(executor, OffloadCudaExecutor)
    assert executor.can.stage is executor
    made.append(executor)
    assert executor.placement.device_bytes <= 2_000_000
    with pytest.raises(PolicyInvalid):
        make_executor(replace(asked, by_hand=OffloadByHand(plan=tmp_path / "none")), ModelSource(spec, files, 1))
    with pytest.raises(SystemExit):
        asked_of(tmp_path, offload="device=1", tensor_parallel=2)


@pytest.mark.slow
def test_a_runner_measures_its_gpu_and_the_policy_that_it_finds_is_one_that_runs(
    files_of: Files, tmp_path: Path, made: Kept,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Little on the device, less on the host, the rest on the disk; and what is measured is kept."""
    caplog.set_level("INFO")
    files = files_of()
    spec, unset = read_spec(files["config.json"]), dict.fromkeys(("kv_pages", "max_sequences", "max_batch_tokens"), 0)
    asked = asked_of(tmp_path, **{"offload": "device=540000,host=120000", **unset})
    settled, policy = settle_offload(asked, spec, threads=1)
    assert policy is not None
    plan, machine = policy.plans[0], policy.machines[0]
    assert not machine.one_memory
    assert min(machine.to_device, machine.to_host, machine.attention, machine.attention_flops_per_s) > 0
    assert plan.policy.block == settled.max_sequences
    assert (plan.policy.kv.disk, plan.policy.activations.disk) == (0.0, 0.0)
    assert plan.policy.weights.disk > 0
    executor = make_executor(settled, ModelSource(spec, files, 1, policy=policy))
    assert isinstance(executor, OffloadCudaExecutor)
    made.append(executor)
    assert executor.placement.weights.resident_bytes == plan.usage[MemoryTier.DEVICE].weights
    assert executor.placement.host_bytes == plan.usage[MemoryTier.HOST].weights
    assert executor.placement.kv.host_bytes == plan.usage[MemoryTier.HOST].kv
    executor.run(make_step([([1, 2, 3], 0, [0], None)]))
    executor.run(make_step([([4], 3, [0], None)]))
    state = executor.stage_state.state
    assert min(state.predicted_ms, state.measured_ms, state.alone_ms) > 0.0
    assert settle_offload(asked, spec, threads=1) == (settled, policy)
    assert "the machine was measured before" in caplog.messages
    with pytest.raises(NoPolicyFits, match=r"the host has 0 bytes, \d+ too few"):
        settle_offload(replace(asked, offload=replace(asked.offload, host_bytes=0)), spec, threads=1)


def test_who_plans_gets_what_a_gpu_was_measured_to_do(
    files_of: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """From the question's JSON to the answer's; what is measured is another test's."""
    spec = replace(read_spec(files_of()["config.json"]), eos=frozenset[int]())
    asked: list[tuple[Any, ...]] = []

    def measured(*arguments: Any) -> MachineRates:
        asked.append(arguments)
        return MACHINE

    monkeypatch.setattr(machine_rates, "measure_gpu_rates", measured)
    question = {"folder": str(tmp_path), "spec": spec_json(spec), "formats": ["bf16", "int4"], "most_bytes": 1 << 20}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(question)))
    assert measuring.main() == 0
    assert asked == [(tmp_path, spec, ["bf16", "int4"], find_gpu(), 1 << 20)]
    assert machine_of(json.loads(capsys.readouterr().out)["machine"]) == MACHINE
