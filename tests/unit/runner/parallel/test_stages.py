"""Cuts of a model into stages, what each stage has of it, and what passes between stages."""

import threading
from collections import deque
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from harness.waiting import PATIENCE_S
from weft.domain.model.config import parse_spec
from weft.domain.model.spec import LayerSpec, ModelSpec, RopeSpec
from weft_kernels.plan import Segment, SegmentPlan
from weft_runner.core.layer_cut import layer_cost
from weft_runner.core.profile_model import DecodeTime, PrefillTime, make_profile
from weft_runner.errors import ExecutorUnavailable, WeightsInvalid
from weft_runner.memory_estimate import estimate_memory
from weft_runner.model import StepInput, StepRow, map_tensors, stage_of
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.weights import load_weights
from weft_runner.parallel import BuiltShard, Layers, PipelineChannel, share_tensors
from weft_runner.worker.loop import StageWork, WorkerLoop


def spec_of(layers: int, vocab: int = 64) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=vocab, hidden_size=32, intermediate_size=48,
        heads=4, kv_heads=2, head_dim=8, norm_eps=1e-6, max_positions=256, tied_embeddings=False,
        ropes=(RopeSpec(1e4),), by_layer=tuple(map(LayerSpec, range(layers))),
    )  # fmt: skip


# ---- the cut


@given(layers=st.integers(1, 12), vocab=st.integers(1, 3000), stages=st.integers(1, 5))
def test_every_layer_is_in_one_stage_and_no_cut_has_a_cheaper_dearest_stage(layers, vocab, stages):
    spec = spec_of(layers, vocab)
    if stages > layers:
        with pytest.raises(ExecutorUnavailable, match=f"--pipeline-parallel {stages}: this model has {layers} layers"):
            stage_of(spec, 0, stages)
        return
    parts = [stage_of(spec, stage, stages) for stage in range(stages)]
    assert [layer for part in parts for layer in part.layers] == list(range(layers))
    assert [part.begins for part in parts] == [True, *[False] * (stages - 1)]
    assert [part.ends for part in parts] == [*[False] * (stages - 1), True]

    def dearest(sizes: list[int]) -> int:
        costs = [size * layer_cost(spec) for size in sizes]
        return max([*costs[:-1], costs[-1] + spec.hidden_size * vocab])

    cuts = [(0, *cut, layers) for cut in combinations(range(1, layers), stages - 1)]
    best = min(dearest([b - a for a, b in pairwise(cut)]) for cut in cuts)
    sizes = [len(part.layers) for part in parts]
    assert dearest(sizes) == best
    assert sizes[0] == min(sizes[:-1] or sizes), "stage 0 chooses tokens as well"


def test_a_large_head_is_worth_layers():
    """Llama 3.1 8B on four stages: 32 layers of 218 million numbers, a head of 525 million."""
    large = ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        heads=32, kv_heads=8, head_dim=128, norm_eps=1e-5, max_positions=8192, tied_embeddings=False,
        ropes=(RopeSpec(5e5),), by_layer=(LayerSpec(),) * 32,
    )  # fmt: skip
    assert [len(stage_of(large, stage, 4).layers) for stage in range(4)] == [8, 9, 9, 6]


# ---- what a stage has


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_has_its_own_layers_of_weights_cache_and_adapters(tmp_path, new_world, small_config, tied):
    world = new_world(tmp_path / "deep", small_config | {"num_hidden_layers": 5, "tie_word_embeddings": tied})
    world.write_base()
    world.write_adapter("a")
    spec, files = world.spec, {path.name: path for path in world.base.iterdir()}
    source = world.adapter("a")
    whole, tensors = load_weights(files, spec), map_tensors(source.tensors)
    bytes_of = []
    for stage in range(3):
        part = stage_of(spec, stage, 3)
        weights = load_weights(files, spec, part=part)
        assert len(weights.layers) == part.local.layers == len(part.layers)
        for own, layer in zip(weights.layers, part.layers, strict=True):
            assert torch.equal(own.qkv, whole.layers[layer].qkv)
        assert weights.embedding.shape == ((61, 32) if stage == 0 else (0, 32))
        assert weights.has_head == (stage == 2)
        assert torch.equal(weights.head, whole.head if stage == 2 else whole.head[:0])
        assert KvCache(part.local, 4, 4).tensor.shape[1] == len(part.layers)
        table = TorchAdapterStore(spec, 2, part)
        adapter = table.build(tensors, source.scales)
        table.put(1, adapter)
        assert all(table.sites(layer, 0)[1] is not None for layer in range(len(part.layers)))
        bytes_of.append(table.device_bytes(tensors, source.scales))
    assert sum(bytes_of) == TorchAdapterStore(spec, 2).device_bytes(tensors, source.scales)


def test_what_is_wrong_with_the_weights_of_a_stage_is_told_by_the_number_of_its_layer_in_the_model(tmp_path, world):
    tensors = load_file(world.base / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    files = {"config.json": world.base / "config.json", "model.safetensors": tmp_path / "model.safetensors"}
    load_weights(files, world.spec, part=stage_of(world.spec, 0, 2))
    with pytest.raises(WeightsInvalid, match=r"up_proj of layer 1 is NaN or infinite at \[7, 5\]"):
        load_weights(files, world.spec, part=stage_of(world.spec, 1, 2))


def test_windows_go_with_their_layers():
    spec = spec_of(5)
    assert [stage_of(spec, stage, 2).local.windows for stage in range(2)] == [(0, 1, 2), (3, 4)]


def test_a_stage_that_an_adapter_leaves_alone_has_nothing_of_it(world):
    """The adapter is built all the same: every stage knows its number."""
    world.write_adapter("a")
    source, part = world.adapter("a"), stage_of(world.spec, 0, 2)
    tensors = {name: t for name, t in map_tensors(source.tensors).items() if ".layers.1." in name}
    adapter = TorchAdapterStore(world.spec, 2, part).build(tensors, source.scales)
    assert (adapter.rank, adapter.site_rank, adapter.n_bytes) == (0, 0, 0)


# ---- what passes between stages


class Peers:
    """One stage's; sends are kept until they are taken."""

    def __init__(self, rank: int, size: int, tensor_rank: int = 0) -> None:
        self.rank, self.size, self.tensor_rank, self.sent_bytes = rank, size, tensor_rank, 0
        self.sent: list[tuple[int, torch.Tensor]] = []
        self.waited: deque[torch.Tensor] = deque()
        self.asked: list[tuple[int, ...]] = []

    def send(self, x: torch.Tensor, to: int) -> Any:
        self.sent_bytes += x.nbytes
        self.sent.append((to, x))
        return Wait(self, x)

    def receive(self, shape: tuple[int, ...], source: int) -> Any:
        self.asked.append((*shape, source))
        return Wait(self, torch.ones(shape))


class Wait:
    def __init__(self, peers: Peers, x: torch.Tensor) -> None:
        self.peers, self.x = peers, x

    def wait(self) -> torch.Tensor:
        self.peers.waited.append(self.x)
        return self.x


STEP = StepInput(
    [1, 2, 3, 4, 5],
    (StepRow(0, 3, 0, (0, 1), True), StepRow(3, 4, 7, (2, 3), False), StepRow(4, 5, 0, (4,), True)),
    SegmentPlan(5, (Segment(0, 3, 1, 8),)),
)


def test_bytes_on_the_wire_are_those_of_the_formula():
    """The formula is that of `model.partition`: T = 5, S = 2."""
    spec, size = spec_of(6), 3
    lines = [PipelineChannel(Peers(rank, size), spec) for rank in range(size)]
    for line in lines[:-1]:
        line.send_next(torch.ones(5, spec.hidden_size))
        assert line.sent_bytes == 4 * 5 * spec.hidden_size
    lines[-1].send_next(torch.ones(2, spec.vocab_size))
    assert lines[-1].sent_bytes == 4 * 2 * spec.vocab_size
    lines[-1].send_next(torch.ones(0, spec.vocab_size))
    assert lines[-1].sent_bytes == 4 * 2 * spec.vocab_size, "no row samples"


def test_each_stage_sends_to_the_next_and_the_last_one_to_the_first():
    spec = spec_of(6)
    for rank in range(3):
        line = PipelineChannel(peers := Peers(rank, 3), spec)
        line.send_next(torch.ones(1, 2))
        assert [to for to, _ in peers.sent] == [(rank + 1) % 3]
    line = PipelineChannel(peers := Peers(1, 3), spec)
    line.hidden(7)
    assert peers.asked == [(7, 32, 0)]
    line = PipelineChannel(peers := Peers(0, 3), spec)
    line.logits(2, 64)
    assert peers.asked == [(2, 64, 2)]


def test_of_the_last_stage_one_rank_sends_logits_and_of_the_others_each_its_hidden_rows():
    for tensor_rank in range(2):
        channels = [PipelineChannel(Peers(rank, 3, tensor_rank), spec_of(6)) for rank in range(3)]
        for channel in channels:
            channel.send_next(torch.ones(1, 2))
        assert [len(channel._peers.sent) for channel in channels] == [1, 1, 1 - tensor_rank]
        assert [channel.begins for channel in channels] == [True, False, False]


@pytest.mark.parametrize(("kept", "waited"), [(None, [0, 1, 2]), (1, [0, 1, 2, 3]), (0, [0, 1, 2, 3, 4])])
def test_a_stage_whose_steps_are_not_taken_waits_for_the_oldest(kept, waited):
    """What is in flight is bounded, also where no step brings anything back."""
    line, peers = PipelineChannel(peers := Peers(0, 2), spec_of(2), kept), peers
    for i in range(5):
        line.send_next(torch.full((1, 1), float(i)))
    assert [float(x) for x in peers.waited] == waited


# ---- what a stage does, in which order


class Executor:
    """Notes what it does."""

    page_bytes = 64

    def __init__(self) -> None:
        self.did: list[str] = []
        self.adapters = self

    def run(self, step: StepInput, *, hidden: torch.Tensor) -> torch.Tensor:
        self.did.append(f"run {len(step.tokens)}")
        return hidden

    def clear_pages(self, pages: list[int]) -> None:
        self.did.append(f"clear {pages}")

    def allocate_adapter_pages(self, pages: list[int]) -> None:
        self.did.append(f"lend {pages}")

    def build(self, tensors: Any, scales: Any, pages: Any) -> Any:
        self.did.append("build")
        return self

    n_bytes, rank, site_rank = 65, 2, 4


@pytest.mark.parametrize("early", [True, False])
def test_hidden_rows_are_received_from_when_a_step_is_told_and_everything_is_done_in_its_turn(early):
    executor, peers = Executor(), Peers(1, 2)
    rank = WorkerLoop(executor, StageWork(executor, PipelineChannel(peers, spec_of(2)), early=early), PATIENCE_S)
    run = "run", STEP, Layers(0, 2, hidden=False)
    acts = [rank.act_of(command) for command in (run, ("clear_pages", [3]), run)]
    assert (len(peers.asked), executor.did, list(peers.waited)) == (2 if early else 0, [], [])
    for act in acts:
        act()
    assert executor.did == ["run 5", "clear [3]", "run 5"]


def test_an_adapter_is_built_after_the_steps_that_may_write_to_its_pages():
    """The builder's thread hears of it at once; the main one of the pages, behind the steps."""
    executor = Executor()
    rank = WorkerLoop(executor, StageWork(executor, PipelineChannel(Peers(1, 2), spec_of(2)), early=True), PATIENCE_S)
    shares: list[BuiltShard] = []
    file, table = share_tensors({"a": np.ones(1, np.float32)})
    builder = threading.Thread(target=lambda: shares.append(rank.build(file, "build", table, {}, 1, [3], 1)))
    builder.start()
    rank.act_of(("run", STEP, Layers(0, 2, hidden=False)))()
    rank.act_of(("allocate_pages", [3]))()
    builder.join(PATIENCE_S)
    assert executor.did == ["run 5", "lend [3]", "build"]
    assert shares == [BuiltShard(2, 2, 4)]


def test_pages_that_are_never_allocated_are_not_waited_for_for_ever():
    rank = WorkerLoop(
        executor := Executor(), StageWork(executor, PipelineChannel(Peers(1, 2), spec_of(2)), early=True), 0.01
    )
    with pytest.raises(TimeoutError, match="allocated 1 times, and 0 times"):
        rank.build(*share_tensors({"a": np.ones(1, np.float32)})[:1], "build", {}, {}, 1, [3], 1)


# ---- what a runner is told, and what it tells


@pytest.mark.parametrize("tied", [True, False])
def test_stages_take_the_memory_of_one_and_a_head_of_its_own_where_it_is_tied(small_config, tied):
    spec = parse_spec(small_config | {"tie_word_embeddings": tied})
    one, two = (estimate_memory(spec, "reference", kv_pages=10, page_tokens=4, stages=stages) for stages in (1, 2))
    assert two.total - one.total == (61 * 32 * 4 if tied else 0)


def test_the_best_number_of_sequences_is_that_of_all_batches_in_flight():
    """A batch of 8 is best; two of them share out 16 sequences, which get a token in the time of one."""
    decode = [DecodeTime(rows, 0, ms) for rows, ms in ((1, 10.0), (2, 10.0), (4, 10.0), (8, 10.0), (16, PATIENCE_S))]
    told = [
        make_profile(decode, [PrefillTime(32, 9.0)], None, max_sequences=m, token_time_ms=100.0, batches=2)
        for m in (16, 12, 3)
    ]
    assert [(profile.best_batch, profile.step_ms_best) for profile in told] == [(16, 10.0), (12, 10.0), (3, 10.0)]
