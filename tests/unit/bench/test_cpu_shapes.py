"""The adapter that each row uses."""

import math
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weft_bench.cpu_shapes import (
    BASE,
    DISTINCT,
    IDENTICAL,
    MIXED_RANKS,
    POPULARITIES,
    SKEWED,
    UNIFORM,
    adapter_of_row,
    distinct,
    drawn,
    ranks_of,
)


@given(st.integers(1, 300))
def test_each_popularity_has_its_number_of_adapters(rows: int) -> None:
    assert distinct(adapter_of_row(BASE, rows)) == 0
    assert distinct(adapter_of_row(IDENTICAL, rows)) == 1
    assert distinct(adapter_of_row(UNIFORM, rows)) == math.ceil(math.sqrt(rows))
    assert distinct(adapter_of_row(DISTINCT, rows)) == rows
    assert all(len(adapter_of_row(popularity, rows)) == rows for popularity in POPULARITIES)


@given(st.integers(1, 300))
def test_uniform_shares_the_rows_as_evenly_as_can_be(rows: int) -> None:
    counts = Counter(adapter_of_row(UNIFORM, rows)).values()
    assert max(counts) - min(counts) <= 1


def test_skewed_is_zipf_of_one_and_a_half() -> None:
    counts = Counter(adapter_of_row(SKEWED, 1000))
    assert [counts[0], counts[1], counts[2]] == [333, 222, 148]
    assert sum(counts.values()) == 1000
    assert list(counts.values()) == sorted(counts.values(), reverse=True)


def test_ranks_of_a_batch_once_for_each_adapter_and_once_for_each_row() -> None:
    assert ranks_of([0, 0, None, 5], MIXED_RANKS) == ([8, 16], [8, 8, 0, 16])


@given(st.integers(1, 50), st.integers(0, 50), st.booleans(), st.integers())
def test_every_adapter_is_asked_for_at_least_once(adapters: int, more: int, zipf: bool, seed: int) -> None:
    asked = drawn(random.Random(seed), adapters, adapters + more, zipf=zipf)
    assert set(asked) == set(range(adapters))
    assert len(asked) == adapters + more
    assert asked == drawn(random.Random(seed), adapters, adapters + more, zipf=zipf)
