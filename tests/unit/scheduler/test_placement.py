"""Punica's placement: as a table over the whole core, and against a plain search over random fleets."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.effects import Assign
from weft_scheduler.core.events import RegistryChange
from weft_scheduler.core.placement import Ask, Punica
from weft_scheduler.core.ranking import Key
from weft_scheduler.core.shelves import Shape, Shelves
from weft_scheduler.core.values import AdapterSpec, Epoch, SequenceView

DIGESTS = ["sha256:1", "sha256:2", "sha256:3"]


def others(n: int, *digests: str) -> tuple[SequenceView, ...]:
    return tuple(SequenceView(f"other{i}", Epoch(1, 0), digests[i] if i < len(digests) else "", 8) for i in range(n))


# runners: uuid -> (sequences, free pages, digests that run there, extra state)
CASES: dict[str, tuple[dict[str, tuple[int, int, tuple[str, ...], dict[str, Any]]], dict[str, Any], str | None]] = {
    "the largest working set": ({"a": (1, 50, (), {}), "b": (3, 50, (), {}), "c": (2, 50, (), {})}, {}, "b"),
    "ties go to the highest uuid": ({"a": (2, 50, (), {}), "c": (2, 50, (), {}), "b": (2, 50, (), {})}, {}, "c"),
    "not over the batch limit": ({"a": (1, 50, (), {}), "b": (4, 50, (), {})}, {}, "a"),
    "not without pages": ({"a": (0, 2, (), {}), "b": (3, 1, (), {})}, {}, "a"),
    "nobody has pages": ({"a": (0, 1, (), {}), "b": (3, 1, (), {})}, {}, None),
    "nobody is under its batch limit": ({"a": (4, 90, (), {}), "b": (4, 90, (), {})}, {}, None),
    "pages that are owed to paused sequences are not free": ({"a": (1, 9, (), {"owed_pages": 8})}, {}, None),
    "not where every slot is busy with others": (
        {"a": (1, 50, ("sha256:2",), {}), "b": (2, 50, ("sha256:2", "sha256:3"), {})},
        {"digest": "sha256:1"},
        "a",
    ),
    "where its adapter runs although every slot is busy": (
        {"a": (1, 50, (), {}), "b": (2, 50, ("sha256:1", "sha256:3"), {})},
        {"digest": "sha256:1"},
        "b",
    ),
    "the base needs no slot": ({"a": (1, 50, (), {}), "b": (2, 50, ("sha256:2", "sha256:3"), {})}, {}, "b"),
    "nowhere while every slot of the pool is busy": (
        {"b": (2, 50, ("sha256:2", "sha256:3"), {})},
        {"digest": "sha256:1"},
        None,
    ),
    "not above a runner's rank": (
        {"a": (0, 50, (), {}), "b": (2, 50, (), {"max_rank": 4})},
        {"digest": "sha256:1"},
        "a",
    ),
    "not beyond a runner's context": (
        {"a": (0, 50, (), {}), "b": (2, 50, (), {"max_context_tokens": 64})},
        {"max_tokens": 100},
        "a",
    ),
    "not on a draining runner": ({"a": (0, 50, (), {}), "b": (2, 50, (), {"draining": True})}, {}, "a"),
    "not on a runner that was never ready": ({"a": (0, 50, (), {}), "b": (2, 50, (), {"ready": False})}, {}, "a"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_places(name: str, desk: Any, picked: Callable[..., Any]) -> None:
    runners, request, expected = CASES[name]
    desk.start(*DIGESTS)
    for uuid, (busy, free, digests, state) in runners.items():
        desk.runner(uuid, *others(busy, *digests), free=free, **state)
    assigns = picked(desk.submit("r", **request), Assign)
    assert [a.runner.uuid for a in assigns] == ([expected] if expected else [])


SHAPES = [Shape(8, 100), Shape(64, 100), Shape(64, 1000)]
FLEET = st.dictionaries(
    st.sampled_from("abcdefghij"),
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 40),
        st.sampled_from(SHAPES),
        st.none() | st.lists(st.sampled_from(DIGESTS), min_size=2, max_size=2, unique=True).map(tuple),
    ),
)


@given(
    fleet=FLEET,
    digest=st.sampled_from(["", *DIGESTS]),
    rank=st.sampled_from([0, 16]),
    room=st.integers(1, 45),
    context=st.sampled_from([50, 500]),
    avoid=st.sets(st.sampled_from("abcdefghij")),
    closed=st.sets(st.sampled_from(SHAPES)),
)
def test_the_index_finds_what_a_plain_search_finds(
    fleet: dict[str, Any], digest: str, rank: int, room: int, context: int, avoid: set[str], closed: set[Shape]
) -> None:
    shelves = Shelves()
    for uuid, (working_set, free, shape, slots) in fleet.items():
        shelves.shelf(shape).put(Key(working_set, uuid), free, hash(uuid), slots)

    def takes(uuid: str) -> bool:
        _, free, shape, slots = fleet[uuid]
        admits = slots is None or digest in ("", *slots)
        fits = free >= room and shape.max_rank >= rank and shape.max_context_tokens >= context
        return admits and fits and uuid not in avoid and shape not in closed

    expected = max((Key(fleet[uuid][0], uuid) for uuid in fleet if takes(uuid)), default=None)
    ask = Ask(digest, rank, room, context, avoid)
    assert Punica().place(shelves, ask, closed) == expected


def test_full_runners_leave_no_rest_behind() -> None:
    shelves = Shelves()
    shelf = shelves.shelf(SHAPES[0])
    shelf.put(Key(1, "a"), 5, 1, ("sha256:1",))
    shelf.drop(Key(1, "a"), ("sha256:1",))
    assert not shelf.full
    shelves.prune(SHAPES[0])
    assert not shelves.by_shape


def test_pinned_adapters_hold_their_slots_and_are_there_for_whoever_asks(
    desk: Any, picked: Callable[..., list[Any]], adapter_of: Callable[..., AdapterSpec]
) -> None:
    """Of 4 slots 3 are protected: a second cold adapter would wait on the runner for a slot that never comes."""
    desk.start(*(f"sha256:{i}" for i in range(6)))
    desk.runner("a", max_adapters=4, max_sequences=9)
    desk.place("cold", "sha256:5")
    pinned = tuple(adapter_of(f"sha256:{i}", pinned=True) for i in range(3))
    desk.handle(RegistryChange(False, adapters=pinned))
    assert not picked(desk.submit("second", "sha256:4"), Assign)
    assert [desk.place(f"r{i}", f"sha256:{i}").runner.uuid for i in (0, 1, 2, 5)] == ["a"] * 4
    effects = desk.handle(RegistryChange(False, adapters=(adapter_of("sha256:0"),)))
    assert not picked(effects, Assign), "it still runs there"
    assert [a.request_id for a in picked(desk.outcome("r0", digest="sha256:0"), Assign)] == ["second"]


def test_a_runner_keeps_one_slot_that_nobody_pins(desk: Any, adapter_of: Callable[..., AdapterSpec]) -> None:
    desk.start(*(f"sha256:{i}" for i in range(4)))
    desk.handle(RegistryChange(False, adapters=tuple(adapter_of(f"sha256:{i}", pinned=True) for i in range(3))))
    desk.runner("a", max_adapters=1)
    assert desk.place("cold", "sha256:3").runner.uuid == "a"
