"""Deadlines against a dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.alarms import Alarm, Alarms, Kind

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(st.tuples(st.sampled_from(["set", "earlier", "clear", "due"]), NAMES, st.integers(0, 20)))


@given(STEPS)
def test_what_is_due_comes_out_once_in_order(steps: list[tuple[str, str, int]]) -> None:
    alarms, model = Alarms(), dict[str, int]()
    for what, name, when in steps:
        alarm = Alarm(Kind.RETRY, name)
        if what == "set":
            alarms.set(alarm, when)
            model[name] = when
        elif what == "earlier":
            alarms.set_earlier(alarm, when)
            model[name] = min(model.get(name, when), when)
        elif what == "clear":
            alarms.clear(alarm)
            model.pop(name, None)
        else:
            taken = list(iter(lambda now=when: alarms.take_due(now), None))
            expected = sorted((w, n) for n, w in model.items() if w <= when)
            assert [a.name for a in taken] == [n for _, n in expected]
            model = {n: w for n, w in model.items() if w > when}
        assert alarms.next() == min(model.values(), default=None)
        assert all((Alarm(Kind.RETRY, n) in alarms) == (n in model) for n in "abc")


def test_a_deadline_that_moves_often_does_not_grow_the_heap() -> None:
    alarms = Alarms()
    for i in range(10_000):
        alarms.set(Alarm(Kind.RETRY, "a"), float(i))
    assert len(alarms._heap) < 100  # pyright: ignore[reportPrivateUsage]
    assert alarms.next() == 9_999.0
