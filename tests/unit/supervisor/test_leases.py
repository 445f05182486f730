from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weft.domain.ids import RunnerId
from weft_supervisor.core import Leases

A1, A2, B1 = RunnerId("a", "1"), RunnerId("a", "2"), RunnerId("b", "1")


def test_a_silent_runner_is_gone_once_and_a_heard_one_stays():
    leases = Leases(2.0)
    leases.grant(A1, 0.0)
    leases.grant(B1, 0.0)
    assert leases.renew(B1, 1.5)
    assert leases.expire(1.99) == []
    assert leases.expire(2.0) == [A1]
    assert leases.expire(2.0) == []
    assert leases.next_deadline() == 3.5
    assert not leases.renew(A1, 2.1)


def test_a_new_incarnation_takes_the_place_of_the_old_one_for_good():
    leases = Leases(2.0)
    assert leases.grant(A1, 0.0) is None
    assert leases.grant(A2, 0.1) == A1
    assert leases.replaced(A1)
    assert not leases.renew(A1, 0.2)
    assert leases.current("a") == A2


def test_the_last_four_replaced_incarnations_of_a_uuid_are_remembered():
    leases, incarnations = Leases(2.0), [RunnerId("a", str(number)) for number in range(6)]
    for incarnation in incarnations:
        leases.grant(incarnation, 0.0)
    assert [leases.replaced(incarnation) for incarnation in incarnations] == [False, True, True, True, True, False]


def test_leases_that_are_held_stay_in_order_with_those_renewed_meanwhile():
    leases = Leases(2.0)
    leases.grant(A1, 0.0)
    leases.grant(B1, 1.9)
    leases.hold_all(6.0)
    assert leases.renew(A1, 3.0)
    leases.check()
    assert leases.expire(5.9) == []
    assert leases.renew(B1, 5.0)
    leases.check()
    assert leases.expire(6.0) == [A1]
    assert leases.next_deadline() == 7.0


class LeaseMachine(RuleBasedStateMachine):
    """Against a dictionary of the last time each incarnation was heard."""

    runners = st.builds(RunnerId, st.sampled_from("abc"), st.sampled_from("123"))

    def __init__(self) -> None:
        super().__init__()
        self.leases, self.now = Leases(2.0), 0.0
        self.heard: dict[RunnerId, float] = {}
        self.replaced: set[RunnerId] = set()

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        gone = self.leases.expire(self.now)
        expected = [runner for runner, at in self.heard.items() if at + 2.0 <= self.now]
        assert sorted(gone) == sorted(expected)
        for runner in gone:
            del self.heard[runner]

    @rule(runner=runners)
    def says_hello(self, runner: RunnerId) -> None:
        assert self.leases.replaced(runner) == (runner in self.replaced)
        if runner in self.replaced:
            return
        old = self.leases.grant(runner, self.now)
        expected = next((other for other in self.heard if other.uuid == runner.uuid and other != runner), None)
        assert old == expected
        if old:
            del self.heard[old]
            self.replaced.add(old)
        self.heard[runner] = self.now

    @rule(runner=runners)
    def beats(self, runner: RunnerId) -> None:
        alive = runner in self.heard
        assert self.leases.renew(runner, self.now) == alive
        if alive:
            self.heard[runner] = self.now

    @invariant()
    def laws_hold(self) -> None:
        self.leases.check()
        assert len(self.leases) == len(self.heard)
        assert self.leases.next_deadline() == min((at + 2.0 for at in self.heard.values()), default=None)


LeaseMachine.TestCase.settings = settings(stateful_step_count=30)
TestLeaseMachine = LeaseMachine.TestCase
