"""The loop around a machine: events whole, effects in order, one timer, failures, the idle check."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from harness.waiting import soon
from weft.domain.machine import TICK, Connected, Kind, Peer, Received, Tick
from weft.machine_shell import MachineShell

PEER = Peer(Kind.RUNNER, "r")
AHEAD_S = 1000.0  # of the loop's clock: the machine has one of its own


class FakeHandle:
    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when, self.call, self.cancelled = when, call, False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A loop's clock and timers; `pass_s` calls what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handles: list[FakeHandle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> FakeHandle:
        self.handles.append(FakeHandle(when, call))
        return self.handles[-1]

    def due(self) -> list[float]:
        return [handle.when for handle in self.handles if not handle.cancelled]

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        for handle in [one for one in self.handles if one.when <= self.now]:
            self.handles.remove(handle)
            if not handle.cancelled:
                handle.call()


class Toy:
    """An event is its effects; a number becomes the next deadline, an exception is raised."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.handled: list[tuple[object, float]] = []
        self.sound = True

    def handle(self, event: Any, now: float) -> list[str]:
        self.handled.append((event, now))
        match event:
            case Exception():
                raise event
            case float():
                self.deadline = event
            case Tick():
                assert self.deadline is not None
                if self.deadline <= now:
                    self.deadline = None
            case _:
                pass
        return event if isinstance(event, list) else []

    def next_deadline(self) -> float | None:
        return self.deadline

    def check(self) -> None:
        self.check_sound()

    def check_sound(self) -> None:
        assert self.sound, "it is not"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    made = FakeLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


@pytest.fixture
def toy() -> Toy:
    return Toy()


def shell_of(toy: Toy, loop: FakeLoop, performed: list[str] | None = None, **of: Any) -> MachineShell[Any, str]:
    perform = (performed if performed is not None else []).append
    return MachineShell(toy, perform, clock=lambda: loop.now + AHEAD_S, **of)


def test_an_event_that_effects_cause_waits_for_them(toy: Toy, loop: FakeLoop) -> None:
    performed = list[str]()

    def perform(effect: str) -> None:
        performed.append(effect)
        if effect == "a":
            shell.feed(["of a"])

    shell = MachineShell[Any, str](toy, perform, clock=lambda: loop.now)
    loop.now = 5.0
    shell.feed(["a", "b"])
    assert performed == ["a", "b", "of a"]
    assert toy.handled == [(["a", "b"], 5.0), (["of a"], 5.0)]


def test_one_timer_is_never_later_than_the_next_deadline(toy: Toy, loop: FakeLoop) -> None:
    shell = shell_of(toy, loop)
    shell.feed([])
    assert loop.due() == [], "nothing to wait for"
    shell.feed(AHEAD_S + 3.0)
    assert loop.due() == [3.0]
    shell.feed(AHEAD_S + 2.0)
    assert loop.due() == [2.0], "earlier: another one"
    shell.feed(AHEAD_S + 9.0)
    assert loop.due() == [2.0], "later: it stays"
    loop.pass_s(2.0)
    assert toy.handled[-1] == (TICK, AHEAD_S + 2.0), "it finds nothing due"
    assert loop.due() == [9.0]
    loop.pass_s(7.0)
    assert (toy.handled[-1], toy.deadline, loop.due()) == ((TICK, AHEAD_S + 9.0), None, [])


def test_a_deadline_that_is_past_is_due_now(toy: Toy, loop: FakeLoop) -> None:
    loop.now = 5.0
    shell_of(toy, loop).feed(AHEAD_S + 1.0)
    assert loop.due() == [5.0]


def test_a_closed_one_has_no_timer_before_the_next_event(toy: Toy, loop: FakeLoop) -> None:
    shell = shell_of(toy, loop)
    shell.feed(AHEAD_S + 1.0)
    shell.close()
    assert loop.due() == []
    shell.feed([])
    assert loop.due() == [1.0]


def test_a_past_deadline_sets_the_timer_of_every_loop(toy: Toy) -> None:
    """uvloop's handle of what is due at once does not know its time."""

    async def past() -> None:
        ticked, loop = asyncio.Event(), asyncio.get_running_loop()

        def handle(event: float | Tick, now: float) -> list[str]:
            if event is TICK:
                ticked.set()
            return toy.handle(event, now)

        shell = MachineShell[float, str](toy, lambda _: None, clock=loop.time, handle=handle)
        for deadline in (-1.0, -2.0, -1.0):
            shell.feed(deadline)
        await soon(ticked.wait())

    uvloop.run(past())
    assert [event for event, _ in toy.handled] == [-1.0, -2.0, -1.0, TICK]


def test_what_surrounds_the_machine_may_hand_out_other_effects(toy: Toy, loop: FakeLoop) -> None:
    performed = list[str]()

    def handle(event: object, now: float) -> list[str]:
        return toy.handle(event, now)[::-1]

    shell_of(toy, loop, performed, handle=handle).feed(["a", "b"])
    assert performed == ["b", "a"]


def test_a_failed_event_is_raised_where_it_is_fed_and_the_machine_goes_on(toy: Toy, loop: FakeLoop) -> None:
    performed, failed = list[str](), list[bool]()
    shell = shell_of(toy, loop, performed, on_failure=lambda: failed.append(True))
    with pytest.raises(KeyError):
        shell.feed(KeyError("a mistake of ours"))
    shell.feed(["a"])
    assert (performed, failed, shell.failure) == (["a"], [], None)


def test_a_failed_tick_ends_it_once(toy: Toy, loop: FakeLoop) -> None:
    failed = list[Exception | None]()
    shell = shell_of(toy, loop, on_failure=lambda: failed.append(shell.failure))
    shell.feed(AHEAD_S + 1.0)
    toy.deadline = None
    loop.pass_s(1.0)
    assert isinstance(shell.failure, AssertionError)
    shell.fail(KeyError("another one"))
    assert failed == [shell.failure], "the first one counts"
    with pytest.raises(AssertionError):
        shell.feed([])
    assert [event for event, _ in toy.handled] == [AHEAD_S + 1.0, TICK], "it takes no more events"


def test_without_anybody_to_end_the_process_a_failed_tick_is_the_loops(toy: Toy, loop: FakeLoop) -> None:
    shell = shell_of(toy, loop)
    shell.feed(AHEAD_S + 1.0)
    toy.deadline = None
    with pytest.raises(AssertionError):
        loop.pass_s(1.0)
    shell.feed(AHEAD_S + 2.0)
    assert loop.due() == [2.0]


def test_an_idle_machine_is_checked_once(toy: Toy, loop: FakeLoop) -> None:
    toy.sound = False
    shell = shell_of(toy, loop, quiet=(Tick, int))
    assert [shell.check_idle() for _ in range(3)] == [None, None, None], "nothing has happened"
    shell.feed([])
    assert [shell.check_idle() for _ in range(3)] == [None, "check_sound", None]
    for _ in range(3):
        shell.feed([])
        assert shell.check_idle() is None, "it is busy"
    toy.deadline = AHEAD_S
    for event in (TICK, Received(PEER, 1)):
        shell.feed(event)
    assert shell.check_idle() == "check_sound", "what came is no activity"
    shell.feed(Connected(PEER))
    assert [shell.check_idle() for _ in range(2)] == [None, "check_sound"]


def test_a_look_follows_each_activity_and_rest_has_none(toy: Toy, loop: FakeLoop) -> None:
    looks = list[float]()
    shell = shell_of(toy, loop, quiet=(Tick, int))
    shell.observe_after(1.0, lambda: looks.append(loop.now))
    loop.pass_s(5.0)
    assert (looks, loop.due()) == ([0.0], []), "once at the start"
    for _ in range(3):
        shell.feed([])
        loop.pass_s(0.5)
    loop.pass_s(5.0)
    assert (looks, loop.due()) == ([0.0, 6.0, 11.5], []), "the last activity came after the first look"
    toy.deadline = AHEAD_S
    for event in (TICK, Received(PEER, 1)):
        shell.feed(event)
    assert loop.due() == [], "what came is no activity"


def test_a_tick_that_has_effects_is_activity(toy: Toy, loop: FakeLoop) -> None:
    looks = list[float]()
    shell = shell_of(toy, loop, quiet=(Tick,), handle=lambda event, _: ["lost"] if event is TICK else [])
    shell.observe_after(1.0, lambda: looks.append(loop.now))
    shell.feed(TICK)
    loop.pass_s(1.0)
    assert looks == [0.0, 1.0]


def test_looks_go_on_until_an_idle_machine_is_checked(toy: Toy, loop: FakeLoop) -> None:
    found = list[str | None]()
    shell = shell_of(toy, loop)
    toy.sound = False
    shell.feed([])
    shell.observe_after(1.0, lambda: found.append(shell.check_idle()))
    for _ in range(3):
        loop.pass_s(1.0)
    assert (found, loop.due()) == ([None, "check_sound"], [])


def test_a_look_that_fails_ends_the_process_like_a_tick(toy: Toy, loop: FakeLoop) -> None:
    failed = list[str]()
    shell = shell_of(toy, loop, on_failure=lambda: failed.append("ended"))

    def look() -> None:
        raise KeyError("a mistake of ours")

    shell.observe_after(1.0, look)
    assert (failed, type(shell.failure), loop.due()) == (["ended"], KeyError, [])
