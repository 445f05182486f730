"""The native executor cut into stages and split over tensor ranks, on threads of this process that share slots.

Stages give the bits of one executor. Tensor ranks give bits of their own: the same for every batch, chunk, number of
threads and carrier of the slots, and as near the reference as one rank.
"""

import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from harness.family_shapes import OTHER_FAMILIES, SLOW_FAMILIES, shape_of
from harness.native_library import native_library
from harness.native_models import Scales, adapter_tensors, as_tensor, cpu_executor, make_step, write_model
from harness.numerics import within
from harness.ranks import base_of, settings_of
from harness.waiting import PATIENCE_S
from weft.domain.model.spec import ModelSpec
from weft_kernels.cpu import Library, load, ranks
from weft_runner.errors import ExecutorLost
from weft_runner.executors import make_executor
from weft_runner.model import Executor, Files, Partition, StepInput, read_spec

LIBRARY = native_library()
TILE32 = [level for level in LIBRARY.levels if level in ("amx_bf16", "avx512", "avx2")]  # of one numerics class

PAGES, SLOT_BYTES, ANSWER = 64, 1 << 18, 3
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS: tuple[dict[str, int], ...] = (
    dict.fromkeys(ALL, 8),
    {"q_proj": 3, "v_proj": 5, "down_proj": 1},
    dict.fromkeys(ALL, 33),
    {"up_proj": 16},
    {"k_proj": 64, "o_proj": 2, "gate_proj": 17, "up_proj": 31},
    dict.fromkeys(ALL, 1),  # fewer than ranks: some have no row of A
)
EVEN: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 204}
MODELS: dict[str, dict[str, Any]] = {
    "a key-value head each": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "heads that do not divide": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 32, "sliding_window": None,
    },
    "one key-value head for both": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 4,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
    "windows, heads of 16": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16, "num_attention_heads": 6,
        "num_key_value_heads": 6, "sliding_window": 37,
    },
}  # fmt: skip
OTHERS = {family: shape_of(family, 3) | {"intermediate_size": 192, "vocab_size": 204} for family in OTHER_FAMILIES}
DIVISIBLE = [family for family in OTHERS if not family.startswith("olmo")]  # OLMo norms all heads of a token together
Row = tuple[Sequence[int], int, Sequence[int], int | None]


class Model(NamedTuple):
    files: Files
    spec: ModelSpec


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def make(name: str) -> Model:
        root: Path = tmp_path_factory.mktemp("models") / "m"
        files = write_model(root, 5, **(OTHERS[name] if name in OTHERS else EVEN | MODELS[name]))
        return Model(files, read_spec(files["config.json"]))

    return make


class Split:
    """Parts of a model in this process, each with an executor: whole steps go through all of them."""

    def __init__(self, executors: Sequence[Sequence[Executor]], slots: Sequence[Any]) -> None:
        """`executors`: by stage and tensor rank."""
        self.stages, self.slots = executors, slots
        self._threads = ThreadPoolExecutor(len(executors[0]))

    def put(self, spec: ModelSpec) -> "Split":
        for executor in [one for stage in self.stages for one in stage]:
            for slot, own in enumerate(RANKS):
                adapter = executor.adapters.build(adapter_tensors(spec, slot, own), Scales())
                executor.adapters.put(slot, adapter)
        return self

    def run(self, step: StepInput) -> np.ndarray:
        found: list[np.ndarray] = [np.empty(0)] * len(self.stages[0])
        for index, stage in enumerate(self.stages):
            given = [None] * len(stage) if index == 0 else found
            steps = [StepInput.unpacked(step.packed()) for _ in stage]  # a step belongs to one thread
            found = list(self._threads.map(lambda one, mine, x: one.run(mine, hidden=x), stage, steps, given))
        return found[0].copy()


@contextmanager
def split(
    model: Model, stages: int = 1, size: int = 1, *, library: Library = LIBRARY, dtype: str = "bf16", threads: int = 1,
    fetched: bool = False,
) -> Iterator[Split]:  # fmt: skip
    """`fetched`: slots are each rank's own, and a callback copies those of the others."""
    files = [os.memfd_create("slots") for _ in range(stages)]
    try:
        ends = [model.spec.layers * (stage + 1) // stages for stage in range(stages)]
        made: list[list[Executor]] = []
        slots: list[Any] = []
        for stage in range(stages):
            mine: list[Any] = [None]
            if size > 1 and fetched:
                mine = [ranks.FetchedSlots(rank=rank, size=size, slot_bytes=SLOT_BYTES) for rank in range(size)]
                barrier, given = threading.Barrier(size), [list[int]()] * size
                for rank, one in enumerate(mine):
                    one.fetch = fetch_of(given, rank, barrier)
            elif size > 1:
                mine = [
                    ranks.SharedSlots(library.native, files[stage], 0, rank=rank, size=size, slot_bytes=SLOT_BYTES,
                                patience_s=PATIENCE_S)
                    for rank in range(size)
                ]  # fmt: skip
            parts = [
                Partition(model.spec, rank, size, ends[stage - 1] if stage else 0, ends[stage]) for rank in range(size)
            ]
            made.append(
                [
                    cpu_executor(model.files, library, dtype=dtype, threads=threads, pages=PAGES, page_tokens=16,
                                slots=len(RANKS), part=part, ranks=own)
                    for part, own in zip(parts, mine, strict=True)
                ]
            )  # fmt: skip
            slots += mine
        yield Split(made, slots).put(model.spec)
    finally:
        for file in files:
            os.close(file)


def fetch_of(given: list[list[int]], rank: int, barrier: threading.Barrier) -> Any:
    """Copies between the slots of one process: what a transport does between several. `given`: each rank's slots."""

    def fetch(slots: list[int], n_bytes: int, to_root: bool) -> None:
        given[rank] = slots
        barrier.wait(PATIENCE_S)
        for other in range(len(given)):
            if other != rank and (rank == 0 or not to_root):
                ctypes.memmove(slots[other], given[other][other], n_bytes)
        barrier.wait(PATIENCE_S)

    return fetch


def batch(seed: int = 3) -> list[tuple[list[int], int | None]]:
    """Prompts of the base and of every adapter, twice."""
    rng = random.Random(seed)
    slots = sorted([None, *range(len(RANKS))] * 2, key=lambda slot: -1 if slot is None else slot)
    return [(rng.choices(range(200), k=rng.choice((1, 5, 40))), slot) for slot in slots]


def played(executor: Any, sequences: list[tuple[list[int], int | None]], chunk: int) -> list[torch.Tensor]:
    """Logits of each sequence after its prompt, which comes in chunks, and after each of ANSWER greedy tokens."""
    pages = iter(range(PAGES))
    own = [[next(pages) for _ in range(-(-(len(tokens) + ANSWER) // 16))] for tokens, _ in sequences]
    texts, done = [list(tokens) for tokens, _ in sequences], [0] * len(sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(len(logits) < ANSWER for logits in found):
        running = [i for i, logits in enumerate(found) if len(logits) < ANSWER]
        rows: list[Row] = [(texts[i][done[i] : done[i] + chunk], done[i], own[i], sequences[i][1]) for i in running]
        logits = as_tensor(executor.run(make_step(rows)))
        for row, i in enumerate(running):
            done[i] += len(rows[row][0])
            if done[i] == len(texts[i]):
                found[i].append(logits[row].clone())
                texts[i].append(int(logits[row].argmax()))
    return [torch.stack(logits) for logits in found]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bf16") for name in MODELS),
        *(pytest.param(name, "bf16", marks=pytest.mark.slow if name in SLOW_FAMILIES else ()) for name in OTHERS),
        *((name, dtype) for name in list(MODELS)[::3] for dtype in ("fp32", "int8")),
    ],
)
def test_stages_give_the_bits_of_one_executor(model_of, name, dtype):
    model = model_of(name)
    with split(model, dtype=dtype) as alone, split(model, 3, dtype=dtype, threads=2) as stages:
        assert equal(played(alone, batch(), 16), played(stages, batch(), 16))
        assert stages.stages[0][0].numerics_class == alone.stages[0][0].numerics_class


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in (*MODELS, *DIVISIBLE)),
        *((name, 3) for name in ("heads that do not divide", "windows, heads of 16")),
    ],
)
def test_stages_of_tensor_ranks_give_the_bits_of_the_ranks_whatever_the_batch_the_chunks_and_the_threads(
    model_of, name, size
):
    model = model_of(name)
    with split(model, 1, size) as ranks, split(model, 3, size, threads=2) as grid:
        together = played(ranks, batch(), 64)
        assert equal(together, played(grid, batch(), 7))
        alone = [played(ranks, [sequence], 64)[0] for sequence in batch()[::2]]
        assert equal(together[::2], alone)
        assert ranks.stages[0][0].numerics_class.endswith(f"/tp{size}")


def test_what_a_stage_returns_stays_while_the_next_step_runs(model_of):
    """The result is on its way to another process then."""
    with split(model_of("a key-value head each"), 2) as stages:
        (first,), (last,) = stages.stages
        one, other = (make_step([([token, token + 1], 0, [0], None)]) for token in (3, 90))
        hidden = first.run(one)
        logits, kept_hidden = last.run(one, hidden=hidden), hidden.copy()
        kept = logits.copy()
        last.run(other, hidden=first.run(other))
        assert np.array_equal(hidden, kept_hidden)
        assert np.array_equal(logits, kept)


def test_slots_that_are_fetched_give_the_bits_of_shared_ones(model_of):
    model = model_of("heads that do not divide")
    with split(model, 1, 3) as shared, split(model, 1, 3, fetched=True) as fetched:
        assert equal(played(shared, batch(), 16), played(fetched, batch(), 16))


@pytest.mark.numeric
@pytest.mark.parametrize("name", [*MODELS, *DIVISIBLE])
def test_ranks_in_fp32_give_the_logits_of_the_reference(model_of, name):
    model = model_of(name)
    flags = {"kv_pages": PAGES, "page_tokens": 16, "max_adapters": len(RANKS)}
    reference = make_executor(settings_of(**flags), base_of(model.files))
    table = reference.adapters
    for slot, own in enumerate(RANKS):
        table.put(slot, table.build(adapter_tensors(model.spec, slot, own), Scales()))
    with split(model, 1, 2, dtype="fp32") as ranks:
        for one, other in zip(played(reference, batch(), 64), played(ranks, batch(), 64), strict=True):
            error = float((one - other).abs().max() / one.abs().max())
            within("fp32: native ranks beside the reference, of the largest logit", error, 5e-4)


@pytest.mark.parametrize("level", TILE32[1:])
def test_levels_of_a_class_give_the_same_bits(model_of, level):
    model = model_of("heads that do not divide")
    with split(model, 1, 2, library=load(TILE32[0])) as best, split(model, 1, 2, library=load(level)) as other:
        assert equal(played(best, batch(), 16), played(other, batch(), 16))


def test_a_rank_that_waits_for_a_lost_one_ends(model_of):
    with split(model_of("a key-value head each"), 1, 2) as ranks, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ranks.stages[0][0].run, make_step([([1, 2, 3], 0, [0], None)]))
        ranks.slots[1].end()
        with pytest.raises(ExecutorLost, match="another rank is lost"):
            waiting.result(PATIENCE_S)


def test_stages_that_make_their_slots_at_the_same_time_leave_each_other_theirs():
    """A file that one stage grows must not shrink by what another stage saw of it before."""
    stages, each = 4, ranks.slots_bytes(2, 64)
    barrier = threading.Barrier(stages)

    def make(file: int, stage: int) -> None:
        barrier.wait(PATIENCE_S)
        ranks.SharedSlots(LIBRARY.native, file, stage * each, rank=0, size=2, slot_bytes=64, patience_s=PATIENCE_S)

    with ThreadPoolExecutor(stages) as threads:
        for _ in range(500):
            file = os.memfd_create("slots")
            list(threads.map(make, [file] * stages, range(stages)))
            assert os.fstat(file).st_size == stages * each
            os.close(file)


def test_what_a_fetch_raises_is_the_reason_of_the_lost_step(model_of):
    with split(model_of("a key-value head each"), 1, 2, fetched=True) as ranks:
        ranks.slots[0].fetch = lambda *_: (_ for _ in ()).throw(RuntimeError("the wire is cut"))
        with pytest.raises(ExecutorLost) as lost:
            ranks.stages[0][0].run(make_step([([1, 2, 3], 0, [0], None)]))
        assert "the wire is cut" in str(lost.value.__cause__)
