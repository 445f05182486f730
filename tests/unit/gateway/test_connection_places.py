"""The order in which connections give way at the bound of connections."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_gateway.core import ConnectionPlaces

# Connections are letters, the first one is the peer's: what happens to each, and who then goes, in order.
STEPS: list[tuple[str, str]] = [
    ("", ""),
    ("idle a1, idle b1", "a1 b1"),
    ("idle a1, idle b1, busy a1", "b1"),
    ("idle a1, idle b1, idle a1", "a1 b1"),
    ("idle a1, idle b1, busy a1, idle a1", "b1 a1"),
    ("idle a1, head b1", "b1 a1"),
    ("head a1, head b1, head b2", "b1 a1 b2"),
    ("head a1, head b1, head b2, head b1", "b1 a1 b2"),
    ("head b1, head b2, head b3, head a1, head a2", "b1 a1 b2 a2 b3"),
    ("head a1, busy a1, busy a1", ""),
    ("head a1, head a2, idle a1, head b1", "a2 b1 a1"),
    ("busy a1, head a1, idle a1", "a1"),
]


def played(steps: str) -> ConnectionPlaces[str]:
    places = ConnectionPlaces[str](1)
    for step in filter(None, steps.split(", ")):
        verb, name = step.split()
        if verb == "head":
            places.unfinished(name, name[0])
        else:
            getattr(places, verb)(name)
    return places


def going(places: ConnectionPlaces[str]) -> list[str]:
    gone = list[str]()
    while (name := places.next_to_go()) is not None:
        gone.append(name)
        places.busy(name)
    return gone


@pytest.mark.parametrize(("steps", "gone"), STEPS)
def test_the_oldest_head_of_the_peer_with_most_goes_first_then_the_longest_idle(steps: str, gone: str) -> None:
    assert " ".join(going(played(steps))) == gone


VERBS = st.tuples(st.sampled_from(["busy", "idle", "head"]), st.sampled_from("abc"), st.integers(0, 4))


@given(st.lists(VERBS, max_size=60))
def test_whatever_happens_it_is_one_of_the_peer_with_most_heads_and_all_go_once(steps: list[tuple[Any, ...]]) -> None:
    heads, idle = dict[str, None](), dict[str, None]()
    for verb, peer, number in steps:
        name = f"{peer}{number}"
        if verb == "head":
            idle.pop(name, None)
            heads.setdefault(name)
        elif verb == "idle":
            heads.pop(name, None)
            idle.setdefault(name)
        else:
            heads.pop(name, None)
            idle.pop(name, None)
    places = played(", ".join(f"{verb} {peer}{number}" for verb, peer, number in steps))
    while heads:
        counts = {name[0]: sum(other[0] == name[0] for other in heads) for name in heads}
        chosen = places.next_to_go()
        assert chosen is not None
        assert counts[chosen[0]] == max(counts.values())
        assert chosen == next(name for name in heads if name[0] == chosen[0]), "its oldest"
        del heads[chosen]
        places.busy(chosen)
    assert going(places) == list(idle)
