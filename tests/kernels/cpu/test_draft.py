"""The native search for drafts against its plain statement in Python."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.draft_search import LENGTHS, plain_draft
from harness.native_library import native_library
from weft_kernels.cpu import CallRefused, Library, draft
from weft_runner.core.drafts.acceptance import Acceptance

SEPARATOR = -1
SHARES = np.ones(draft.GUESS_CLASSES)


@pytest.fixture(scope="module")
def library() -> Library:
    return native_library()


@pytest.fixture(scope="module")
def search(library: Library) -> draft.DraftSearch:
    return draft.DraftSearch(library.native)


@dataclass(frozen=True, slots=True)
class Query:
    """`tail` None: the text's own end. `shares`: nine of ten guesses of a class are right, or so."""

    text: list[int]
    tail: list[int] | None
    max_tokens: int = draft.MAX_DRAFT
    shares: tuple[float, ...] = (0.9,) * draft.GUESS_CLASSES
    min_gain: float = 0.0

    @property
    def wanted(self) -> list[int]:
        return self.text if self.tail is None else self.tail


def expected(query: Query) -> draft.DraftFound:
    return plain_draft(query.text, query.wanted, query.shares, query.min_gain, query.max_tokens)


def found(search: draft.DraftSearch, queries: list[Query]) -> list[draft.DraftFound]:
    arrays = [tuple(map(np.array, (one.text, one.wanted), (np.int32,) * 2)) for one in queries]
    shares = [np.array(one.shares, np.float64) for one in queries]
    rows = [
        (text.ctypes.data, len(text), tail.ctypes.data, len(tail), of.ctypes.data, one.min_gain, one.max_tokens)
        for one, (text, tail), of in zip(queries, arrays, shares, strict=True)
    ]
    return [([*tokens], [*classes], [*gains]) for tokens, classes, gains in search.find(rows)]


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
    shares = draw(st.lists(st.floats(0.0, 1.0), min_size=draft.GUESS_CLASSES, max_size=draft.GUESS_CLASSES))
    most = draw(st.just(draft.MAX_DRAFT) | st.integers(0, draft.MAX_DRAFT))
    return Query(text, tail, most, tuple(shares), draw(st.sampled_from([0.0, 0.05, 0.5])))


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


def test_the_runner_knows_as_many_classes_of_guesses():
    assert len(Acceptance().shares) == draft.GUESS_CLASSES
    assert LENGTHS[-1] == draft.MAX_MATCH == 2 ** (draft.GUESS_LENGTHS - 1)


def test_an_end_that_as_many_reach_as_go_on_ends_the_draft(search: draft.DraftSearch):
    ended, on = [5, 6, SEPARATOR], [5, 6, 7]
    assert found(search, [Query([*on, *on, *ended], [5])])[0][0] == [6, 7, 5, 6]
    assert found(search, [Query([*on, *ended], [5])])[0][0] == [6]


def test_a_draft_ends_before_a_guess_that_is_hardly_right(search: draft.DraftSearch):
    once, shares = [5, 6, 7, 8, 9, SEPARATOR], [0.0] * draft.GUESS_CLASSES
    shares[2 * draft.GUESS_LENGTHS : 2 * draft.GUESS_LENGTHS + 2] = 0.5, 0.6  # the only place: 1 token, 2 or 3 before
    query = Query(once, [5], shares=tuple(shares), min_gain=0.2)
    assert found(search, [query]) == [([6, 7], [14, 15], [0.5, 0.3])]
    assert found(search, [replace(query, min_gain=0.6)]) == [([], [14], [])], "what is known of it"


# ---- memory


def test_what_lies_around_the_arrays_is_neither_read_nor_written(search: draft.DraftSearch):
    """The text stands between tokens which, were they read, would make matches longer and drafts other ones."""
    whole = np.zeros(300, np.int32)
    begin = whole.ctypes.data + 400
    (one,) = search.find([(begin, 100, begin, 30, SHARES.ctypes.data, 0.0, draft.MAX_DRAFT)])
    assert [*map(len, one)] == [32, 32, 32]
    assert one[1][0] == 3 * draft.GUESS_LENGTHS + 4, "30 tokens before it"
    assert not whole.any()


def test_empty_arrays_are_not_read(search: draft.DraftSearch):
    assert search.find([]) == []
    assert search.find([(0, 0, 0, 0, 0, 0.0, 0)] * 3) == [draft.NOTHING] * 3


# ---- refusals


@pytest.mark.parametrize(
    ("field", "value"), [("length", -1), ("tail length", -1), ("max_tokens", -1), ("max_tokens", draft.MAX_DRAFT + 1)]
)
def test_a_query_that_makes_no_sense_is_refused_before_anything_is_read(
    search: draft.DraftSearch, field: str, value: int
):
    length, tail_length, most = (value if field == one else 0 for one in ("length", "tail length", "max_tokens"))
    rows = [(0, 1 << 40, 0, 0, 0, 0.0, 0), (0, length, 0, tail_length, 0, 0.0, most)]
    with pytest.raises(CallRefused, match="a length is negative, or max_tokens is not one of 0 to 32"):
        search.find(rows)


def test_a_negative_number_of_queries_is_refused(library: Library, search: draft.DraftSearch):
    assert library.native.weft_draft(0, -1, 0) == -2
