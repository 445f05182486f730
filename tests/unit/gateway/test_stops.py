"""Stop strings: the first to be complete wins, nothing of it is released, chunks make no difference."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft_gateway.core.answer_text import MAX_STOP_CHARS, MAX_STOPS, StopMatcher

letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that ends first (the longest of those), and that string."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, minus_length = min(ends)
    return text[: end + minus_length], text[end + minus_length : end]


def chunked(text: str, cuts: list[int]) -> list[str]:
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


@given(letters, stop_lists, st.lists(st.integers(0, 30), max_size=6))
@example("cab", ["b", "ab"], [])
@example("aaab", ["aab"], [2])
def test_released_text_is_what_comes_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    released = "".join(matcher.push(chunk) for chunk in chunked(text, cuts)) + matcher.flush()
    assert (released, matcher.matched) == reference(text, stops)


@given(letters, stop_lists.filter(bool))
def test_what_is_held_back_may_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = matcher.push(text)
    if not matcher.matched:
        held = text.removeprefix(released)
        assert len(held) == max(
            (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
        ), "no more and no less than the longest beginning of a stop string"


@pytest.mark.parametrize("stops", [["a"] * (MAX_STOPS + 1), [""], ["x" * (MAX_STOP_CHARS + 1)]])
def test_stop_strings_beyond_the_bounds_are_refused(stops: list[str]) -> None:
    StopMatcher(["x" * MAX_STOP_CHARS] * MAX_STOPS)
    with pytest.raises(ValueError, match="at most 64"):
        StopMatcher(stops)


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=6),
)
def test_a_stop_string_that_is_part_of_the_answer_is_what_the_text_ends_with(
    stops: list[str], chunks: list[str]
) -> None:
    without, including = StopMatcher(stops), StopMatcher(stops, include=True)
    found = "".join(map(including.push, chunks)) + including.flush()
    before = "".join(map(without.push, chunks)) + without.flush()
    assert including.matched == without.matched
    assert found == (next(before + stop for stop in stops if found == before + stop) if without.matched else before)
