"""The book of operations: bounded, every operation ends once, equal requests share."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.artifacts.depot_api import FINISHED, OperationStatus
from weft_depot.core import Operations

STATES = ("Pending", "Validated", *FINISHED)
VALIDATED = OperationStatus("Validated", verdict={"rank": 8})
FETCHED = OperationStatus("Fetched", "sha256:x")
FAILED = OperationStatus("Failed", reason="NotFinite", message="a NaN")


@pytest.mark.parametrize("end", [FETCHED, FAILED], ids=lambda end: end.state)
def test_an_operation_goes_its_way_and_keeps_its_verdict(end: OperationStatus) -> None:
    book = Operations()
    assert book.start("1", "key")
    book.change("1", VALIDATED, 1.0)
    done = book.change("1", end, 2.0)
    assert done == replace(end, verdict={"rank": 8})
    assert book.find("1") == done
    assert book.find("2") is None


def test_equal_requests_share_while_it_runs_and_not_after() -> None:
    book = Operations()
    book.start("1", "key")
    assert book.running("key") == "1"
    book.change("1", FAILED, 1.0)
    assert book.running("key") is None


def test_old_and_surplus_ones_are_forgotten_oldest_first() -> None:
    book = Operations(max_finished=2, keep_s=10)
    for number in range(4):
        book.start(str(number), str(number))
        book.change(str(number), FAILED, float(number))
    assert book.forget(4.0) == ["0", "1"]
    assert book.forget(11.9) == []
    assert book.forget(12.0) == ["2"]
    assert book.find("3") is not None


def test_forgetting_looks_at_what_goes_and_at_one_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Operations(keep_s=10)
    for number in range(100):
        book.start(str(number), str(number))
        book.change(str(number), FAILED, float(number))
    looked: list[str] = []

    class Watching(dict[str, tuple[OperationStatus, float]]):
        def items(self) -> Any:
            for item in super().items():
                looked.append(item[0])
                yield item

    monkeypatch.setattr(book, "_finished", Watching(book._finished))  # pyright: ignore[reportPrivateUsage]
    assert book.forget(12.0) == ["0", "1", "2"]
    assert looked == ["0", "1", "2", "3"]


def test_the_same_operation_does_not_end_twice() -> None:
    book = Operations()
    book.start("1", "key")
    with pytest.raises(AssertionError):
        book.change("1", FETCHED, 1.0)  # never validated
    book.change("1", FAILED, 1.0)
    with pytest.raises(KeyError):
        book.change("1", FAILED, 2.0)


class Book(RuleBasedStateMachine):
    """Random lives of operations against a dictionary of what should be."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Operations(max_unfinished=4, max_finished=3, keep_s=5.0)
        self.now, self.count = 0.0, 0
        self.states: dict[str, str] = {}

    @rule(key=st.sampled_from("abcdef"))
    def start(self, key: str) -> None:
        if self.book.running(key):
            return
        self.count += 1
        started = self.book.start(str(self.count), key)
        unfinished = [state for state in self.states.values() if state in ("Pending", "Validated")]
        assert started == (len(unfinished) < 4)
        if started:
            self.states[str(self.count)] = "Pending"

    @precondition(lambda self: any(s in ("Pending", "Validated") for s in self.states.values()))
    @rule(data=st.data(), fail=st.booleans())
    def advance(self, data: st.DataObject, fail: bool) -> None:
        open_ones = [name for name, state in self.states.items() if state in ("Pending", "Validated")]
        name = data.draw(st.sampled_from(open_ones))
        if fail:
            self.states[name] = self.book.change(name, FAILED, self.now).state
        elif self.states[name] == "Pending":
            self.states[name] = self.book.change(name, VALIDATED, self.now).state
        else:
            self.states[name] = self.book.change(name, FETCHED, self.now).state

    @rule(seconds=st.floats(0.1, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name in self.book.forget(self.now):
            assert self.states.pop(name) in ("Fetched", "Failed"), "an unfinished operation is never forgotten"
        assert sum(state in FINISHED for state in self.states.values()) <= 3

    @invariant()
    def holds(self) -> None:
        self.book.check_operations()
        assert self.book.counts() == {state: list(self.states.values()).count(state) for state in STATES}
        for name, state in self.states.items():
            found = self.book.find(name)
            assert found is not None
            assert found.state == state


TestBook = Book.TestCase
TestBook.settings = settings(stateful_step_count=30)
