"""Loads beside steps keep to a budget; without steps they wait for nothing."""

import pytest

from weft_runner.shell.load_pacer import LoadPacer


class World:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now, self.stepping = 100.0, True
        self.pacer = LoadPacer(lambda: self.stepping, 1000.0, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, slices: int, n_bytes: int, seconds: float) -> float:
        """So many slices, each of so many seconds. How long all of it took."""
        began = self.now
        for _ in range(slices):
            self.now += seconds
            self.pacer(n_bytes)
        return self.now - began


def test_slices_beside_steps_take_what_the_budget_says() -> None:
    world = World()
    assert 0.9 <= world.work(100, 10, 0.001) <= 1.2
    assert world.work(100, 10, 0.1) == pytest.approx(10.0), "work that is slower than the budget is not hurried"


def test_without_steps_nothing_waits_and_no_debt_is_left() -> None:
    world = World()
    world.stepping = False
    assert world.work(100, 1000, 0.001) < 0.11
    world.stepping = True
    assert world.work(1, 10, 0.001) < 0.02, "what was packed without steps is not held against the next slice"
    world.now += 100.0
    assert world.work(100, 10, 0.001) >= 0.9, "time without loads is not saved up"
