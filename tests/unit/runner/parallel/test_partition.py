"""The part of a model that each rank has: together all of it, no number twice but those that are said to be."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.model.config import parse_spec
from weft.domain.model.spec import LayerSpec, ModelSpec, RopeSpec
from weft_runner.errors import ExecutorUnavailable
from weft_runner.model import SITES, AdapterPairs, LoraPair, Partition, check_divisible, map_tensors
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.partition import ROW
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.weights import load_weights


@pytest.fixture
def even_world(tmp_path: Any, new_world: Any, small_config: dict[str, Any]) -> Any:
    """The small model with a vocabulary of 64: two and four ranks share it."""
    world = new_world(tmp_path / "even", small_config | {"vocab_size": 64})
    world.write_base()
    return world


def parts_of(spec: ModelSpec, size: int) -> list[Partition]:
    return [Partition(spec, rank, size) for rank in range(size)]


def files_of(world: Any) -> dict[str, Any]:
    return {path.name: path for path in world.base.iterdir()}


@pytest.mark.parametrize("size", [1, 2])
def test_the_parts_of_the_weights_are_the_model(even_world, size):
    spec, files = even_world.spec, files_of(even_world)
    whole = load_weights(files, spec)
    parts = [load_weights(files, spec, part=part) for part in parts_of(spec, size)]
    assert torch.equal(torch.cat([part.head for part in parts]), whole.head)
    for index, layer in enumerate(whole.layers):
        mine = [part.layers[index] for part in parts]
        assert torch.equal(torch.cat([one.o for one in mine], dim=1), layer.o)
        assert torch.equal(torch.cat([one.down for one in mine], dim=1), layer.down)
        q, k, v = layer.qkv.split((spec.q_size, spec.kv_size, spec.kv_size))
        rows = [one.qkv.split((spec.q_size // size, spec.kv_size // size, spec.kv_size // size)) for one in mine]
        for matrix, shares in zip((q, k, v), zip(*rows, strict=True), strict=True):
            assert torch.equal(torch.cat(shares), matrix)
        gates, ups = zip(*(one.gate_up.chunk(2) for one in mine), strict=True)
        assert torch.equal(torch.cat((*gates, *ups)), layer.gate_up)
        assert all(torch.equal(one.attention_norm, layer.attention_norm) for one in mine)


def test_a_rank_holds_its_part_alone(even_world):
    """Matrices, pages and adapters are cut; the embedding is on all ranks."""
    spec, files = even_world.spec, files_of(even_world)
    whole, half = (load_weights(files, spec, part=part) for part in (Partition(spec), Partition(spec, 1, 2)))
    for layer, mine in zip(whole.layers, half.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            matrix, own = getattr(layer, name), getattr(mine, name)
            assert 2 * own.untyped_storage().nbytes() == matrix.untyped_storage().nbytes() == matrix.nbytes
    assert half.embedding.shape == whole.embedding.shape
    assert 2 * KvCache(Partition(spec, 1, 2).local, 4, 4).page_bytes == KvCache(spec, 4, 4).page_bytes
    adapter = even_world.write_adapter("a", rank=4)
    source = even_world.adapter(adapter.name)
    built = [
        TorchAdapterStore(spec, 1, part).build(map_tensors(source.tensors), source.scales) for part in parts_of(spec, 2)
    ]
    alone = TorchAdapterStore(spec, 1).build(map_tensors(source.tensors), source.scales)
    assert [one.n_bytes for one in built] == [alone.n_bytes // 2] * 2
    assert {(one.rank, one.site_rank) for one in built} == {(alone.rank, alone.site_rank)}


def test_few_key_value_heads_are_on_several_ranks_beside_the_queries_that_read_them(small_config):
    spec = parse_spec(small_config | {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64})
    parts = parts_of(spec, 4)
    assert [part.outputs("k_proj") for part in parts] == [slice(0, 4), slice(0, 4), slice(4, 8), slice(4, 8)]
    assert {part.local.kv_heads for part in parts} == {1}
    for part in parts:
        queries = range(part.outputs("q_proj").start // 4, part.outputs("q_proj").stop // 4)
        assert {head // 4 for head in queries} == {part.outputs("v_proj").start // 4}


@pytest.mark.parametrize(
    ("change", "size", "named"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 36}, 4, ["num_attention_heads 6"]),
        ({"intermediate_size": 50}, 4, ["intermediate_size 50"]),
        ({"vocab_size": 61}, 2, ["vocab_size 61"]),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}, 4, ["num_key_value_heads 6"]),
        ({}, 3, ["num_attention_heads 4", "hidden_size 32", "vocab_size 64", "num_key_value_heads 2"]),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(small_config, change, size, named):
    spec = parse_spec(small_config | {"vocab_size": 64} | change)
    with pytest.raises(ExecutorUnavailable, match=f"--tensor-parallel {size}") as refused:
        check_divisible(spec, size, even_heads=True)
    assert all(name in str(refused.value) for name in named)
    check_divisible(spec, 1, even_heads=True)


def test_key_value_heads_that_do_not_divide_go_with_their_queries_and_the_first_ranks_have_one_more(small_config):
    change = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "vocab_size": 64}
    spec = parse_spec(small_config | change)
    check_divisible(spec, 2, even_heads=False)
    with pytest.raises(ExecutorUnavailable, match="num_key_value_heads 3"):
        check_divisible(spec, 2, even_heads=True)
    first, second = parts_of(spec, 2)
    assert [(part.local.heads, part.local.kv_heads) for part in (first, second)] == [(6, 2), (3, 1)]
    assert [part.outputs("q_proj") for part in (first, second)] == [slice(0, 24), slice(24, 36)]
    assert [part._inputs("o_proj") for part in (first, second)] == [slice(0, 24), slice(24, 36)]
    assert [part.outputs("v_proj") for part in (first, second)] == [slice(0, 8), slice(8, 12)]


# ---- adapters

SPEC = ModelSpec(
    "LlamaForCausalLM", vocab_size=64, hidden_size=16, intermediate_size=24, heads=4, kv_heads=2, head_dim=4,
    norm_eps=1e-6, max_positions=64, tied_embeddings=True, ropes=(RopeSpec(10_000.0),), by_layer=(LayerSpec(),),
)  # fmt: skip
Ranks = dict[str, int]


def pairs_of(ranks: Ranks) -> AdapterPairs:
    """An adapter of these ranks by projection (0: not adapted), with numbers that tell where they were."""

    def pair(name: str, rank: int) -> LoraPair:
        n_in, n_out = SPEC.projection(name)
        a = np.arange(rank * n_in, dtype=np.float32).reshape(rank, n_in)
        b = np.arange(n_out * rank, dtype=np.float32).reshape(n_out, rank)
        return LoraPair(name, a, b, 2.0, n_in, n_out, rank)

    return (tuple(tuple(pair(name, ranks[name]) for name in names if ranks[name]) for names in SITES),)


adapters = st.fixed_dictionaries({name: st.sampled_from((0, 1, 2, 3, 8)) for names in SITES for name in names})


@given(ranks=adapters, size=st.sampled_from((2, 4)))
def test_the_parts_of_an_adapter_are_the_adapter(ranks, size):
    """A at column sites by ranks in turn, so that part r mod N has row r as its row r // N; all else in one piece."""
    whole = pairs_of(ranks)
    parts = [Partition(SPEC, rank, size).pairs(whole) for rank in range(size)]
    for index, site in enumerate(whole[0]):
        mine = [part[0][index] for part in parts]
        if not site:
            assert mine == [()] * size
        elif site[0].projection in ROW:
            assert np.array_equal(np.concatenate([own[0].a for own in mine], axis=1), site[0].a)
        else:
            stacked = [np.concatenate([pair.a for pair in own]) for own in mine]
            rows = [stacked[r % size][r // size] for r in range(sum(pair.rank for pair in site))]
            assert np.array_equal(np.stack(rows), np.concatenate([pair.a for pair in site]))
        for i, pair in enumerate(site):
            own = [one[i] for one in mine]
            assert {(one.rank, one.scale) for one in own} == {(pair.rank, pair.scale)}


@given(ranks=adapters)
def test_b_is_split_by_outputs_everywhere_and_says_where_its_own_begin(ranks):
    whole = pairs_of(ranks)
    parts = [Partition(SPEC, rank, 2).pairs(whole) for rank in range(2)]
    for index, site in enumerate(whole[0]):
        for i, pair in enumerate(site):
            own = [part[0][index][i] for part in parts]
            assert np.array_equal(np.concatenate([one.b for one in own]), pair.b)
            row = pair.projection in ROW  # there the base here has all outputs, elsewhere this part's alone
            assert [one.out_start for one in own] == [0, pair.n_out // 2 if row else 0]


def test_alone_nothing_is_copied(even_world):
    spec, pairs = even_world.spec, pairs_of(dict.fromkeys((name for names in SITES for name in names), 2))
    assert Partition(spec).local == spec
    assert Partition(spec).pairs(pairs) is pairs
