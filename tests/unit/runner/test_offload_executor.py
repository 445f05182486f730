"""A model larger than its memory: the in-memory executor's bits, whatever stays and whatever the parts."""

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from prometheus_client import CollectorRegistry

from harness import offload_child
from harness.family_shapes import OTHER_FAMILIES, SLOW_FAMILIES, shape_of
from harness.native_library import native_library
from harness.native_models import BASE, Scales, adapter_tensors, cpu_executor, make_step, offload_executor, write_model
from harness.waiting import PATIENCE_S, wait_until
from weft.domain.model.spec import ModelSpec
from weft.domain.request import Sampling
from weft_kernels.cpu import KINDS
from weft_runner.core.batch import Candidate, form_batch
from weft_runner.errors import DiskUnusable, ExecutorLost, OutOfMemory, PolicyInvalid, RunnerError
from weft_runner.executors import ModelSource, make_executor
from weft_runner.model import BFLOAT16, Partition, SamplingArgs, read_spec, stage_of
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.model.cpu.packed_weights import RowPacker
from weft_runner.model.cpu.page_file import PageFile
from weft_runner.model.tiers.packed_file import PackedLayout, packed_file
from weft_runner.offload import (
    BlockTime,
    Budgets,
    Formats,
    MemoryTier,
    OffloadPlan,
    PassTime,
    Policy,
    Shares,
    Usage,
    WeightTiers,
    state_of_all,
)
from weft_runner.parallel import OffloadedPipeline
from weft_runner.settings import OffloadByHand, parse_settings
from weft_runner.shell.engine_factory import batch_limits
from weft_runner.shell.metrics import OffloadSeries

LIBRARY = native_library()
PAGES, SLOTS = 64, 4
Made = TypeVar("Made", bound=CpuExecutor)
ALL, PASS = Shares(1.0, 0.0, 0.0), PassTime(1.0, 0.0, 0.0, 0.0, 0.5, 1.0)
PLAN = OffloadPlan(
    policy=Policy(8, 4, Shares(0.4, 0.0, 0.6), ALL, ALL), formats=Formats(), budgets=Budgets(12 << 20, 0, 1 << 30),
    tiers=WeightTiers((), None), activations=MemoryTier.DEVICE, kv_device=8, kv_host=0, prompt_passes=2,
    batch_tokens=512, buffers=2, usage={tier: Usage() for tier in MemoryTier},
    predicted=BlockTime(PASS, PASS, 32.0, 30.0, 8.0, 1.0), relaxed_s=31.0,
)  # fmt: skip
RANKS = (
    {"q_proj": 8, "v_proj": 8}, {"down_proj": 3, "o_proj": 5, "up_proj": 16}, {"k_proj": 1},
    {"gate_proj": 33, "up_proj": 2},
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5, "max_position_embeddings": 160},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 1,
        "tie_word_embeddings": True, "num_hidden_layers": 3,
    },
    "windows": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4,
        "use_sliding_window": True, "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    **{family: shape_of(family, 3) for family in OTHER_FAMILIES},
}  # fmt: skip
Files = Callable[..., dict[str, Path]]
Offload = Callable[..., OffloadExecutor]


@pytest.fixture(scope="module")
def files_of(tmp_path_factory: pytest.TempPathFactory) -> Files:
    @cache
    def make(model: str = "llama", dtype: torch.dtype = torch.bfloat16) -> dict[str, Path]:
        return write_model(tmp_path_factory.mktemp("models") / model, 7, dtype, **MODELS[model])

    return make


def sizes(dtype: str, threads: int = 1, page_tokens: int = 16) -> dict[str, Any]:
    """`dtype`: of the weights, with `+int4` also of KV; `+top` with sparse attention."""
    weights, *others = dtype.split("+")
    kinds = {"kv_dtype": "int4" if "int4" in others else "auto", "top_share": 0.3 if "top" in others else 0.0}
    kinds |= {"dtype": weights}
    return {**kinds, "threads": threads, "pages": PAGES, "page_tokens": page_tokens, "slots": SLOTS}


def with_adapters(executor: Made, spec: ModelSpec | None = None) -> Made:
    """`spec`: of the whole model, where the executor has a part."""
    for slot, ranks in enumerate(RANKS):
        tensors = adapter_tensors(spec or executor.spec, slot, ranks)
        executor.adapters.put(slot, executor.adapters.build(tensors, Scales()))
    return executor


@pytest.fixture
def offload(files_of: Files, tmp_path: Path) -> Iterator[Offload]:
    """Make executors of a model's files, of the Llama's if none are given, within limits; they end with the test."""
    made = list[OffloadExecutor]()

    def make(
        files: dict[str, Path] | None = None, dtype: str = "bf16", *, part: Partition | None = None, threads: int = 1,
        page_tokens: int = 16, **limits: Any,
    ) -> OffloadExecutor:  # fmt: skip
        own = sizes(dtype, threads, page_tokens)
        made.append(offload_executor(files or files_of(), tmp_path, own, part=part, **limits))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def in_memory(files: dict[str, Path], dtype: str = "bf16", page_tokens: int = 16) -> CpuExecutor:
    return cpu_executor(files, LIBRARY, **sizes(dtype, page_tokens=page_tokens))


Rows = list[tuple[list[int], int, list[int], int | None]]


@dataclass(frozen=True, slots=True)
class Turn:
    """Before a step: `granted` pages change hands, `taken` ones are adapters'. Rows as `make_step` takes them."""

    rows: Rows
    granted: list[int]
    taken: list[int]


SEQUENCES, MAX_TOKENS = 6, 160


def script(seed: int, steps: int = 5) -> list[Turn]:
    """Prompts, chunks of them and single tokens, with adapters and without, on pages in any order.

    Some begin with full pages that another one has written; some are preempted, and begin again on pages that were
    another's; adapters come and leave.
    """
    drawn = random.Random(seed)
    fed, slots = [0] * SEQUENCES, [drawn.choice((None, 0, 1, 2, 3)) for _ in range(SEQUENCES)]
    free, most = drawn.sample(range(PAGES), PAGES), MAX_TOKENS // 16
    owned = [[free.pop() for _ in range(most)] for _ in range(SEQUENCES)]
    taken, made = list[int](), list[Turn]()
    for _ in range(steps):
        granted = taken if drawn.random() < 0.5 else []
        taken = [page for page in taken if page not in granted]
        free += granted
        victim = drawn.randrange(SEQUENCES)
        if fed[victim] and sum(owned[victim][0] in pages for pages in owned) == 1:
            fed[victim] = 0
            granted = [*granted, *owned[victim]]
        new = [free.pop() for _ in range(drawn.randint(0, len(free)))]
        rows: Rows = []
        for i in sorted(drawn.sample(range(SEQUENCES), drawn.randint(1, SEQUENCES))):
            other = drawn.randrange(SEQUENCES)
            if not fed[i] and other != i and drawn.random() < 0.4 and not any(row[2] is owned[other] for row in rows):
                full = fed[other] // 16
                owned[i], fed[i] = [*owned[other][:full], *owned[i][full:]], 16 * full
            count = drawn.choice((1, 1, 1, 2, 17, 40))
            if fed[i] + count <= MAX_TOKENS:
                rows.append(([drawn.randrange(203) for _ in range(count)], fed[i], owned[i], slots[i]))
                fed[i] += count
        taken = [*taken, *new]
        if rows:
            made.append(Turn(rows, granted, new))
    return made


def long_script(drawn: random.Random) -> list[Turn]:
    """One with a step of more tokens than a ring in memory holds."""
    scripts = (script(drawn.getrandbits(32)) for _ in count())
    return next(turns for turns in scripts if any(sum(len(row[0]) for row in turn.rows) > 60 for turn in turns))


def play(executor: CpuExecutor, turns: list[Turn]) -> Iterator[npt.NDArray[np.int32]]:
    """The bits of each step's logits."""
    executor.clear_pages(list(range(PAGES)))
    for turn in turns:
        executor.clear_pages(turn.granted)
        executor.allocate_adapter_pages(turn.taken)
        yield executor.run(make_step(turn.rows)).view(np.int32)


def same(one: CpuExecutor, other: CpuExecutor, turns: list[Turn]) -> None:
    for found, expected in zip(play(one, turns), play(other, turns), strict=True):
        assert np.array_equal(found, expected)


SHARES = (0.0, 0.25, 0.5, 1.0)
DISK_PARTS = ((16, 40, 240), (7, 0, 201), (240, 59, 0), (20, 20, 200), (11, 55, 240))  # tokens, pages, tokens


STORED = ("bf16", "fp32", "int8", "int4", "int4+int4+top")


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *(("llama", dtype) for dtype in STORED),
        ("qwen2", STORED[-1]),
        ("qwen2", "bf16"),
        *(
            pytest.param(model, "bf16", marks=pytest.mark.slow if model in SLOW_FAMILIES else ())
            for model in OTHER_FAMILIES
        ),
    ],
)
def test_its_bits_are_those_of_the_executor_in_memory(
    files_of: Files, offload: Offload, rng: random.Random, model: str, dtype: str
) -> None:
    """Each dtype has every share and every part on disk; all dtypes together have each share with each part.

    All executors of a dtype play one script, so that what they should answer is computed once.
    """
    files = files_of(model)
    expected = with_adapters(in_memory(files, dtype))
    kept, made = dict[float, float](), list[OffloadExecutor]()
    for at, (micro_batch, disk_pages, disk_tokens) in enumerate(DISK_PARTS, STORED.index(dtype)):
        share = SHARES[at % len(SHARES)]
        parts = {"kv_disk_pages": disk_pages, "activation_disk_tokens": disk_tokens, "max_tokens": 240}
        how = {"share": share, "micro_batch": micro_batch, "threads": 1 + at % 2}
        made.append(with_adapters(offload(files, dtype, **how, **parts)))
        assert made[-1].numerics_class == expected.numerics_class
        assert made[-1].placement.disk_bytes <= 1 << 30
        kept[share] = made[-1].residency.share

    turns = long_script(random.Random(f"{rng.random()} {model} {dtype}"))
    wanted = [bits.copy() for bits in play(expected, turns)]
    for executor in made:
        for found, bits in zip(play(executor, turns), wanted, strict=True):
            assert np.array_equal(found, bits), executor.placement
    assert any(executor.figures.activations.read_bytes for executor in made)
    assert [kept[share] for share in SHARES] == sorted(set(kept.values()))


def test_weights_that_do_not_stay_are_read_once_a_pass_and_ahead_of_it(offload: Offload) -> None:
    """Whatever the number of rows and micro-batches; the head only where a row samples."""
    executor = offload(share=0.0, micro_batch=4)
    rows = [([1] * 9, 0, [0], None), ([2] * 9, 0, [1], None)]
    for done in range(1, 4):
        executor.run(make_step(rows))
        assert executor.figures.stream.read_bytes >= done * executor.residency.streamed_bytes
    ahead = executor.figures.ring_bytes
    assert executor.figures.stream.read_bytes <= 3 * executor.residency.streamed_bytes + ahead


ON_DISK = {
    "memory": {}, "kv": {"kv_disk_pages": 63}, "activations": {"activation_disk_tokens": 100, "max_tokens": 100},
    "both": {"kv_disk_pages": 63, "activation_disk_tokens": 60, "max_tokens": 100},
}  # fmt: skip
on_disk = pytest.mark.parametrize("disk", ON_DISK.values(), ids=ON_DISK.keys())


@on_disk
def test_layers_are_read_in_the_order_of_their_requests(
    files_of: Files, offload: Offload, disk: dict[str, int]
) -> None:
    """Half a pass, the same half again, the other one, a whole pass; hidden rows by the caller."""
    executor, expected = offload(share=0.25, micro_batch=9, **disk), in_memory(files_of())
    step = make_step([([5, 6, 7] * 13, 0, [0, 2, 3], None), ([8] * 50, 0, [1, 4, 5, 6], None)])
    found = [[one.run(step, last=2) for _ in range(2)] for one in (executor, expected)]
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert np.array_equal(*(one.run(step, first=2, hidden=found[0][0]).copy() for one in (executor, expected)))
    assert np.array_equal(*(one.run(step).copy() for one in (executor, expected)))


@pytest.mark.parametrize("disk_pages", [0, 63])
def test_a_step_that_advances_has_the_bits_of_one_made_anew(offload: Offload, disk_pages: int) -> None:
    executor = offload(share=0.5, micro_batch=2, kv_disk_pages=disk_pages)
    prompts = [([3 + i], 0, [i], None) for i in range(5)]
    found = []
    for anew in (False, True):
        executor.clear_pages(list(range(PAGES)))
        step = make_step(prompts)
        executor.run(step)
        step.advance([9, 8, 7, 6, 5], [1] * 5)
        if anew:
            step = make_step([([9 - i], 1, [i], None) for i in range(5)])
        found.append(executor.run(step).copy())
    assert np.array_equal(*found)


@on_disk
def test_a_layer_is_done_for_those_who_wait_after_its_last_micro_batch(offload: Offload, disk: dict[str, int]) -> None:
    executor = offload(share=0.25, micro_batch=2, **disk)
    called: list[int] = []
    executor.run(make_step([([1] * 70, 0, [0, 1, 2, 3, 4], None)]), layer_done=called.append)
    assert called == list(range(5))
    assert executor.layer_counter.count == 5


@pytest.mark.parametrize("disk_tokens", [0, 240])
def test_a_pass_that_is_given_up_leaves_nothing_in_the_way(files_of: Files, offload: Offload, disk_tokens: int) -> None:
    """The caller fails between two layers; what its next pass reads and writes is whole."""
    parts = {"kv_disk_pages": PAGES, "activation_disk_tokens": disk_tokens, "max_tokens": 240}
    executor = offload(share=0.25, micro_batch=8, **parts)

    def fails(layer: int) -> None:
        raise InterruptedError(layer)

    expected = in_memory(files_of())
    for seed in range(3):
        with pytest.raises(InterruptedError):
            executor.run(make_step([([1] * 40, 0, [5, 6, 7], None), ([2] * 20, 0, [8, 9], None)]), layer_done=fails)
        same(executor, expected, [Turn(turn.rows, turn.granted, []) for turn in script(seed)])


def test_two_stages_of_a_pipeline_have_budgets_of_their_own(files_of: Files, offload: Offload) -> None:
    expected = with_adapters(in_memory(files_of()))
    limits = {"micro_batch": 5, "max_tokens": 240, "activation_disk_tokens": 240}
    parts = [stage_of(expected.spec, stage, 2) for stage in range(2)]
    stages = [offload(part=part, share=0.4 * stage, **limits) for stage, part in enumerate(parts)]
    first, last = (with_adapters(stage, expected.spec) for stage in stages)
    for turn in script(3):
        step = make_step(turn.rows)
        assert np.array_equal(last.run(step, hidden=first.run(step)), expected.run(step))


def test_rows_that_come_to_a_stage_and_leave_it_are_in_its_budget(files_of: Files, offload: Offload) -> None:
    """Each pass in flight has such rows: the middle one of three stages has both kinds."""
    spec = read_spec(files_of()["config.json"])
    rows_bytes, found = 4 * 240 * spec.hidden_size, list[int]()
    for stage, messages in ((0, 1), (1, 2), (2, 1)):
        for passes in (1, 3):
            executor = offload(part=stage_of(spec, stage, 3), max_tokens=240, in_flight=passes)
            found.append(executor.placement.work_bytes)
        assert found[-1] - found[-2] == 2 * messages * rows_bytes


# ---- the file


def packed_path(folder: Path) -> Path:
    (path,) = folder.glob("*.packed")
    return path


def test_runners_of_a_node_share_what_the_first_one_packed(offload: Offload) -> None:
    first, second = (offload(share=share) for share in (0.0, 0.5))
    assert (first.packed, second.packed) == (True, False)
    same(first, second, script(1))
    assert offload(base="sha256:" + "6" * 64).packed  # of another base


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def with_one_bit_changed(path: Path, at: float = 0.5) -> None:
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * at))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def with_another_header(path: Path) -> None:
    with_one_bit_changed(path, 20 / path.stat().st_size)


@pytest.mark.parametrize("damage", [cut_short, emptied, with_one_bit_changed, with_another_header])
def test_a_damaged_file_is_packed_again_by_name(
    files_of: Files, offload: Offload, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    offload(share=0.0)
    damage(packed_path(tmp_path))
    caplog.set_level("INFO")
    executor = offload(share=0.0)
    assert executor.packed
    (packing,) = [record for record in caplog.records if record.message == "weights are packed"]
    assert "no such file" not in packing.kv["why"]  # type: ignore[attr-defined]
    same(executor, in_memory(files_of()), script(2))


# ---- a runner

FLAGS = [
    "--listen=127.0.0.1:1", "--probes=127.0.0.1:2", "--supervisor=127.0.0.1:3", "--depot=http://127.0.0.1:4",
    "--pool=a/b", f"--base-digest={BASE}", f"--kv-pages={PAGES}", "--max-sequences=8", "--max-batch-tokens=64",
    "--dtype=bf16", "--max-adapters=4",
]  # fmt: skip
LITTLE = OffloadByHand(batch_tokens=8)


@pytest.mark.slow
def test_flags_of_a_runner_make_it_of_one_process_and_of_stages(files_of: Files, tmp_path: Path) -> None:
    """Each stage has its own budget and its own file; the tokens are those of one process in memory."""
    files = files_of()
    spec, plain = read_spec(files["config.json"]), in_memory(files)
    prompt = ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 0, [0], None)
    draws = [SamplingArgs(Sampling(temperature=0.0), 11)]
    expected = plain.sample(plain.run(make_step([prompt])), draws)
    base = ModelSource(spec, files, 1)
    flags, by_hand = (
        [*FLAGS, f"--data-dir={tmp_path}", f"--offload=device={12 << 20}"],
        replace(LITTLE, weights_share=0.3),
    )
    one = make_executor(parse_settings(flags, by_hand=by_hand), base)
    assert isinstance(one, OffloadExecutor)
    with closing(one):
        assert 0.0 < one.residency.share <= 0.3
        assert one.sample(one.run(make_step([prompt])), draws) == expected
    two = make_executor(parse_settings([*flags, "--pipeline-parallel=2"], by_hand=by_hand), base)
    assert isinstance(two, OffloadedPipeline)
    with closing(two):
        assert two.launch(make_step([prompt]), draws).result() == expected
        assert len(list((tmp_path / "offload").glob("*.packed"))) == 3
        assert (two.depth, two.depth_for(lambda: 1000)) == (1, 1)
        assert [stage.frames for stage in two.stages()] == [PAGES] * 2
        assert 0.0 < state_of_all(two.stages()).resident_share <= 0.3
        wait_until(
            lambda: sum(stage.layers_done for stage in two.stages()) == spec.layers,
            "the other stage says how far it is",
        )
        registry = CollectorRegistry()
        registry.register(OffloadSeries(lambda: [stage.figures for stage in two.stages()]))
        wait_until(lambda: all(stage.figures.step_s > 0.0 for stage in two.stages()), "and what it has read")
        for stage, figures in enumerate(state.figures for state in two.stages()):
            assert disk_bytes(registry, stage) == figures.streamed_bytes > 0
            read = registry.get_sample_value("weft_runner_offload_read_bytes_total", {"stage": str(stage)})
            assert read is not None
            assert figures.streamed_bytes <= read <= figures.stream.read_bytes


def test_a_plan_says_which_weights_and_how_much_kv_stay(files_of: Files, tmp_path: Path) -> None:
    """In each layer the o and the down matrix stay, of KV 40 pages, no activations.

    A plan of another model or of other numbers is refused.
    """
    files = files_of()
    base, path = ModelSource(read_spec(files["config.json"]), files, 1), tmp_path / "plan.json"
    asked = parse_settings(
        [*FLAGS, f"--data-dir={tmp_path}", f"--offload=device={12 << 20}"], by_hand=replace(LITTLE, plan=path)
    )
    device, disk = MemoryTier.DEVICE, MemoryTier.DISK
    usage = {**PLAN.usage, disk: Usage(kv=24 * 20 << 10)}
    plan = replace(
        PLAN, tiers=WeightTiers(((disk, device, disk, device),) * 5, disk), batch_tokens=9, kv_device=2, usage=usage,
        activations=disk, policy=replace(PLAN.policy, activations=Shares(0.0, 0.0, 1.0)),
    )  # fmt: skip
    path.write_text(json.dumps(asdict(plan)))
    executor = make_executor(asked, base)
    assert isinstance(executor, OffloadExecutor)
    with closing(executor):
        assert {*executor.residency.resident[:5]} == {(False, True, False, True)}
        assert {*executor.residency.resident[5:]} == {(False,)}
        assert (executor.placement.kv.outside_pages, executor.placement.kv.batch_pages) == (24, 16)
        assert executor.placement.activations.outside_rows == 64
        assert executor.figures.planned_pass_s == plan.predicted.token.pass_s
        same(executor, in_memory(files), script(4))
    for wrong in (
        replace(plan, tiers=replace(plan.tiers, layers=plan.tiers.layers * 2)),
        replace(plan, formats=Formats("int4")),
        replace(plan, formats=Formats(kv="int4")),
    ):
        path.write_text(json.dumps(asdict(wrong)))
        with pytest.raises(PolicyInvalid):
            make_executor(asked, base)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--executor=reference"], "--offload is for --executor cpu"),
        (["--tensor-parallel=2"], "split the model by --pipeline-parallel"),
        (["--offload=host=5"], "'host=5' has no device=BYTES"),
        (["--offload=device=0"], "'device=0' is not device="),
        (["--offload=device=5,memory=5"], "'memory=5' is not device="),
        (["--offload=device=5,path="], "'path=' is not device="),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings([*FLAGS, f"--data-dir={tmp_path}", "--offload=device=1000000", *flags])
    assert said in capsys.readouterr().err


def test_a_budget_that_the_machine_does_not_have_is_refused(files_of: Files, tmp_path: Path) -> None:
    files = files_of()
    flags = [*FLAGS, f"--data-dir={tmp_path}", f"--offload=device={1 << 49}"]
    with pytest.raises(OutOfMemory, match="--offload device and host of 1 ranks here"):
        make_executor(parse_settings(flags), ModelSource(read_spec(files["config.json"]), files, 1))


def test_a_pass_from_disk_takes_all_prompts_that_it_can(tmp_path: Path) -> None:
    """A pass takes as long with one row as with many: to chunk prompts by a token time would gain nothing."""
    flags = [*FLAGS, f"--data-dir={tmp_path}", "--offload=device=1000000"]
    limits = batch_limits(parse_settings(flags))
    assert (limits.max_prefills, limits.token_time_ms) == (8, math.inf)
    whole = form_batch([Candidate("p", "", 1000)], [Candidate(str(i), "", 1) for i in range(7)], limits)
    first = form_batch([Candidate("p", "", 1000)], [], limits)
    assert whole.prompt_tokens == first.prompt_tokens == limits.max_batch_tokens - 8, "no running row cuts a prompt"


ALONE = {"stage": "0"}


def registry_of(executor: OffloadExecutor) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(OffloadSeries(lambda: [executor.figures]))
    return registry


def test_metrics_say_what_is_read_and_how_long_steps_wait_for_it(offload: Offload) -> None:
    executor = offload(share=0.5)
    registry = registry_of(executor)
    executor.run(make_step([([1], 0, [0], None)]))
    figures = executor.figures
    assert disk_bytes(registry, 0) == figures.streamed_bytes
    assert (registry.get_sample_value("weft_runner_offload_read_bytes_total", ALONE) or 0) >= figures.streamed_bytes
    assert 0 <= (registry.get_sample_value("weft_runner_offload_wait_seconds_total", ALONE) or 0) <= figures.step_s


def test_metrics_say_what_kv_is_read_and_written_and_how_long_steps_wait_for_it(offload: Offload) -> None:
    """A pass that begins a page reads none and writes it; the next one reads it."""
    executor = offload(**KV_ON_DISK)
    registry, row, page_bytes = registry_of(executor), list(range(10, 14)), executor.placement.kv.page_bytes
    for position, read, written in ((0, 0, 1), (1, 1, 2)):
        executor.run(make_step([([1], position, row, None)]))
        executor.allocate_adapter_pages([])  # waits for what is stored
        *n_bytes, waited_s = page_metrics(registry, "kv")
        assert n_bytes == [read * page_bytes, written * page_bytes]
        assert 0 < waited_s <= executor.figures.step_s


def test_metrics_say_what_activations_are_read_and_written_and_how_long_steps_wait_for_them(offload: Offload) -> None:
    """Every layer but the first and the last one moves them; not KV, nor in a pass that the ring holds."""
    executor = offload(micro_batch=16, **ON_DISK["activations"])
    registry = registry_of(executor)
    executor.run(make_step([([1], 0, [0], None)]))
    assert page_metrics(registry, "activations") == [0, 0, 0]
    executor.run(make_step([([1] * 96, 0, list(range(6)), None)]))
    passing = 96 * executor.placement.activations.row_bytes * (executor.spec.layers - 1)
    *n_bytes, waited_s = page_metrics(registry, "activations")
    assert n_bytes == [passing, passing]
    assert 0 < waited_s <= executor.figures.step_s
    assert page_metrics(registry, "kv") == [0, 0, 0]


def disk_bytes(registry: CollectorRegistry, stage: int) -> float | None:
    return registry.get_sample_value("weft_runner_offload_weight_bytes", {"stage": str(stage), "place": "disk"})


def page_metrics(registry: CollectorRegistry, of: str) -> list[float]:
    names = ("read_bytes", "written_bytes", "wait_seconds")
    return [registry.get_sample_value(f"weft_runner_offload_{of}_{name}_total", ALONE) or 0.0 for name in names]


# ---- processes

GROUPS = Path("/sys/fs/cgroup/memory")  # of v1, whose account begins when a process enters


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 210 MB of packed weights."""
    root = tmp_path_factory.mktemp("large") / "model"
    write_model(root, 3, **offload_child.MODEL)
    return root


@pytest.fixture
def group() -> Iterator[list[str]]:
    """A control group with a limit of BUDGET and SLACK, where this process may make one."""
    made = GROUPS / f"weft-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError:
        yield []
        return
    (made / "memory.limit_in_bytes").write_text(str(BUDGET + SLACK))
    yield [str(made)]
    made.rmdir()


BUDGET = 48 << 20
SLACK = 40 << 20  # Python's objects, threads' memory, buffers of the start: 18 to 27 MiB


def child(*arguments: object) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(offload_child.__file__).parents[1])}
    command = [sys.executable, "-m", "harness.offload_child", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_a_model_four_times_its_budget_stays_inside_it(large: Path, tmp_path: Path, group: list[str]) -> None:
    """The kernel's account, which ends a process above its limit, and its anonymous memory tell; packing included.

    Once with its KV in memory, and once with six times as much of it on the disk: to the same numbers.
    """
    sums = []
    for disk_pages in (0, 48):
        process = child(large, tmp_path, BUDGET, disk_pages, *group)
        found = json.loads(process.communicate(timeout=PATIENCE_S)[0])
        assert process.returncode == 0
        assert found["weights"] > 4 * BUDGET
        assert found["taken"] <= BUDGET + SLACK
        assert found["read"] >= offload_child.STEPS * found["streamed"]
        assert found["cached"] == 0
        assert bool(disk_pages) == all(found["kv"])
        sums.append(found["sums"])
    assert sums[0] == sums[1]


@pytest.mark.slow
def test_a_start_that_is_killed_while_it_packs_leaves_nothing_in_the_way(large: Path, tmp_path: Path) -> None:
    packing = child(large, tmp_path, BUDGET, 0)
    wait_until(lambda: any(tmp_path.glob("*.partial")), "a file that is being written")
    packing.kill()
    packing.communicate(timeout=PATIENCE_S)
    assert not list(tmp_path.glob("*.packed"))
    found = json.loads(child(large, tmp_path, BUDGET, 0).communicate(timeout=PATIENCE_S)[0])
    again = json.loads(child(large, tmp_path, 8 * BUDGET, 0).communicate(timeout=PATIENCE_S)[0])
    assert found["sums"] == again["sums"]
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".lock", ".packed"]


# ---- refusals and failures


@pytest.mark.parametrize(
    ("limits", "error", "what"),
    [
        ({"disk_bytes": 1000}, DiskUnusable, "--offload disk 1000 is below the"),
        ({"device_bytes": 100_000}, OutOfMemory, r"--offload device 100000 is too small: .* for KV and adapters"),
    ],
)
def test_a_budget_that_is_too_small_is_named_and_a_disks_before_anything_is_packed(
    offload: Offload, tmp_path: Path, limits: dict[str, int], error: type[RunnerError], what: str
) -> None:
    with pytest.raises(error, match=what):
        offload(**limits)
    assert not list(tmp_path.glob("*.p*")) or error is OutOfMemory


def test_a_full_disk_is_named_and_keeps_nothing(files_of: Files, tmp_path: Path) -> None:
    """A model that no disk has room for."""
    spec = replace(read_spec(files_of()["config.json"]), intermediate_size=1 << 36)
    packer = RowPacker(LIBRARY, LIBRARY.pool(1), KINDS["bf16"])
    layout = PackedLayout(packer, Partition(spec), BASE, "bf16", BFLOAT16)
    with (
        pytest.raises(DiskUnusable, match=f"has no room for {layout.n_bytes} bytes of packed weights"),
        packed_file(tmp_path, layout, packer, disk_bytes=1 << 60, stopping=lambda: False),
    ):
        raise AssertionError("nothing is packed")
    assert not list(tmp_path.glob("*.p*"))


KV_ON_DISK = {"share": 1.0, "micro_batch": 4, "kv_disk_pages": 60}


def test_a_disk_that_is_too_small_for_kv_is_named(offload: Offload, tmp_path: Path) -> None:
    placement = offload(**KV_ON_DISK).placement
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".lock", ".packed"]  # KV has no name to be left
    packed, kv = placement.packed_bytes, placement.kv.disk_bytes
    with pytest.raises(DiskUnusable, match=f"below the {packed} bytes of the packed weights, {kv} of KV and 0 of"):
        offload(**KV_ON_DISK, disk_bytes=packed + kv - 1)
    with pytest.raises(DiskUnusable, match=f"has no room for {5 << 60} bytes of KV"):
        PageFile(tmp_path, 5, 1 << 48, 4096)


@pytest.mark.parametrize(("dtype", "page_tokens"), [("bf16", 16), ("int4+int4+top", 48)])
def test_layers_with_a_window_load_the_pages_that_it_has(
    files_of: Files, offload: Offload, dtype: str, page_tokens: int
) -> None:
    """Two of four layers see 5 tokens, which lie in blocks of 64 that attention reads; the bits are those in memory."""
    files, most = files_of("windows"), 192 // page_tokens
    row, prefix, new = list(range(10, 10 + most)), 128 // page_tokens, [40, 41, 42]
    executor = offload(files, dtype, page_tokens=page_tokens, **KV_ON_DISK)
    expected, kv = in_memory(files, dtype, page_tokens), executor.placement.kv
    for one in (executor, expected):
        one.clear_pages([*row, *new])
    prompt = [3 + i % 7 for i in range(150)]
    shared = [*row[:prefix], *new], prefix * page_tokens
    steps: list[Rows] = [
        [(prompt, 0, row, None)],
        [([9], 150, row, None)],
        [([8], 151, row, None), (prompt[:20], shared[1], shared[0], None)],
    ]
    for number, rows in enumerate(steps):
        executor.allocate_adapter_pages([])  # waits for what is stored
        before = executor.figures.kv.read_bytes
        assert np.array_equal(executor.run(make_step(rows)), expected.run(make_step(rows)))
        if number == 1:
            seen = 150 // page_tokens + 1
            of_window = seen - 128 // page_tokens
            assert executor.figures.kv.read_bytes - before == 2 * (seen + of_window) * kv.layer_bytes


def break_pages(path: Path, broken: str, n_bytes: int) -> None:
    """The one open file of pages is another now, which cannot be read or written."""
    (opened,) = (one for one in Path("/proc/self/fd").iterdir() if one.is_symlink() and ".pages" in str(one.readlink()))
    other = os.open(path, os.O_CREAT | (os.O_WRONLY if broken == "read" else os.O_RDONLY))
    if broken == "written":
        path.write_bytes(bytes(n_bytes))
    os.dup2(other, int(opened.name))
    os.close(other)


@pytest.mark.parametrize("broken", ["read", "written"])
@pytest.mark.parametrize("what", ["activations are", "KV is"])
def test_what_is_lost_ends_the_executor_by_name(offload: Offload, tmp_path: Path, what: str, broken: str) -> None:
    """Reads or writes of its file answer with an error of the system; no token comes of what was lost."""
    of_kv = what == "KV is"
    executor = offload(**KV_ON_DISK if of_kv else {"micro_batch": 9, **ON_DISK["activations"]})
    executor.run(make_step([([1] * (40 if of_kv else 80), 0, list(range(10, 15)), None)]))
    executor.allocate_adapter_pages([])  # waits for what is stored
    placed = executor.placement.kv if of_kv else executor.placement.activations
    break_pages(tmp_path / "other", broken, placed.disk_bytes)
    for i in range(2):
        row = ([1], 40 + i, list(range(10, 15)), None) if of_kv else ([1] * 80, 0, list(range(10, 15)), None)
        with pytest.raises(ExecutorLost, match=f"{what} lost: .*pages cannot be {broken} at byte"):
            run_until_lost(executor, row)


def run_until_lost(executor: OffloadExecutor, row: Any = ([1], 0, [0], None)) -> None:
    """What was read ahead is still whole, and a step waits for what the one before stored: a few passes at the most."""
    for _ in range(3):
        executor.run(make_step([row]))


def test_a_file_that_is_cut_short_while_it_serves_ends_the_executor_by_name(offload: Offload, tmp_path: Path) -> None:
    executor = offload(share=0.0)
    executor.run(make_step([([1], 0, [0], None)]))
    os.truncate(packed_path(tmp_path), 8192)
    with pytest.raises(ExecutorLost, match=r"weights are lost: .*\.packed ends at byte"):
        run_until_lost(executor)


def test_a_disk_that_fails_ends_the_executor_by_name(offload: Offload, tmp_path: Path) -> None:
    """Reads answer with an error of the system: the file behind them is one that cannot be read from."""
    executor = offload(share=0.0)
    with (tmp_path / "unreadable").open("wb") as file:
        for opened in Path("/proc/self/fd").iterdir():
            if opened.is_symlink() and opened.resolve() == packed_path(tmp_path):
                os.dup2(file.fileno(), int(opened.name))
        with pytest.raises(ExecutorLost, match=r"weights are lost: .*\.packed cannot be read at byte"):
            run_until_lost(executor)
