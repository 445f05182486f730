"""What ranks tell each other around a product, and a whole model on ranks that are threads."""

from typing import Any

import pytest
import torch

from harness.numerics import near
from harness.ranks import on_threads
from weft_kernels.plan import plan_rows
from weft_runner.model import Partition, StepInput, StepRow, map_tensors
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.lora import DOWN, GATE_UP, OUT, QKV
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.reference.executor import ReferenceExecutor
from weft_runner.model.tensor_parallel import ProcessGroup, SingleProcessGroup, TensorParallel
from weft_runner.model.weights import load_weights

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("site", [QKV, GATE_UP])
def test_at_column_sites_every_rank_gets_the_shrunk_rows_in_the_order_of_the_ranks(size, site):
    whole = torch.randn(5, 7)

    def rank(group: ProcessGroup) -> torch.Tensor:
        tensor = TensorParallel(group)
        part = torch.full((5, tensor.own_width(7, site)), torch.nan)  # what no rank has is not read
        own = whole[:, group.rank :: group.size]
        part[:, : own.shape[1]] = own
        return tensor.shrunk(part, site)[:, :7]

    assert all(torch.equal(told, whole) for told in on_threads(size, rank))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("site", [OUT, DOWN])
def test_at_row_sites_shrunk_rows_and_outputs_are_summed(size, site):
    def rank(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, int]:
        tensor, mine = TensorParallel(group), torch.full((3, 2), 1.0 + group.rank)
        return tensor.shrunk(mine, site), tensor.summed(mine, site), tensor.own_width(2, site)

    total = torch.full((3, 2), float(sum(range(1, size + 1))))
    for shrunk, summed, width in on_threads(size, rank):
        assert torch.equal(shrunk, total)
        assert torch.equal(summed, total)
        assert width == 2


def test_outputs_of_column_sites_stay_where_they_are():
    y = torch.randn(2, 3)
    assert on_threads(2, lambda group: TensorParallel(group).summed(y, QKV) is y) == [True, True]


def test_logits_are_whole_on_rank_0():
    whole = torch.randn(3, 8)
    told = on_threads(4, lambda g: TensorParallel(g).logits(whole[:, 2 * g.rank : 2 * g.rank + 2]))
    assert torch.equal(told[0], whole)
    assert [part.shape for part in told[1:]] == [(3, 2)] * 3


# ---- a model

MODULES = ("q_proj", "v_proj", "gate_proj"), ("o_proj", "down_proj"), ("k_proj",)
SHAPES = {
    "two key-value heads": {},
    "one key-value head, and an untied head": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "as many as heads": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}


@pytest.fixture(params=SHAPES)
def model(request: Any, tmp_path: Any, new_world: Any, small_config: dict[str, Any]) -> Any:
    world = new_world(tmp_path / "w", small_config | {"vocab_size": 64} | SHAPES[request.param])
    world.write_base()
    for i, (rank, modules) in enumerate(zip((1, 3, 64), MODULES, strict=True)):
        world.write_adapter(f"a{i}", seed=i, rank=rank, modules=modules)
    world.write_adapter("a3", seed=3, rank=5, use_rslora=True)
    return world


def step_of(ranks: dict[int, int]) -> StepInput:
    """Four prompts and a base row between them, each on pages of its own."""
    slots = [0] * 3 + [1] * 2 + [None] * 2 + [2] * 1 + [3] * 4
    ends = (3, 5, 7, 8, 12)
    rows = [StepRow(start, end, 0, (i,), True) for i, (start, end) in enumerate(zip((0, *ends), ends, strict=False))]
    return StepInput([7 * i % 61 for i in range(len(slots))], tuple(rows), plan_rows(slots, ranks))


@pytest.mark.numeric
@pytest.mark.parametrize("size", [2, 4])
def test_a_split_model_gives_the_logits_of_the_whole(model, size):
    """Mixed ranks, subsets of modules, fewer ranks of an adapter than devices, fewer key-value heads than devices."""
    spec, files = model.spec, {path.name: path for path in model.base.iterdir()}

    def logits(group: ProcessGroup) -> torch.Tensor:
        part = Partition(spec, group.rank, group.size)
        table, ranks = TorchAdapterStore(spec, 4, part), {}
        for slot in range(4):
            source = model.adapter(f"a{slot}")
            table.put(slot, built := table.build(map_tensors(source.tensors), source.scales))
            ranks[slot] = built.site_rank
        weights, kv = load_weights(files, spec, part=part), KvCache(part.local, 8, 4)
        return ReferenceExecutor(part.local, weights, kv, table, group).run(step_of(ranks))

    whole, told = logits(SingleProcessGroup()), on_threads(size, logits)
    near("fp32: ranks beside one process", told[0], whole, 2e-5)
    assert torch.equal(torch.stack(told[1:]), told[0].view(5, size, -1).permute(1, 0, 2)[1:])
