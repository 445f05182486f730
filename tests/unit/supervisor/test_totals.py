import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.ids import Epoch, RunnerId
from weft.domain.runner import RunnerBook, RunnerFigures, RunnerReport, RunnerSpec, SequenceState
from weft_supervisor.core import summarize, violation


def book(free: int, used: int, *reserved: int, adapters: int = 0, total: int = 10, pool: str = "a/p") -> RunnerBook:
    spec = RunnerSpec(RunnerId("u", "1"), "h:1", pool, 16, total, 64, 4, 8, 16)
    rows = [SequenceState(f"r{i}", Epoch(), "g", "", pages, 16, i) for i, pages in enumerate(reserved)]
    found = RunnerBook(spec)
    found.apply(RunnerReport(1, True, RunnerFigures(free, used, adapters), rows))
    return found


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (book(5, 1, 4), "5 free + 4 reserved + 0 pages of adapters are not 10"),
        (book(5, 1, 4, adapters=2), "5 free + 4 reserved + 2 pages of adapters are not 10"),
        (book(6, 5, 4), "5 used pages are more than 4 reserved"),
    ],
)
def test_a_page_table_that_does_not_balance_is_named(broken, text):
    assert text in (violation(broken) or "")


rows = st.lists(st.integers(0, 50), max_size=8)


@given(st.lists(st.tuples(st.sampled_from(["a/p", "b/p"]), rows, st.integers(0, 50), st.integers(0, 9)), max_size=6))
def test_a_pool_balances_because_its_runners_do(runners):
    books: list[RunnerBook] = []
    for pool, pages, free, adapters in runners:
        total = free + sum(pages) + adapters
        books.append(book(free, sum(pages), *pages, adapters=adapters, total=total, pool=pool))
        assert violation(books[-1]) is None
    for pool, memory in summarize(books).items():
        assert memory.free_pages + memory.reserved_pages + memory.adapter_pages == memory.total_pages
        assert memory.used_pages <= memory.reserved_pages
        own = [one for one in books if one.spec.pool == pool]
        assert memory.total_pages == sum(one.spec.total_pages for one in own)
        assert memory.sequences == sum(len(one.sequences) for one in own)
