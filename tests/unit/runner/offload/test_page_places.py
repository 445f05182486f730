"""Pages keep their places, frames and extents are never lost, and what a page holds is where its place says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_runner.errors import OutOfMemory
from weft_runner.offload.page_places import TAKEN, PagePlaces


def check_places(places: PagePlaces) -> None:
    """Hold the law of the module: no frame and no extent twice, none lost."""
    taken = places._taken
    own = [int(place) for page, place in enumerate(places.places) if page not in taken]
    frames = sorted([*(place for place in own if place >= 0), *taken.values()])
    assert frames == list(range(places.frames)), frames
    assert sorted(~place for place in own if place < 0) == list(range(places.extents)), own
    assert all(places.places[page] == TAKEN for page in taken), taken


@given(st.integers(1, 24), st.integers(0, 24), st.lists(st.lists(st.integers(0, 23), unique=True, max_size=6)))
def test_what_a_page_holds_is_where_its_place_says_while_adapters_come_and_leave(
    pages: int, frames: int, turns: list[list[int]]
) -> None:
    """Each turn takes the pages that are not taken, and grants the others; frames and extents hold page numbers."""
    places = PagePlaces(pages, min(frames, pages))
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
