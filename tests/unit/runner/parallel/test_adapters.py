"""The store of a split model: who is told what, in which order, and what happens when somebody cannot."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from weft.domain.model.config import parse_spec
from weft_runner.errors import AdapterInvalid, ExecutorLost
from weft_runner.model import HostTensorStore
from weft_runner.parallel import ShardedAdapterStore

MODULE = "model.layers.0.self_attn.q_proj"
TENSORS = {
    f"base_model.model.{MODULE}.lora_A.weight": np.ones((2, 32), np.float32),
    f"base_model.model.{MODULE}.lora_B.weight": np.ones((32, 2), np.float32),
}


@dataclass
class BuiltAdapter:
    rank: int = 2
    site_rank: int = 4
    n_bytes: int = 100


@dataclass
class Own(HostTensorStore):
    """Rank 0's store."""

    held: dict[int, Any] = field(default_factory=dict)
    slots: int = 8
    error: Exception | None = None
    page_bytes: int = 64

    def device_bytes(self, tensors: Any, scales: Any) -> int:
        return 128

    def build(self, tensors: Any, scales: Any, pages: Any) -> BuiltAdapter:
        if self.error:
            raise self.error
        return BuiltAdapter()

    def put(self, slot: int, adapter: Any) -> None:
        self.held[slot] = adapter

    def clear(self, slot: int) -> None:
        self.held.pop(slot, None)


@dataclass
class Followers:
    """Notes what they are told."""

    told: list[tuple[Any, ...]] = field(default_factory=list)
    answer: Exception | None = None

    def request(self, *command: Any, file: int) -> None:
        self.told.append(command)

    def replies(self) -> list[Any]:
        self.told.append(("replies",))
        if self.answer:
            raise self.answer
        return []

    def broadcast(self, *command: Any) -> None:
        self.told.append(command)


@dataclass
class Halves:
    """A scale of one half for all modules."""

    def scale_of(self, module: str, rank: int, /) -> float:
        return 0.5


@pytest.fixture
def own() -> Own:
    return Own()


@pytest.fixture
def workers() -> Followers:
    return Followers()


@pytest.fixture
def store(own: Own, workers: Followers, small_config: dict[str, Any]) -> ShardedAdapterStore:
    return ShardedAdapterStore(own, workers, parse_spec(small_config))


def test_all_build_it_before_any_has_it_in_a_slot(store, own, workers):
    adapter = store.build(TENSORS, Halves(), (5, 6))
    assert (adapter.rank, adapter.site_rank, adapter.n_bytes) == (2, 4, 100)
    store.put(3, adapter)
    assert isinstance(own.held[3], BuiltAdapter)
    store.clear(3)
    assert own.held == {}
    (build, _, scales, number, pages, allocations), *rest = workers.told
    assert (build, scales, pages, allocations) == ("build", {MODULE: 0.5}, (5, 6), 0)
    assert rest == [("replies",), ("put", 3, number, []), ("clear", 3)]


def test_what_is_built_and_not_put_is_forgotten_by_all(store, workers):
    """An adapter is not put where its rank was above the runner's, or its sequences are gone."""
    unwanted = [store.build(TENSORS, Halves()).number for _ in range(2)]
    store.put(0, adapter := store.build(TENSORS, Halves()))
    assert workers.told[-1] == ("put", 0, adapter.number, unwanted)
    store.put(1, another := store.build(TENSORS, Halves()))
    assert workers.told[-1] == ("put", 1, another.number, []), "once"


@pytest.mark.parametrize("error", [AdapterInvalid("no"), MemoryError()])
def test_one_that_rank_0_cannot_build_is_answered_by_the_others_all_the_same_and_forgotten(store, own, workers, error):
    own.error = error
    with pytest.raises(type(error)):
        store.build(TENSORS, Halves())
    assert workers.told[-1] == ("replies",), "else the next answer would be this one's"
    own.error = None
    store.put(0, adapter := store.build(TENSORS, Halves()))
    assert workers.told[-1] == ("put", 0, adapter.number, [1])


@pytest.mark.parametrize("error", [AdapterInvalid("rank 1: no"), ExecutorLost("rank 1")])
def test_one_that_another_rank_cannot_build_is_not_loaded(store, workers, error):
    workers.answer = error
    with pytest.raises(type(error), match="rank 1"):
        store.build(TENSORS, Halves())


def test_a_wrong_one_is_refused_before_anybody_hears_of_it(store, workers):
    with pytest.raises(AdapterInvalid):
        store.build({name: tensor[:1] for name, tensor in TENSORS.items()}, Halves())
    assert workers.told == []


def test_what_it_needs_is_what_each_rank_needs(store):
    assert store.device_bytes(TENSORS, Halves()) == 128
    assert store.page_bytes == 64
