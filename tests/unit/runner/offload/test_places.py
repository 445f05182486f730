"""Weights that stay are inside the budget and evenly spread; what a page of KV holds is where its place says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_runner.errors import OutOfMemory
from weft_runner.offload import least_bytes, page_places, place_weights

SIZES = st.builds(
    lambda layers, matrices, pieces: [matrices] * layers + [[n] for n in pieces],
    st.integers(1, 12),
    st.lists(st.integers(1, 1000), min_size=4, max_size=4),
    st.lists(st.integers(1, 1000), max_size=5),
)


def check_places(places: page_places.PagePlaces) -> None:
    """Hold the law of the module: no frame and no extent twice, none lost."""
    taken = places._taken
    own = [int(place) for page, place in enumerate(places.places) if page not in taken]
    frames = sorted([*(place for place in own if place >= 0), *taken.values()])
    assert frames == list(range(places.frames)), frames
    assert sorted(~place for place in own if place < 0) == list(range(places.extents)), own
    assert all(places.places[page] == page_places.TAKEN for page in taken), taken


@given(st.integers(1, 24), st.integers(0, 24), st.lists(st.lists(st.integers(0, 23), unique=True, max_size=6)))
def test_what_a_page_holds_is_where_its_place_says_while_adapters_come_and_leave(
    pages: int, frames: int, turns: list[list[int]]
) -> None:
    """Each turn takes the pages that are not taken, and grants the others; frames and extents hold page numbers."""
    places = page_places.PagePlaces(pages, min(frames, pages))
    memory, disk, taken = dict[int, int](), dict[int, int](), set[int]()
    for page in range(pages):
        place = int(places.places[page])
        (memory if place >= 0 else disk)[place if place >= 0 else ~place] = page
    for turn in turns:
        chosen = {page for page in turn if page < pages}
        granted, wanted = chosen & taken, chosen - taken
        for frame in places.grant(sorted(granted)):
            memory[frame] = next(page for page in granted if places.places[page] == frame)
        taken -= granted
        if len(taken) + len(wanted) > places.frames:
            with pytest.raises(OutOfMemory, match="adapters hold more KV pages than the"):
                places.take(sorted(wanted))
            return
        for spill in places.take(sorted(wanted)):
            disk[spill.extent] = memory[spill.frame]
        taken |= wanted
        check_places(places)
        for page in set(range(pages)) - taken:
            place = int(places.places[page])
            assert (memory[place] if place >= 0 else disk[~place]) == page or page in granted


@given(SIZES, st.integers(0, 100), st.integers(0, 50_000), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_what_stays_and_the_ring_are_inside_the_budget(
    groups: list[list[int]], embedding: int, more: int, share: float
) -> None:
    budget = least_bytes(groups) + more
    placed = place_weights(groups, embedding, budget, share)
    total = sum(map(sum, groups))
    assert placed.resident_bytes + placed.ring_bytes + embedding * placed.embedding <= budget
    assert placed.resident_bytes + placed.streamed_bytes == total
    assert placed.resident_bytes <= share * total
    assert placed.ring_bytes >= max(placed.streamed)
    if total <= budget and share == 1.0:
        assert not placed.ring_bytes


@given(st.integers(8, 64), st.integers(5, 95))
def test_the_disk_has_as_much_to_read_for_one_half_of_the_layers_as_for_the_other(layers: int, percent: int) -> None:
    groups = [[3, 2, 12, 6]] * layers
    placed = place_weights(groups, 0, 2 * 23 + 23 * layers * percent // 100)
    half = layers // 2
    assert abs(sum(placed.streamed[:half]) - sum(placed.streamed[-half:])) <= 2 * 23
