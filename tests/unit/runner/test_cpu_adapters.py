"""Adapters packed for the native kernels: in slices, by plans of their layout, always the same bytes."""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from harness.native_library import native_library
from harness.native_models import Scales, adapter_tensors, write_model
from weft.domain.model.spec import ModelSpec
from weft_kernels.cpu import BF16, FP32, memory
from weft_runner.errors import AdapterInvalid
from weft_runner.model import BFLOAT16, FLOAT16, FLOAT32, Array, Partition, adapter_pairs, map_tensors, read_spec
from weft_runner.model.arrays import native
from weft_runner.model.cpu.adapters import CpuAdapter, CpuAdapterStore, SpareMemory

DTYPES = (BFLOAT16, FLOAT32, FLOAT16)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = dict.fromkeys(MODULES, 8)


library = cache(native_library)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(write_model(tmp_path_factory.mktemp("model") / "base", 1)["config.json"])


def store_of(spec: ModelSpec, kind: int = BF16, threads: int = 1) -> CpuAdapterStore:
    return CpuAdapterStore(library(), library().pool(threads), Partition(spec), 4, kind)


def packed(matrix: Array, kind: int, pad_in: int) -> bytes:
    """Pack a matrix by the function that packs those of the base."""
    source = np.ascontiguousarray(native(matrix))
    n_out, n_in = source.shape
    to = np.zeros(library().packed_bytes(kind, n_out, n_in, pad_in) + 64, np.uint8)
    at, stored = -to.ctypes.data % 64, FP32 if source.dtype == np.float32 else BF16
    with library().pool(1) as pool:
        library().pack(
            pool, source.ctypes.data, stored, n_in, (n_out, n_in), to[at:].ctypes.data, kind, pad_in=pad_in
        )  # fmt: skip
    return to[at : len(to) - 64 + at].tobytes()


def check(adapter: CpuAdapter, tensors: Mapping[str, Array], spec: ModelSpec, kind: int) -> None:
    """Every matrix is where its site says, as it would be alone."""
    end = adapter.memory.address
    by_site = [site for layer in adapter_pairs(tensors, Scales(), spec) for site in layer]
    for site, pairs in zip(adapter.sites, by_site, strict=True):
        assert site["n_slices"] == len(pairs)
        parts = [(site["a"], np.concatenate([native(pair.a) for pair in pairs]), 32)] if pairs else []
        parts += [(part["b"], pair.b, 2) for part, pair in zip(site["slice"], pairs, strict=False)]
        for address, matrix, pad_in in parts:
            assert address == -(-end // 64) * 64
            expected = packed(matrix, kind, pad_in)
            assert ctypes.string_at(int(address), len(expected)) == expected
            end = int(address) + len(expected)
        ranks = [pair.rank for pair in pairs]
        assert site["rank"] == sum(ranks)
        assert site["slice"]["rank_start"][: len(ranks)].tolist() == [sum(ranks[:i]) for i in range(len(ranks))]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_split_into_slices_gives_the_bytes_of_whole_matrices(spec: ModelSpec, data: st.DataObject) -> None:
    ranks = data.draw(st.dictionaries(st.sampled_from(MODULES), st.integers(1, 40), min_size=1), label="ranks")
    kind, threads = data.draw(st.sampled_from((BF16, FP32))), data.draw(st.integers(1, 3))
    slice_bytes = data.draw(st.one_of(st.integers(1, 20_000), st.just(1 << 30)), label="slice bytes")
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3), label="dtypes")
    drawn = adapter_tensors(spec, data.draw(st.integers(0, 99)), ranks)
    tensors = {name: tensor.astype(dtypes[i % len(dtypes)]) for i, (name, tensor) in enumerate(drawn.items())}
    store = store_of(spec, kind, threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft_runner.model.cpu.adapter_plan.SLICE_BYTES", slice_bytes)
        check(store.build(tensors, Scales()), tensors, spec, kind)


def saved(folder: Path, spec: ModelSpec, seed: int, dtype: np.dtype = BFLOAT16) -> Path:
    path = folder / f"{seed}.safetensors"
    save_file({name: tensor.astype(dtype) for name, tensor in adapter_tensors(spec, seed, RANKS).items()}, path)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_of_one_layout_share_a_plan_and_nothing_else(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype
) -> None:
    store, planned = store_of(spec), list[object]()
    plan = store._planner.plan
    monkeypatch.setattr(store._planner, "plan", lambda *args: planned.append(args) or plan(*args))
    files = [map_tensors(saved(tmp_path, spec, seed, dtype)) for seed in range(3)]
    for tensors in files:
        check(store.build(tensors, Scales()), tensors, spec, BF16)
        assert store.device_bytes(tensors, Scales()) == store.build(tensors, Scales()).n_bytes
    assert len(planned) == (1 if dtype != FLOAT16 else 9), "copies of other numbers have other addresses"


def test_scales_are_each_adapters_own(spec: ModelSpec, tmp_path: Path) -> None:
    class Doubled(Scales):
        def scale_of(self, module: str, rank: int) -> float:
            return 2.0 if module == "model.layers.1.self_attn.v_proj" else 1.0

    class Broken(Scales):
        def scale_of(self, module: str, rank: int) -> float:
            return float("nan")

    store, tensors = store_of(spec), map_tensors(saved(tmp_path, spec, 0))
    assert {*store.build(tensors, Scales()).sites["slice"]["scale"].ravel().tolist()} == {Scales().scale_of("", 1), 0.0}
    sites = store.build(tensors, Doubled()).sites
    assert sites[4]["slice"]["scale"].tolist() == [1.0, 1.0, 2.0]
    assert sites[0]["slice"]["scale"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(AdapterInvalid, match="the scale nan"):
        store.build(tensors, Broken())


def test_an_adapter_in_the_memory_of_one_that_has_left_is_the_same_bytes(spec: ModelSpec) -> None:
    store, ranks = store_of(spec), dict.fromkeys(MODULES, 5)
    first, second = (adapter_tensors(spec, seed, ranks) for seed in range(2))
    store.put(0, left := store.build({name: tensor + 1 for name, tensor in first.items()}, Scales()))
    assert store.build(first, Scales()).memory is not left.memory
    store.clear(0)
    again = store.build(second, Scales())
    assert again.memory is left.memory
    check(again, second, spec, BF16)
    assert store.build(second, Scales()).memory is not left.memory


def test_spare_memory_keeps_what_came_last_within_its_bytes() -> None:
    spare, pieces = SpareMemory(300), [memory.MappedMemory(n_bytes) for n_bytes in (100, 200, 101)]
    for piece in pieces:
        spare.give(piece)
    assert spare.take(100) is not pieces[0], "it had to leave"
    assert spare.take(101) is pieces[2]
    assert spare.take(200) is not pieces[1]
    spare.give(memory.MappedMemory(301))
    assert not spare._pieces
