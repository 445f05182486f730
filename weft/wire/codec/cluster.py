"""Runner <-> supervisor and supervisor <-> scheduler: reports up, orders down.

What runs in a runner is its pool's owner's choice (SECURITY.md), and its figures are divided by, summed and sent on.
Bounds that need the runner's specification are in `weft.domain.runner.RunnerBook`.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from weft.domain.adapter import DesiredChange
from weft.domain.request import OutcomeAck, OutcomeReport
from weft.domain.routes import Keys, KeysConfirmed
from weft.domain.runner import (
    ClusterReport,
    Heartbeat,
    OrderedRunner,
    Registered,
    ReportedRunner,
    Resync,
    RunnerOrder,
    RunnerReport,
    RunnerSpec,
    SchedulerHello,
    SupervisorHello,
)
from weft.domain.text import quoted
from weft.wire.codec.direction import Direction
from weft.wire.codec.pairs import ByHand, Custom, Pair
from weft.wire.errors import PeerError, report_peer_error
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb

R = TypeVar("R", bound=RunnerReport)
MAX_REPORT_BYTES = 16 << 20  # ten thousand adapters with a long error each; a gRPC message takes 64 MiB
MAX_FORWARDED_BYTES = 16 << 10  # a change of 64 sequences has 7 KiB


# ---------------------------------------------------------------- a runner's specification and reports


class ReceivedReport(RunnerReport):
    """A report with the message that it came as, which is what a supervisor forwards: 2.1 us, encoded again 7.7 us.

    That is as safe: the scheduler decodes it within the same bounds, and of large ones, in which long reasons and
    unknown fields could be, only what was read travels on. One that is changed (`_replace`) has no message.
    """

    message: spb.RunnerReport | None = None


def _check_spec(spec: RunnerSpec) -> None:
    if spec.max_context_tokens > (n_tokens := spec.total_pages * spec.page_tokens):
        raise PeerError(f"max_context_tokens {spec.max_context_tokens} are more than its pages hold: {n_tokens}")


SPEC = Pair(RunnerSpec, spb.RunnerHello, check=_check_spec, who=lambda m: f"runner {quoted(m.runner.uuid)}: ")


def _fill_progress(progress: Sequence[int], m: spb.RunnerReport) -> None:
    m.progress.extend(progress)


def _progress(m: spb.RunnerReport) -> Sequence[int]:
    """Read the progress without a copy."""
    return m.progress if m.progress else ()


_PROGRESS = {"progress": Custom(_fill_progress, _progress)}
_REPORT = Pair(RunnerReport, spb.RunnerReport, custom=_PROGRESS)
_RECEIVED = Pair(ReceivedReport, spb.RunnerReport, custom=_PROGRESS)
fill_report, read_spec = _REPORT.fill, SPEC.read


def read_report(m: spb.RunnerReport) -> RunnerReport:
    """Read a report of a runner. Raises PeerError."""
    return _sized(m, _REPORT)


def received_report(m: spb.RunnerReport) -> ReceivedReport:
    """Read a report of a runner, and keep its message. Raises PeerError."""
    report = _sized(m, _RECEIVED)
    if m.ByteSize() <= MAX_FORWARDED_BYTES:
        report.message = m
    return report


def _sized(m: spb.RunnerReport, pair: Pair[R, spb.RunnerReport]) -> R:
    if (size := m.ByteSize()) > MAX_REPORT_BYTES:
        raise PeerError(f"a report of {size} bytes is more than {MAX_REPORT_BYTES}")
    return pair.read(m)


def _fill_forwarded(report: RunnerReport, m: spb.RunnerReport) -> None:
    if isinstance(report, ReceivedReport) and report.message is not None:
        m.CopyFrom(report.message)
    else:
        _REPORT.fill(report, m)


def _check_reported(reported: ReportedRunner) -> None:
    runner, spec = reported.runner, reported.spec
    if spec is not None and spec.runner != runner:
        raise PeerError(f"a report of runner {quoted(runner.uuid)} has the specification of {quoted(spec.runner.uuid)}")


REPORTED = Pair(
    ReportedRunner,
    spb.ReportedRunner,
    parts=(SPEC, ByHand(RunnerReport, _fill_forwarded, read_report)),
    check=_check_reported,
)


def _fill_reports(reports: Iterable[ReportedRunner], m: pb.ClusterReport) -> None:
    for reported in reports:
        REPORTED.fill(reported, m.reports.add())


def _reports(m: pb.ClusterReport) -> Sequence[ReportedRunner]:
    """Read the reports of runners. Supervisors refuse bad reports, so a bad report here is dropped."""
    reports = list[ReportedRunner]()
    for message in m.reports:
        try:
            reports.append(REPORTED.read(message))
        except PeerError as error:
            report_peer_error("runner", error)
    return tuple(reports)


# ---------------------------------------------------------------- orders


def _check_change(change: DesiredChange) -> None:
    if len({adapter.digest for adapter in change.adapters}) < len(change.adapters):
        raise PeerError("a list of desired adapters has a digest twice, expected each once")


ORDER = Pair(RunnerOrder, spb.RunnerOrder, parts=[Pair(DesiredChange, spb.DesiredChange, check=_check_change)])

RunnerMessage = RunnerSpec | RunnerReport | Heartbeat
SupervisorMessage = SupervisorHello | ClusterReport | OutcomeAck | Keys | KeysConfirmed
OrderMessage = SchedulerHello | OrderedRunner | OutcomeReport | Resync

RUNNER_TO_SUPERVISOR: Direction[spb.RunnerToSupervisor, RunnerMessage] = Direction(
    spb.RunnerToSupervisor,
    "runner",
    hello=SPEC,
    report=ByHand(RunnerReport, _REPORT.fill, received_report),
    heartbeat=Heartbeat,
)
SUPERVISOR_TO_RUNNER: Direction[spb.SupervisorToRunner, Registered | RunnerOrder | Resync] = Direction(
    spb.SupervisorToRunner, "supervisor", registered=Registered, order=ORDER, resync=Resync
)
SUPERVISOR_TO_SCHEDULER: Direction[pb.SupervisorToScheduler, SupervisorMessage] = Direction(
    pb.SupervisorToScheduler,
    "supervisor",
    hello=SupervisorHello,
    report=Pair(ClusterReport, pb.ClusterReport, custom={"reports": Custom(_fill_reports, _reports)}),
    outcome_ack=OutcomeAck,
    keys=Keys,
    keys_confirmed=KeysConfirmed,
)
SCHEDULER_TO_SUPERVISOR: Direction[pb.SchedulerToSupervisor, OrderMessage] = Direction(
    pb.SchedulerToSupervisor,
    "scheduler",
    hello=SchedulerHello,
    orders=Pair(OrderedRunner, pb.RunnerOrders, parts=[ORDER]),
    outcome_report=OutcomeReport,
    resync=Resync,
)
