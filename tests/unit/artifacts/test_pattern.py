"""Patterns agree with `re.fullmatch`, and none can hold up a process."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.costs import traced_lines
from weft.artifacts.pattern import Budget, PatternError, compile_pattern

ATOM = st.sampled_from(
    [
        "a", "b", "_", "1", r"\.", ".", r"\d", r"\w", r"\W", r"\D", r"\s", "[ab]", "[^a]", "[a-c1]", r"[\d_]", "[]a]",
        "[a-]", r"\-",
    ]
)  # fmt: skip
TEXTS = st.recursive(
    ATOM | st.sampled_from([r"\b", "^", "$", r"\B", ""]),
    lambda inner: (
        st.lists(inner, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda items: f"({'|'.join(items)})")
        | st.tuples(
            ATOM | inner.map(lambda text: f"(?:{text})"), st.sampled_from("* + ? {2} {1,} {0,2} *? +?".split())
        ).map("".join)
        | st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda pair: f"{pair[0]}{pair[1]})")
        | st.tuples(st.sampled_from(["(?<=", "(?<!"]), ATOM).map(lambda pair: f"{pair[0]}{pair[1]}(?:{pair[1]}|.))")
    ),
    max_leaves=8,
)


@given(TEXTS, st.lists(st.text("ab1._- c", min_size=1, max_size=8), max_size=6))
@example(r"(?:\bab\b|.*\.b{1,2})", ["ab", "a.b", "a.bb", "a.bbb"])
@example("", ["a"])
def test_it_matches_what_re_fullmatch_matches(text: str, names: list[str]) -> None:
    matches, reference = compile_pattern(text, Budget(1 << 40)), re.compile(text, re.ASCII)
    for name in names:
        assert matches(name) == (reference.fullmatch(name) is not None), (text, name)


@given(st.text(r"ab|()[]{}*+?.^$\dQBzpx&~-,1:=!<P", max_size=14))
@settings(max_examples=5 * settings.default.max_examples)
def test_whatever_is_not_understood_is_refused_and_never_matched_otherwise(text: str) -> None:
    try:
        matches = compile_pattern(text, Budget())
    except PatternError:
        return
    reference = re.compile(text, re.ASCII)
    for name in ("a", "ab", "aab", "1", "b|a", "-"):
        assert matches(name) == (reference.fullmatch(name) is not None), (text, name)


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+b", "(a|a)*b", "(a|aa)+$b", "(.*)*x", "(?:a?){30}a{30}", "(?:.*a){20}", "((((a*)*)*)*)*b",
        "(?!(a|a)*b).*", "(?=" + "(a|a)" * 40 + "b)", "(?!" + ".*" * 100 + "b).*",
    ],
)  # fmt: skip
def test_patterns_that_run_away_in_a_backtracking_matcher_are_matched_at_once(text: str) -> None:
    """A backtracking matcher in C would never return."""
    matches, lines = traced_lines(lambda: compile_pattern(text, Budget())("a" * 40))
    assert matches in (True, False)
    assert lines < 50_000


@pytest.mark.parametrize(
    "text",
    [
        "a{1000}{1000}", "((a{100}){100}){100}", "a" * 3000, "(?:a{999}){9}", "(?:" + "[a-m0-9_]" * 200 + "){30}",
        "(?!((a{100}){100}){100})", "(?!((a*)*)*b).*",
    ],
)  # fmt: skip
def test_patterns_that_are_too_large_are_refused(text: str) -> None:
    with pytest.raises(PatternError):
        compile_pattern(text, Budget())


@pytest.mark.parametrize(
    "text",
    [
        r"(a)\1", "(?i)a", "(?P<n>a)", "a++", "a{,}", "a{2,1}", "(", ")", "[", "[a", "\\", "*", "a**", "^*", "[b-a]",
        r"[a\b]", r"[[:alpha:]]", r"\pL", r"\Qa\E", r"\12", "a{,2}", "{1}", r"\A", "a{x}", "(?<=a*)b", "(?<!a|bc)d",
        "(?=a", "(?!a))", "(?=a)a**", "(?!a)*?+", "(?=*a)", "(?=[b-a])", "(?<=a{2,1})b", "(?=" * 50 + ")" * 50,
    ],
)  # fmt: skip
def test_what_is_outside_the_language_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        compile_pattern(text, Budget())


def test_all_patterns_of_one_config_share_one_budget() -> None:
    budget = Budget(instructions=400)
    compile_pattern("(?:.*a){20}", budget)
    compile_pattern("(?:.*a){20}", budget)
    with pytest.raises(PatternError, match="too large"):
        compile_pattern("(?:.*a){20}", budget)
