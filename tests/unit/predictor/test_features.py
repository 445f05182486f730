import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft_predictor.core import MAX_CHARS, Features, feature_rows

DIM = 1 << 17


def features(text: str, prompt_tokens: int, dim: int) -> Features:
    """Features of one prompt."""
    rows = feature_rows([(text, prompt_tokens)], dim)
    return Features(rows.index, rows.value)


@given(st.text(max_size=300), st.integers(0, 10_000))
def test_any_text_gives_a_finite_sorted_vector_within_its_dimension(text, prompt_tokens):
    x = features(text, prompt_tokens, DIM)
    assert x.index[0] == 0
    assert (np.diff(x.index) > 0).all()
    assert x.index[-1] < DIM
    assert np.isfinite(x.value).all()
    assert (x.value > 0).all()


def test_the_hash_is_the_same_in_every_process_and_release():
    """A saved model is of columns: another hash would give it other words."""
    x = features("Summarise this article in three points: Überraschung!", 12, DIM)
    text = " ".join(f"{column}:{value:.6f}" for column, value in zip(x.index, x.value, strict=True))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "50764b797c850ef1967e856251a4e61ad8dce3faccc2f06c31c5d2d4cb5e93d9"
    )


@given(st.lists(st.tuples(st.text(max_size=100), st.integers(0, 10_000)), min_size=1, max_size=20))
def test_the_features_of_a_batch_are_to_the_bit_those_of_its_prompts(prompts):
    rows = feature_rows(prompts, DIM)
    for number, prompt in enumerate(prompts):
        mine, alone = rows.row == number, features(*prompt, DIM)
        assert rows.index[mine].tolist() == alone.index.tolist()
        assert rows.value[mine].tolist() == alone.value.tolist()


def test_text_beyond_the_bound_changes_nothing():
    head = "word " * (MAX_CHARS // 5 + 1)
    long, longer = features(head, 5, DIM), features(head + "and more", 5, DIM)
    assert (long.index == longer.index).all()
    assert (long.value == longer.value).all()


def test_case_and_spacing_do_not_count_but_order_does():
    same = features("Write  a POEM", 3, DIM), features("write a poem", 3, DIM)
    assert len(np.intersect1d(same[0].index, same[1].index)) >= len(same[1].index) - 2  # the size class may differ
    turned = features("poem a write", 3, DIM)
    assert len(np.setdiff1d(turned.index, same[1].index)) >= 4


def test_different_words_rarely_share_a_column():
    seen = [set(features(f"w{i}", 1, DIM).index) - {0} for i in range(200)]
    union = set().union(*seen)
    assert len(union) > 0.5 * sum(map(len, seen))
