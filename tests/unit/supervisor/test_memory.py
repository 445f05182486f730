import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_supervisor.core.events import Epoch, Report, RunnerId, Sequence
from weft_supervisor.core.memory import Memory, check_memory, fault, memory_of, picture

RUNNER = RunnerId("u", "1")


def report(free: int, used: int, *pages: tuple[int, int], lent: int = 0) -> Report:
    rows = tuple(Sequence(f"r{i}", Epoch(), i, reserved, used) for i, (reserved, used) in enumerate(pages))
    return Report(RUNNER, 1, free, used, rows, adapter_pages=lent)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (report(5, 1, (4, 1)), "5 free + 4 reserved + 0 pages of adapters are not 10"),
        (report(5, 1, (4, 1), lent=2), "5 free + 4 reserved + 2 pages of adapters are not 10"),
        (report(6, 2, (4, 1)), "2 used pages are not the sum"),
        (report(6, 5, (4, 5)), "r0 uses 5 pages of 4 reserved"),
    ],
)
def test_a_book_that_does_not_balance_is_named(broken, words):
    assert words in (fault(broken, 10) or "")
    with pytest.raises(AssertionError, match=r"r0|free|used"):
        check_memory(broken, 10)


rows = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda p: (max(p), min(p))), max_size=8)


@given(st.lists(st.tuples(st.sampled_from(["a/p", "b/p"]), rows, st.integers(0, 50), st.integers(0, 9)), max_size=6))
def test_a_pool_balances_because_its_runners_do(runners):
    memories = []
    for pool, pages, free, lent in runners:
        one = report(free, sum(used for _, used in pages), *pages, lent=lent)
        total = free + sum(reserved for reserved, _ in pages) + lent
        check_memory(one, total)
        memories.append((pool, memory_of(one, total)))
    for pool, memory in picture(memories).items():
        assert memory.free_pages + memory.reserved_pages + memory.adapter_pages == memory.total_pages
        assert memory.used_pages <= memory.reserved_pages
        assert memory == sum((m for p, m in memories if p == pool), Memory())
