"""What the depot keeps, and when it may forget."""

from math import nextafter

from hypothesis import example, given
from hypothesis import strategies as st

from weft_operator.core import ClusterState, RetainBlobs
from weft_operator.core.artifacts import Retention
from weft_operator.core.reconcile import longest_drain_s, plan_retention


@example([("a", 0.0, 1.0)], 1.0)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100), st.floats(1, 50)), max_size=20), st.floats(0, 200))
def test_a_digest_is_kept_until_its_last_drain_is_over(left: list[tuple[str, float, float]], now: float) -> None:
    ledger = Retention()
    ends: dict[str, float] = {}
    for digest, at, drain_s in left:
        ledger.left(digest, at, drain_s)
        ends[digest] = max(ends.get(digest, 0.0), at + drain_s)
    draining = {digest for digest, end in ends.items() if end > now}
    assert ledger.retained_digests({"live"}, now) == draining | {"live"}
    ledger.forget(now)
    assert ledger.retained_digests({"live"}, now) == draining | {"live"}
    assert set(ledger.kept_until) == draining


def test_nothing_is_due_while_nothing_drains() -> None:
    ledger = Retention(started_at=1000.0)
    assert ledger.due_at(300.0) == 1300.0  # the first list
    ledger.last_sent = frozenset()
    assert ledger.due_at(300.0) is None
    ledger.left("a", 1400.0, 60.0)
    assert ledger.due_at(300.0) == 1460.0


def test_the_first_list_is_sent_at_the_moment_that_is_named_for_it() -> None:
    state = ClusterState()
    ledger = state.expectations.retention
    ledger.started_at = 1000.0
    due = ledger.due_at(longest_drain_s(state.desired))
    assert due is not None
    assert plan_retention(state, nextafter(due, 0.0)) == []
    assert plan_retention(state, due) == [RetainBlobs(frozenset())]
