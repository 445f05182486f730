"""Weights that stay, and the ring that the others come through: inside the budget, evenly spread, none overlaps."""

from collections import deque
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from weft_runner.offload.residency import GroupRing, Ring, least_bytes, place_weights

SIZES = st.builds(
    lambda layers, matrices, pieces: [matrices] * layers + [[n] for n in pieces],
    st.integers(1, 12),
    st.lists(st.integers(1, 1000), min_size=4, max_size=4),
    st.lists(st.integers(1, 1000), max_size=5),
)


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


@given(st.integers(10, 200), st.lists(st.integers(1, 100), max_size=60), st.randoms())
def test_pieces_of_a_ring_never_overlap_and_one_always_fits_an_empty_one(
    n_bytes: int, pieces: list[int], chance: Random
) -> None:
    ring, held = Ring(n_bytes), deque[int]()
    for piece in pieces:
        if piece > n_bytes:
            continue
        while (at := ring.take(piece)) is None:
            held.popleft()  # raises where an empty ring has no room
            ring.release()
            ring.check()
        held.append(at)
        ring.check()
        if held and chance.random() < 0.3:
            held.popleft()
            ring.release()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(20, 60), st.randoms())
def test_groups_come_in_the_order_of_steps(sizes: list[int], n_bytes: int, chance: Random) -> None:
    """A step may need fewer groups than the one before: what the ring holds is sought anew only where that changes."""
    ring, held, before, changed = GroupRing(sizes, n_bytes), deque[int](), len(sizes), False
    for _ in range(20):
        needed = chance.choice([before, chance.randint(1, len(sizes))])
        ring.begin(needed)
        changed |= needed != before
        for group in range(needed):
            if (held[0] if held else ring.following) != group:
                assert changed
                changed = False
                held.clear()
                ring.seek(group)
            while (taken := ring.take()) is not None:
                held.append(taken[0])
            assert held.popleft() == group
            ring.release()
        before = needed
