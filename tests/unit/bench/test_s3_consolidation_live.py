"""`weft bench s3 --part consolidation-live`: the load, and what a slice of time is counted as."""

import random

from weft_bench.s3_consolidation import Hour
from weft_bench.s3_consolidation_live import BEST_BATCH, LEAST_TOKENS, MOST_TOKENS, arrivals, asks_of


def test_requests_are_the_same_for_every_setting_and_come_most_in_the_middle() -> None:
    def made() -> list[tuple[float, int]]:
        chance = random.Random(0)
        return [(at_s, ask.seed) for at_s, ask in arrivals(chance, asks_of(chance), 150.0)]

    requests = made()
    assert requests == made()
    assert len({ask.seed for ask in asks_of(random.Random(0))}) == len(asks_of(random.Random(0)))
    assert all(LEAST_TOKENS <= ask.max_tokens <= MOST_TOKENS for ask in asks_of(random.Random(0)))
    thirds = [sum(50.0 * part <= at_s < 50.0 * (part + 1) for at_s, _ in requests) for part in range(3)]
    assert thirds[1] > 1.5 * max(thirds[0], thirds[2])


def test_a_slice_has_its_shape_where_at_most_one_runner_is_partial_and_receives() -> None:
    hour = Hour(BEST_BATCH, length=3)
    for part, batches in enumerate(({"a": 8, "b": 3, "c": 0}, {"a": 8, "b": 3, "c": 2}, {"a": 9, "b": 3, "c": 2})):
        hour.sample(part, batches)
        for name in batches:
            hour.of(name, part).received += part < 2 or name != "c"
    assert [hour.partial(part) for part in range(3)] == [1, 2, 1]
    assert hour.in_shape() == 2 / 3
    assert (hour.busy, hour.provided, hour.ideal) == (8, 9, 2 + 2 + 2)
