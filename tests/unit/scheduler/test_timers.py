"""Deadlines against a dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.timers import TimerQueue
from weft_scheduler.core.scheduler import TIMERS
from weft_scheduler.core.timers import Timer, TimerKind

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(st.tuples(st.sampled_from(["set", "earlier", "clear", "due"]), NAMES, st.integers(0, 20)))


@given(STEPS)
def test_what_is_due_comes_out_once_in_order(steps: list[tuple[str, str, int]]) -> None:
    timers, model = TimerQueue[Timer](), dict[str, int]()
    for what, name, when in steps:
        timer = Timer(TimerKind.AVOIDANCE, name)
        if what == "set":
            timers.set(timer, when)
            model[name] = when
        elif what == "earlier":
            timers.set_earlier(timer, when)
            model[name] = min(model.get(name, when), when)
        elif what == "clear":
            timers.clear(timer)
            model.pop(name, None)
        else:
            taken = list(iter(lambda now=when: timers.take_due(now), None))
            expected = sorted((w, n) for n, w in model.items() if w <= when)
            assert [a.name for a in taken] == [n for _, n in expected]
            model = {n: w for n, w in model.items() if w > when}
        assert timers.next() == min(model.values(), default=None)
        assert all((Timer(TimerKind.AVOIDANCE, n) in timers) == (n in model) for n in "abc")


def test_every_kind_of_timer_has_a_handler() -> None:
    assert TIMERS.keys() == {*TimerKind}


def test_a_deadline_that_moves_often_does_not_grow_the_heap() -> None:
    timers = TimerQueue[Timer]()
    for i in range(10_000):
        timers.set(Timer(TimerKind.AVOIDANCE, "abc"[i % 3]), float(-i))
        assert len(timers._heap) <= 64 + 4 * 3  # pyright: ignore[reportPrivateUsage]
        assert timers.next() == -i
