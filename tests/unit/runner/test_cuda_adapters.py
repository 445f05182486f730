"""Adapters in KV pages from their host copies: packed once, the same bytes each time, no file read again."""

import gc
import weakref
from typing import Any

import pytest
import torch

from harness.small_runner import PROJECTIONS, adapter_tensors
from weft.domain.model.config import parse_spec
from weft_runner.errors import AdapterInvalid
from weft_runner.model import Array, Partition
from weft_runner.model.cuda import adapters as paged_adapters
from weft_runner.model.cuda.adapters import PagedAdapterStore
from weft_runner.model.host_tensors import arrays_of
from weft_runner.model.kv_cache import KvCache

PAGES = 64


class Doubled:
    def scale_of(self, module: str, rank: int, /) -> float:
        del module, rank
        return 2.0


@pytest.fixture
def store(small_config, monkeypatch) -> PagedAdapterStore:
    """On the CPU, with pages of host memory that begin as zeros: two images are then equal in their gaps too."""
    spec = parse_spec({**small_config, "hidden_size": 64, "intermediate_size": 96})
    made = PagedAdapterStore(Partition(spec), KvCache(spec, PAGES, 16), slots=2, max_rank=16)
    empty = made.host_page
    monkeypatch.setattr(made, "host_page", lambda: empty().zero_())
    return made


@pytest.fixture
def tensors(store) -> dict[str, Array]:
    return arrays_of(adapter_tensors(store._part.whole, 3, 8, PROJECTIONS))


@pytest.fixture
def packed_layers(monkeypatch) -> list[int]:
    """The layers that calls pack, noted one by one."""
    seen: list[int] = []
    fill = paged_adapters.fill_layer

    def noted(*args: Any) -> None:
        seen.append(args[-1])
        fill(*args)

    monkeypatch.setattr(paged_adapters, "fill_layer", noted)
    return seen


def pages_of(store: PagedAdapterStore, pages: list[int]) -> torch.Tensor:
    return store._pages[pages].clone()


def test_a_copy_is_packed_once_and_gives_the_bytes_of_its_file_wherever_it_goes(store, tensors, packed_layers):
    count = store.device_bytes(tensors, Doubled()) // store.page_bytes
    first, second, third = (list(range(at, at + count)) for at in (0, 20, 40))
    store.build(tensors, Doubled(), first)
    copy = store.copy(tensors, Doubled())
    layers = [*range(store._part.local.layers)]
    assert packed_layers == layers
    built = [copy.build(second), copy.build(third[::-1])]
    assert packed_layers == layers + layers
    assert torch.equal(pages_of(store, second), pages_of(store, first))
    assert torch.equal(pages_of(store, third[::-1]), pages_of(store, first))
    assert [one.n_bytes for one in built] == [copy.n_bytes] * 2 == [count * store.page_bytes] * 2
    assert (built[0].rank, built[0].site_rank) == (8, 24)


@pytest.mark.parametrize("how", ["complete", "build"])
def test_what_it_was_made_from_is_let_go_once_it_is_packed(store, tensors, how, packed_layers):
    copy = store.copy(tensors, Doubled())
    pages = list(range(copy.n_bytes // store.page_bytes))
    refs = [weakref.ref(tensor) for tensor in tensors.values()]
    tensors.clear()
    assert all(ref() is not None for ref in refs)
    assert not packed_layers
    copy.complete() if how == "complete" else copy.build(pages)
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    copy.build(pages)
    assert len(packed_layers) == store._part.local.layers


def test_a_copy_whose_load_failed_half_way_is_packed_from_there_on(store, tensors, packed_layers, monkeypatch):
    copy = store.copy(tensors, Doubled())
    pages = list(range(copy.n_bytes // store.page_bytes))
    store.build(tensors, Doubled(), pages)
    wanted = pages_of(store, pages)
    with pytest.raises(IndexError):
        copy.build(pages[:1])
    copy.build(pages)
    assert torch.equal(pages_of(store, pages), wanted)
    assert packed_layers.count(0) == 2, "of the file, and of the copy"


def test_a_wrong_adapter_is_refused_before_anything_is_kept(store):
    with pytest.raises(AdapterInvalid, match="rank 17 is above"):
        store.copy(arrays_of(adapter_tensors(store._part.whole, 3, 17, PROJECTIONS)), Doubled())
