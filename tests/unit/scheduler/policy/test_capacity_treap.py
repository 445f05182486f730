"""The treap against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.policy.placement.capacity_treap import CapacityTreap, RunnerKey, priority_of

KEYS = st.builds(RunnerKey, st.integers(0, 1), st.sampled_from("abcdefgh"))


@given(
    steps=st.lists(st.tuples(KEYS, st.integers(1, 9)), max_size=40),
    need=st.integers(0, 10),
    avoid=st.sets(st.sampled_from("abcdefgh")),
)
def test_the_best_has_room_and_is_not_avoided(steps: list[tuple[RunnerKey, int]], need: int, avoid: set[str]) -> None:
    treap, model = CapacityTreap(), dict[RunnerKey, int]()
    for key, room in steps:
        if key in model and room % 2:
            treap.resize(key, room)
            model[key] = room
        elif key in model:
            treap.drop(key)
            del model[key]
        else:
            treap.put(key, room, priority_of(key.uuid))
            model[key] = room
        assert (len(treap), treap.free_tokens) == (len(model), max(model.values(), default=0))
    assert list(treap.descending(0)) == sorted(model.items(), reverse=True)
    fitting = [key for key, room in model.items() if room >= need and key.uuid not in avoid]
    assert treap.best(need, avoid) == max(fitting, default=None)


def test_dropping_a_key_that_is_not_there_is_an_error() -> None:
    treap = CapacityTreap()
    treap.put(RunnerKey(1, "a"), 5, 1)
    with pytest.raises(KeyError):
        treap.drop(RunnerKey(1, "b"))
    with pytest.raises(KeyError):
        treap.resize(RunnerKey(1, "b"), 3)


def test_it_looks_past_a_bounded_number_of_avoided_runners() -> None:
    treap = CapacityTreap()
    for i in range(10):
        treap.put(RunnerKey(0, f"{i}"), 5, priority_of(str(i)))
    assert treap.best(5, {str(i) for i in range(1, 10)}, skip_limit=9) == RunnerKey(0, "0")
    assert treap.best(5, {str(i) for i in range(1, 10)}, skip_limit=8) is None


def test_its_depth_is_logarithmic_for_sorted_insertions() -> None:
    treap = CapacityTreap()
    for i in range(4096):
        treap.put(RunnerKey(0, f"{i:05}"), 1, priority_of(f"{i:05}"))
    assert depth(treap._root) < 5 * 12  # pyright: ignore[reportPrivateUsage]


def depth(node: object) -> int:
    return 0 if node is None else 1 + max(depth(node.left), depth(node.right))  # type: ignore[attr-defined]
