"""What the supervisor tells the scheduler: in messages that gRPC takes."""

import pytest

from weft.identities import Epoch, RunnerId
from weft.wire.v1.supervisor_pb2 import RunnerState
from weft_supervisor import wire
from weft_supervisor.core.events import Preempt, Report, SendReport


def report(number: int, size: int) -> Report:
    payload = RunnerState(sequence=number, id={"uuid": "u" * size})
    return Report(RunnerId(f"u{number}", "i"), number, 0, 0, payload=payload)


def test_many_states_become_several_messages_and_decisions_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_REPORT_BYTES", 300)
    states = tuple(report(number, size) for number, size in enumerate((100, 100, 900, 10), start=1))
    gone = RunnerId("gone", "i")
    preempt = Preempt(RunnerId("u1", "i"), "r", Epoch(1, 1), "r", 16)
    told = [message.report for message in wire.cluster_reports(SendReport(states, (gone,), (preempt,)))]
    assert [[state.sequence for state in one.runners] for one in told] == [[1, 2], [3], [4]]
    assert [len(one.lost) for one in told] == [len(one.preempts) for one in told] == [0, 0, 1]


def test_what_is_lost_is_told_without_states() -> None:
    [told] = wire.cluster_reports(SendReport((), (RunnerId("gone", "i"),)))
    assert [lost.uuid for lost in told.report.lost] == ["gone"]
