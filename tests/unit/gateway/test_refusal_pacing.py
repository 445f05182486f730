"""Refusals of a tenant that floods: quick ones within a rate, later ones in a bounded number."""

from hypothesis import given
from hypothesis import strategies as st

from weft_gateway.core.refusal_pacing import HOLD_S, MAX_HELD, QUICK_BURST, QUICK_PER_S, RefusalPacing

TIMES = st.lists(st.floats(0.0, 3.0), max_size=200).map(sorted)


@given(TIMES, st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_as_many_are_quick_as_the_rate_allows(times: list[float], begin: float, length: float) -> None:
    pacing = RefusalPacing()
    quick = [at for at in times if not pacing.begin("tenant", at).hold_s]
    within = sum(begin <= at <= begin + length for at in quick)
    assert within <= QUICK_BURST + 1 + QUICK_PER_S * length


def test_the_others_wait_and_beyond_a_bound_their_connections_end() -> None:
    pacing = RefusalPacing()
    paces = [pacing.begin("tenant", 0.0) for _ in range(int(QUICK_BURST) + MAX_HELD + 1)]
    assert [pace.hold_s for pace in paces] == [*[0.0] * int(QUICK_BURST), *[HOLD_S] * MAX_HELD, 0.0]
    assert [pace.closes for pace in paces].index(True) == len(paces) - 1
    assert not pacing.begin("other", 0.0).hold_s, "nobody else waits"
    pacing.end("tenant")
    assert pacing.begin("tenant", 0.0).hold_s == HOLD_S
    assert not pacing.begin("tenant", 10.0).hold_s
