"""The treap against a sorted list."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.ranking import Key, Ranking

KEYS = st.builds(Key, st.integers(0, 4), st.sampled_from("abcdefgh"))


def priority(uuid: str) -> int:
    return int.from_bytes(blake2b(uuid.encode(), digest_size=8).digest(), "big")


@given(
    steps=st.lists(st.tuples(KEYS, st.integers(1, 50))),
    need=st.integers(0, 60),
    avoid=st.sets(st.sampled_from("abcdefgh")),
)
def test_the_best_is_the_highest_key_with_enough_room_that_is_not_avoided(
    steps: list[tuple[Key, int]], need: int, avoid: set[str]
) -> None:
    ranking, model = Ranking(), dict[Key, int]()
    for key, room in steps:
        if key in model:
            ranking.drop(key)
            del model[key]
        else:
            ranking.put(key, room, priority(key.uuid))
            model[key] = room
    assert list(ranking) == sorted(model.items(), reverse=True)
    assert len(ranking) == len(model)
    fitting = [key for key, room in model.items() if room >= need and key.uuid not in avoid]
    assert ranking.best(need, avoid) == max(fitting, default=None)


def test_dropping_a_key_that_is_not_there_is_an_error() -> None:
    ranking = Ranking()
    ranking.put(Key(1, "a"), 5, 1)
    with pytest.raises(KeyError):
        ranking.drop(Key(1, "b"))


def test_it_looks_past_a_bounded_number_of_avoided_runners() -> None:
    ranking = Ranking()
    for i in range(10):
        ranking.put(Key(0, f"{i}"), 5, priority(str(i)))
    assert ranking.best(5, {str(i) for i in range(1, 10)}, skip_limit=9) == Key(0, "0")
    assert ranking.best(5, {str(i) for i in range(1, 10)}, skip_limit=8) is None


def test_its_depth_is_logarithmic_for_sorted_insertions() -> None:
    ranking = Ranking()
    for i in range(4096):
        ranking.put(Key(0, f"{i:05}"), 1, priority(f"{i:05}"))
    assert depth(ranking._root) < 5 * 12  # pyright: ignore[reportPrivateUsage]


def depth(node: object) -> int:
    return 0 if node is None else 1 + max(depth(node.left), depth(node.right))  # type: ignore[attr-defined]
