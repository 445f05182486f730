"""The native search for drafts against its plain statement in Python."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.native_library import native_library
from weft_kernels.cpu import CallRefused, Library, draft

SEPARATOR = -1


@pytest.fixture(scope="module")
def library() -> Library:
    return native_library()


@pytest.fixture(scope="module")
def search(library: Library) -> draft.DraftSearch:
    return draft.DraftSearch(library.native)


@dataclass(frozen=True, slots=True)
class Query:
    """`tail` None: the text's own end."""

    text: list[int]
    tail: list[int] | None
    max_tokens: int = draft.MAX_DRAFT

    @property
    def wanted(self) -> list[int]:
        return self.text if self.tail is None else self.tail


@dataclass(frozen=True, slots=True)
class Draft:
    """What is found. `tokens`: (token, agree, of) of each."""

    matched: int
    tokens: list[tuple[int, int, int]]


def expected(query: Query) -> Draft:
    text = query.text
    lengths = {place: common(text[:place], query.wanted) for place in range(len(text)) if text[place] >= 0}
    matched = max(lengths.values(), default=0)
    places = [place for place in reversed(lengths) if matched and lengths[place] == matched][: draft.MAX_PLACES]
    tokens: list[tuple[int, int, int]] = []
    while len(tokens) < query.max_tokens and places:
        on = [place for place in places if place < len(text) and text[place] >= 0]
        votes = Counter(text[place] for place in on)  # in the order of places: the newest of equals comes first
        token, agree = max(votes.items(), key=lambda item: item[1], default=(0, 0))
        if agree <= len(places) - len(on):
            break
        tokens.append((token, agree, len(places)))
        places = [place + 1 for place in on if text[place] == token]
    return Draft(matched, tokens)


def common(text: list[int], tail: list[int]) -> int:
    """Count the last tokens that both have, at most MAX_MATCH."""
    n = 0
    while n < min(len(text), len(tail), draft.MAX_MATCH) and text[-1 - n] == tail[-1 - n] >= 0:
        n += 1
    return n


def found(search: draft.DraftSearch, queries: list[Query]) -> list[Draft]:
    texts = [np.array(query.text, np.int32) for query in queries]
    tails = [np.array(query.wanted, np.int32) for query in queries]
    rows = list[draft.DraftAddresses]()
    for text, tail, query in zip(texts, tails, queries, strict=True):
        end = text if query.tail is None else tail
        rows.append(draft.DraftAddresses(text.ctypes.data, len(text), end.ctypes.data, len(end), query.max_tokens))
    return [Draft(one.matched, list(zip(one.tokens, one.agree, one.of, strict=True))) for one in search.find(rows)]


# ---- the same as the plain statement

ALPHABETS = st.sampled_from([[0], [0, 1], [0, 1, SEPARATOR], [0, 0, 0, 1, 2, SEPARATOR], [7, 49_151, 2**31 - 1]])
PIECES = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 90), st.integers(1, 6)), max_size=6)


@st.composite
def texts(draw: st.DrawFn, alphabet: list[int]) -> list[int]:
    """Pieces repeated a few times, of which some come again: long matches, overlaps, and many places of one length."""
    text: list[int] = []
    for seed, length, times in draw(PIECES):
        random = np.random.default_rng(seed)
        piece = random.choice(alphabet, min(length, int(random.integers(1, 91)))).tolist()
        text += piece * times + text[: int(random.integers(0, 40))]
    return text + draw(st.lists(st.sampled_from(alphabet), max_size=8))


@st.composite
def queries(draw: st.DrawFn) -> Query:
    alphabet = draw(ALPHABETS)
    text = draw(texts(alphabet))
    cut = draw(st.integers(0, len(text)))
    tail = draw(st.sampled_from([None, text[:cut], text[cut:]]) | texts(alphabet))
    return Query(text, tail, draw(st.just(draft.MAX_DRAFT) | st.integers(0, draft.MAX_DRAFT)))


@given(st.lists(queries(), max_size=5))
def test_drafts_are_those_of_the_plain_statement(search: draft.DraftSearch, several: list[Query]):
    assert found(search, several) == [expected(query) for query in several]


RUN, LONG = [0] * (draft.MAX_MATCH - 1), [0] * 5000
WORST = {
    "all equal": Query(LONG, None),
    "a run that is never whole": Query([*RUN, 1] * 60, LONG),
    "a run before another token": Query(LONG, [1, *RUN]),
    "of period three": Query([0, 1, 2] * 2000, None),
    "of period three, but for the last": Query([0, 1, 2] * 2000, [1, 1, 2, *[0, 1, 2] * 20]),
    "all places go on in another way": Query([t for i in range(1, 999) for t in (0, i)], [0]),
    "hashes that collide": Query([t for i in range(1, 256) for t in (0, i << 23)] + [0, 1 << 23], [5, 0]),
    "alternating": Query([0, 1] * 3000, [1] * 9),
}


@pytest.mark.parametrize("name", WORST)
def test_worst_texts_give_what_the_plain_statement_gives(search: draft.DraftSearch, name: str):
    assert found(search, [WORST[name]]) == [expected(WORST[name])]


def test_an_end_that_as_many_reach_as_go_on_ends_the_draft(search: draft.DraftSearch):
    ended, on = [5, 6, SEPARATOR], [5, 6, 7]
    assert found(search, [Query([*on, *on, *ended], [5])]) == [Draft(1, [(6, 3, 3), (7, 2, 3), (5, 2, 2), (6, 2, 2)])]
    assert found(search, [Query([*on, *ended], [5])]) == [Draft(1, [(6, 2, 2)])]


# ---- memory


def test_what_lies_around_the_arrays_is_neither_read_nor_written(search: draft.DraftSearch):
    """The text stands between tokens which, were they read, would make matches longer and drafts other ones."""
    whole = np.zeros(300, np.int32)
    begin = whole.ctypes.data + 400
    (one,) = search.find([draft.DraftAddresses(begin, 100, begin, 30, draft.MAX_DRAFT)])
    assert (one.matched, len(one.tokens), one.agree[0], one.of[0]) == (30, 32, 70, 70)
    assert not whole.any()


def test_empty_arrays_are_not_read(search: draft.DraftSearch):
    assert search.find([]) == []
    assert search.find([draft.DraftAddresses(0, 0, 0, 0, 0)] * 3) == [draft.DraftFound(0, [], [], [])] * 3


# ---- refusals


@pytest.mark.parametrize(
    ("field", "value"), [("length", -1), ("tail_length", -1), ("max_tokens", -1), ("max_tokens", draft.MAX_DRAFT + 1)]
)
def test_a_query_that_makes_no_sense_is_refused_before_anything_is_read(
    search: draft.DraftSearch, field: str, value: int
):
    nothing = draft.DraftAddresses(0, 0, 0, 0, 0)
    rows = [nothing._replace(length=1 << 40), nothing._replace(**{field: value})]
    with pytest.raises(CallRefused, match="a length is negative, or max_tokens is not one of 0 to 32"):
        search.find(rows)


def test_a_negative_number_of_queries_is_refused(library: Library, search: draft.DraftSearch):
    assert library.native.weft_draft(0, -1, 0) == -2
