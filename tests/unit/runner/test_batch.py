"""The rows that run next and their order, for any set of candidates."""

from hypothesis import given
from hypothesis import strategies as st

from weft_runner.core import BatchLimits
from weft_runner.core.batch import Candidate, adapter_segments, form_batch

ADAPTERS = st.sampled_from(["", "a", "b", "c", "d"])


@st.composite
def situations(draw):
    prefilling = draw(st.lists(st.tuples(ADAPTERS, st.integers(1, 60)), max_size=6))
    decoding = draw(st.lists(ADAPTERS, max_size=12))
    most, of_prompts = draw(st.integers(len(decoding) or 1, 80)), draw(st.integers(1, 80))
    limits = BatchLimits(draw(st.integers(1, 4)), most, max_prompt_tokens=of_prompts)
    return (
        [Candidate(f"p{i}", adapter, pending) for i, (adapter, pending) in enumerate(prefilling)],
        [Candidate(f"d{i}", adapter, 1) for i, adapter in enumerate(decoding)],
        limits,
    )


@given(situations())
def test_every_decode_row_runs_and_prefills_take_what_is_left_in_order(situation):
    prefilling, decoding, limits = situation
    batch = form_batch(prefilling, decoding, limits)
    prefills, decodes = batch.rows[: batch.n_prefills], batch.rows[batch.n_prefills :]
    assert sorted(row.key for row in decodes) == sorted(c.key for c in decoding)
    assert all(row.samples and row.n_tokens == 1 for row in decodes)
    assert batch.n_tokens <= limits.max_batch_tokens
    assert batch.prompt_tokens <= limits.max_prompt_tokens
    assert len(prefills) <= limits.max_prefills
    pending = {c.key: c.pending for c in prefilling}
    assert {row.key for row in prefills} == {c.key for c in prefilling[: len(prefills)]}, "first come, first served"
    assert all(row.samples == (row.n_tokens == pending[row.key]) for row in prefills)
    partial = [row.key for row in prefills if not row.samples]
    assert partial in ([], [c.key for c in prefilling[: len(prefills)]][-1:]), "only the last one in order is cut"
    if prefilling and limits.max_batch_tokens > len(decodes):
        assert prefills, "a prompt makes progress in every iteration that has room"


@given(situations())
def test_rows_of_an_adapter_are_adjacent_and_the_border_shares_one_where_possible(situation):
    prefilling, decoding, limits = situation
    batch = form_batch(prefilling, decoding, limits)
    prefills, decodes = batch.rows[: batch.n_prefills], batch.rows[batch.n_prefills :]
    for side in (prefills, decodes):
        runs = [row.adapter for i, row in enumerate(side) if i == 0 or side[i - 1].adapter != row.adapter]
        assert len(runs) == len(set(runs))
        for adapter in set(runs):
            keys = [int(row.key[1:]) for row in side if row.adapter == adapter]
            assert keys == sorted(keys), "order of admission inside a group"
    common = {row.adapter for row in prefills} & {row.adapter for row in decodes}
    if common:
        assert prefills[-1].adapter == decodes[0].adapter


@given(situations())
def test_segments_cover_exactly_the_rows_with_an_adapter(situation):
    batch = form_batch(*situation)
    per_token = [row.adapter for row in batch.rows for _ in range(row.n_tokens)]
    told = [""] * len(per_token)
    segments = adapter_segments(batch.rows)
    for segment in segments:
        assert segment.start < segment.end
        assert not any(told[segment.start : segment.end])
        told[segment.start : segment.end] = [segment.adapter] * (segment.end - segment.start)
    assert told == per_token
    assert len(segments) <= 2 * len({a for a in per_token if a})


def test_a_long_prompt_is_chunked_beside_the_running_rows():
    batch = form_batch(
        [Candidate("p", "a", 1000)], [Candidate("d", "b", 1), Candidate("e", "a", 1)], BatchLimits(1, 64)
    )
    assert [(row.key, row.n_tokens, row.samples) for row in batch.rows] == [
        ("p", 62, False),
        ("e", 1, True),
        ("d", 1, True),
    ]
    assert [(s.start, s.end, s.adapter) for s in adapter_segments(batch.rows)] == [(0, 63, "a"), (63, 64, "b")]
