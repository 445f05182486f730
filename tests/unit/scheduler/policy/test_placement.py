"""Punica's placement: as a table over the whole core, and against a plain search over random fleets."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, adapter, of, sequence
from weft.domain.ids import Epoch
from weft.domain.request import Assign
from weft.domain.routes import RegistryChange
from weft.domain.runner import SequenceState
from weft_scheduler.core.policy.placement.policy import PlacementRequest, RunnerLoad
from weft_scheduler.core.policy.placement.punica import Punica
from weft_scheduler.core.policy.placement.runner_index import RunnerShape

DIGESTS = ["sha256:1", "sha256:2", "sha256:3"]


def others(n: int, *digests: str) -> tuple[SequenceState, ...]:
    return tuple(sequence(f"other{i}", Epoch(1, 0), digests[i] if i < len(digests) else "", 8) for i in range(n))


PAGED = {"page_bytes": 1600}  # of 16 tokens, of which an adapter takes 20

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
    "not where its adapter's pages are short": (
        {"a": (1, 50, ("sha256:2",), PAGED), "b": (2, 5, ("sha256:2",), PAGED)},
        {"digest": "sha256:1"},
        "a",
    ),
    "where its adapter is busy no page is needed for it": (
        {"a": (1, 50, ("sha256:2",), PAGED), "b": (2, 5, ("sha256:1",), PAGED)},
        {"digest": "sha256:1"},
        "b",
    ),
    "an adapter is never so large that an idle runner lacks its pages": (
        {"a": (0, 25, (), PAGED)},
        {"digest": "sha256:large"},
        "a",
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
def test_it_places(name: str, driver: Driver) -> None:
    runners, request, expected = CASES[name]
    driver.start()
    sized = (adapter(digest, bytes=20 * 1600) for digest in DIGESTS)
    driver.change(RegistryChange(False, adapters=(*sized, adapter("sha256:large", bytes=1 << 30))))
    for uuid, (busy, free, digests, state) in runners.items():
        driver.runner(uuid, *others(busy, *digests), free=free, **state)
    assert [a.runner.uuid for a in of(driver.submit("r", **request), Assign)] == ([expected] if expected else [])


SHAPES = [RunnerShape(8, 100), RunnerShape(64, 100), RunnerShape(64, 1000, token_bytes=10, kv_tokens=30)]
FLEET = st.dictionaries(
    st.sampled_from("abcdefghij"),
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([5, 10, 15, 20, 40]),
        st.sampled_from(SHAPES),
        st.lists(st.sampled_from(DIGESTS), max_size=2, unique=True).map(tuple),
        st.booleans(),
    ),
)


@given(
    fleet=FLEET,
    digest=st.sampled_from(["", *DIGESTS]),
    rank=st.sampled_from([0, 8, 16]),
    room=st.sampled_from([5, 10, 15, 45]),
    context=st.sampled_from([100, 500]),
    avoid=st.sets(st.sampled_from("abcdefghij")),
    closed=st.sets(st.sampled_from(SHAPES)),
    compared=st.sampled_from([0, 32]),
)
@example(
    {"a": (1, 40, SHAPES[0], ("sha256:1",), True), "b": (2, 40, SHAPES[0], (), True)},
    "sha256:1", 0, 5, 100, set(), set(), 32,
)  # fmt: skip
@example(
    {"a": (1, 40, SHAPES[0], ("sha256:1",), True), "b": (2, 40, SHAPES[0], ("sha256:2",), True)},
    "sha256:1", 0, 5, 100, {"a"}, set(), 0,
)  # fmt: skip
def test_the_index_finds_what_a_plain_search_finds(
    fleet: dict[str, Any],
    digest: str,
    rank: int,
    room: int,
    context: int,
    avoid: set[str],
    closed: set[RunnerShape],
    compared: int,
) -> None:
    policy = Punica()
    for uuid, (working_set, free, shape, busy, full) in fleet.items():
        policy.update(
            RunnerLoad(uuid, shape if working_set else SHAPES[0], 0, 9, 1, (*DIGESTS,), False)
        )  # an earlier load of it
        policy.update(RunnerLoad(uuid, shape, working_set, 9, free, busy, full))
    policy.update(RunnerLoad("left", SHAPES[0], 1, 9, 99, ("sha256:1",), True))
    policy.remove("left")

    def takes(uuid: str) -> bool:
        _, free, shape, busy, full = fleet[uuid]
        admits = not full or digest in ("", *busy)
        needed = room if digest in ("", *busy) else shape.tokens_with_adapter(room, 100)
        fits = free >= needed and shape.max_rank >= rank and shape.max_context_tokens >= context
        return admits and fits and uuid not in avoid and shape not in closed

    expected = max(((fleet[uuid][0], uuid) for uuid in fleet if takes(uuid)), default=(0, None))[1]
    with pytest.MonkeyPatch.context() as patch:
        # with more holders, full runners are visited in order
        patch.setattr("weft_scheduler.core.policy.placement.runner_index.MAX_COMPARED", compared)
        choice = policy.place(PlacementRequest(digest, rank, room, context, avoid, adapter_bytes=100), closed)
        assert (choice.uuid if choice else None) == expected
    assert policy.has_capacity(closed) == any(one[2] not in closed for one in fleet.values())
    assert policy.free_tokens() == max((free for _, free, *_ in fleet.values()), default=0)
    there = {shape for uuid, (_, _, shape, *_) in fleet.items() if uuid not in avoid}
    fitting = {shape for shape in there if shape.max_rank >= rank and shape.max_context_tokens >= context}
    assert policy.placeable_shapes(PlacementRequest(digest, rank, room, context, avoid)) == fitting


def test_an_assign_that_is_not_reported_counts_its_adapters_pages_once(driver: Driver) -> None:
    """100 pages: two adapters of 40 and their sequences of two or three leave no room for a third adapter."""
    driver.start()
    driver.change(RegistryChange(False, adapters=tuple(adapter(f"sha256:{i}", bytes=20 * 1600) for i in range(1, 4))))
    driver.runner("a", page_bytes=1600, max_adapters=9, max_sequences=9, free=50)
    placed = {f"sha256:{i}": bool(of(driver.submit(f"r{i}", f"sha256:{i}"), Assign)) for i in (1, 2, 3)}
    assert list(placed.values()) == [True, True, False]
    assert of(driver.submit("again", "sha256:1"), Assign), "it needs no page for its adapter"


def test_full_runners_leave_no_rest_behind() -> None:
    policy = Punica()
    policy.update(RunnerLoad("a", SHAPES[0], 1, 9, 5, ("sha256:1",), True))
    policy.update(RunnerLoad("a", SHAPES[0], 1, 9, 7, ("sha256:1",), True))
    policy.remove("a")
    policy.remove("a")
    assert not policy.entries()
    assert not policy.has_capacity(())


def test_pinned_adapters_hold_their_slots_and_are_there_for_whoever_asks(driver: Driver) -> None:
    """Three of four slots are protected: a second cold adapter would wait on the runner for a slot that never comes."""
    driver.start(*(f"sha256:{i}" for i in range(6))).runner("a", max_adapters=4, max_sequences=9)
    driver.place("cold", "sha256:5")
    pinned = tuple(adapter(f"sha256:{i}", pinned=True) for i in range(3))
    driver.change(RegistryChange(False, adapters=pinned))
    assert not of(driver.submit("second", "sha256:4"), Assign)
    assert [driver.place(f"r{i}", f"sha256:{i}").runner.uuid for i in (0, 1, 2, 5)] == ["a"] * 4
    effects = driver.change(RegistryChange(False, adapters=(adapter("sha256:0"),)))
    assert not of(effects, Assign), "it still runs there"
    assert [a.request_id for a in of(driver.outcome("r0", digest="sha256:0"), Assign)] == ["second"]


def test_a_runner_keeps_one_slot_that_nobody_pins(driver: Driver) -> None:
    driver.start(*(f"sha256:{i}" for i in range(4)))
    driver.change(RegistryChange(False, adapters=tuple(adapter(f"sha256:{i}", pinned=True) for i in range(3))))
    driver.runner("a", max_adapters=1)
    assert driver.place("cold", "sha256:3").runner.uuid == "a"
