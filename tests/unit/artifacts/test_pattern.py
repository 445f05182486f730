"""The linear-time matcher agrees with `re.fullmatch`, and no pattern can hold it up."""

import re
import time
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.artifacts.pattern import Budget, Pattern, PatternError

ATOM = st.sampled_from(
    [
        "a",
        "b",
        "_",
        "1",
        r"\.",
        ".",
        r"\d",
        r"\w",
        r"\W",
        r"\D",
        r"\s",
        "[ab]",
        "[^a]",
        "[a-c1]",
        r"[\d_]",
        "[]a]",
        "[a-]",
        r"\-",
    ]
)
TEXTS = st.recursive(
    ATOM | st.sampled_from([r"\b", "^", "$", r"\B", ""]),
    lambda inner: (
        st.lists(inner, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda items: f"({'|'.join(items)})")
        | st.tuples(
            ATOM | inner.map(lambda text: f"(?:{text})"), st.sampled_from("* + ? {2} {1,} {0,2} {,2} *? +?".split())
        ).map("".join)
    ),
    max_leaves=8,
)


@given(TEXTS, st.lists(st.text("ab1._- c", min_size=1, max_size=8), max_size=6))
@example(r"(?:\bab\b|.*\.b{1,2})", ["ab", "a.b", "a.bb", "a.bbb"])
@example("", ["a"])
def test_it_matches_what_re_fullmatch_matches(text: str, names: list[str]) -> None:
    pattern, reference = Pattern(text), re.compile(text, re.ASCII)
    for name in names:
        assert pattern.matches(name) == (reference.fullmatch(name) is not None), (text, name)


@given(st.text(r"ab|()[]{}*+?.^$\d-,1:=!<", max_size=14))
def test_whatever_is_not_understood_is_refused_and_never_matched_otherwise(text: str) -> None:
    try:
        pattern = Pattern(text)
    except PatternError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "[[": ours is the meaning of today
        reference = re.compile(text, re.ASCII)
    for name in ("a", "ab", "aab", "1", "b|a", "-"):
        assert pattern.matches(name) == (reference.fullmatch(name) is not None), (text, name)


@pytest.mark.parametrize(
    "text", ["(a+)+b", "(a|a)*b", "(a|aa)+$b", "(.*)*x", "(?:a?){30}a{30}", "(?:.*a){20}", "((((a*)*)*)*)*b"]
)
def test_patterns_that_run_away_in_a_backtracking_matcher_are_matched_at_once(text: str) -> None:
    started = time.process_time()
    assert Pattern(text).matches("a" * 40) in (True, False)
    assert time.process_time() - started < 5, "a backtracking matcher would take longer than the universe"


@pytest.mark.parametrize(
    "text",
    [
        "a{1000}{1000}",
        "((a{100}){100}){100}",
        "(" * 40 + ")" * 40,
        "a" * 3000,
        "(?:a{999}){9}",
        "(?:(?:(?:){1000}){1000}){1000}",
    ],
)
def test_patterns_that_are_too_large_are_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Pattern(text)


@pytest.mark.parametrize(
    "text",
    [
        "(?=a)",
        "(?!a)",
        "(?<=a)b",
        r"(a)\1",
        "(?i)a",
        "(?P<n>a)",
        "a++",
        "a{,}",
        "a{2,1}",
        "(",
        ")",
        "[",
        "[a",
        "\\",
        "*",
        "a**",
        "^*",
        "[b-a]",
        r"[\D]",
        "{1}",
        r"\A",
        "a{x}",
    ],
)
def test_what_is_outside_the_language_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Pattern(text)


def test_all_patterns_of_one_config_share_one_budget() -> None:
    budget = Budget(steps=200)
    patterns = [Pattern("(?:.*a){20}", budget) for _ in range(3)]
    with pytest.raises(PatternError, match="takes too long"):
        all(pattern.matches("abcabcabcabc" * 3) for pattern in patterns)
    assert budget.steps < 0


def test_names_walked_before_cost_nothing_more() -> None:
    budget = Budget()
    pattern = Pattern(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(?:q|k|v)_proj", budget)
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(10)]
    assert all(pattern.matches(name) for name in names)
    before = budget.steps
    assert all(pattern.matches(name) for name in names)
    assert budget.steps == before
